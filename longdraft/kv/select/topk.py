"""Exact top-k attention, the yardstick of MagicDec (arXiv:2408.11049): the tokens with the most attention of all.

Every round scores all keys by the query of the newest final token, in each layer and KV head, and copies the best. No
other choice of as many tokens holds more of that attention; what selections lose against it is what they could gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from longdraft.capture import Needs, Seen
from longdraft.kv.select.base import TokenSelector
from longdraft.kv.select.snapkv import attention_mass


@dataclass(frozen=True)
class TopK(TokenSelector):
    """The tokens that the newest query rates highest, ties to the earlier ones.

    Expensive: every choice reads all keys and copies its whole budget. It is a bound to compare others with, not a
    way to be fast; a larger ``refresh`` makes it cheaper and worse.
    """

    refresh: int | str = 1

    @property
    def needs(self) -> Needs:
        """See ``TokenSelector``."""
        return Needs(queries=1)

    def choose(self, seen: Seen, keys: Callable[[int], torch.Tensor], count: int) -> torch.Tensor:
        """See ``TokenSelector``."""
        newest = seen.last(1)
        position = torch.tensor([newest.start], device=newest.queries.device)
        chosen = []
        for layer, query in enumerate(newest.queries):
            mass = attention_mass(query, keys(layer), position)
            chosen.append(mass.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort().values)
        return torch.stack(chosen)
