"""Tiny random checkpoints of every supported family and option, and their logits by ``transformers``.

Weights have std 0.1 and norm weights lie in [0.5, 1.5], so that logits are far from flat while float32 results of two
implementations still agree to about 1e-5; every bias is non-zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

T0: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# (id, family, overrides of T0)
VARIANTS: list[tuple[str, str, dict[str, object]]] = [
    ("llama", "llama", {}),
    ("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama-tied", "llama", {"tie_word_embeddings": True}),
    ("llama-mha", "llama", {"num_key_value_heads": 4}),
    ("llama-mqa", "llama", {"num_key_value_heads": 1}),
    ("llama-9-3", "llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}),
    ("llama-wide-heads", "llama", {"head_dim": 32}),
    ("llama-head-dim-null", "llama", {"head_dim": None}),
    ("llama-eps", "llama", {"rms_norm_eps": 0.01}),
    ("llama-theta", "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    ("llama-linear", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    ("llama-dynamic", "llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    ("llama-yarn", "llama", {"rope_parameters": _YARN}),
    (
        "llama-yarn-options",
        "llama",
        {"rope_parameters": _YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.2, "truncate": False}},
    ),
    ("llama-yarn-mscale", "llama", {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}}),
    (
        "llama-llama3",
        "llama",
        {
            "max_position_embeddings": 512,
            "rope_parameters": _LLAMA3 | {"rope_theta": 10000.0, "original_max_position_embeddings": 64},
        },
    ),
    ("mistral", "mistral", {"sliding_window": None}),
    ("mistral-window", "mistral", {"sliding_window": 256}),
    ("mistral-head-dim-null", "mistral", {"sliding_window": None, "head_dim": None}),
    ("qwen2", "qwen2", {}),
    ("qwen2-window-off", "qwen2", {"use_sliding_window": False, "sliding_window": 8}),
    ("qwen2-tied", "qwen2", {"tie_word_embeddings": True}),
    ("qwen2-yarn", "qwen2", {"rope_parameters": _YARN | {"rope_theta": 1000000.0}}),
    ("qwen3", "qwen3", {}),
    ("qwen3-bias", "qwen3", {"attention_bias": True}),
    ("qwen3-wide-heads", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
]


def tiny_checkpoint(
    folder: Path | str,
    family: str,
    seed: int = 0,
    *,
    max_shard_size: str | int = "1GB",
    std: float = 0.1,
    dtype: torch.dtype = torch.float32,
    **overrides: object,
) -> Path:
    """Write a random model of ``family`` (a ``model_type``) with the sizes of ``T0`` plus ``overrides``.

    ``max_shard_size`` such as ``"100KB"`` splits it into shards with an index. Returns ``folder`` as a path.
    """
    config = AutoConfig.for_model(family, **{**T0, **overrides})
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                values = 0.5 + torch.rand(weight.shape, generator=random)
            else:
                values = std * torch.randn(weight.shape, generator=random)
            weight.copy_(values)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Path(folder)


@torch.no_grad()
def reference_logits(
    folder: Path | str, ids: Sequence[int] | torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:  # [N, V]
    """Logits after every one of ``ids`` (one sequence, ``[N]``), by ``transformers`` with its plainest attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    return model(torch.as_tensor(ids, dtype=torch.long)[None]).logits[0]
