"""What a pass hands out besides logits, for drafts that choose by it: who needs what, and the records that carry it.

Each kind is one field of all three records, ``None`` where nobody wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from longdraft.view import LayerKV

MASS_EVERY = (
    4  # page masses are noted at positions that are multiples of this: neighbours attend alike, and noting costs
)

Attention = Callable[[torch.Tensor, LayerKV], torch.Tensor]


@dataclass(frozen=True)
class Needs:
    """What a draft wants to be told of each sequence, of so many of its last tokens.

    ``queries``: as attention reads them, after rotary embedding. ``page_mass``: where their attention went, by page, of
    the tokens at multiples of ``MASS_EVERY``. ``hidden``: the residual stream, behind each of ``taps`` layers (0: the
    embedding); of the first ``sinks`` tokens, too.
    """

    queries: int = 0
    page_mass: int = 0
    hidden: int = 0
    sinks: int = 0
    taps: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Of how many of a sequence's last tokens anything is wanted."""
        return max(self.queries, self.page_mass, self.hidden)

    def ranges(self, length: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Which of the tokens ``[start, stop)`` of a text anything is wanted of, its first ``length`` being known."""
        recent = max(start, length - self.tokens)
        wanted = (start, min(stop, self.sinks, recent)), (recent, stop)
        return [(a, b) for a, b in wanted if a < b]

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            max(self.queries, other.queries),
            max(self.page_mass, other.page_mass),
            max(self.hidden, other.hidden),
            max(self.sinks, other.sinks),
            tuple(sorted({*self.taps, *other.taps})),
        )


NOTHING = Needs()


@dataclass(frozen=True)
class Capture:
    """A form for one pass: some of its flat tokens, and room for what is wanted of them. The pass fills it in.

    ``page_mass`` holds the attention weights of each page of a token's row, summed over the heads of a KV group; a
    token's pages add up to the number of these heads, and pages past its row's last one hold zero. What tokens that
    ``mass_tokens`` leaves out have there means nothing. Layers that do not run leave their part as it is. Capturing
    changes no output bit.
    """

    tokens: torch.Tensor  # [n] int64, on the model's device
    queries: torch.Tensor | None = None  # [L, n, H, D] float32
    page_mass: torch.Tensor | None = None  # [L, n, G, P] float32
    mass_tokens: torch.Tensor | None = None  # [n] int64: as ``tokens``, or -1 where no masses are wanted; None: of all
    hidden: torch.Tensor | None = None  # [T, n, hidden] in the compute type, as ``taps`` says
    taps: tuple[int, ...] = ()  # T numbers of layers, ascending

    @property
    def massed(self) -> torch.Tensor:
        """``[n]`` of which tokens masses are wanted: their numbers, or -1."""
        return self.tokens if self.mass_tokens is None else self.mass_tokens

    def note(self, behind: int, x: torch.Tensor) -> None:
        """Take what is wanted of the residual stream ``x [N, hidden]`` behind so many layers."""
        if behind in self.taps:
            self.hidden[self.taps.index(behind)] = x[self.tokens]

    def noting(self, layer: int, attention: Attention, page_mass: Attention | None) -> Attention:
        """``attention`` of one layer, which notes what is wanted when it is called.

        ``page_mass``: queries ``[n, H, D]`` of the form's tokens and the layer's cache → ``[n, G, P]``, where wanted.
        """

        def noting(q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
            asked = q[self.tokens]
            if self.queries is not None:
                self.queries[layer] = asked
            if self.page_mass is not None and page_mass is not None:
                self.page_mass[layer] = page_mass(asked, kv)
            return attention(q, kv)

        return noting

    def part(self, start: int, stop: int, position: int, taps: Sequence[int] = ()) -> Seen:
        """What was captured of the tokens ``[start, stop)`` of the form, the first of which stands at ``position``.

        ``taps``: which residual streams, in which order.
        """
        hidden = None
        if taps:  # a copy: a view would hold on to all that the pass captured
            chosen = slice(None) if tuple(taps) == self.taps else [self.taps.index(tap) for tap in taps]
            hidden = self.hidden[chosen, start:stop].clone()
        others = (None if x is None else x[:, start:stop] for x in (self.queries, self.page_mass))
        return Seen(position, *others, hidden)


@dataclass(frozen=True)
class Seen:
    """What passes said of consecutive tokens of one sequence, from position ``start`` on; see ``Capture``."""

    start: int
    queries: torch.Tensor | None = None  # [L, n, H, D] float32
    page_mass: torch.Tensor | None = None  # [L, n, G, P] float32
    hidden: torch.Tensor | None = None  # [T, n, hidden], one stream for each of the draft's taps

    @property
    def stop(self) -> int:
        """The position behind the last token."""
        return self.start + next(x.shape[1] for x in self._kinds if x is not None)

    def then(self, new: Seen, keep: int) -> Seen:
        """This and what came after it, cut to the last ``keep`` tokens; what does not join on is forgotten."""
        more = keep - (new.stop - new.start)
        if self.stop != new.start or more <= 0:
            return new.last(keep)
        old = self.since(max(self.start, self.stop - more))
        return Seen(old.start, *(_join(*pair) for pair in zip(old._kinds, new._kinds, strict=True)))

    def only(self, needs: Needs) -> Seen | None:
        """The kinds that ``needs`` names; ``None`` if there are none of them."""
        wanted = needs.queries, needs.page_mass, needs.hidden
        kept = [x if n else None for x, n in zip(self._kinds, wanted, strict=True)]
        return None if all(x is None for x in kept) else Seen(self.start, *kept)

    def last(self, keep: int) -> Seen:
        """This, cut to the last ``keep`` tokens; a copy, since a view would hold on to all that the pass captured."""
        kept = self.since(max(self.start, self.stop - keep))
        return Seen(kept.start, *(None if x is None else x.clone() for x in kept._kinds))

    def since(self, position: int) -> Seen:
        """What this says of the tokens from ``position`` on, one of its own or the one behind them."""
        return Seen(position, *(None if x is None else x[:, position - self.start :] for x in self._kinds))

    def until(self, length: int) -> Seen | None:
        """What this says of the sequence's first ``length`` tokens; ``None`` if nothing."""
        if length <= self.start:
            return None
        return Seen(self.start, *(None if x is None else x[:, : length - self.start] for x in self._kinds))

    @property
    def _kinds(self) -> tuple[torch.Tensor | None, ...]:
        return self.queries, self.page_mass, self.hidden


def _join(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """Both, one token after the other; of pages there may be more in either."""
    if first is None or second is None:
        return None
    width = max(first.shape[-1], second.shape[-1])
    return torch.cat([pad(x, (0, width - x.shape[-1])) for x in (first, second)], dim=1)
