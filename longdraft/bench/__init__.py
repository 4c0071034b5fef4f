"""What a measurement of decoding speed asks for, what it answers, and the statistics between them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from longdraft.config import AutoDraft, DraftConfig, as_float, as_int
from longdraft.core import sum_by_position
from longdraft.errors import InvalidValueError, MissingDependencyError
from longdraft.outputs import ControlStats

if TYPE_CHECKING:
    import numpy as np

INSTALL = 'pip install "longdraft[bench]"'
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Arm:
    """One way of decoding; without a ``draft`` the plain one."""

    name: str
    draft: DraftConfig | AutoDraft | None = None

    @property
    def config(self) -> DraftConfig | None:
        """The draft, where it is always the same one."""
        return self.draft if isinstance(self.draft, DraftConfig) else None

    @property
    def budget(self) -> int | None:
        """The draft's budget, where it has one."""
        unbounded = self.config is None or self.config.weights == "ngram" or self.config.selection == "full"
        return None if unbounded else self.config.budget

    @property
    def gamma(self) -> int:
        """Most tokens proposed per pass."""
        return self.draft.gamma if self.draft else 0

    @property
    def label(self) -> str:
        """For headings."""
        size = "" if self.budget is None else f" {self.budget}"
        return f"{self.name}{size} γ{self.gamma}" if self.config else self.name


PLAIN = Arm("plain")
Lengths = int | tuple[int, ...]  # tokens per row of a batch: the same for all, or several in turn


def row_lengths(lengths: Lengths, batch: int) -> list[int]:
    """Of each row."""
    return list(islice(cycle((lengths,) if isinstance(lengths, int) else lengths), batch))


@dataclass(frozen=True)
class Plan:
    """Which cells are measured, and how long.

    Every batch at every context and temperature, with every one of ``arms`` against plain decoding. Rows of several
    lengths are together in a batch where a context is a tuple. In each of ``rounds`` every arm decodes at least
    ``round_tokens`` per row. ``assume_acceptance`` replaces what drafts propose: each token is then right with that
    probability.
    """

    batches: tuple[int, ...]
    contexts: tuple[Lengths, ...]
    arms: tuple[Arm, ...]
    temperatures: tuple[float, ...] = (0.0,)
    rounds: int = 8
    round_tokens: int = 32
    assume_acceptance: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        contexts = [n for lengths in self.contexts for n in row_lengths(lengths, max(self.batches, default=1))]
        for what, values, high in (("batch", self.batches, 4096), ("context", contexts, 2**31 - 1)):
            for value in values:
                as_int(what, value, 1, high)
        as_int("rounds", self.rounds, 2, 10_000)  # no interval can be given for one
        as_int("round_tokens", self.round_tokens, 1, 2**20)
        if self.assume_acceptance is not None:
            as_float("assume_acceptance", self.assume_acceptance, 0, 1)
        if not self.arms or any(arm.draft is None for arm in self.arms):
            raise InvalidValueError("arms", [arm.name for arm in self.arms], "must be drafts, at least one")

    @property
    def most_per_turn(self) -> int:
        """Most tokens that a row may get in one turn: all its proposals stand while another row's never do."""
        return (self.round_tokens + 1) * (1 + max(arm.gamma for arm in self.arms))


@dataclass(frozen=True)
class Turn:
    """What an arm did in one turn, or in several."""

    tokens: int
    seconds: float
    draft_s: float
    steps: int
    passes: int  # rows' shares of steps
    drafted: list[int]  # by position
    accepted: list[int]
    context: float  # mean length of its rows
    control: ControlStats = field(default_factory=ControlStats)  # empty unless its drafts were chosen step by step

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


Round = dict[Arm, Turn]


def total(turns: Sequence[Turn]) -> Turn:
    """Several turns as one."""
    sums = {name: sum(getattr(t, name) for t in turns) for name in ("tokens", "seconds", "draft_s", "steps", "passes")}
    drafted, accepted = (sum_by_position(getattr(t, name) for t in turns) for name in ("drafted", "accepted"))
    context, control = sum(t.context for t in turns) / len(turns), ControlStats.total(t.control for t in turns)
    return Turn(**sums, drafted=drafted, accepted=accepted, context=context, control=control)


@dataclass(frozen=True)
class Cell:
    """What was measured of one arm at one batch, context and temperature.

    Speeds are tokens per second of decoding over all rounds; ``speedup`` is the median of the rounds' ratios, and
    ``predicted`` what the prices at hand say of it, given the acceptance that came. Times are those of one step.
    ``context`` is the rows' mean where they differ, as ``row_contexts`` says. ``gamma`` is the most that is proposed,
    ``control`` what was chosen where that was left open (``ControlStats.report``), ``over_fixed`` its speed over that
    of the fastest other arm. The roof is the time in which memory can deliver what a plain step must read.
    """

    batch: int
    context: int
    dtype: str
    draft: str
    weights: str
    budget: int | None
    gamma: int
    temperature: float
    plain_tok_s: float
    spec_tok_s: float
    speedup: float
    ci_low: float
    ci_high: float
    identical: bool
    tokens_per_verify: float
    acceptance_by_position: list[float]
    t_plain_ms: float
    t_draft_ms: float
    t_verify_ms: float
    roof_share: float | None
    repeated_8gram: float
    simulated: bool
    noisy: bool
    shown: Shown = field(compare=False)
    predicted: float | None = None
    row_contexts: list[int] | None = None
    control: dict[str, Any] | None = None
    over_fixed: Over | None = None

    def report(self) -> dict[str, object]:
        """As a JSON object; what not every arm has only where there is one."""
        out = _report(self)
        rare = ("row_contexts", "control", "over_fixed")
        return {name: value for name, value in out.items() if name not in rare or value is not None}

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out 1."""
        return not self.ci_low <= 1 <= self.ci_high


@dataclass(frozen=True)
class Over:
    """Speed over that of ``arm``, by rounds."""

    arm: str
    ratio: float
    ci_low: float
    ci_high: float


@dataclass(frozen=True)
class Shown:
    """What a cell's table shows beyond its report."""

    label: str
    rounds: int
    read_bytes: float  # by a plain step
    flops: float  # of a plain step
    roof_ms: float | None


@dataclass(frozen=True)
class PeerCell:
    """Another engine's plain decoding. ``ratio`` is our plain speed over its speed; ``dtype`` is its weights' type."""

    peer: str
    batch: int
    context: int
    dtype: str
    tok_s: float
    ratio: float
    ci_low: float
    ci_high: float
    shown: str = field(compare=False)  # whether its tokens are ours, in words

    def report(self) -> dict[str, object]:
        """As a JSON object."""
        return _report(self)


def _report(cell: Cell | PeerCell) -> dict[str, object]:
    out = asdict(cell)
    del out["shown"]
    return out


def interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """The median of the rounds' ratios and the ends of its bootstrap interval."""
    import numpy as np

    values = np.asarray(ratios)
    return float(np.median(values)), *bounds(resampled((values,), np.median, seed))


def resampled(samples: tuple[np.ndarray, ...], statistic: Callable[..., np.ndarray], seed: int) -> np.ndarray:
    """``statistic(*samples, axis=-1)`` of bootstrap samples, drawn for all ``samples [n]`` together."""
    import numpy as np

    try:
        from scipy.stats import DegenerateDataWarning, bootstrap
    except ImportError as error:
        raise MissingDependencyError("scipy", "A confidence interval", INSTALL) from error
    random = np.random.default_rng(seed)
    with warnings.catch_warnings():  # about an interval that is not used: ``bounds`` makes it of the distribution
        warnings.simplefilter("ignore", DegenerateDataWarning)
        done = bootstrap(samples, statistic, paired=len(samples) > 1, method="percentile", random_state=random)
    return done.bootstrap_distribution


def bounds(distribution: np.ndarray) -> tuple[float, float]:
    """The ends of the percentile interval; resamples without a value (NaN) do not count."""
    import numpy as np

    low, high = np.nanquantile(distribution, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def repeated_share(rows: Iterable[Sequence[int]], n: int = 8) -> float:
    """The share of ``n``-grams that occurred before in the same row: text in a loop is easily drafted."""
    total = repeated = 0
    for row in rows:
        counts = Counter(tuple(row[i : i + n]) for i in range(len(row) - n + 1))
        total += counts.total()
        repeated += counts.total() - len(counts)
    return repeated / total if total else 0.0
