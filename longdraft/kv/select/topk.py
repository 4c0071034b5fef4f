"""Exact top-k attention, the yardstick of MagicDec (arXiv:2408.11049): the tokens with the most attention of all.

Every round scores all keys by the query of the newest final token, in each layer and KV head, and copies the best. No
other choice of as many tokens holds more of that attention; what selections lose against it is what they could gain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longdraft.capture import Needs, Seen
from longdraft.kv.select.base import TokenSelector, top
from longdraft.kv.select.keys import Keys


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

    def choose(self, seen: Seen, keys: Keys, count: int) -> torch.Tensor:
        """See ``TokenSelector``."""
        return top(keys.mass(seen.queries[:, -1:], seen.stop - 1), count)
