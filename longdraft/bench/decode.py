"""The decoding benchmark: plain and speculative arms take turns on forks of the same filled prompts.

Each round runs every arm, forwards and backwards in turns (A B C, C B A, …), so that a drift of the machine meets all
alike; a round's ratio of speeds is formed within that round. Only decode steps are timed. A round that others disturbed
is repeated. Every arm's tokens are compared with those of plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product

from longdraft.bench import (
    PLAIN,
    Arm,
    Cell,
    Lengths,
    Over,
    Plan,
    Round,
    Shown,
    Turn,
    interval,
    repeated_share,
    row_lengths,
    total,
)
from longdraft.bench.machine import Load, MemoryRoof, disturbed, plain_step_cost
from longdraft.bench.predict import predicted_speedup
from longdraft.bench.simulate import assumed, continuations
from longdraft.bench.turns import OnProgress, Rows, end, fill, fork, require_pages, resolved, told, touch, turn
from longdraft.config import AutoDraft
from longdraft.drafts.base import Draft
from longdraft.errors import ContextLengthError, InvalidValueError
from longdraft.llm import LLM
from longdraft.sampling_params import SamplingParams

MOST_ROUNDS = 2  # times the rounds asked for: repeating has an end
Prompts = Callable[[int, int], list[list[int]]]  # batch, context → token ids


def measure(
    llm: LLM,
    plan: Plan,
    prompts: Prompts,
    on_cell: Callable[[Cell], None],
    on_progress: OnProgress | None = None,
    roof: MemoryRoof | None = None,
    after_cell: Callable[[Contest], None] | None = None,
) -> None:
    """Measure every cell of ``plan`` and hand each to ``on_cell``; when interrupted, also what is known of the current.

    ``after_cell`` may run more turns on the same rows. The engine must have no other requests, and is left so. Raises
    ``ContextLengthError`` or ``KVCapacityError`` before anything is computed where a cell cannot fit.
    """
    if llm.engine.num_unfinished:
        raise InvalidValueError("unfinished requests", llm.engine.num_unfinished, "must be 0 while speed is measured")
    report, plan = on_progress or (lambda name, done, total, unit: None), replace(plan, arms=resolved(llm, plan.arms))
    for context in plan.contexts:
        check_room(llm, plan, context)
    for context, temperature in product(plan.contexts, plan.temperatures):
        lengths = row_lengths(context, max(plan.batches))
        rows = [ids[:n] for ids, n in zip(prompts(len(lengths), max(lengths)), lengths, strict=True)]
        params = SamplingParams(
            temperature=temperature, seed=plan.seed, max_tokens=_life(llm, plan, max(lengths)), ignore_eos=True
        )
        with _filled(llm, plan, rows, params, report) as sources:
            for batch in plan.batches:
                contest = Contest(llm, plan, {arm: group[:batch] for arm, group in sources.items()})
                try:
                    contest.run(on_cell, report, roof)
                    if after_cell:
                        after_cell(contest)
                finally:
                    contest.close()


def _life(llm: LLM, plan: Plan, context: int) -> int:
    """Tokens that a fork may get before it is made anew from its source."""
    room = llm.engine.config.max_tokens_per_request - context
    return min(room, max(2 * plan.most_per_turn, 2 * plan.rounds * plan.round_tokens))


def _at(temperature: float) -> str:
    """For names of bars."""
    return f" T{temperature:g}" if temperature else ""


def check_room(llm: LLM, plan: Plan, lengths: Lengths) -> None:
    """Refuse a context at which the arms do not fit side by side."""
    batch = max(plan.batches)
    context = max(row_lengths(lengths, batch))
    config = llm.engine.config
    shortest = 2 * plan.most_per_turn  # to warm up, and one turn
    limit = config.max_tokens_per_request - shortest
    if context > limit:
        raise ContextLengthError(
            "context", context, f"must be at most {limit}, to leave room for {shortest} new tokens"
        )
    forks = 2 + len(plan.arms)  # plain, arms, and the known continuation
    require_pages(llm, batch, context, forks, _life(llm, plan, context))
    sequences = batch * (forks + len(plan.arms) + 1)
    if sequences > config.max_num_seqs:
        raise InvalidValueError("max_num_seqs", config.max_num_seqs, f"must be at least {sequences} for these cells")


@contextmanager
def _filled(
    llm: LLM, plan: Plan, prompts: Sequence[Sequence[int]], params: SamplingParams, report: OnProgress
) -> Iterator[dict[Arm, Rows]]:
    """What each arm is forked from: held sequences at their first token, whose drafts have taken in the prompt."""
    engine = llm.engine
    plain = [engine.sequence(engine.add(ids, params)) for ids in prompts]
    made = list(plain)
    try:
        with told(llm, plain, plan.arms):
            fill(llm, plain, f"fill {max(map(len, prompts))}{_at(params.temperature)}", report)
            pretend = nullcontext()
            if plan.assume_acceptance is not None:
                known = continuations(llm, plain, report)
                pretend = assumed(engine.runner, plan, llm.model.config.vocab_size, known)
            with pretend:
                drafts = {arm: engine.runner.draft(arm.config) if arm.config else arm.draft for arm in plan.arms}
                by_draft: dict[Draft | AutoDraft, Rows] = {}
                for arm, draft in drafts.items():
                    if draft not in by_draft:
                        by_draft[draft] = fork(llm, plain, arm)
                        made += by_draft[draft]
                yield {PLAIN: plain} | {arm: by_draft[draft] for arm, draft in drafts.items()}
    finally:
        end(llm, made)


class Contest:
    """The arms at one batch, context and temperature."""

    def __init__(self, llm: LLM, plan: Plan, sources: dict[Arm, Rows]) -> None:
        self.llm, self.plan, self.sources = llm, plan, sources
        self.rows: dict[Arm, Rows] = {}
        self.differing: set[Arm] = set()
        self.outputs: list[list[int]] = []  # the longest that plain decoding gave
        self.lengths = [seq.num_prompt for seq in sources[PLAIN]]
        self.batch, self.temperature = len(self.lengths), sources[PLAIN][0].params.temperature
        self.context = round(sum(self.lengths) / self.batch)

    def run(self, on_cell: Callable[[Cell], None], report: OnProgress, roof: MemoryRoof | None) -> None:
        """All rounds, and a cell per arm; also where an interruption leaves at least two rounds."""
        clean: list[Round] = []
        disturbed_ones: list[Round] = []
        wanted, name = self.plan.rounds, f"{self.batch} x {self.context}{_at(self.temperature)}"
        per_round = self.batch * self.plan.round_tokens * len(self.sources)
        try:
            while len(clean) < wanted and len(clean) + len(disturbed_ones) < MOST_ROUNDS * wanted:
                turns, noisy = self.round(backwards=len(clean) % 2 == 1)
                (disturbed_ones if noisy else clean).append(turns)
                if roof:
                    roof.read()
                report(name, len(clean) * per_round, wanted * per_round, "tokens")
        finally:
            counted = clean + disturbed_ones[: wanted - len(clean)]
            if len(counted) > 1:
                self.compare()
                for arm in self.plan.arms:
                    on_cell(self._cell(arm, counted, len(clean) < wanted, roof))
        report(name, wanted * per_round, wanted * per_round, "tokens")

    def round(self, backwards: bool) -> tuple[Round, bool]:
        """One turn of every arm, and whether any of them was disturbed."""
        self.make_room()
        arms, turns, noisy = list(self.rows), {}, False
        for arm in reversed(arms) if backwards else arms:
            before = Load.now()
            turns[arm] = turn(self.llm, self.rows[arm], self.plan.round_tokens)
            noisy |= disturbed(before, Load.now())
        return turns, noisy

    def make_room(self) -> None:
        """Make forks, again where one could reach its end in the next turn; each takes a step that is not timed."""
        alive = [seq for rows in self.rows.values() for seq in rows]
        if alive and all(seq.max_total - len(seq.ids) > self.plan.most_per_turn for seq in alive):
            return
        self.close()
        for arm, sources in self.sources.items():
            self.rows[arm] = fork(self.llm, sources, arm)
        touch(self.llm, [seq for rows in self.rows.values() for seq in rows])
        for rows in self.rows.values():
            turn(self.llm, rows, 1)

    def close(self) -> None:
        """Compare the arms' rows once more and end them."""
        self.compare()
        end(self.llm, [seq for rows in self.rows.values() for seq in rows])
        self.rows.clear()

    def compare(self) -> None:
        """Note which arms' tokens differ from the plain ones, as far as both go."""
        plain = self.rows.get(PLAIN, [])
        for arm, rows in self.rows.items():
            pairs = ((a.output_ids, b.output_ids) for a, b in zip(plain, rows, strict=True))
            if any(x != y for a, b in pairs for x, y in zip(a, b, strict=False)):
                self.differing.add(arm)
        outputs = [seq.output_ids for seq in plain]
        self.outputs = max(self.outputs, outputs, key=lambda rows: sum(map(len, rows)))

    def _cell(self, arm: Arm, rounds: list[Round], noisy: bool, roof: MemoryRoof | None) -> Cell:
        plain, fast = (total([turns[a] for turns in rounds]) for a in (PLAIN, arm))
        speedup, low, high = interval([turns[arm].speed / turns[PLAIN].speed for turns in rounds], self.plan.seed)
        read, flops = plain_step_cost(self.llm.model, self.llm.engine.store.bytes_per_token, self.batch, plain.context)
        t_plain_ms = 1000 * plain.seconds / plain.steps
        roof_ms = 1000 * read / roof.bytes_per_s if roof and roof.bytes_per_s else None
        return Cell(
            batch=self.batch,
            context=self.context,
            dtype=str(self.llm.model.dtype).removeprefix("torch."),
            draft=arm.name,
            weights=arm.config.weights if arm.config else arm.name,
            budget=arm.budget,
            gamma=arm.gamma,
            temperature=self.temperature,
            plain_tok_s=plain.speed,
            spec_tok_s=fast.speed,
            speedup=speedup,
            ci_low=low,
            ci_high=high,
            identical=arm not in self.differing,
            tokens_per_verify=fast.tokens / fast.passes,
            acceptance_by_position=[a / d for a, d in zip(fast.accepted, fast.drafted, strict=True) if d],
            t_plain_ms=t_plain_ms,
            t_draft_ms=1000 * fast.draft_s / (fast.steps * _mean_gamma(arm, fast) or 1),
            t_verify_ms=1000 * (fast.seconds - fast.draft_s) / fast.steps,
            roof_share=roof_ms and roof_ms / t_plain_ms,
            repeated_8gram=repeated_share(self.outputs),
            simulated=self.plan.assume_acceptance is not None,
            noisy=noisy,
            shown=Shown(arm.label, len(rounds), read, flops, roof_ms),
            predicted=predicted_speedup(self.llm, arm, self.lengths, plain, fast),
            row_contexts=self.lengths if len(set(self.lengths)) > 1 else None,
            control=None if arm.config else fast.control.report(),
            over_fixed=None if arm.config else self._over_fixed(arm, rounds),
        )

    def _over_fixed(self, arm: Arm, rounds: list[Round]) -> Over:
        """Against the fastest of the arms that always do the same, plain decoding among them."""
        fixed = [other for other in self.sources if other.config or other is PLAIN]
        best = max(fixed, key=lambda other: total([turns[other] for turns in rounds]).speed)
        return Over(best.label, *interval([turns[arm].speed / turns[best].speed for turns in rounds], self.plan.seed))


def _mean_gamma(arm: Arm, turns: Turn) -> float:
    """Draft passes per step: γ, or what was chosen on average."""
    return arm.gamma if arm.config else sum(g * n for (_, g), n in turns.control.rounds.items()) / turns.passes
