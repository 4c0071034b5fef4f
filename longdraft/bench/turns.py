"""Turns of an arm: forks of filled rows, decoded for a while with everybody else on hold, and what that took."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest

from longdraft.bench import Arm, Turn
from longdraft.config import AutoDraft, DraftConfig, draft_key
from longdraft.core import Sequence as EngineSequence
from longdraft.core import Status, sum_by_position
from longdraft.engine.control import OwnDrafts
from longdraft.errors import KVCapacityError, LongDraftError
from longdraft.llm import LLM
from longdraft.outputs import ControlStats

OnProgress = Callable[[str, int, int, str], None]  # of what, done, in all, unit
Rows = list[EngineSequence]


def fill(llm: LLM, rows: Rows, name: str, report: OnProgress) -> None:
    """Let queued rows take in their prompts, and hold each at its first token. The engine has no other work."""
    prompt_tokens = sum(seq.num_prompt for seq in rows)
    while llm.engine.has_work:
        for output in llm.engine.step():
            require_running(output.seq)
            llm.engine.hold(output.seq.id)
        report(name, sum(min(seq.num_committed, seq.num_prompt) for seq in rows), prompt_tokens, "tokens")


def require_pages(llm: LLM, batch: int, context: int, forks: int, life: int) -> None:
    """``KVCapacityError`` unless ``batch`` prompts fit, each with ``forks`` that have ``life`` tokens of their own."""
    store = llm.engine.store
    needed, size = batch * (store.takes(context) + forks * (store.takes(life) + 2)), store.capacity // store.num_pages
    if needed > store.num_pages:
        raise KVCapacityError(
            f"{batch} prompts of {context} tokens and their forks need room for {needed * size:,} tokens of KV, the "
            f"cache has {store.num_pages * size:,}. Raise kv_cache_memory_bytes or measure less at once."
        )


def fork(llm: LLM, sources: Rows, arm: Arm) -> Rows:
    """Held forks; their draft has taken in the prompt where it does not share what it knows of the sources.

    Drafts that are chosen step by step have done so where they are told of prompts; others do when they are chosen.
    """
    engine = llm.engine
    rows = [engine.sequence(engine.fork(seq.id, draft=arm.draft)) for seq in sources]
    for seq in rows:
        engine.hold(seq.id)
    for config in {config for seq in rows for config in engine.control.told(seq)}:
        engine.runner.draft(config).follow(rows)
    return rows


def resolved(llm: LLM, arms: Iterable[Arm]) -> tuple[Arm, ...]:
    """``arms`` with their drafts in full, each once: a SPIRe draft says itself what it reads, whatever the budget."""
    return tuple(dict.fromkeys(replace(arm, draft=llm.resolve(arm.draft)) for arm in arms))


@contextmanager
def told(llm: LLM, rows: Rows, arms: Iterable[Arm]) -> Iterator[None]:
    """While it lasts, drafts of ``arms`` that must hear of a text from its beginning are told of ``rows``.

    These have no draft themselves. Their forks share what such a draft knows of them: nothing could tell it later.
    """
    engine, right = llm.engine, llm.engine.control.told
    drafts = [draft_key(draft) for arm in arms for draft in engine.drafts_of(arm.draft)]
    drafts = [draft for draft in dict.fromkeys(drafts) if engine.runner.draft(draft).needs.taps]

    def all_told(seq: EngineSequence) -> tuple[DraftConfig, ...]:
        return (*right(seq), *drafts) if seq in rows else right(seq)

    engine.control.told = all_told
    try:
        yield
    finally:
        del engine.control.told  # the class's method is visible again


def touch(llm: LLM, rows: Rows) -> None:
    """Take the pages that ``rows`` will grow into, and give them back.

    The system finds memory for a page when it is first used: milliseconds, which no arm is to be charged for.
    """
    store = llm.engine.store
    for seq in rows:
        store.reserve(seq.id, seq.num_committed, seq.max_total - seq.num_committed)
    for seq in rows:
        store.truncate(seq.id, seq.num_committed)


def end(llm: LLM, rows: Rows) -> None:
    """Abort what is not finished."""
    for seq in rows:
        if seq.status is not Status.FINISHED:
            llm.engine.abort(seq.id)


def require_running(seq: EngineSequence) -> None:
    """A request that ended has failed: ends of text are ignored, and there was room."""
    if seq.status is Status.FINISHED:
        raise LongDraftError(f"A request ended while it was measured: {seq.error or seq.finish_reason}.")


def advance(llm: LLM, rows: Rows, lengths: Sequence[int]) -> None:
    """Let ``rows`` alone decode, each until it has ``lengths[i]`` ids or, where proposals stand, some more."""
    engine = llm.engine
    for seq, length in zip(rows, lengths, strict=True):
        engine.hold(seq.id, len(seq.ids) >= length)
    while not all(seq.held for seq in rows):
        engine.step()
        for seq, length in zip(rows, lengths, strict=True):
            require_running(seq)
            engine.hold(seq.id, len(seq.ids) >= length)


def turn(llm: LLM, rows: Rows, tokens: int) -> Turn:
    """Let ``rows`` alone decode until each has at least ``tokens`` more."""
    engine, stats = llm.engine, llm.engine.stats
    before, decode_s, draft_s, steps = _counts(rows), stats.decode_s, stats.draft_s, stats.decode_steps
    control = ControlStats.total(seq.stats.control for seq in rows)
    lengths = [len(seq.ids) for seq in rows]
    for seq in rows:
        engine.hold(seq.id, False)
    with _overheard_by_nobody(llm, rows):
        while any(len(seq.ids) < length + tokens for seq, length in zip(rows, lengths, strict=True)):
            engine.step()
            for seq in rows:
                require_running(seq)
    for seq in rows:
        engine.hold(seq.id)
    (got,), (passes,), drafted, accepted = (_minus(a, b) for a, b in zip(_counts(rows), before, strict=True))
    return Turn(
        tokens=got,
        seconds=stats.decode_s - decode_s,
        draft_s=stats.draft_s - draft_s,
        steps=stats.decode_steps - steps,
        passes=passes,
        drafted=drafted,
        accepted=accepted,
        context=sum(lengths) / len(rows) + got / len(rows) / 2,
        control=ControlStats.total(seq.stats.control for seq in rows).add(control, -1),
    )


@contextmanager
def _overheard_by_nobody(llm: LLM, rows: Rows) -> Iterator[None]:
    """Online control shall learn from what it chose alone, as it would without the other arms."""
    control = llm.engine.control
    if not any(isinstance(seq.draft, AutoDraft) for seq in rows):
        llm.engine.control = OwnDrafts()  # of the engine's uses only that of telling what came of a step
    try:
        yield
    finally:
        llm.engine.control = control


def _counts(rows: Rows) -> tuple[list[int], ...]:
    stats = [seq.stats for seq in rows]
    tokens, passes = sum(s.decode_tokens for s in stats), sum(s.verify_passes for s in stats)
    by_position = (sum_by_position(getattr(s, name) for s in stats) for name in ("drafted", "accepted"))
    return [tokens], [passes], *by_position


def _minus(after: Sequence[int], before: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip_longest(after, before, fillvalue=0)]
