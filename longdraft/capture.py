"""What a pass hands out besides logits, for drafts that choose by it: who needs what, and the records that carry it.

Each kind is one field of all three records. Other kinds have their place here: attention masses per page
``[L, n, G, P]``, hidden states of some layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from longdraft.view import LayerKV

Attention = Callable[[torch.Tensor, LayerKV], torch.Tensor]


@dataclass(frozen=True)
class Needs:
    """What a draft wants to be told of each sequence: so many of its last tokens' queries, after rotary embedding."""

    queries: int = 0

    @property
    def tokens(self) -> int:
        """Of how many of a sequence's last tokens anything is wanted."""
        return self.queries


NOTHING = Needs()


@dataclass(frozen=True)
class Capture:
    """A form for one pass: some of its flat tokens, and room for what is wanted of them. The pass fills it in.

    Layers that do not run leave their part as it is. Capturing changes no output bit.
    """

    tokens: torch.Tensor  # [n] int64, on the model's device
    queries: torch.Tensor  # [L, n, H, D] float32

    def noting_queries(self, layer: int, attention: Attention) -> Attention:
        """``attention`` of one layer, which notes the queries ``[N, H, D]`` that it is called with."""

        def noting(q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
            self.queries[layer] = q[self.tokens]
            return attention(q, kv)

        return noting

    def part(self, start: int, stop: int, position: int) -> Seen:
        """What was captured of the tokens ``[start, stop)`` of the form, the first of which stands at ``position``."""
        return Seen(position, self.queries[:, start:stop])


@dataclass(frozen=True)
class Seen:
    """What passes said of consecutive tokens of one sequence, from position ``start`` on."""

    start: int
    queries: torch.Tensor  # [L, n, H, D] float32

    @property
    def stop(self) -> int:
        """The position behind the last token."""
        return self.start + self.queries.shape[1]

    def then(self, new: Seen, keep: int) -> Seen:
        """This and what came after it, cut to the last ``keep`` tokens; what does not join on is forgotten."""
        joined = Seen(self.start, torch.cat([self.queries, new.queries], dim=1)) if self.stop == new.start else new
        return joined.last(keep)

    def last(self, keep: int) -> Seen:
        """This, cut to the last ``keep`` tokens; a copy, since a view would hold on to all that the pass captured."""
        kept = self.queries[:, -keep:].clone()
        return Seen(self.stop - kept.shape[1], kept)

    def until(self, length: int) -> Seen | None:
        """What this says of the sequence's first ``length`` tokens; ``None`` if nothing."""
        return Seen(self.start, self.queries[:, : length - self.start]) if length > self.start else None
