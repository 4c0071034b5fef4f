"""What steps take in this vLLM: passes and proposals over empty pages are timed when it starts. Imports no vLLM.

Points, fits and the form of the curves are those of ``longdraft calibrate``; what is timed is the runner's own pass,
over blocks of its cache that no request has yet. The scale of it all is observed while requests run
(``planner/pace.py``), so a few seconds are enough.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from statistics import median
from typing import TYPE_CHECKING

import torch

from longdraft.config import DraftConfig
from longdraft.errors import KVCapacityError
from longdraft.integrations.vllm.drafter import Forward, guess
from longdraft.integrations.vllm.tables import DraftTables, Step, fed
from longdraft.planner.curves import Curves

if TYPE_CHECKING:
    from longdraft.bench.calibrate_points import Point

BATCHES, CONTEXTS = (1, 4, 16), (512, 2048, 8192)
MOST_TOKENS = 2**16  # of a point's rows together
SECONDS = 20.0  # after which nothing is timed a second time
ROUNDS = 5
REPORT_S = 5.0
TOKEN = 7  # any

# Logits [N, V] after tokens [N] of rows whose numbers of them are given: the target's pass over block tables [R, M].
Verify = Callable[[torch.Tensor, Step, torch.Tensor, Sequence[int]], torch.Tensor]


@dataclass(frozen=True)
class Bench:
    """The passes of a runner with ``blocks`` of ``block_size`` tokens, the first of which is nobody's."""

    verify: Verify
    forward: Forward
    blocks: int
    block_size: int
    sinks: int
    budget: int
    device: torch.device

    def fits(self, point: Point) -> bool:
        """Whether there are blocks for its rows."""
        return self.blocks_of(point) < self.blocks and sum(point.lengths) <= MOST_TOKENS

    def blocks_of(self, point: Point) -> int:
        """How many its rows take."""
        return sum(self._counts(point))

    def run(self, point: Point) -> None:
        """What ``point`` says, until its tokens are known."""
        table = self._table(point)
        if point.draft is None:
            step = fed(table, point.lengths, point.sizes, self.block_size)
            ids = torch.full((sum(point.sizes),), TOKEN, dtype=torch.int32, device=self.device)
            out = [self.verify(ids, step, table, point.sizes).argmax(dim=-1)]
        else:
            budgets, known = [self.budget] * len(point.lengths), [n + 1 for n in point.lengths]
            tables = DraftTables.build(table, known, list(point.sizes), budgets, self.sinks, self.block_size)
            newest = torch.full((len(known),), TOKEN, dtype=torch.int32, device=self.device)
            out = guess(self.forward, tables, newest, max(point.sizes), lambda logits, _: logits.argmax(dim=-1))
        out[-1].tolist()

    def _counts(self, point: Point) -> list[int]:
        return [-(-(n + size) // self.block_size) for n, size in zip(point.lengths, point.sizes, strict=True)]

    def _table(self, point: Point) -> torch.Tensor:
        """Blocks of its own for each row."""
        counts = self._counts(point)
        first = list(accumulate(counts, initial=1))[:-1]
        start = torch.tensor(first, dtype=torch.int32)[:, None]
        columns = torch.arange(max(counts), dtype=torch.int32)[None]
        return (start + columns.minimum(torch.tensor(counts)[:, None] - 1)).int().to(self.device)


def points_of(bench: Bench, draft: DraftConfig, rows: int, length: int, tokens: int) -> list[Point]:
    """What is timed for batches of up to ``rows``, contexts of up to ``length``, passes of up to ``tokens``.

    Raises ``KVCapacityError`` where that is nothing.
    """
    from longdraft.bench.calibrate_points import ROOM, Grid  # what only measuring needs

    longest = max(1, min(length, (bench.blocks - 1) * bench.block_size) - ROOM)
    batches, contexts = ({min(n, top) for n in values} for values, top in ((BATCHES, rows), (CONTEXTS, longest)))
    grid = Grid(tuple(sorted(batches)), tuple(sorted(contexts)), (draft.budget,))
    points = [p for p in grid.points([draft]) if bench.fits(p) and sum(p.sizes) <= tokens]
    if not {True, False} <= {p.draft is None for p in points if not p.held_out}:
        raise KVCapacityError(f"a cache of {bench.blocks} blocks has no room for what is timed; give it more memory")
    return points


def measure(
    bench: Bench, points: Sequence[Point], report: Callable[[str], None], seconds: float = SECONDS
) -> tuple[Curves, float]:
    """Curves of the target and of the draft, and the median of their errors, relative, where points were held out."""
    from longdraft.bench.calibrate_fit import fit_curves, predict, spread
    from longdraft.bench.calibrate_points import Measured

    taken: dict[Point, list[float]] = defaultdict(list)
    began = reported = time.perf_counter()
    rounds = [random.Random(n).sample(points, len(points)) for n in range(ROUNDS)]  # noqa: S311 - no secret
    for done, point in enumerate(chain.from_iterable(rounds)):
        started = time.perf_counter()
        if done >= len(points) and started - began > seconds:
            break
        bench.run(point)
        ended = time.perf_counter()
        taken[point].append(ended - started)
        if ended - reported > REPORT_S:
            reported = ended
            report(f"{done + 1} of at most {ROUNDS * len(points)} passes and proposals are timed")
    # The first time chooses kernels and makes buffers, so it counts only where there is no other.
    measured = [Measured(point, median(times[1:] or times)) for point, times in taken.items()]
    curves = fit_curves(measured, {})
    held = [predict(curves, m.point) / m.seconds - 1 for m in measured if m.point.held_out]
    return curves, spread(held)[0]
