"""What the acceptance bench reports: cells and differences, made from the samples of one task, context and temperature.

Names are those of the JSON; docs/acceptance.md says what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, product
from typing import TypeVar

import numpy as np

from longdraft.bench import Arm
from longdraft.bench.examine import Sample
from longdraft.bench.ratios import Estimate, Ratio


@dataclass(frozen=True)
class AcceptanceCell:
    """One draft at one budget and γ."""

    task: str
    context: int
    draft: str
    weights: str
    budget: int | None
    gamma: int
    temperature: float
    prompts: int
    positions: int
    after: int
    acceptance: float
    ci_low: float
    ci_high: float
    acceptance_by_position: list[float | None]
    ci_by_position: list[list[float] | None]
    expected_tokens: float
    tokens_per_verify: float
    tokens_per_verify_ci: list[float]
    proposed: float
    overlap: float | None
    overlap_ci: list[float] | None
    coupled_overlap: float | None
    captured_mass: float | None
    captured_mass_ci: list[float] | None
    bytes_per_token: int
    extra_bytes: int
    note_bytes: int
    select_ms: float
    identical: bool
    repeated_8gram: float
    answered: float | None


@dataclass(frozen=True)
class Difference:
    """A draft's figure less the baseline's on the same prompts.

    ``measure`` is acceptance, overlap, coupled_overlap, captured_mass, or tokens_per_verify, which alone has a γ.
    """

    task: str
    context: int
    temperature: float
    draft: str
    budget: int | None
    baseline: str
    baseline_budget: int | None
    measure: str
    gamma: int | None
    difference: float
    ci_low: float
    ci_high: float

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out 0."""
        return not self.ci_low <= 0 <= self.ci_high


Row = TypeVar("Row", AcceptanceCell, Difference)


@dataclass
class Result:
    """Cells, and the differences between them."""

    cells: list[AcceptanceCell] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    def report(self) -> dict[str, object]:
        """As a JSON object."""
        return {name: [asdict(x) for x in getattr(self, name)] for name in ("cells", "differences")}


@dataclass(frozen=True)
class Ground:
    """What all drafts of a result have in common."""

    task: str
    context: int
    temperature: float
    positions: int
    after: int
    gammas: tuple[int, ...]
    seed: int
    repeated_8gram: float
    answered: float | None


def make_cell(ground: Ground, arm: Arm, n: int, sample: Sample, read: int, held: int, noted: int) -> AcceptanceCell:
    """The cell of the ``n``-th γ."""
    gamma, asked = ground.gammas[n], ground.positions * len(sample.proposed)
    places = [ratio.estimate(ground.seed) for ratio in by_position(sample, ground.positions)[:gamma]]
    rated = ("tokens_per_verify", "overlap", "coupled_overlap", "captured_mass")
    loop, overlap, coupled, mass = (_ratio(ground, sample, name, n).estimate(ground.seed) for name in rated)
    seconds = float(sample.select_s.sum() / max(1, sample.proposed.sum()))
    return AcceptanceCell(
        task=ground.task,
        context=ground.context,
        draft=arm.name,
        weights=arm.draft.weights,
        budget=arm.budget,
        gamma=gamma,
        temperature=ground.temperature,
        prompts=len(sample.proposed),
        positions=ground.positions,
        after=ground.after,
        acceptance=places[0].value,
        ci_low=places[0].low,
        ci_high=places[0].high,
        acceptance_by_position=[_value(e) for e in places],
        ci_by_position=[_ends(e) for e in places],
        expected_tokens=1 + float(sample.stood[:, :gamma].sum()) / asked,
        tokens_per_verify=loop.value,
        tokens_per_verify_ci=_ends(loop),
        proposed=float(sample.proposed.sum()) / asked,
        overlap=_value(overlap),
        overlap_ci=_ends(overlap),
        coupled_overlap=_value(coupled),
        captured_mass=_value(mass),
        captured_mass_ci=_ends(mass),
        bytes_per_token=read,
        extra_bytes=held,
        note_bytes=noted,
        select_ms=1000 * seconds,
        identical=bool(sample.identical.all()),
        repeated_8gram=ground.repeated_8gram,
        answered=ground.answered,
    )


def differences(ground: Ground, samples: Mapping[Arm, Sample], baseline: str | None) -> Iterator[Difference]:
    """Every draft against the baseline of the same budget, or of every budget where one of the two has none."""
    bases = [arm for arm in samples if arm.name == baseline]
    measures = [(name, None, 0) for name in ("acceptance", "overlap", "coupled_overlap", "captured_mass")]
    measures += [("tokens_per_verify", gamma, n) for n, gamma in enumerate(ground.gammas)]
    for arm, base in product(samples, bases):
        if arm.name == baseline or (None not in (arm.budget, base.budget) and arm.budget != base.budget):
            continue
        for name, gamma, n in measures:
            mine, other = (_ratio(ground, samples[which], name, n) for which in (arm, base))
            if found := mine.minus(other, ground.seed):
                where = (ground.task, ground.context, ground.temperature, arm.name, arm.budget, base.name, base.budget)
                yield Difference(*where, name, gamma, found.value, found.low, found.high)


def by_position(sample: Sample, positions: int) -> list[Ratio]:
    """How often the n-th proposed token stands where all before it do; one that was not proposed does not."""
    reached = np.column_stack([np.full(len(sample.stood), positions), sample.stood[:, :-1]])
    return [Ratio(top, bottom) for top, bottom in zip(sample.stood.T, reached.T, strict=True)]


def by_setting(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, int, float], list[Row]]]:
    """Cells, or differences, of the same task, context and temperature together."""
    for key, group in groupby(rows, lambda row: (row.task, row.context, row.temperature)):
        yield key, list(group)


def _ratio(ground: Ground, sample: Sample, name: str, n: int) -> Ratio:
    """A measure by its name in the cell; ``n`` is the number of the γ, where that matters."""
    if name == "acceptance":
        return by_position(sample, ground.positions)[0]
    if name == "tokens_per_verify":
        return Ratio(sample.tokens[:, n], sample.passes[:, n])
    if name == "captured_mass":
        return Ratio(sample.captured, np.ones(len(sample.captured)))
    top = {"overlap": sample.overlap, "coupled_overlap": sample.coupled}[name]
    return Ratio(top, np.full(len(top), ground.positions))


def _value(estimate: Estimate | None) -> float | None:
    return estimate and estimate.value


def _ends(estimate: Estimate | None) -> list[float] | None:
    return estimate and [estimate.low, estimate.high]
