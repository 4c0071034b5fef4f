"""Attention as the equation reads, one row at a time: the oracle every other implementation is compared with."""

from __future__ import annotations

import torch

from longdraft.kernels.dispatch import CallSpec
from longdraft.kernels.layout import PlainLayout
from longdraft.view import AttnPlan, LayerKV


class ReferenceAttention:
    """softmax(q kᵀ / √D) v per row and head; query head ``h`` reads KV head ``h // group_size``."""

    name = "ref"

    def __init__(self, plan: AttnPlan, layout: PlainLayout, spec: CallSpec) -> None:
        self.plan, self.layout, self.spec = plan, layout, spec

    @staticmethod
    def supports(spec: CallSpec) -> str | None:
        """Serves every call."""
        return None

    def __call__(self, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
        """``q [N, H, D]`` → ``[N, H, D]``; the step's own K/V must already be written."""
        view, out = self.plan.view, torch.empty_like(q)
        group, compute = self.spec.group_size, self.spec.compute_dtype
        for b, length in enumerate(view.lens.tolist()):
            start, stop = self.plan.query_starts[b : b + 2].tolist()
            token = torch.arange(length)
            slots = view.tables[b, token // view.page_size] * view.page_size + token % view.page_size
            slots = slots.to(q.device)
            k = self.layout.read(kv.k, slots).to(compute).repeat_interleave(group, dim=1)  # [S, H, D]
            v = self.layout.read(kv.v, slots).to(compute).repeat_interleave(group, dim=1)
            rows = q[start:stop].to(kv.k.dtype).to(compute)
            scores = torch.einsum("qhd,shd->hqs", rows, k) * q.shape[2] ** -0.5
            position = torch.arange(length - (stop - start), length, device=q.device)
            hidden = torch.arange(length, device=q.device)[None, :] > position[:, None]  # [Q, S]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            out[start:stop] = torch.einsum("hqs,shd->qhd", weights, v)
        return out
