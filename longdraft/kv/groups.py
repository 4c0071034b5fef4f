"""Groups of tokens between a cache's layout, in which they lie one by one, and a format, which takes heads first."""

from __future__ import annotations

import torch

from longdraft.kernels.layout import Layout
from longdraft.view import LayerKV


def read_groups(layout: Layout, kv: LayerKV, slots: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens at ``slots [n * group]``, or by head ``[n * group, G]`` → ``k, v [n, G, group, D]``."""
    pair = layout.read_k(kv.k, slots), layout.read_v(kv.v, slots)
    k, v = (x.unflatten(0, (-1, group)).transpose(1, 2) for x in pair)
    return k, v


def write_groups(layout: Layout, kv: LayerKV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store ``k, v [n, G, group, D]`` at ``slots [n * group]``."""
    layout.write_k(kv.k, slots, k.transpose(1, 2).flatten(0, 1))
    layout.write_v(kv.v, slots, v.transpose(1, 2).flatten(0, 1))
