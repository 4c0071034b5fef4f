"""The decoder of the Llama, Mistral, Qwen2 and Qwen3 families: one forward pass for every phase.

Knows nothing of requests or drafts. Tokens arrive flat and ragged; what attention reads is in the plan, so prefill,
decoding and verifying are the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from longdraft.capture import Capture
from longdraft.errors import OutOfMemoryError
from longdraft.kernels.attention.mass import PageMass
from longdraft.kernels.dispatch import CallSpec, select
from longdraft.kernels.layout import Layout
from longdraft.kv.format.base import Format
from longdraft.kv.formatted import FormattedStore
from longdraft.kv.store import PagedStore
from longdraft.models.config import ModelConfig
from longdraft.models.fused import fuse, int8_twin
from longdraft.models.layers import GatedMLP, Linear, RMSNorm
from longdraft.models.rope import RotaryTable, apply_rotary
from longdraft.models.weights import WeightSource, check_names_and_shapes, num_parameters
from longdraft.view import AttnPlan, LayerKV


class Transformer:
    """A model's weights, ready to run on one device.

    ``dtype`` is what weights are stored in and products' inputs are rounded to; the residual stream, norms, softmax and
    logits are float32 (float64 under float64). ``kv_dtype`` is what K and V are stored in; old ones in ``kv_format``,
    if there is one, which makes another model of it: what it returns is close to what it would, and no more.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        *,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        kv_format: Format | None = None,
        device: torch.device | str = "cpu",
        page_size: int = 16,
        progress: Callable[[int, int], None] | None = None,
        ends: Transformer | None = None,
    ) -> None:
        """``ends``: a model whose embedding, final norm and head serve this one, too; ``source`` has none then."""
        check_names_and_shapes(config, source, ends is None)
        self.config, self.dtype, self.kv_dtype = config, dtype, kv_dtype or dtype
        self.kv_format, self.device = kv_format, torch.device(device)
        group_size = config.num_heads // config.num_kv_heads
        self.spec = CallSpec(self.device.type, dtype, self.kv_dtype, config.head_dim, group_size, page_size)
        self._attention = select("attention", self.spec)
        self.layout = self._attention.layout(page_size, config.num_kv_heads, config.head_dim, self.spec)
        self._rotary = RotaryTable(config.rope, config.head_dim, config.max_position_embeddings, self.device)
        load = _Loader(config, source, self.spec, self.device)
        if ends is None:
            embedding = load.tensor("model.embed_tokens.weight")
            # A tied head is the embedding itself, not a second copy.
            self.head = load.head(embedding) if config.tie_embeddings else load.linear("lm_head")
            self.embedding = None if config.tie_embeddings else embedding
            self.norm = load.norm("model.norm")
        else:
            self.head, self.embedding, self.norm = ends.head, ends.embedding, ends.norm
        self._embed = self.head.rows if self.embedding is None else self.embedding.__getitem__
        self.layers = []
        for i in range(config.num_layers):
            self.layers.append(_Layer(config, load, f"model.layers.{i}"))
            if progress:
                progress(i + 1, config.num_layers)
        self.weight_bytes = load.num_bytes
        self._fused = fuse(self)
        self._int8: Transformer | None = None

    @property
    def bytes_per_weight(self) -> float:
        """On average, as weights are kept: that may be in less than their type takes."""
        return self.weight_bytes / num_parameters(self.config)

    @torch.inference_mode()
    def forward(
        self,
        ids: torch.Tensor,  # [N]
        positions: torch.Tensor,  # [N]
        plan: AttnPlan,
        kv: Sequence[LayerKV],
        logits_at: torch.Tensor,  # [R] flat tokens whose next-token logits are wanted
        layers: Sequence[int] | None = None,  # those to run, in order; None: all
        capture: Capture | None = None,  # to be filled in
        out: torch.Tensor | None = None,  # [R, V], of a fused pass: where its logits go
    ) -> torch.Tensor:
        """Write the tokens' K and V to ``plan.slots`` and return logits ``[R, V]`` in the compute type."""
        if self._fused is None:
            return self.forward_by_parts(ids, positions, plan, kv, logits_at, layers, capture)
        return self._fused.forward(ids, self.rotary(positions, plan), plan, kv, logits_at, layers, capture, out)

    def rotary(self, positions: torch.Tensor, plan: AttnPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of a step's positions, ``[N, D/2]`` each."""
        return self._rotary.lookup(positions, plan.end or int(plan.view.lens.max()))

    @torch.inference_mode()
    def write_keys_values(
        self,
        streams: torch.Tensor,  # [L, N, hidden]: what enters each layer
        positions: torch.Tensor,  # [N]
        slots: torch.Tensor,  # [N]
        kv: Sequence[LayerKV],
    ) -> None:
        """Write the K and V that each layer makes of its own residual streams, without running anything else."""
        rotary = self._rotary.lookup(positions)
        if self._fused is not None:
            self._fused.write_keys_values(streams, rotary, slots, kv)
            return
        for layer, x, cache in zip(self.layers, streams, kv, strict=True):
            k, v = layer.keys_values(x, rotary)
            self.layout.write_k(cache.k, slots, k)
            self.layout.write_v(cache.v, slots, v)

    def hidden_form(self, taps: int, tokens: int) -> torch.Tensor:
        """Room ``[T, n, hidden]`` for residual streams, to be captured."""
        return torch.empty(taps, tokens, self.config.hidden_size, dtype=self.spec.compute_dtype, device=self.device)

    def new_store(self, num_pages: int) -> PagedStore:
        """An empty cache for this model's K and V, of so many pages."""
        sizes = (self.config.num_layers, num_pages, self.layout, self.kv_dtype, self.device)
        return FormattedStore(*sizes, self.kv_format) if self.kv_format else PagedStore(*sizes)

    @property
    def lossless(self) -> bool:
        """Whether it is the model that its files say, but for the types of numbers."""
        return self.kv_format is None

    @property
    def fused(self) -> bool:
        """Whether a pass is one call of native kernels, and so the same for a row in whatever company."""
        return self._fused is not None

    def quantised(self) -> Transformer:
        """This model with 8-bit weights, for drafting; made once. ``InvalidValueError`` without the native kernels."""
        if self._int8 is None:
            self._int8 = int8_twin(self)
        return self._int8

    @torch.inference_mode()
    def forward_by_parts(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: AttnPlan,
        kv: Sequence[LayerKV],
        logits_at: torch.Tensor,
        layers: Sequence[int] | None = None,
        capture: Capture | None = None,
        out: torch.Tensor | None = None,  # not used: operations make tensors of their own
    ) -> torch.Tensor:
        """``forward``, operation by operation: what the fused pass is compared with, and what runs without one."""
        shared = None if plan.view.layered else self._attention(plan, self.layout, self.spec)
        rotary = self.rotary(positions, plan)
        wanted = capture is not None and capture.page_mass is not None
        page_mass = PageMass(plan, capture.massed, self.layout, self.spec) if wanted else None
        x = self._embed(ids).to(self.spec.compute_dtype)
        if capture:
            capture.note(0, x)
        for i in range(len(self.layers)) if layers is None else layers:
            attention = shared or self._attention(plan.layer(i), self.layout, self.spec)
            attention = capture.noting(i, attention, page_mass) if capture else attention
            attention = plan.decoding(i, attention)
            x = self.layers[i](x, rotary, plan, kv[i], attention, self.layout)
            if capture:
                capture.note(i + 1, x)
        return self.head(self.norm(x[logits_at]))


class _Layer:
    """One decoder layer: attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, load: _Loader, name: str) -> None:
        self.sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
        self.attention_norm = load.norm(f"{name}.input_layernorm")
        self.qkv = load.linear(*(f"{name}.self_attn.{part}_proj" for part in "qkv"))
        self.kv = self.qkv.part(config.num_heads * config.head_dim)
        self.q_norm = load.norm(f"{name}.self_attn.q_norm") if config.qk_norm else None
        self.k_norm = load.norm(f"{name}.self_attn.k_norm") if config.qk_norm else None
        self.output = load.linear(f"{name}.self_attn.o_proj")
        self.mlp_norm = load.norm(f"{name}.post_attention_layernorm")
        gate_up = load.linear(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj")
        self.mlp = GatedMLP(gate_up, load.linear(f"{name}.mlp.down_proj"))

    def __call__(
        self,
        x: torch.Tensor,  # [N, hidden]
        rotary: tuple[torch.Tensor, torch.Tensor],
        plan: AttnPlan,
        kv: LayerKV,
        attention: Callable[[torch.Tensor, LayerKV], torch.Tensor],
        layout: Layout,
    ) -> torch.Tensor:
        heads, kv_heads, dim = self.sizes
        qkv = self.qkv(self.attention_norm(x)).view(len(x), heads + 2 * kv_heads, dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        layout.write_k(kv.k, plan.slots, k)
        layout.write_v(kv.v, plan.slots, v)
        x = x + self.output(attention(q, kv).flatten(1))
        return x + self.mlp(self.mlp_norm(x))

    def keys_values(
        self,
        x: torch.Tensor,  # [N, hidden]
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [N, G, D] each
        """What the layer would store of tokens that enter it as ``x``."""
        k, v = self.kv(self.attention_norm(x)).view(len(x), 2, self.sizes[1], self.sizes[2]).unbind(1)
        return apply_rotary(self.k_norm(k) if self.k_norm else k, *rotary), v


class _Loader:
    """Turns named tensors of a checkpoint into layers; sibling projections become one product."""

    def __init__(self, config: ModelConfig, source: WeightSource, spec: CallSpec, device: torch.device) -> None:
        self.config, self.source, self.spec, self.device = config, source, spec, device
        self.kernel: Any = select("linear", spec)
        self.names = source.shapes()
        self.num_bytes = 0

    def tensor(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The named tensors, stacked along their first dimension."""
        try:
            parts = [self.source.load(name).to(self.device, dtype or self.spec.dtype) for name in names]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        except (RuntimeError, MemoryError) as error:  # torch's own error for this is a RuntimeError
            raise OutOfMemoryError(
                f"Loading {names[0]} failed after {self.num_bytes / 2**30:.2f} GiB of weights ({error}). "
                "Use a smaller dtype or model."
            ) from error
        self.num_bytes += joined.nbytes
        return joined

    def linear(self, *names: str) -> Linear:
        """One linear layer from sibling projections; they have biases all together or not at all."""
        has_bias = self._has_bias(names[0])
        bias = self.tensor(*(f"{name}.bias" for name in names)) if has_bias else None
        return self._product(self.tensor(*(f"{name}.weight" for name in names)), bias)

    def head(self, embedding: torch.Tensor) -> Linear:
        """The output layer of a tied model."""
        return self._product(embedding, None)

    def _product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        layer = self.kernel(weight, bias, self.spec)
        self.num_bytes += layer.num_bytes - weight.nbytes  # as it is kept, which may be more or less
        return layer

    def norm(self, name: str) -> RMSNorm:
        """An RMSNorm, its weight in the compute type."""
        return RMSNorm(self.tensor(f"{name}.weight", dtype=self.spec.compute_dtype), self.config.norm_eps)

    def _has_bias(self, name: str) -> bool:
        kind = name.rsplit(".", 1)[-1]
        if kind in ("q_proj", "k_proj", "v_proj"):
            return self.config.qkv_bias
        return self.config.o_bias if kind == "o_proj" else self.config.mlp_bias and kind != "lm_head"
