"""Which tensors a model has, under the Hugging Face names, and how a checkpoint hands them over."""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import torch

from longdraft.errors import ModelFileError
from longdraft.models.config import ModelConfig


class WeightSource(Protocol):
    """Tensors of one checkpoint under the Hugging Face names (``model.layers.0.self_attn.q_proj.weight`` ...)."""

    @property
    def path(self) -> str:
        """The file or folder, for messages."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every tensor, from headers alone: nothing large is read."""

    def load(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, in the file's float dtype (float32 where it was dequantised)."""


def expected_shapes(config: ModelConfig, ends: bool = True) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor that ``config`` calls for. A tied model has no ``lm_head.weight``.

    Without its ``ends`` the layers alone: no embedding, final norm and head.
    """
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)} if ends else {}

    def linear(name: str, out: int, into: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        linear(f"{layer}.self_attn.q_proj", q, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, q, config.o_bias)
        linear(f"{layer}.mlp.gate_proj", inner, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, config.mlp_bias)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (dim,)
    if ends:
        shapes["model.norm.weight"] = (hidden,)
    if ends and not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def num_parameters(config: ModelConfig, prefix: str = "") -> int:
    """Weights of a model, or of those of its tensors whose names start with ``prefix``."""
    return sum(math.prod(shape) for name, shape in expected_shapes(config).items() if name.startswith(prefix))


def fingerprint(config: ModelConfig, source: WeightSource) -> str:
    """Hex digest of a model's sizes, norms and biases: what its files of any format and precision have in common."""
    sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers)
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    digest = hashlib.sha256(repr((*sizes, *heads)).encode())
    for name, shape in sorted(expected_shapes(config).items()):
        if len(shape) == 1:
            digest.update(name.encode() + source.load(name).float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_names_and_shapes(config: ModelConfig, source: WeightSource, ends: bool = True) -> None:
    """Raise ``ModelFileError`` naming the first missing, misshapen or unconsumed tensor; see ``expected_shapes``.

    A tied model may carry an ``lm_head.weight`` equal to its embedding (``checkpoint/ties.py`` sees to that).
    Buffers that some exporters write (``rotary_emb.inv_freq``) are recomputed and may be present.
    """
    have, want = source.shapes(), expected_shapes(config, ends)
    for name, shape in want.items():
        if name not in have:
            fix = "The config says the embeddings are not tied." if name == "lm_head.weight" else ""
            raise ModelFileError(source.path, f"tensor {name!r} is missing", fix=fix)
        if tuple(have[name]) != shape:
            raise ModelFileError(source.path, f"tensor {name!r} has shape {tuple(have[name])}, expected {shape}")
    for name in have.keys() - want.keys():
        if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
            continue
        raise ModelFileError(source.path, f"tensor {name!r} is not used by a {config.family!r} model of this config")
