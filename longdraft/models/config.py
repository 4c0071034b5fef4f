"""What a model is, read from ``config.json`` (or GGUF metadata put in the same words).

Owns the reading and checking of architecture settings. Settings that would change the output and are not supported
are refused by name, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and scaling rule."""

    theta: float = 10000.0
    kind: str = "default"  # default | linear | dynamic | yarn | llama3
    factor: float = 1.0
    original_max_len: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None = derived
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    freq_factors: tuple[float, ...] | None = None  # GGUF rope_freqs.weight: each inverse frequency is divided by it


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama/Mistral/Qwen2/Qwen3 family."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None  # only a window >= max_model_len is accepted (= full attention)
