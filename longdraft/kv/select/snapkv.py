"""SnapKV (arXiv:2404.14469): the tokens to which the last ones of the prompt paid attention.

What a model looks at stays much the same while it answers, so the attention of the last few queries (the observation
window) tells which keys the next ones will need. MagicDec (arXiv:2408.11049) drafts with it. Scores are scaled and
masked as the model's own are, whatever the number of query heads per KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import avg_pool1d

from longdraft.capture import Needs, Seen
from longdraft.kv.select.base import TokenSelector
from longdraft.kv.select.keys import Keys


def top_and_recent(mass: torch.Tensor, count: int, recent: int, pool: int) -> torch.Tensor:
    """``[L, G, count]`` of the S tokens that ``mass [L, G, S]`` rates: the last ``recent``, and the best before those.

    These are compared by their mean over ``pool`` neighbours (an odd number), so that what is chosen comes in clusters;
    what lies outside of them counts as zero.
    """
    *heads, length = mass.shape
    past = length - recent
    pooled = avg_pool1d(mass[..., :past], pool, stride=1, padding=pool // 2) if past else mass[..., :0]
    top = pooled.topk(count - recent).indices.sort().values
    return torch.cat([top, torch.arange(past, length, device=mass.device).expand(*heads, -1)], dim=2)


@dataclass(frozen=True)
class SnapKV(TokenSelector):
    """The last ``window`` tokens (at most half of all) and those that their queries rate highest, pooled over ``pool``.

    Where fewer queries are known, fewer have a say.
    """

    window: int = 32
    pool: int = 5

    @property
    def needs(self) -> Needs:
        """See ``TokenSelector``."""
        return Needs(queries=self.window)

    def choose(self, seen: Seen, keys: Keys, count: int) -> torch.Tensor:
        """See ``TokenSelector``."""
        mass = keys.mass(seen.queries, seen.start)
        return top_and_recent(mass, count, min(self.window, count // 2), self.pool)
