"""vLLM's KV cache as pages of the native kernels (``csrc/attention.h``): what lies where. Imports no vLLM.

A layer's cache is ``[blocks, G, S, 2 D]`` numbers, block by block, and what a block holds inside is the attention's own
affair. Here the first half of a block are the keys of its S / 16 pages, the second half their values, each as the
kernels read them. Nothing leaves its block, so vLLM zeroes, shares and frees blocks as ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longdraft.kernels import native
from longdraft.kernels.dispatch import CallSpec
from longdraft.view import AttnPlan, LayerKV, TableView

PAGE = 16  # tokens


@dataclass(frozen=True)
class Pages:
    """The pages of a cache whose blocks hold ``block_size`` tokens, a multiple of 16, of ``num_kv_heads`` heads."""

    block_size: int
    num_kv_heads: int
    spec: CallSpec

    def storage(self, cache: torch.Tensor) -> LayerKV:
        """A layer's ``cache`` as the kernels address it: page ``p`` of keys, and of values, at ``p`` pages' length."""
        flat = cache.view(-1)
        native.use_huge_pages(flat)
        return LayerKV(flat, flat[self.block_size * self.num_kv_heads * self.spec.head_dim :])

    def key_bounds(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """``[P, G, 2, D]``: the smallest and the largest key of each of ``blocks [P]`` of a layer's ``cache``."""
        each = self.block_size // PAGE
        layout = native.NativeAttention.layout(PAGE, self.num_kv_heads, self.spec.head_dim, self.spec)
        keys = (blocks[:, None] * 2 * each + torch.arange(each)).flatten()
        bounds = layout.bounds_k(cache.view(1, -1, self.num_kv_heads, PAGE * self.spec.head_dim), keys)
        low, high = bounds[0].unflatten(0, (-1, each)).unbind(3)
        return torch.stack([low.amin(dim=1), high.amax(dim=1)], dim=2)

    def plan(
        self,
        table: torch.Tensor,
        lens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        end: int | None = None,
    ) -> AttnPlan:
        """A step of B rows that feeds N tokens, in vLLM's terms.

        ``table [B, M]`` block numbers; ``lens [B]`` with the step's own tokens, which are the last ones; ``starts
        [B + 1]`` the rows' first tokens; ``slots [N]`` where tokens go, negative ones nowhere; ``end``: see the plan's.
        """
        each = self.block_size // PAGE
        blocks = table[:, : -(-int(lens.max()) // self.block_size)].long()
        pages = (blocks[:, :, None] * 2 * each + torch.arange(each)).flatten(1)
        slots = slots.long() + slots.long() // self.block_size * self.block_size
        return AttnPlan(TableView(pages, lens.long(), PAGE), starts.long(), slots, end)

    def attention(self, plan: AttnPlan) -> native.NativeAttention:
        """The attention of a step's layers."""
        layout = native.NativeAttention.layout(PAGE, self.num_kv_heads, self.spec.head_dim, self.spec)
        return native.NativeAttention(plan, layout, self.spec)
