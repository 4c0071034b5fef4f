"""SnapKV (arXiv:2404.14469): the tokens to which the last ones of the prompt paid attention.

What a model looks at stays much the same while it answers, so the attention of the last few queries (the observation
window) tells which keys the next ones will need. MagicDec (arXiv:2408.11049) drafts with it. Scores are scaled and
masked as the model's own are, whatever the number of query heads per KV head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import avg_pool1d

from longdraft.capture import Needs, Seen
from longdraft.kernels.attention.mass import group_weights
from longdraft.kv.select.base import TokenSelector


def attention_mass(
    queries: torch.Tensor,  # [n, H, D] after rotary embedding
    keys: torch.Tensor,  # [S, G, D] likewise
    positions: torch.Tensor,  # [n] where the queries stand; query p sees the keys [0, p]
) -> torch.Tensor:
    """``[G, S]`` float32: attention weights of every key, summed over the queries and over the heads of a KV group."""
    return torch.stack([x.sum(dim=0) for x in group_weights(queries.float(), keys.float(), positions)])


def top_and_recent(mass: torch.Tensor, count: int, recent: int, pool: int) -> torch.Tensor:
    """``[G, count]`` of the S tokens that ``mass [G, S]`` rates: the last ``recent``, and the best of those before.

    These are compared by their mean over ``pool`` neighbours (an odd number), so that what is chosen comes in clusters;
    what lies outside of them counts as zero.
    """
    kv_heads, length = mass.shape
    past = length - recent
    pooled = avg_pool1d(mass[:, None, :past], pool, stride=1, padding=pool // 2)[:, 0] if past else mass[:, :0]
    top = pooled.topk(count - recent).indices.sort().values
    return torch.cat([top, torch.arange(past, length, device=mass.device).expand(kv_heads, -1)], dim=1)


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

    def choose(self, seen: Seen, keys: Callable[[int], torch.Tensor], count: int) -> torch.Tensor:
        """See ``TokenSelector``."""
        recent = min(self.window, count // 2)
        positions = torch.arange(seen.start, seen.stop, device=seen.queries.device)
        chosen = [
            top_and_recent(attention_mass(q, keys(layer), positions), count, recent, self.pool)
            for layer, q in enumerate(seen.queries)
        ]
        return torch.stack(chosen)
