"""A plan in words: what is read, which roof it meets, what verification costs, what is gained."""

from __future__ import annotations

from longdraft.planner.candidates import Candidate, Target
from longdraft.planner.cost import Times, pass_work, times
from longdraft.planner.hardware import GIB
from longdraft.planner.plan import Choice, Planner, draft_times

LIMITS = {
    "weights": "reading the weights",
    "cache": "reading the cache",
    "compute": "arithmetic",
    "overhead": "launching kernels",
}
CLOSE = 1.1  # below this the model's own error decides


def why(planner: Planner, ranking: list[Choice], batch: int, context: int, break_even: int | None) -> list[str]:
    """Sentences about the best choice of a ``ranking``; where that is plain decoding, about the best draft."""
    target, best = planner.target, ranking[0]
    drafted = next((choice for choice in ranking if choice.draft), None)
    said = [_verdict(best, drafted)]
    if best.plain.rows < batch:
        gib = target.hardware.usable_bytes / GIB
        wait = f"{best.plain.rows} of them run at a time, the others wait"
        said.append(f"{batch} rows of {context:,} tokens do not fit into {gib:.1f} GiB: {wait}.")
    said.append(_plain_step(target, best, context))
    if drafted is not None and drafted.round.rows < best.plain.rows:
        said.append(f"What {drafted.draft.key} holds in memory leaves room for {drafted.round.rows} rows.")
    if drafted is not None:
        said += [_drafting(target, drafted, context), _verifying(target, drafted, context), _gain(drafted, context)]
    said.append(_break_even(planner, batch, break_even))
    return said


def _plain_step(target: Target, choice: Choice, context: int) -> str:
    plain = choice.plain
    work = pass_work(target.network, {context: plain.rows})
    spent = times(work, target.hardware)
    share = work.kv_bytes / (work.kv_bytes + work.weight_bytes)
    return (
        f"A plain step of {plain.rows} x {context:,} tokens reads {work.weight_bytes / 1e9:.1f} GB of weights and "
        f"{work.kv_bytes / 1e9:.1f} GB of cache ({share:.0%}): {plain.seconds * 1e3:.1f} ms, bound by "
        f"{LIMITS[spent.bound]} at {target.hardware.bytes_per_s / 1e12:.2f} TB/s."
    )


def _drafting(target: Target, choice: Choice, context: int) -> str:
    draft, rows = choice.draft, {context: choice.round.rows}
    step = draft_times(target, draft, rows)
    if step is None:
        return f"{draft.key} looks tokens up in the text: drafting takes no pass."
    work = pass_work(draft.network, rows, reads=draft.reads)
    seconds = choice.round.draft_s
    return (
        f"A draft step of {draft.config.label} reads {work.weight_bytes / 1e9:.2f} GB of weights and "
        f"{draft.reads(context):,} of {context:,} tokens per row ({work.kv_bytes / 1e9:.2f} GB): "
        f"{seconds * 1e3:.2f} ms, {seconds / choice.plain.seconds:.2f} of a plain step, bound by "
        f"{LIMITS[step.bound]}."
    )


def _verifying(target: Target, choice: Choice, context: int) -> str:
    rows, queries = {context: choice.round.rows}, choice.round.gamma + 1
    one, many = (times(pass_work(target.network, rows, n), target.hardware) for n in (1, queries))
    steps = target.pass_seconds(rows, queries) / target.pass_seconds(rows)
    return (
        f"Verifying {queries} tokens per row takes {steps:.2f} plain steps: the cache is read once "
        f"for all of them, the linear layers do {queries} times the arithmetic and {_linear(one, many)}."
    )


def _linear(one: Times, many: Times) -> str:
    if many.linear_compute <= many.weight_read:
        return "still wait for their weights"
    grown = many.linear_compute / max(one.linear_compute, one.weight_read)
    return f"are bound by it ({grown:.1f} times as long)"


def _gain(choice: Choice, context: int) -> str:
    cost = choice.round.seconds / choice.plain.seconds
    tokens = choice.round.tokens
    return (
        f"With gamma {choice.round.gamma} a round takes {cost:.2f} plain steps and gives {tokens:.2f} tokens if "
        f"{_acceptance(choice.draft, context)} of the drafted tokens stand; {_needed(choice)}."
    )


def _needed(choice: Choice) -> str:
    least = choice.min_acceptance()
    if least is None:
        return "no acceptance would make it pay"
    same = choice.round.min_acceptance(choice.plain)
    there = "never at this gamma" if same is None else f"from an acceptance of {same:.2f} on"
    return f"it pays {there}, with another gamma from {least:.2f} on" if same != least else f"it pays {there}"


def _acceptance(draft: Candidate, context: int) -> str:
    """The assumed rate, or rates by position, as text."""
    rate = draft.acceptance.rate(context)
    return f"{rate:.2f}" if isinstance(rate, (int, float)) else ", ".join(f"{r:.2f}" for r in rate)


def _verdict(best: Choice, drafted: Choice | None) -> str:
    if best.draft is None:
        lost = f": the best draft reaches {drafted.speedup:.2f} x" if drafted else ": no draft fits in memory"
        return f"Do not speculate{lost}."
    said = f"Speculate with {best.draft.config.label}, gamma {best.round.gamma}: {best.speedup:.2f} x."
    if best.speedup < CLOSE:
        said += " That is within the model's error; measure before relying on it."
    return said


def _break_even(planner: Planner, batch: int, context: int | None) -> str:
    limit = planner.target.config.full_attention_length
    if context == 1:
        return f"At batch {batch} speculation pays at any context, at the assumed acceptance."
    if context is None:
        return f"At batch {batch} no context up to the model's {limit:,} tokens makes a draft pay."
    return f"At batch {batch} speculation pays from a context of about {context:,} tokens on."
