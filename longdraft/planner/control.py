"""Online control: at every step, which draft proposes for which row, and how many tokens, or none at all.

After MagicDec (arXiv:2408.11049): the draft and γ with most tokens per second by its Eq. 2, plain decoding among them.

Owns the policy: when a plan is made anew, when it is left for another, what is tried now and then, which drafts keep
their states, and why nothing is proposed. The parts: prices of passes (``prices.py``) times the pace that is observed
(``pace.py``) for this batch (``batch.py``), acceptance (``evidence.py``), the rows' joint choice (``joint.py``).

Reads no clock. Nothing here changes what a request returns: see docs/lossless.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from longdraft.config import AutoDraft, DraftConfig, draft_key
from longdraft.core import Choice, Round, Status
from longdraft.core import Sequence as EngineSequence
from longdraft.drafts.registry import needs
from longdraft.outputs import ControlStats
from longdraft.planner.batch import BatchCosts, draft_kind, situation, target_kind
from longdraft.planner.evidence import Evidence
from longdraft.planner.joint import Plan, Problem
from longdraft.planner.pace import Pace
from longdraft.planner.prices import Prices
from longdraft.planner.reasons import LOW_ACCEPTANCE, MEASURING, why_off
from longdraft.planner.rest import Rest
from longdraft.planner.trials import Trials
from longdraft.planner.watch import LONG

SOONEST = 2  # steps for which a plan stands at first while its rows stay the same
PLAN_EVERY, OFF_EVERY = 16, 64  # at most, and one without drafts
SURPRISE = 1.5  # steps by which a plan must be missed, in tokens or in time, to be made anew at once
USUAL = 1 - 1 / 32  # what the usual rate keeps from step to step of what it was
BETTER = 1.02  # by so much another plan must be faster than the one that stands


@dataclass
class _Row:
    """The states that drafts have of one sequence, by their numbers."""

    kept: dict[int, float] = field(default_factory=dict)  # → upkeep in vain since the last use
    dropped: list[int] = field(default_factory=list)  # since the last step


@dataclass(frozen=True)
class _Standing:
    """The plan that stands for some rows, from the step on in which it was made; of drafts that run passes."""

    ids: tuple[int, ...]
    problem: Problem
    plan: Plan
    plain: Plan
    reasons: list[str | None]
    situation: tuple[int, int]
    made: int
    began: int  # the step in which these rows came together

    @property
    def until(self) -> int:
        """The step before which it is not made anew for its age: soon while little is known of the rows."""
        return self.made + min(max(SOONEST, self.made - self.began), OFF_EVERY if self.plan.off else PLAN_EVERY)


@dataclass(frozen=True)
class _Step:
    """What was chosen for a step. ``rows``: sequence id → its place in the plan; ``woken``: ids, of the draft.

    ``guesses``: what the draft that is asked had said, by sequence id; ``trial``: whether something is tried.
    """

    plan: Plan
    plain_s: float
    reasons: list[str | None]
    rows: dict[int, int]
    guesses: Mapping[int, Sequence[int]]
    trial: bool
    woken: set[int] = field(default_factory=set)


class Controller:
    """See ``Control`` of the engine; one for all requests of an engine."""

    def __init__(self, prices: Prices, drafts: Mapping[DraftConfig, float], max_gamma: int = AutoDraft.gamma) -> None:
        """``drafts``: who may propose → how often its tokens are assumed to stand before anything was seen."""
        self.prices, self.max_gamma, self.pace = prices, max_gamma, Pace()
        self.drafts = tuple(draft_key(draft) for draft in drafts)
        self.evidence = Evidence(drafts, max_gamma)
        self._watched = self.evidence.watched
        own = {number for number, draft in enumerate(self.drafts) if draft.own_model}  # nothing could tell them later
        self._lasting = sorted(own | ({self._watched} - {None}))
        self._asked = None if self._watched is None else replace(self.drafts[self._watched], gamma=LONG[-1])
        self.trials = Trials([needs(draft).tokens > 0 for draft in self.drafts], self._watched)
        self.stats = ControlStats()
        self._labels = [draft.label for draft in self.drafts]
        self._with_gamma = [[replace(d, gamma=max(1, g)) for g in range(max_gamma + 1)] for d in self.drafts]
        self._rows: dict[int, _Row] = {}  # by sequence id
        self._step = 0
        self._standing: _Standing | None = None
        self._came = self._took = 0.0  # tokens and seconds lately: the usual rate of these rows
        self._short, self._surprised = 0.0, False  # steps by which the plan was missed; whether it calls for a new one
        self._now: _Step | None = None  # what was chosen for the step under way
        self._rest = Rest()
        self._own_s = 0.0  # what control itself takes a step, usually

    # --- the engine's interface

    @property
    def asked(self) -> DraftConfig | None:
        """See ``Control``."""
        return None if self._rest.left else self._asked

    def choose(
        self, seqs: Sequence[EngineSequence], guesses: Mapping[int, Sequence[int]] = MappingProxyType({})
    ) -> list[Choice]:
        """See ``Control``."""
        ids = tuple(seq.id for seq in seqs)
        if (choices := self._rest.choices(ids)) is not None:
            self._step += 1
            return choices
        choices, now = self._choose(seqs, guesses), self._now
        alone = now is not None and len(now.rows) == len(seqs)
        self._rest.note(ids, choices, still=alone and now.plan.off and not now.trial)
        return choices

    def _choose(self, seqs: Sequence[EngineSequence], guesses: Mapping[int, Sequence[int]]) -> list[Choice]:
        self._now = None
        choosing = [i for i, seq in enumerate(seqs) if isinstance(seq.draft, AutoDraft)]
        choices = [seq.own_choice for seq in seqs]
        if not choosing:
            return choices
        self._step += 1
        standing = self._replan(seqs, choosing)
        problem, best = self._with_guesses(standing, guesses)
        plan = self.trials.choose(problem, best, standing.plain, self._step, standing.situation)
        measuring = plan is standing.plain is not best
        reasons = [
            None if gamma else MEASURING if measuring else was or LOW_ACCEPTANCE
            for gamma, was in zip(plan.gammas, standing.reasons, strict=True)
        ]
        rows = {seqs[i].id: n for n, i in enumerate(choosing)}
        self._now = _Step(plan, standing.plain.seconds, reasons, rows, guesses, plan is not best)
        for n, i in enumerate(choosing):
            choices[i] = self._choice(seqs[i], plan.drafts[n], plan.gammas[n])
        return choices

    def told(self, seq: EngineSequence) -> tuple[DraftConfig, ...]:
        """See ``Control``."""
        if not isinstance(seq.draft, AutoDraft):
            return seq.own_choice.told
        row = self._rows.get(seq.id) or self._new_row()
        return tuple(self.drafts[number] for number in row.kept)

    def observe(
        self,
        rounds: Sequence[Round],
        seconds: float | None,
        draft_s: Mapping[DraftConfig, float],
        own_s: float = 0.0,
    ) -> None:
        """See ``Control``. Without ``seconds``, where a step had other work besides, only acceptance is learnt."""
        if not self._rest.on:
            self._learn(rounds, seconds, draft_s)
        if self._now and seconds is not None:
            self._own_s += (1 - USUAL) * (own_s - self._own_s)
            self._count(rounds, seconds + own_s, self._now)
        for r in rounds:  # of one that has just ended nothing more is wanted
            if r.row.seq.status is Status.FINISHED:
                self.release(r.row.seq.id)

    def _learn(self, rounds: Sequence[Round], seconds: float | None, draft_s: Mapping[DraftConfig, float]) -> None:
        woken = [r for r in rounds if self._now and r.row.seq.id in self._now.woken]
        lengths = [r.row.seq.num_committed - r.row.num_tokens - max(0, r.tokens - 1) for r in rounds]
        if seconds is not None:
            self._observe_pace(rounds, lengths, seconds, draft_s, woken)
        blind = [r for r in woken if needs(r.row.choice.draft).tokens]
        seen = self.evidence.observe(rounds, self._step, blind, self._now.guesses if self._now else {})
        plain = seconds is not None and not any(r.row.room for r in rounds)
        self.trials.observe(situation(lengths) if plain else None, seen, self._step)
        if self._now:
            took = self._now.plan.seconds if seconds is None else seconds
            came, expected = sum(r.tokens for r in rounds if r.row.seq.id in self._now.rows), sum(self._now.plan.each)
            self._came = USUAL * self._came + sum(r.tokens for r in rounds)
            self._took = USUAL * self._took + took
            self._short = max(0.0, self._short + took / self._now.plan.seconds - came / expected)
            self._surprised = self._short > SURPRISE or self._now.trial

    def fork(self, source: EngineSequence, child: EngineSequence) -> None:
        """See ``Control``."""
        if isinstance(child.draft, AutoDraft):
            kept = [
                self.evidence.numbers[draft_key(c)] for c in self.told(source) if draft_key(c) in self.evidence.numbers
            ]
            own = [number for number in self._lasting if number != self._watched]
            self._rows[child.id] = _Row(kept=dict.fromkeys([*kept, *own], 0.0))

    def release(self, seq_id: int) -> None:
        """See ``Control``."""
        self._rows.pop(seq_id, None)
        self.evidence.release(seq_id)

    # --- the plan

    def _replan(self, seqs: Sequence[EngineSequence], choosing: Sequence[int]) -> _Standing:
        """The plan that stands, made anew where its rows are others or it is old."""
        ids = tuple(seq.id for seq in seqs)
        standing = self._standing
        if standing and standing.ids == ids and self._step < standing.until and not self._surprised:
            return standing
        problem = self._problem(seqs, choosing)
        plain, best = problem.plain(), replace(problem, offers=self.evidence.tested(problem.offers, self._step)).best()
        on, same = standing is not None and not standing.plan.off, standing is not None and standing.ids == ids
        if on and same:  # it stands unless another one is clearly better
            gammas = [min(pair) for pair in zip(standing.plan.gammas, problem.caps, strict=True)]
            held = problem.plan(standing.plan.drafts, gammas)
            best = best if best.rate > BETTER * held.rate else held
        plan = best if best.rate > (1.0 if on else BETTER) * plain.rate else plain
        if not same:
            self._came = self._took = 0.0
            known = set(standing.ids) if standing else set()
            self.trials.welcome(len(set(ids) - known) / len(ids), plain, self._step)
        else:
            self._drop_idle(problem, plan, self._step - standing.made)
        if new := set(plan.drafts) - set(standing.plan.drafts if standing else ()) - {None, self._watched}:
            self.evidence.doubt(new)
            self.trials.begin_anew(self._step)
        self._short, self._surprised = 0.0, False
        began = standing.began if same else self._step
        still_off = same and plan.off and standing.plan.off  # then for the same reasons, which take long to find
        reasons = standing.reasons if still_off else why_off(problem, plan, plain)
        where = situation(problem.costs.lengths)
        self._standing = _Standing(ids, problem, plan, plain, reasons, where, self._step, began)
        return self._standing

    def _with_guesses(self, standing: _Standing, guesses: Mapping[int, Sequence[int]]) -> tuple[Problem, Plan]:
        """What there is to choose from, and what stands or is better with what the draft that is asked says now."""
        said = [guesses.get(i, ()) for i in standing.problem.ids]
        if not any(said):
            return standing.problem, standing.plan
        offer = self.evidence.watched_offer(said, self._step)
        problem = replace(standing.problem, offers=[*standing.problem.offers, offer], _plans={})
        rate = self._came / self._took if self._took else standing.plan.rate
        return problem, problem.joined(offer, standing.plan, rate)

    def _problem(self, seqs: Sequence[EngineSequence], choosing: Sequence[int]) -> Problem:
        """What there is to choose from."""
        rows = [self._rows.setdefault(seqs[i].id, self._new_row()) for i in choosing]
        awake = {n: frozenset(i for i, row in enumerate(rows) if n in row.kept) for n in range(len(self.drafts))}
        costs = BatchCosts(self.prices, self.pace, self.drafts, seqs, choosing, awake, self._watched)
        ids = [seqs[i].id for i in choosing]
        offers = self.evidence.offers(ids, self._step)
        room = [(seqs[i].draft.gamma, seqs[i].max_total - len(seqs[i].ids) - 1) for i in choosing]
        caps = [max(0, min(self.max_gamma, *limits)) for limits in room]
        others = sum(_tokens_per_pass(seq) for seq in seqs if not isinstance(seq.draft, AutoDraft))
        return Problem(costs, offers, caps, others, ids)

    def _choice(self, seq: EngineSequence, number: int | None, gamma: int) -> Choice:
        """The choice for a row; a draft that proposes for it has a state of it from now on."""
        row = self._rows.setdefault(seq.id, self._new_row())  # it may have been preempted since the plan was made
        if number is not None:
            if number not in row.kept and self.prices.wake(self.drafts[number], seq.num_committed) > 0:
                self._now.woken.add(seq.id)
            row.kept[number] = 0.0
        dropped = tuple(self.drafts[n] for n in row.dropped if n not in row.kept)
        row.dropped.clear()
        draft = None if number is None else self._with_gamma[number][gamma]
        return Choice(draft, tuple(self.drafts[n] for n in row.kept), dropped)

    def _new_row(self) -> _Row:
        """The draft that is watched, and models of their own, have a state of every row, from its prompt on."""
        return _Row(dict.fromkeys(self._lasting, 0.0))

    def _drop_idle(self, problem: Problem, plan: Plan, steps: int) -> None:
        """Give up states whose upkeep in vain, over ``steps`` more, has come to what bringing them back would cost."""
        costs = problem.costs
        for i, at in enumerate(costs.choosing):
            row = self._rows[costs.seqs[at].id]
            for number in [n for n in row.kept if n != plan.drafts[i] and n not in self._lasting]:
                row.kept[number] += steps * costs.upkeep(number, [i])
                if row.kept[number] > 0 and row.kept[number] >= costs.wake(number, i):
                    del row.kept[number]
                    row.dropped.append(number)

    # --- what comes of it

    def _observe_pace(
        self,
        rounds: Sequence[Round],
        lengths: Sequence[int],
        seconds: float,
        draft_s: Mapping[DraftConfig, float],
        woken: Sequence[Round],
    ) -> None:
        """How long passes took against their prices. Rounds that woke a draft say nothing of its usual ones.

        Nor does the first pass of a row, which touches memory for the first time, and looking up what to propose.
        """
        if not any(r.row.seq.stats.verify_passes == 1 for r in rounds):
            base = self.prices.target(lengths, [1] * len(rounds))
            fed = [1 + len(r.row.proposal) for r in rounds]
            more = self.prices.target(lengths, fed) - base if any(r.row.proposal for r in rounds) else 0.0
            self.pace.observe(target_kind(lengths), seconds - sum(draft_s.values()), base, more)
        for config, spent in draft_s.items():
            draft = draft_key(config)
            rows = [i for i, r in enumerate(rounds) if r.row.room and draft_key(r.row.choice.draft) == draft]
            number = self.evidence.numbers.get(draft)
            if number not in (None, self._watched) and not any(rounds[i] in woken for i in rows):
                own = [lengths[i] for i in rows]
                price = self.prices.draft(draft, own, [rounds[i].row.room for i in rows])
                self.pace.observe(draft_kind(number, own), spent, price)

    def _count(self, rounds: Sequence[Round], seconds: float, now: _Step) -> None:
        """Note the step, in the totals and for each sequence that chose; control's own seconds are part of it."""
        expected = now.plan.seconds + self._own_s
        for r in rounds:
            n = now.rows.get(r.row.seq.id)
            if n is None:
                continue
            draft = now.plan.drafts[n]
            chosen = now.reasons[n] if draft is None else (self._labels[draft], now.plan.gammas[n])
            for stats in (self.stats, r.row.seq.stats.control):
                stats.note(chosen, (seconds, r.tokens * now.plain_s), (expected, now.plan.each[n] * now.plain_s))


def _tokens_per_pass(seq: EngineSequence) -> float:
    """What a sequence's steps gave so far, on average."""
    return seq.stats.decode_tokens / seq.stats.verify_passes if seq.stats.verify_passes else 1.0
