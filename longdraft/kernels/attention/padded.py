"""Attention in plain torch without a loop over rows: rows of similar shape are padded to one rectangle.

K and V are gathered once per layer and never expanded: the query heads of a KV head either share one product with it,
or, where there are many queries, go through torch's fused attention one after the other. Whatever depends only on the
plan is made once per step.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from longdraft.kernels.dispatch import CallSpec
from longdraft.kernels.layout import PlainLayout
from longdraft.view import NEVER, AttnPlan, LayerKV

# From this many queries per KV head on, torch's fused attention beats two plain products (measured on CPU).
FUSED_FROM = 48
# A row joins a rectangle if that at most doubles its queries, adds at most a quarter to its pages, and keeps the
# gathered keys within this many bytes: about what stays in a cache, and no fresh memory from the system every step.
QUERY_SLACK, PAGE_SLACK, MAX_BYTES = 2.0, 1.25, 16 * 2**20


def rectangles(query_lens: list[int], num_pages: list[int], max_pages: int) -> list[list[int]]:
    """Group rows so that padding a group to its largest row wastes little; every row is in exactly one group.

    A group of several rows has at most ``max_pages`` pages, padding included.
    """
    order = sorted(range(len(query_lens)), key=lambda b: (query_lens[b], num_pages[b]), reverse=True)
    groups: list[list[int]] = []
    for b in order:
        for group in groups:
            pages = [num_pages[i] for i in (*group, b)]
            similar = query_lens[group[0]] <= QUERY_SLACK * query_lens[b] and max(pages) <= PAGE_SLACK * min(pages)
            if similar and len(pages) * max(pages) <= max_pages:
                group.append(b)
                break
        else:
            groups.append([b])
    return groups


class PaddedAttention:
    """See the module's docstring. One object serves all layers of one step."""

    name = "torch"

    def __init__(self, plan: AttnPlan, layout: PlainLayout, spec: CallSpec) -> None:
        block = layout.page_size * layout.head_dim
        page_bytes = layout.num_kv_heads * block * spec.compute_dtype.itemsize
        pages, positions = plan.view.expand()
        ends = (positions != NEVER) * torch.arange(1, positions.shape[-1] + 1)
        used = -(-ends.amax(dim=(1, 2)) // layout.page_size)  # [B] pages up to the last slot that is seen
        groups = rectangles(plan.query_lens.tolist(), used.tolist(), MAX_BYTES // page_bytes)
        self.rectangles = [
            _Rectangle(plan, rows, pages[rows, :, : int(used[rows].max())], positions[rows], layout, spec)
            for rows in groups
        ]
        # One pair for all rectangles and layers: fresh memory costs a page fault per 4 KiB.
        size = (max(len(r.blocks) for r in self.rectangles), block)
        self.buffers = [torch.empty(size, dtype=spec.kv_dtype, device=plan.slots.device) for _ in range(2)]

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
        out = torch.empty_like(q)
        for rectangle in self.rectangles:
            k, v = (rectangle.gather(*pair) for pair in zip((kv.k, kv.v), self.buffers, strict=True))
            rectangle.attend(q, k, v, out)
        return out


class _Rectangle:
    """Some rows of a plan, padded to ``Q`` queries and ``P`` pages (``S = P * page_size`` keys) per head."""

    def __init__(
        self,
        plan: AttnPlan,
        rows: list[int],
        pages: torch.Tensor,  # [b, G', P]
        positions: torch.Tensor,  # [b, G', at least S]
        layout: PlainLayout,
        spec: CallSpec,
    ) -> None:
        device, lens, query_lens = plan.slots.device, plan.view.lens[rows, None], plan.query_lens[rows, None]
        num_q, num_p = int(query_lens.max()), pages.shape[-1]
        positions = positions[..., : num_p * layout.page_size]
        self.layout, self.spec, self.size = layout, spec, (len(rows), num_q, num_p)

        # A row with fewer queries repeats its last one; the copies are computed and dropped.
        query = torch.arange(num_q)[None].minimum(query_lens - 1)  # [b, Q]
        tokens = (plan.query_starts[rows, None] + query).flatten()
        real = (torch.arange(num_q) < query_lens).flatten()
        self.tokens, self.real_tokens = tokens.to(device), tokens[real].to(device)
        self.real = real.nonzero().flatten().to(device)  # not a mask, whose size a device would have to report back
        self.blocks = layout.block_index(pages).to(device)

        # What an unused slot holds must not be seen, not even times zero (0 · NaN is NaN).
        filled = (positions != NEVER).unflatten(-1, (num_p, -1))  # [b, G', P, page_size]
        filled = filled.expand(-1, layout.num_kv_heads, -1, -1)
        partial = ~filled.all(dim=-1)
        self.scrub = tuple(index.to(device) for index in partial.nonzero(as_tuple=True))
        self.keep = filled[partial][:, :, None].to(device)  # [m, page_size, 1]

        self.fused = spec.group_size * num_q >= FUSED_FROM
        at = (lens - query_lens + query).to(device)[:, None, :, None]  # [b, 1, Q, 1]
        self.mask = positions.to(device)[:, :, None] > at  # [b, G', Q, S]
        if self.fused:  # added to the scores: torch would turn a boolean mask into this one in every layer
            zero = torch.zeros((), dtype=spec.compute_dtype, device=device)
            self.mask = torch.where(self.mask, -torch.inf, zero)

    def gather(self, storage: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """The rows' K (or V) as ``[b, G, S, D]`` in the compute type, zero at and past each row's length."""
        rows, _, num_p = self.size
        layout, buffer = self.layout, buffer[: len(self.blocks)]
        layout.gather(storage, self.blocks, buffer)
        x = buffer.view(rows, layout.num_kv_heads, num_p, layout.page_size, layout.head_dim)
        tail = x[self.scrub]  # [m, page_size, D]
        x[self.scrub] = tail.where(self.keep, tail.new_zeros(()))
        return x.view(rows, layout.num_kv_heads, -1, layout.head_dim).to(self.spec.compute_dtype)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """Fill this rectangle's rows of ``out [N, H, D]`` from ``k, v [b, G, S, D]``."""
        (rows, num_q, _), (_, heads, dim) = self.size, q.shape
        # Rounded to the storage type of K, as by a kernel that multiplies in that type.
        x = q[self.tokens].to(self.spec.kv_dtype).to(self.spec.compute_dtype)
        x = x.view(rows, num_q, k.shape[1], -1, dim).permute(0, 2, 3, 1, 4)  # [b, G, group, Q, D]
        if self.fused:
            each = [scaled_dot_product_attention(head, k, v, attn_mask=self.mask) for head in x.unbind(2)]
            y = torch.stack(each, dim=2)
        else:
            scores = (x.flatten(2, 3) @ k.transpose(-1, -2)).mul_(dim**-0.5)
            scores.view(rows, k.shape[1], -1, num_q, k.shape[2]).masked_fill_(self.mask[:, :, None], -torch.inf)
            y = (scores.softmax(dim=-1) @ v).view(x.shape)
        out[self.real_tokens] = y.permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)[self.real]
