"""Attention of drafts and verify passes, as transformers' ``AttentionInterface`` takes it. Owns ``Pass`` and its mask.

transformers masks by columns that all rows share. Here each row ends where it likes, so every pass brings its own mask
along as an argument of the model's forward, which hands it down to attention; no mask of transformers' is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from longdraft.errors import UnsupportedModelError

NAME = "longdraft"
# What some models' attention adds to softmax(QK)V; ignoring it would change the output.
_EXTRAS = ("softcap", "s_aux", "sinks", "position_bias", "sliding_window")


@dataclass
class Pass:
    """One forward of a model whose attention is ``attend``: what queries see, and what is kept of them."""

    mask: torch.Tensor | None  # [B, n, S] bool: which columns of the cache each query sees; None: all
    keep_queries: bool = False
    queries: list[torch.Tensor] = field(default_factory=list)  # by layer, [B, H, n, D] after rotary embedding
    layers: int = 0  # how many have attended
    _packed: dict[tuple, torch.Tensor] = field(default_factory=dict)

    def packed(self, group: int, like: torch.Tensor) -> torch.Tensor | None:
        """The mask ``[B, 1, group * n, S]`` to add to the scores of a KV head's queries, made once for all layers."""
        if self.mask is None:
            return None
        key = group, like.device, like.dtype
        if key not in self._packed:
            hidden = ~self.mask.to(like.device).repeat(1, group, 1)[:, None]
            self._packed[key] = torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, -torch.inf)
        return self._packed[key]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, H, n, D]
    key: torch.Tensor,  # [B, G, S, D]
    value: torch.Tensor,  # [B, G, S, Dv]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    longdraft_pass: Pass | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attention ``[B, n, H, Dv]``. The heads of a group lie beside each other as queries, so no key is repeated."""
    extras = [name for name in _EXTRAS if others.get(name) is not None]
    if longdraft_pass is None or attention_mask is not None or extras:
        what = f"attention with {extras[0]}" if extras else "attention that makes its own mask or drops arguments"
        raise UnsupportedModelError(what, type(module).__name__, "plain causal attention is", _PLAIN)
    longdraft_pass.layers += 1
    if longdraft_pass.keep_queries:
        longdraft_pass.queries.append(query)
    batch, heads, n, _ = query.shape
    groups = key.shape[1]
    packed = query.reshape(batch, groups, heads // groups * n, -1)
    mask = longdraft_pass.packed(heads // groups, query)
    out = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, n, -1).transpose(1, 2).contiguous(), None


_PLAIN = "Leave out custom_generate for this model."
AttentionInterface.register(NAME, attend)


@contextmanager
def attending(model: PreTrainedModel) -> Iterator[None]:
    """While it lasts, the model's attention is ``attend``."""
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def forward(
    model: PreTrainedModel,
    ids: torch.Tensor,  # [B, n]
    positions: torch.Tensor,  # [B, n], rotary ones
    cache: object,
    note: Pass,
    keep: int = 0,
) -> torch.Tensor:
    """Logits ``[B, n, V]`` of the tokens ``ids``, whose keys and values go to ``cache``.

    ``keep``: of how many last ones logits are wanted, if not of all.
    """
    with attending(model):
        logits = call(model, cache, keep, input_ids=ids, position_ids=positions, longdraft_pass=note)
    layers = model.config.num_hidden_layers
    if note.layers != layers:  # a layer that attends in another way has not seen the mask
        what = f"{note.layers} of {layers} layers"
        raise UnsupportedModelError("attention through AttentionInterface", what, "all layers must", _PLAIN)
    return logits


def call(model: PreTrainedModel, cache: object, keep: int, **inputs: object) -> torch.Tensor:
    """The model's logits; ``keep`` as in ``forward``, where the model can leave out the others."""
    inputs = {name: x.to(model.device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    few = {"logits_to_keep": keep} if model._supports_logits_to_keep() else {}
    return model(**inputs, **few, cache=cache, use_cache=True).logits
