"""Attention in plain torch without a loop over rows: rows of similar shape are padded to one rectangle.

The query heads of a KV head share one product with it, so that K and V are read once per KV head and never expanded.
Work per layer is one gather and two products per rectangle; whatever depends only on the plan is made once per step.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from longdraft.kernels.dispatch import CallSpec
from longdraft.kernels.layout import PlainLayout
from longdraft.view import AttnPlan, LayerKV

# From this many queries per KV head on, torch's fused attention beats two plain products (measured on CPU).
FUSED_FROM = 48
# A row joins a rectangle if that at most doubles its queries and adds at most a quarter to its pages.
QUERY_SLACK, PAGE_SLACK = 2.0, 1.25


def rectangles(query_lens: list[int], num_pages: list[int]) -> list[list[int]]:
    """Group rows so that padding a group to its largest row wastes little; every row is in exactly one group."""
    order = sorted(range(len(query_lens)), key=lambda b: (query_lens[b], num_pages[b]), reverse=True)
    groups: list[list[int]] = []
    for b in order:
        for group in groups:
            pages = [num_pages[i] for i in (*group, b)]
            if query_lens[group[0]] <= QUERY_SLACK * query_lens[b] and max(pages) <= PAGE_SLACK * min(pages):
                group.append(b)
                break
        else:
            groups.append([b])
    return groups


class PaddedAttention:
    """See the module's docstring. One object serves all layers of one step."""

    name = "torch"

    def __init__(self, plan: AttnPlan, layout: PlainLayout, spec: CallSpec) -> None:
        pages = -(-plan.view.lens // plan.view.page_size)
        groups = rectangles(plan.query_lens.tolist(), pages.tolist())
        self.rectangles = [_Rectangle(plan, rows, layout, spec) for rows in groups]

    @staticmethod
    def supports(spec: CallSpec) -> str | None:
        """Serves every call."""
        return None

    def __call__(self, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
        """``q [N, H, D]`` → ``[N, H, D]``; the step's own K/V must already be written."""
        out = torch.empty_like(q)
        for rectangle in self.rectangles:
            rectangle.attend(q, kv, out)
        return out


class _Rectangle:
    """Some rows of a plan, padded to ``Q`` queries and ``P`` pages (``S = P * page_size`` keys)."""

    def __init__(self, plan: AttnPlan, rows: list[int], layout: PlainLayout, spec: CallSpec) -> None:
        device, view = plan.slots.device, plan.view
        lens, query_lens = view.lens[rows, None], plan.query_lens[rows, None]  # [b, 1]
        num_q, num_p = int(query_lens.max()), int((-(-lens // view.page_size)).max())
        self.layout, self.spec, self.size = layout, spec, (len(rows), num_q, num_p)

        # A row with fewer queries repeats its last one; the copies are computed and dropped.
        query = torch.arange(num_q)[None].minimum(query_lens - 1)  # [b, Q]
        tokens = (plan.query_starts[rows, None] + query).flatten()
        real = (torch.arange(num_q) < query_lens).flatten()
        self.tokens, self.real, self.real_tokens = tokens.to(device), real.to(device), tokens[real].to(device)

        # A row with fewer pages repeats its first one: entries past its end are never followed.
        page_start = torch.arange(num_p)[None] * view.page_size
        table = torch.where(page_start < lens, view.tables[rows, :num_p], view.tables[rows, :1])
        self.blocks = layout.block_index(table).to(device)
        # What lies at or past a row's length must not be seen, not even times zero (0 · NaN is NaN).
        unfilled = lens - page_start < view.page_size  # [b, P]
        self.scrub = tuple(index.to(device) for index in unfilled.nonzero(as_tuple=True))
        keep = torch.arange(view.page_size) < (lens - page_start)[unfilled][:, None]
        self.keep = keep[:, None, :, None].to(device)  # [m, 1, page_size, 1]

        self.fused = spec.group_size * num_q >= FUSED_FROM
        hidden = torch.arange(num_p * view.page_size) > (lens - query_lens + query)[:, :, None]  # [b, Q, S]
        self.mask = hidden.to(device)[:, None]
        if self.fused:  # added to the scores: torch would turn a boolean mask into this one in every layer
            self.mask = torch.zeros(self.mask.shape, dtype=spec.compute_dtype, device=device).masked_fill_(
                self.mask, -torch.inf
            )
        self.buffers: list[torch.Tensor] = []

    def attend(self, q: torch.Tensor, kv: LayerKV, out: torch.Tensor) -> None:
        """Fill this rectangle's rows of ``out [N, H, D]``."""
        (rows, num_q, _), (_, heads, dim) = self.size, q.shape
        k, v = self._gather(kv)  # [b, G, S, D]
        # Rounded to the storage type of K, as by a kernel that multiplies in that type.
        x = q[self.tokens].to(kv.k.dtype).to(self.spec.compute_dtype).view(rows, num_q, heads, dim).transpose(1, 2)
        if self.fused:
            y = scaled_dot_product_attention(x, k, v, attn_mask=self.mask, enable_gqa=True)
        else:
            scores = (x.reshape(rows, k.shape[1], -1, dim) @ k.transpose(-1, -2)).mul_(dim**-0.5)
            masked = scores.view(rows, heads, num_q, -1).masked_fill_(self.mask, -torch.inf)
            y = masked.softmax(dim=-1).view(scores.shape) @ v
            y = y.view(rows, heads, num_q, dim)
        out[self.real_tokens] = y.transpose(1, 2).reshape(-1, heads, dim)[self.real]

    def _gather(self, kv: LayerKV) -> list[torch.Tensor]:
        """The rows' K and V as ``[b, G, S, D]``, zero at and past each row's length."""
        rows, _, num_p = self.size
        layout = self.layout
        if not self.buffers:  # one pair for all layers: fresh memory costs a page fault per 4 KiB
            self.buffers = [kv.k.new_empty(len(self.blocks), layout.page_size * layout.head_dim) for _ in range(2)]
        gathered = []
        for storage, buffer in zip((kv.k, kv.v), self.buffers, strict=True):
            layout.gather(storage, self.blocks, buffer)
            x = buffer.view(rows, layout.num_kv_heads, num_p, layout.page_size, layout.head_dim)
            row, page = self.scrub
            tail = x[row, :, page]  # [m, G, page_size, D]
            x[row, :, page] = tail.where(self.keep, tail.new_zeros(()))
            gathered.append(x.view(rows, layout.num_kv_heads, -1, layout.head_dim).to(self.spec.compute_dtype))
        return gathered
