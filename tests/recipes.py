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


def write_texts(folder):
    """A dozen small documents, in ``folder``/texts."""
    (folder / "texts").mkdir()
    for n in range(12):
        (folder / "texts" / f"{n}.txt").write_text(f"{n} bottles of milk on the wall, {n} bottles of milk. " * 6)
