"""Attention as the equation reads, one row at a time: the oracle every other implementation is compared with."""

from __future__ import annotations

import torch

from longdraft.kernels.dispatch import CallSpec
from longdraft.kernels.layout import PlainLayout
from longdraft.view import NEVER, AttnPlan, LayerKV


class ReferenceAttention:
    """softmax(q kᵀ / √D) v per row and head; query head ``h`` reads KV head ``h // group_size``."""

    name = "ref"

    def __init__(self, plan: AttnPlan, layout: PlainLayout, spec: CallSpec) -> None:
        self.plan, self.layout, self.spec = plan, layout, spec

    @staticmethod
    def supports(spec: CallSpec) -> str | None:
        """Serves every call."""
        return None

    @staticmethod
    def layout(page_size: int, num_kv_heads: int, head_dim: int, spec: CallSpec) -> PlainLayout:
        """How K and V must lie for these kernels."""
        return PlainLayout(page_size, num_kv_heads, head_dim)

    def __call__(self, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
        """``q [N, H, D]`` → ``[N, H, D]``; the step's own K/V must already be written."""
        out, size = torch.empty_like(q), self.layout.page_size
        pages, positions = self.plan.view.expand()
        for b, length in enumerate(self.plan.view.lens.tolist()):
            start, stop = self.plan.query_starts[b : b + 2].tolist()
            at = torch.arange(length - (stop - start), length)  # the queries' positions
            for head in range(q.shape[1]):
                g = head // self.spec.group_size
                listed = min(g, pages.shape[1] - 1)  # one list for all heads, or one each
                seen = (positions[b, listed] != NEVER).nonzero().flatten()
                slots = pages[b, listed, seen // size] * size + seen % size
                k, v = (self.layout.read(x, slots.to(q.device))[:, g].to(self.spec.compute_dtype) for x in (kv.k, kv.v))
                query = q[start:stop, head].to(kv.k.dtype).to(self.spec.compute_dtype)
                scores = query @ k.T * q.shape[2] ** -0.5  # [Q, S]
                hidden = positions[b, listed, seen] > at[:, None]
                out[start:stop, head] = scores.masked_fill(hidden.to(q.device), -torch.inf).softmax(dim=-1) @ v
        return out
