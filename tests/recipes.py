"""Parts of training recipes that several tests share."""

TINY_TARGET = """
[target.model]
model_type = "llama"
vocab_size = 260
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 3
num_attention_heads = 2
max_position_embeddings = 128
"""
