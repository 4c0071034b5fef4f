"""Tokens per round of several drafts on held-out texts, and what that is worth by the roofline (arXiv:2504.06419).

Three ways to get at tokens per round, and every row says which:

rounds    real rounds that begin in given texts (``train/rounds.py``); any draft, trained or not
forced    one pass of a draft over the texts: fast, an estimate; ``train/rounds.py`` says of what
engine    the engine's own loop, behind given texts and along what the target writes then, under the coupled rule

Texts are drawn for intervals, not rounds: those of one text are alike. Drafts are compared on the same texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product

import numpy as np
import torch

from longdraft.bench import Arm
from longdraft.bench.examine import Examination, join
from longdraft.bench.examine import Setting as Examined
from longdraft.bench.modelled import HONEST, PAPER, Drafting, Setting, multiplier
from longdraft.bench.ratios import Estimate, Ratio
from longdraft.bench.tasks import Prompt
from longdraft.config import MAX_GAMMA, MAX_SEED, DraftConfig, as_float, as_int
from longdraft.errors import InvalidValueError
from longdraft.llm import LLM
from longdraft.models.config import ModelConfig
from longdraft.models.feedback import FeedbackDraft
from longdraft.models.transformer import Transformer
from longdraft.train.losses import Logits
from longdraft.train.rounds import RULES, Drafter, Filled, Places, forced, rounds

BATCH = 64  # rows of the modelled cells


@dataclass(frozen=True)
class Method:
    """A draft that is measured: how it proposes in ``Filled`` texts of the target, of whose streams it reads ``taps``.

    ``drafting``: what it runs. ``tokens``: on how many it was trained.
    """

    name: str
    make: Callable[[Filled], Drafter]
    drafting: Drafting
    taps: tuple[int, ...] = ()
    tokens: int = 0


@dataclass(frozen=True)
class TauPlan:
    """Every text at every context and temperature: rounds of ``k`` proposals over ``span`` tokens behind the context.

    ``batch``: texts at a time. ``rule``: see ``rounds``.
    """

    contexts: tuple[int, ...] = (256, 512, 960)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    k: int = 4
    span: int = 64
    batch: int = 4
    rule: str = "maximal"
    seed: int = 0

    def __post_init__(self) -> None:
        for context in self.contexts:
            as_int("contexts", context, 1, 2**31 - 1)
        for temperature in self.temperatures:
            as_float("temperatures", temperature, 0.0, 1e3)
        as_int("k", self.k, 1, MAX_GAMMA)
        as_int("span", self.span, self.k, 2**20)
        as_int("batch", self.batch, 1, 4096)
        as_int("seed", self.seed, 0, MAX_SEED - 2**31)
        if self.rule not in RULES:
            raise InvalidValueError("rule", self.rule, f"must be one of {', '.join(RULES)}")

    def places(self, context: int) -> Places:
        """Where rounds begin."""
        return Places(context, self.span // self.k, self.k)


@dataclass(frozen=True)
class Counts:
    """Of each text P, for each γ of ``gammas``: the tokens that rounds gave, and their number, ``[P, γ]`` both."""

    how: str
    context: int
    temperature: float
    gammas: tuple[int, ...]
    tokens: np.ndarray
    rounds: np.ndarray

    @classmethod
    def of(cls, how: str, context: int, temperature: float, stood: torch.Tensor) -> Counts:
        """Of the chances ``[P, J, k]`` that the first 1 … k proposals stand; shorter rounds are a part of them."""
        _, number, k = stood.shape
        tokens = number + stood.sum(dim=1).cumsum(dim=-1).numpy()
        return cls(how, context, temperature, tuple(range(1, k + 1)), tokens, np.full_like(tokens, number))

    def ratio(self, gamma: int) -> Ratio:
        """Tokens per round."""
        n = self.gammas.index(gamma)
        return Ratio(self.tokens[:, n], self.rounds[:, n])


def measure(
    target: Transformer,
    texts: torch.Tensor,
    methods: Sequence[Method],
    plan: TauPlan,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[Counts]]:
    """Real rounds of every method in held-out ``texts [P, L]``, by its name, for every context and temperature.

    All methods see the same texts with the same noise. ``InvalidValueError`` where texts are too short.
    """
    need = max(plan.places(context).length for context in plan.contexts)
    as_int("length of the texts", texts.shape[1], need, 2**31 - 1, "Give longer texts, or shorter contexts.")
    taps = [tap for method in methods for tap in method.taps]
    cells = list(product(plan.contexts, plan.temperatures))
    found: dict[tuple[str, int, float], list[torch.Tensor]] = {}
    for first in range(0, len(texts), plan.batch):
        part = texts[first : first + plan.batch]
        filled = Filled(target, part, plan.places(max(plan.contexts)), taps)
        seeds = plan.seed + torch.arange(first, first + len(part))
        for context, method in product(plan.contexts, methods):
            there = filled.at(plan.places(context))
            drafter = method.make(there)
            for temperature in plan.temperatures:
                stood = rounds(there, drafter, temperature, seeds, plan.rule)
                found.setdefault((method.name, context, temperature), []).append(stood)
        on_progress(first + len(part), len(texts))
    return {
        method.name: [Counts.of("rounds", *cell, torch.cat(found[(method.name, *cell)])) for cell in cells]
        for method in methods
    }


def measure_forced(
    target: Transformer, texts: torch.Tensor, draft: FeedbackDraft, logits: Logits, plan: TauPlan
) -> list[Counts]:
    """The estimate by one pass of ``draft``; ``logits``: the target's norm and head."""
    counts, taps = [], (*draft.taps, target.config.num_layers)
    for context in plan.contexts:
        rates: dict[float, list[torch.Tensor]] = {temperature: [] for temperature in plan.temperatures}
        for part in texts.split(plan.batch):
            filled = Filled(target, part, plan.places(context), taps)
            for temperature, found in rates.items():
                found.append(forced(draft, filled, logits, temperature))
        for temperature, found in rates.items():
            counts.append(Counts.of("forced", context, temperature, torch.cat(found).cumprod(dim=-1)))
    return counts


def measure_engine(
    llm: LLM, texts: torch.Tensor, draft: DraftConfig, plan: TauPlan, gammas: tuple[int, ...]
) -> list[Counts]:
    """The engine's own rounds behind the first tokens of ``texts [P, L]``, along ``plan.span`` tokens of the target's.

    The engine must have no other requests, and is left so.
    """
    counts = []
    for context, temperature in product(plan.contexts, plan.temperatures):
        samples, how = [], Examined(temperature, plan.span, gammas, seed=plan.seed)
        for first in range(0, len(texts), plan.batch):
            prompts = [Prompt(ids, []) for ids in texts[first : first + plan.batch, :context].tolist()]
            examined = Examination(llm, prompts, how, first)
            try:
                examined.prepare("", lambda *_: None)
                samples.append(examined.sample(Arm("", draft)))
            finally:
                examined.close()
        sample = join(samples)
        counts.append(Counts("engine", context, temperature, gammas, sample.tokens, sample.passes))
    return counts


# --- tables


@dataclass(frozen=True)
class Row:
    """One method at one context, temperature and γ; ``paper`` and ``honest`` are modelled speed-ups (``modelled.py``).

    ``trained``: tokens; ``per_weight``: of these per weight of its layers. ``best``: no γ has a higher ``honest``.
    """

    method: str
    how: str
    context: int
    temperature: float
    gamma: int
    tokens_per_round: float
    ci_low: float
    ci_high: float
    paper: float
    honest: float
    best: bool
    trained: int
    per_weight: float


def table(target: ModelConfig, method: Method, counts: Iterable[Counts], seed: int = 0) -> Iterator[Row]:
    """All rows of a method, in order."""
    for found in counts:
        estimates = {gamma: found.ratio(gamma).estimate(seed) for gamma in found.gammas}
        worth = {
            g: [_worth(s, target, method, found, g, e.value) for s in (PAPER, HONEST)] for g, e in estimates.items()
        }
        best = max(worth, key=lambda gamma: worth[gamma][1])
        for gamma, e in estimates.items():
            place = (method.name, found.how, found.context, found.temperature, gamma)
            trained = (method.tokens, method.tokens / method.drafting.body)
            yield Row(*place, e.value, e.low, e.high, *worth[gamma], gamma == best, *trained)


def _worth(setting: Setting, target: ModelConfig, method: Method, found: Counts, gamma: int, tokens: float) -> float:
    cell = {"batch": BATCH, "context": found.context, "gamma": gamma, "tokens": tokens}
    return multiplier(target, method.drafting, setting, **cell)


def against(
    found: Mapping[str, Sequence[Counts]], baseline: str, gamma: int, seed: int = 0
) -> Iterator[tuple[str, Counts, Estimate]]:
    """By how many tokens per round each method differs from ``baseline``, texts being drawn for both at once."""
    for name, counts in found.items():
        for mine, base in zip(counts, found[baseline], strict=True):
            if name != baseline:
                yield name, mine, mine.ratio(gamma).minus(base.ratio(gamma), seed)


def report(rows: Iterable[Row]) -> list[dict[str, object]]:
    """As JSON objects."""
    return [asdict(row) for row in rows]
