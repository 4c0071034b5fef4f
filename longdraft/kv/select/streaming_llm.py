"""StreamingLLM (arXiv:2309.17453): the first tokens and the most recent ones.

The first few tokens draw attention whatever they say (attention sinks); with them and a window of recent tokens a model
stays fluent at any length. Here both are ranges of the target's own pages, at the tokens' own positions: no copy, no
rotation. MagicDec (arXiv:2408.11049) drafts with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from longdraft.kv.select.base import ViewSelector
from longdraft.view import TableView


def window_start(lens: torch.Tensor, budget: int, sinks: int) -> torch.Tensor:
    """First token of the window, ``[B]``: it takes what ``sinks`` leave of the budget, and never overlaps them."""
    return (lens - (budget - sinks)).clamp(min=sinks)


def first_and_last(length: int, count: int, sinks: int = 16) -> torch.Tensor:
    """``count`` of ``length`` positions, ascending: the first few (at most half), and the last ones."""
    sinks = min(sinks, count // 2)
    return torch.cat([torch.arange(sinks), torch.arange(length - (count - sinks), length)])


@dataclass(frozen=True)
class StreamingLLM(ViewSelector):
    """Tokens ``[0, sinks) ∪ [start, len)`` with ``sinks + (len − start) = budget`` once a row is longer than that.

    Sinks take at most half of the budget.
    """

    sinks: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "sinks", min(self.sinks, self.budget // 2))

    def select(self, view: TableView) -> TableView:
        """See ``ViewSelector``."""
        starts = window_start(view.lens, self.budget, self.sinks)
        return replace(view, sinks=self.sinks, starts=starts.minimum(view.lens))
