"""A whole pass as one call of the native kernels, over the very weights that ``Transformer`` holds.

``Transformer.forward_by_parts`` is the same pass operation by operation, and its oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from longdraft.kernels import native
from longdraft.view import AttnPlan, LayerKV

if TYPE_CHECKING:
    from longdraft.models.transformer import Transformer


def fuse(model: Transformer) -> FusedDecoder | None:
    """The fused pass of a model whose layers all run on the native kernels; ``None`` for others."""
    is_native = isinstance(model.head, native.NativeLinear) and isinstance(model.layout, native.BlockedLayout)
    return FusedDecoder(model) if is_native else None


class FusedDecoder:
    """Addresses of a model's weights, gathered once."""

    def __init__(self, model: Transformer) -> None:
        config, spec = model.config, model.spec
        self.layout, self.spec, self.vocab_size = model.layout, spec, config.vocab_size
        self.heads, self.all_layers = config.num_heads, list(range(config.num_layers))
        self._model = model  # the handle holds addresses only
        shape = (config.num_heads, config.num_kv_heads, config.head_dim, spec.kv_dtype == torch.bfloat16)
        sizes = (config.hidden_size, config.intermediate_size, config.vocab_size, config.norm_eps)
        embedding = 0 if model.embedding is None else model.embedding.data_ptr()
        weights = (model.norm.weight.data_ptr(), model.head.handle, embedding, spec.dtype == torch.bfloat16)
        self.decoder = native._native.Decoder(shape, *sizes, *weights)
        for layer in model.layers:
            products = (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
            norms = (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
            self.decoder.add_layer(
                *(product.handle for product in products), *(n.weight.data_ptr() if n else 0 for n in norms)
            )

    def forward(
        self,
        ids: torch.Tensor,
        cos: torch.Tensor,  # [N, D/2]
        sin: torch.Tensor,
        plan: AttnPlan,
        kv: Sequence[LayerKV],
        logits_at: torch.Tensor,
        layers: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """See ``Transformer.forward``."""
        steps = native.NativePlan(plan, self.heads, self.layout, self.spec)
        logits = torch.empty(len(logits_at), self.vocab_size)
        native.runtime().forward(
            self.decoder,
            steps.handle,
            self.all_layers if layers is None else list(layers),
            len(ids),
            ids.data_ptr(),
            plan.slots.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            len(logits_at),
            logits_at.data_ptr(),
            [(layer.k.data_ptr(), layer.v.data_ptr()) for layer in kv],
            logits.data_ptr(),
        )
        return logits
