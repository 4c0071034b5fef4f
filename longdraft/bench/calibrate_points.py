"""Which passes and proposals a calibration times: those that curves are fitted to, and others to check them by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from longdraft.config import TARGETS, DraftConfig, as_int
from longdraft.drafts.registry import watches
from longdraft.errors import ContextLengthError

ROOM = 64  # tokens behind a row's context, for what is timed
TOKENS = (2, 3, 4, 9, 6, 5)  # that a verification feeds per row
GAMMAS = (2, 3, 5, 1)
RAGGED = (1, 4, 2, 6)  # either, of rows that differ
CONTEXTS = 512, 2048, 8192
ANCHOR = 4, 4096  # rows and context of the pass that all others are compared with


@dataclass(frozen=True)
class Point:
    """Something to be timed. ``sizes``: tokens that a pass feeds per row, or tokens that are proposed for it.

    Without a ``draft`` it is a pass of the target; with one its proposals, or if ``noted`` a pass of the target, all
    tokens of which stand, that also tells the draft what it needs. ``held_out`` points are not fitted to.
    """

    lengths: tuple[int, ...]
    sizes: tuple[int, ...]
    draft: DraftConfig | None = None
    noted: bool = False
    held_out: bool = False

    @property
    def label(self) -> str:
        """For lists."""
        what = "target" if self.draft is None else f"{'noted for ' if self.noted else ''}{self.draft.label}"
        lengths, sizes = ("–".join(f"{n:,}" for n in sorted({min(x), max(x)})) for x in (self.lengths, self.sizes))
        return f"{what}: {len(self.lengths)} x {lengths}, {sizes} tokens"


@dataclass(frozen=True)
class Measured:
    """A point, its seconds, and the part of them that telling the draft, or its choosing, took."""

    point: Point
    seconds: float
    extra_s: float = 0.0


@dataclass(frozen=True)
class Grid:
    """Batches, contexts and budgets of the points that are fitted to, ascending; those held out lie between them."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    budgets: tuple[int, ...]

    def __post_init__(self) -> None:
        for what, values, high in (("batch", self.batches, 256), ("context", self.contexts, 2**31 - 1)):
            for value in values:
                as_int(what, value, 1, high)
        for budget in self.budgets:
            as_int("budget", budget, 1, 2**31 - 1)

    @property
    def anchor(self) -> Point:
        """A plain step; smaller where the grid is."""
        return _even(min(ANCHOR[0], self.batches[-1]), min(ANCHOR[1], self.contexts[-1]), 1)

    def points(self, drafts: Sequence[DraftConfig]) -> list[Point]:
        """All of them, the anchor first."""
        found = [self.anchor, *self._target()]
        for draft in drafts:
            found += self._proposals(draft)
            if watches(draft):
                found += self._noted(replace(draft, budget=self.budgets[-1]))
            elif draft.own_model:
                found += self._noted(draft)
        return list(dict.fromkeys(found))

    def _target(self) -> Iterator[Point]:
        """Plain steps everywhere, and verifications of two sizes each."""
        for (i, batch), (j, context) in product(enumerate(self.batches), enumerate(self.contexts)):
            for tokens in (1, TOKENS[(i + j) % 6], TOKENS[(i + j + 3) % 6]):
                yield _even(batch, context, tokens)
        for (i, batch), (j, context) in product(enumerate(_between(self.batches)), enumerate(_between(self.contexts))):
            for tokens in (1, (4, 7, 3, 5)[(2 * i + j) % 4]):
                yield replace(_even(batch, context, tokens), held_out=True)
        for batch in _between(self.batches):
            yield self._ragged(batch)

    def _proposals(self, draft: DraftConfig) -> Iterator[Point]:
        """Every batch with every budget. What chooses is made to choose in every round."""
        if watches(draft):
            draft = replace(draft, refresh=1)
        budgets = self.budgets if bounded(draft) else (draft.budget,)
        for (i, batch), (j, budget) in product(enumerate(self.batches), enumerate(budgets)):
            # Only choices look at whole rows, one row after another: long ones where there are few.
            context = self.contexts[max(0, len(self.contexts) - 1 - i // 2 - j)]
            yield _even(batch, context, GAMMAS[(i + j) % 4], replace(draft, budget=budget))
        if watches(draft):  # and those that read here and there, in many long rows
            yield _even(self.batches[-1], self.contexts[-1], 2, replace(draft, budget=budgets[0]))
        middle = replace(draft, budget=_between(budgets)[0])
        for batch, context in zip(_between(self.batches), reversed(_between(self.contexts)), strict=False):
            yield replace(_even(batch, context, 4, middle), held_out=True)
        yield self._ragged(_between(self.batches)[-1], middle)

    def _noted(self, draft: DraftConfig) -> Iterator[Point]:
        """Passes that tell ``draft`` what it needs."""
        for i, (batch, context) in enumerate(product(self.batches, self.contexts[1:] or self.contexts)):
            yield _even(batch, context, (1, 4, 2)[i % 3], draft, noted=True)
        yield self._ragged(_between(self.batches)[-1], draft, noted=True)

    def _ragged(self, batch: int, draft: DraftConfig | None = None, noted: bool = False) -> Point:
        """Rows of all lengths that differ in size, too; held out."""
        low, high = self.contexts[0], self.contexts[-1]
        lengths = tuple(low + (high - low) * i // max(1, batch - 1) for i in range(batch))
        return Point(lengths, tuple(RAGGED[i % len(RAGGED)] for i in range(batch)), draft, noted, held_out=True)


def make_grid(batches: Sequence[int], contexts: Sequence[int], budgets: Sequence[int], limit: int) -> Grid:
    """The grid for rows of at most ``limit`` tokens; without ``contexts`` for ``CONTEXTS``, as far as there is room.

    Raises ``ContextLengthError`` where there is no room.
    """
    longest = limit - ROOM
    asked = max(contexts, default=1)
    if asked > longest:
        fix = "Give a shorter --context, or the cache more memory."
        raise ContextLengthError("--context", asked, f"there is room for {max(0, longest)} tokens", fix)
    kept = contexts or [min(n, longest) for n in CONTEXTS]
    return Grid(*(tuple(sorted(set(values))) for values in (batches, kept, budgets)))


def bounded(draft: DraftConfig) -> bool:
    """Whether the draft reads a budget of tokens, which is not its own business."""
    return draft.weights in TARGETS and draft.kv != "full"


def _even(batch: int, context: int, size: int, draft: DraftConfig | None = None, noted: bool = False) -> Point:
    return Point((context,) * batch, (size,) * batch, draft, noted)


def _between(values: Sequence[int]) -> list[int]:
    """A number between each and the next, in the middle of their logarithms; of a single value itself."""
    pairs = zip(values, values[1:], strict=False)
    return [round((low * high) ** 0.5) for low, high in pairs] or list(values)
