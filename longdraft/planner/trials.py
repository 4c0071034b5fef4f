"""What is tried now and then beside the plan, so that what was given up can come back, and what it may cost.

A draft that does not propose is tried for a round where it would pay if its tokens stood as often as one may hope; a
plain step is taken where none was seen for long and the gain is in doubt, since everything is compared with plain
decoding. Trials are paid from a credit: one part in so many of all predicted time, and something with every new row, of
whose text nothing is known yet. They come more rarely each time that they change nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from longdraft.planner.estimate import Try
from longdraft.planner.joint import Offer, Plan, Problem

SHARE = 1 / 300  # of the predicted time
NEW_CREDIT, MOST_CREDIT = 1, 16  # plain steps' worth: for rows that are all new, and at most
MOST = 1 / 2  # of the rows; if so many are new, all drafts are tried soon
HOPE = 0.9  # how often the tokens of a draft may be hoped to stand
WORTH = 1.02  # by so much it would have to be faster than the plan
GAMMA = 1
FIRST, LAST = 16, 96  # steps between trials of the same draft; doubled each time
FIRST_PLAIN, LAST_PLAIN = 4, 512  # steps until plain decoding is measured; doubled each time that it was seen
CERTAIN, ONCE = 1.6, 2  # speed-up of which plain steps, seen so often, need not be measured again
TRIES = 4  # proposed tokens that a trial takes at least, over so many rounds at most
PROMISING = 0.7  # share of accepted tokens of a row that calls for another round at once


@dataclass
class _Draft:
    """When a draft is tried next."""

    due: int = 0
    interval: int = FIRST
    promising: frozenset[int] = frozenset()  # ids of the sequences for which it did well in the last trial

    def put_off(self, step: int) -> None:
        """It changed nothing, or would not: later, and later each time."""
        self.interval, self.promising = min(2 * self.interval, LAST), frozenset()
        self.due = step + self.interval


@dataclass
class _Plain:
    """When plain decoding is measured next in batches of one kind."""

    due: int
    seen: int = 0

    def measured(self, step: int) -> None:
        """Later, and later each time."""
        self.seen += 1
        self.due = step + min(FIRST_PLAIN << min(self.seen, 10), LAST_PLAIN)


@dataclass
class _Trial:
    """One that is under way, over ``left`` more rounds at most."""

    number: int
    left: int
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)  # sequence id → (asked, accepted)

    @property
    def asked(self) -> int:
        """Proposed tokens so far."""
        return sum(asked for asked, _ in self.rows.values())

    def note(self, tries: Sequence[Try]) -> None:
        """Its next round."""
        self.left -= 1
        for seq_id, asked, accepted in tries:
            before = self.rows.get(seq_id, (0, 0))
            self.rows[seq_id] = before[0] + asked, before[1] + accepted

    def promising(self) -> frozenset[int]:
        """The sequences for which it did well."""
        return frozenset(i for i, (asked, accepted) in self.rows.items() if accepted >= PROMISING * asked)


class Trials:
    """Of the drafts with numbers from 0; ``slow`` ones must be told of a pass before they propose as they can.

    ``watched`` is one that need not be tried, since it is known what it would have got.
    """

    def __init__(self, slow: Sequence[bool], watched: int | None = None) -> None:
        self.slow, self.watched = slow, watched
        self.credit = 0.0  # seconds
        self._drafts = [_Draft() for _ in slow]
        self._plain: dict[Hashable, _Plain] = {}  # by situation
        self._under_way: _Trial | None = None

    def welcome(self, share: float, plain: Plan, step: int) -> None:
        """New rows, which are that share of all. If most are, what others' texts said of drafts has had its time."""
        self.credit += share * NEW_CREDIT * plain.seconds
        if share > MOST:
            self.begin_anew(step)

    def choose(self, problem: Problem, plan: Plan, plain: Plan, step: int, situation: Hashable) -> Plan:
        """``plan``, or what is tried instead in this step."""
        self.credit = min(self.credit + SHARE * plan.seconds, MOST_CREDIT * plain.seconds)
        for number in {number for number in plan.drafts if number is not None}:  # these need not be tried
            self._drafts[number].due = step + FIRST
        measured = self._plain.setdefault(situation, _Plain(step + FIRST_PLAIN))
        doubtful = measured.seen < ONCE or plan.rate < CERTAIN * plain.rate
        if not plan.off and step >= measured.due and doubtful:
            measured.measured(step)  # also where rows that do not choose go on with their drafts
            return plain
        trial = self._trial(problem, plan, step)
        if trial is None:
            return plan
        if trial is not plan:
            self.credit -= max(0.0, _loss(problem, trial, plan))
        return trial

    def begin_anew(self, step: int) -> None:
        """Try every draft soon."""
        for draft in self._drafts:
            draft.interval, draft.due, draft.promising = FIRST, min(draft.due, step + 1), frozenset()

    def observe(self, plain: Hashable | None, seen: Mapping[int, Sequence[Try]], step: int) -> None:
        """What came of a step: in what situation if it was a plain one, and the rounds of drafts by their numbers."""
        if plain is not None:
            self._plain.setdefault(plain, _Plain(step)).measured(step)
        if self._under_way is None:
            return
        trial = self._under_way
        trial.note(seen.get(trial.number, ()))
        if trial.left > 0 and trial.asked < TRIES:
            return
        self._under_way, draft = None, self._drafts[trial.number]
        draft.promising = trial.promising()
        if draft.promising:
            draft.due = step + 1
        else:
            draft.put_off(step)
        if len(draft.promising) > len(trial.rows) / 2:
            draft.promising = frozenset()  # then it may be so for all

    def _trial(self, problem: Problem, plan: Plan, step: int) -> Plan | None:
        """A round of the draft that has waited longest, for as many rows as the credit pays; ``None``: none now."""
        if self._under_way is not None:
            if self._under_way.number not in plan.drafts:
                return self._affordable(problem, plan, self._under_way.number) or plan
            self._under_way = None
        idle = [n for n in range(len(self._drafts)) if n not in plan.drafts and n != self.watched]
        waiting = [n for n in idle if self._drafts[n].due <= step]
        for number in sorted(waiting, key=lambda n: self._drafts[n].due):
            offer = next((offer for offer in problem.offers if offer.number == number), None)
            if offer is None or not _hopeful(problem, plan, offer):
                self._drafts[number].put_off(step)
                continue
            trial = self._affordable(problem, plan, number)
            if trial is not None:
                self._under_way = _Trial(number, TRIES + self.slow[number])
            return trial
        return None

    def _affordable(self, problem: Problem, plan: Plan, number: int) -> Plan | None:
        """``plan`` with this draft for all rows, for half of them, … or for one, as the credit allows.

        If some rows did well in the last trial, it is for these.
        """
        rows, promising = [i for i, cap in enumerate(problem.caps) if cap], self._drafts[number].promising
        rows = [i for i in rows if problem.ids[i] in promising] or rows
        while rows:
            drafts, gammas = list(plan.drafts), list(plan.gammas)
            for i in rows:
                drafts[i], gammas[i] = number, min(GAMMA, problem.caps[i])
            trial = problem.plan(drafts, gammas)
            if _loss(problem, trial, plan) <= self.credit:
                return trial
            rows = rows[: len(rows) // 2]
        return None


def _loss(problem: Problem, trial: Plan, plan: Plan) -> float:
    """Seconds that the trial is expected to lose against the plan, with all that waking takes."""
    moved = [i for i, number in enumerate(trial.drafts) if number != plan.drafts[i] and number is not None]
    waking = sum(problem.costs.waking(trial.drafts[i], i) for i in moved)
    return trial.seconds + waking - trial.tokens / plan.rate


def _hopeful(problem: Problem, plan: Plan, offer: Offer) -> bool:
    """Whether the draft would beat the plan if its tokens stood as often as one may hope."""
    chances = [HOPE ** (k + 1) for k in range(max(problem.caps, default=0))]
    hoped = Offer(offer.number, [chances] * len(problem.caps))
    best = Problem(problem.costs, [hoped], problem.caps, problem.others).alone(hoped, plan.rate)
    return best.rate > WORTH * plan.rate
