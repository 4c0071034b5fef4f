"""A whole pass as one call of the native kernels, over the very weights that ``Transformer`` holds.

``Transformer.forward_by_parts`` is the same pass operation by operation, and its oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from longdraft.capture import Capture
from longdraft.errors import InvalidValueError
from longdraft.kernels import native
from longdraft.kernels.linear.native import NativeLinear
from longdraft.view import AttnPlan, LayerKV

if TYPE_CHECKING:
    from longdraft.models.transformer import Transformer


def fuse(model: Transformer) -> FusedDecoder | None:
    """The fused pass of a model whose layers all run on the native kernels; ``None`` for others."""
    is_native = isinstance(model.head, NativeLinear) and isinstance(model.layout, native.BlockedLayout)
    return FusedDecoder(model) if is_native else None


class FusedDecoder:
    """Addresses of a model's weights, gathered once."""

    def __init__(self, model: Transformer, tied: NativeLinear | None = None) -> None:
        """``tied``: the layer whose rows are the embeddings of a tied model, if that is not the model's head."""
        config, spec = model.config, model.spec
        self.layout, self.spec, self.vocab_size = model.layout, spec, config.vocab_size
        self.heads, self.all_layers = config.num_heads, list(range(config.num_layers))
        self._model = model  # the handle holds addresses only
        self._kv: Sequence[LayerKV] = ()  # the caches of the last pass, and where they lie
        self._addresses: list[tuple[int, int]] = []
        shape = (config.num_heads, config.num_kv_heads, config.head_dim, spec.kv_dtype == torch.bfloat16)
        sizes = (config.hidden_size, config.intermediate_size, config.vocab_size, config.norm_eps)
        embedding = 0 if model.embedding is None else model.embedding.data_ptr()
        half = spec.dtype == torch.bfloat16
        weights = (model.norm.weight.data_ptr(), model.head.handle, embedding, (tied or model.head).handle, half)
        self.decoder = native._native.Decoder(shape, *sizes, *weights)
        for layer in model.layers:
            products = (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down, layer.kv)
            norms = (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
            self.decoder.add_layer(*(x.handle for x in products), *(n.weight.data_ptr() if n else 0 for n in norms))

    def forward(
        self,
        ids: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],  # cosines and sines, [N, D/2]
        plan: AttnPlan,
        kv: Sequence[LayerKV],
        logits_at: torch.Tensor,
        layers: Sequence[int] | None = None,
        capture: Capture | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Transformer.forward``."""
        steps = native.NativePlan(plan, self.heads, self.layout, self.spec)
        logits = torch.empty(len(logits_at), self.vocab_size) if out is None else out
        assert logits.is_contiguous() and logits.shape == (len(logits_at), self.vocab_size)
        native.runtime().forward(
            self.decoder,
            steps.handle,
            self.all_layers if layers is None else list(layers),
            len(ids),
            ids.data_ptr(),
            plan.slots.data_ptr(),
            *(x.data_ptr() for x in rotary),
            len(logits_at),
            logits_at.data_ptr(),
            self._where(kv),
            logits.data_ptr(),
            *_wanted(capture),
            plan.decode and (lambda i: _address(plan.decode(i, kv[i]))),
        )
        return logits

    def write_keys_values(
        self,
        streams: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        kv: Sequence[LayerKV],
    ) -> None:
        """See ``Transformer.write_keys_values``."""
        streams = streams.float().contiguous()
        addresses = (x.data_ptr() for x in (streams, slots, *rotary))
        native.runtime().project(self.decoder, len(slots), *addresses, self._where(kv))

    def _where(self, kv: Sequence[LayerKV]) -> list[tuple[int, int]]:
        """Addresses of K and V of each layer; a store's layers stay where they are."""
        if kv is not self._kv:
            self._kv, self._addresses = kv, [_address(layer) for layer in kv]
        return self._addresses


def int8_twin(model: Transformer) -> Transformer:
    """``model`` with 8-bit copies of its weights, for drafting; it shares everything else, caches included.

    Raises ``InvalidValueError`` where the native kernels do not run.
    """
    if not model.fused:
        reason = native.unsupported(model.spec) or "this model runs on other kernels"
        raise InvalidValueError("weights", "target@int8", f"needs the native kernels ({reason})")
    twin = copy.copy(model)
    twin.head, twin.layers, products = model.head.quantised(), [], []
    for layer in model.layers:
        rounded = copy.copy(layer)
        rounded.mlp = copy.copy(layer.mlp)
        rounded.qkv, rounded.output = layer.qkv.quantised(), layer.output.quantised()
        rounded.mlp.gate_up, rounded.mlp.down = layer.mlp.gate_up.quantised(), layer.mlp.down.quantised()
        twin.layers.append(rounded)
        products += [rounded.qkv, rounded.output, rounded.mlp.gate_up, rounded.mlp.down]
    twin.weight_bytes = sum(x.num_bytes for x in [twin.head, *products])
    twin._fused = FusedDecoder(twin, model.head)
    return twin


def _address(layer: LayerKV) -> tuple[int, int]:
    return layer.k.data_ptr(), layer.v.data_ptr()


def _wanted(capture: Capture | None) -> tuple[int | list[int], ...]:
    """What native passes take of a form, 0 standing for what is not wanted.

    How many tokens it asks about, which, and where queries go; of which page masses are wanted, and where to; where
    residual streams go, and which.
    """
    if capture is None:
        return 0, 0, 0, 0, 0, 0, []
    kinds = (capture.tokens, capture.queries, capture.massed, capture.page_mass, capture.hidden)
    return len(capture.tokens), *(native.address(x) for x in kinds), list(capture.taps)
