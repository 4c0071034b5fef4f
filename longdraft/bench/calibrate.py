"""Calibration: passes and proposals over synthetic rows are timed, each against an anchor, and curves are fitted.

The speed of a shared machine's memory drifts while it is measured. So a plain step, the anchor, is timed before and
after every few points; what counts of a point is its ratio to the anchor, the median over rounds, each in an order of
its own. What others disturbed is timed again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from statistics import median

import psutil
import torch

from longdraft.bench.calibrate_fit import fit_curves, fit_roofline, predict, spread
from longdraft.bench.calibrate_points import Grid, Measured, Point
from longdraft.bench.calibrate_rows import LEAST_S, SyntheticRows, Timed, fitting
from longdraft.bench.machine import Load, disturbed, foreign_s
from longdraft.bench.turns import OnProgress
from longdraft.config import DraftConfig
from longdraft.drafts.registry import watches
from longdraft.errors import BusyMachineError, InvalidValueError
from longdraft.llm import LLM
from longdraft.planner.calibration import Calibration, Errors, setting
from longdraft.planner.candidates import Target
from longdraft.planner.curves import kind
from longdraft.planner.hardware import GIB, Hardware

BLOCK = 5  # points between two measurements of the anchor
LEAST_ROUNDS, MOST_ROUNDS = 3, 25
ROUNDS_OF_LONG = 2  # of points that take more than their share of the time at once
LEAST_BLOCKS = 10  # before anything is said of how many were disturbed
LISTEN_S = 1.0  # before anything is timed
MOST_FOREIGN = 0.1  # of all cores' time, while listening
MOST_NOISY, FEW_NOISY = 0.5, 0.2  # of the blocks: too many to go on, and few enough not to mention
WAKES = 3  # measurements of a lost state
MEMORY_SHARE = 0.9  # of all memory, for weights and cache
FIX = "Try again when they are done, or take what comes by --force."


@dataclass(frozen=True)
class Outcome:
    """A calibration, what it was fitted to, and what it says of each of these: seconds, in the same order."""

    calibration: Calibration
    measured: list[Measured]
    predicted: list[float]


@dataclass
class Record:
    """What was timed so far: of each point its ratios to the anchor, and the anchor's seconds."""

    ratios: dict[Point, list[Timed]] = field(default_factory=dict)
    anchor: list[float] = field(default_factory=list)
    blocks: int = 0
    noisy: int = 0

    @property
    def anchor_s(self) -> float:
        """Seconds of the anchor."""
        return median(self.anchor)

    def measured(self) -> list[Measured]:
        """The points at the anchor's usual speed."""
        return [
            Measured(
                point,
                self.anchor_s * median(t.seconds for t in timed),
                self.anchor_s * median(t.extra_s for t in timed),
            )
            for point, timed in self.ratios.items()
        ]


def calibrate(
    llm: LLM,
    grid: Grid,
    drafts: Sequence[DraftConfig],
    seconds: float,
    report: OnProgress,
    force: bool = False,
) -> Outcome:
    """Measure and fit; ``seconds`` is about the time to measure. The engine must have no requests, and is left so.

    Raises ``BusyMachineError`` where others use the machine, unless ``force`` takes that, ``KVCapacityError`` where the
    cache has no room for the anchor, ``InvalidValueError`` for a draft that cannot be.
    """
    if llm.engine.num_unfinished:
        raise InvalidValueError("unfinished requests", llm.engine.num_unfinished, "must be 0 while speed is measured")
    for draft in drafts:
        llm.engine.runner.check(draft)
    if not force:
        require_quiet()
    points = fitting(llm, grid.points(drafts))
    rows = SyntheticRows(llm, points, report)
    try:
        record = measure(rows, points, seconds, report, force)
        wakes = {kind(draft): _wake_s(rows, points, draft) for draft in drafts}
    finally:
        rows.close()
    measured = record.measured()
    curves = fit_curves(measured, wakes)
    predicted = [predict(curves, m.point) for m in measured]
    held = [p / m.seconds - 1 for m, p in zip(measured, predicted, strict=True) if m.point.held_out]
    hardware, roofline = fit_roofline(_target(llm), measured)
    calibration = Calibration(
        setting=setting(llm.model),
        name=llm.checkpoint.name,
        made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        anchor_s=record.anchor_s,
        batch=max(len(p.lengths) for p in points),
        context=max(max(p.lengths) for p in points),
        noisy=record.noisy > FEW_NOISY * record.blocks,
        errors=Errors(*spread(held), len(held), *spread(roofline)),
        hardware=hardware,
        curves=curves,
    )
    return Outcome(calibration, measured, predicted)


def _target(llm: LLM) -> Target:
    """The model on a machine of which all but the speed is known."""
    model = llm.model
    where = setting(model)
    memory = psutil.virtual_memory().total
    if model.device.type == "cuda":
        memory = torch.cuda.get_device_properties(model.device).total_memory
    hardware = Hardware(
        where.machine,
        tflops=1.0,
        bandwidth_gb_s=1.0,
        memory_gib=round(memory / GIB, 1),
        memory_share=MEMORY_SHARE,
        kind="gpu" if model.device.type == "cuda" else "cpu",
        source=f"calibrated with {llm.checkpoint.name}, {where.dtype}, {where.kernels}, {where.threads} threads",
    )
    sizes = model.bytes_per_weight, model.kv_dtype.itemsize
    return Target(llm.checkpoint.name, model.config, hardware, *sizes)


def _wake_s(rows: SyntheticRows, points: Sequence[Point], draft: DraftConfig) -> float:
    """Seconds per token of text to build up the state of ``draft`` again, in the longest row that it was timed on."""
    mine = [p for p in points if p.draft and kind(p.draft) == kind(draft) and not p.noted]
    if not mine or not (watches(draft) or draft.weights == "ngram"):
        return 0.0
    longest = max(mine, key=lambda p: p.lengths[0])
    length = longest.lengths[0]
    return max(0.0, median(rows.wake(longest.draft, length) for _ in range(WAKES))) / length


def require_quiet(seconds: float = LISTEN_S) -> None:
    """Do nothing for a while, and raise ``BusyMachineError`` if others do something meanwhile."""
    before = Load.now()
    time.sleep(seconds)
    after = Load.now()
    share = foreign_s(before, after) / ((after.wall - before.wall) * (psutil.cpu_count() or 1))
    if share > MOST_FOREIGN:
        raise BusyMachineError(share, MOST_FOREIGN, FIX)


def measure(
    rows: SyntheticRows, points: Sequence[Point], seconds: float, report: OnProgress, force: bool = False
) -> Record:
    """Time ``points``, the first of which is the anchor, for about as many ``seconds``; two or three rounds at least.

    Without ``force`` raises ``BusyMachineError`` after a round if others disturbed most blocks.
    """
    record, anchor, others = Record(), points[0], list(points[1:])
    end = time.perf_counter() + seconds
    costs = {}
    for i, point in enumerate(points):  # once for nothing: drafts make their buffers, and first choices
        costs[point] = max(LEAST_S, rows.time(point).seconds) * (2 if point.noted else 1)
        report("warm up", i + 1, len(points), "points")
    rounds = list(_rounds(others, costs, end - time.perf_counter(), costs[anchor]))
    blocks = [(number, block) for number, chosen in enumerate(rounds) for block in _blocks(chosen, number)]
    for done, (number, block) in enumerate(blocks):
        if number >= LEAST_ROUNDS and time.perf_counter() > end:
            break
        _time_block(rows, record, anchor, block)
        report("measure", done + 1, len(blocks), "blocks")
        if not force and record.blocks >= LEAST_BLOCKS and record.noisy > MOST_NOISY * record.blocks:
            raise BusyMachineError(record.noisy / record.blocks, MOST_NOISY, FIX)
    record.ratios = {anchor: [Timed(1.0)]} | {point: record.ratios[point] for point in others}
    return record


def _rounds(
    points: Sequence[Point], costs: dict[Point, float], seconds: float, anchor_s: float
) -> Iterator[list[Point]]:
    """The points of each round: all in the first ones; then those that have not had their share of the time yet."""
    used, share = dict.fromkeys(points, 0.0), seconds / max(1, len(points))
    for number in range(MOST_ROUNDS):
        least = {p: ROUNDS_OF_LONG if costs[p] > share else LEAST_ROUNDS for p in points}
        chosen = [p for p in points if number < least[p] or used[p] + costs[p] < share]
        spent = sum(costs[p] for p in chosen) + 2 * anchor_s * (-(-len(chosen) // BLOCK))
        if not chosen or (number >= LEAST_ROUNDS and spent > seconds):
            return
        seconds -= spent
        for point in chosen:
            used[point] += costs[point]
        yield chosen


def _blocks(points: list[Point], number: int) -> Iterator[list[Point]]:
    """The points of a round in an order of its own, a few at a time."""
    order = random.Random(number).sample(points, len(points))  # noqa: S311 - no secret
    for i in range(0, len(order), BLOCK):
        yield order[i : i + BLOCK]


def _time_block(rows: SyntheticRows, record: Record, anchor: Point, points: Sequence[Point]) -> None:
    """Time some points between two measurements of the anchor; again where others disturbed that, but once only."""
    for _ in range(2):
        before = Load.now()
        first = rows.time(anchor).seconds
        timed = [rows.time(point) for point in points]
        last = rows.time(anchor).seconds
        if not (noisy := disturbed(before, Load.now())):
            break
    record.blocks += 1
    record.noisy += noisy
    record.anchor += [first, last]
    unit = (first + last) / 2
    for point, t in zip(points, timed, strict=True):
        record.ratios.setdefault(point, []).append(Timed(t.seconds / unit, t.extra_s / unit))
