"""Plain against speculative decoding of the same prompts: filled once, forked, decoded in turns, compared.

Both groups run in one engine on the same pages of the same prompts. They take turns of a few steps, so that a machine
whose speed drifts slows both alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from longdraft.config import DraftConfig, SamplingParams
from longdraft.core import Sequence as EngineSequence
from longdraft.core import Status
from longdraft.exactness import gap, rounding, tier
from longdraft.llm import LLM

TURN = 4  # steps that one group runs before the other
OnProgress = Callable[[str, int, int], None]  # (prefill | plain | speculative, tokens done, tokens in all)


@dataclass
class Group:
    """One way of decoding: its sequences and what they took."""

    name: str
    sequences: list[EngineSequence]
    seconds: float = 0.0
    draft_s: float = 0.0
    first: list[int] = field(default_factory=list)  # output tokens each sequence started with

    @property
    def running(self) -> list[EngineSequence]:
        """Sequences that are not finished."""
        return [seq for seq in self.sequences if seq.status is not Status.FINISHED]

    @property
    def tokens(self) -> int:
        """Tokens decoded by this group."""
        return sum(len(seq.output_ids) for seq in self.sequences) - sum(self.first)

    def figures(self, prefill_s: float) -> dict[str, object]:
        """What every report says of a way of decoding. ``tokens_per_s`` is decoded tokens over decoding seconds."""
        stats = [seq.stats for seq in self.sequences]
        passes = sum(s.verify_passes for s in stats)
        longest = max((len(s.drafted) for s in stats), default=0)
        drafted, accepted = (
            [sum(getattr(s, name)[i] for s in stats if i < len(s.drafted)) for i in range(longest)]
            for name in ("drafted", "accepted")
        )
        return {
            "tokens_per_s": self.tokens / self.seconds if self.seconds else 0.0,
            "tokens": sum(len(seq.output_ids) for seq in self.sequences),
            "decode_tokens": self.tokens,
            "seconds": prefill_s + self.seconds,
            "prefill_s": prefill_s,
            "decode_s": self.seconds,
            "draft_s": self.draft_s,
            "verify_s": self.seconds - self.draft_s,
            "verify_passes": passes,
            "tokens_per_verify": self.tokens / passes if passes else 0.0,
            "drafted_by_position": drafted,
            "acceptance_by_position": [a / d for a, d in zip(accepted, drafted, strict=True)],
        }


@dataclass(frozen=True)
class Comparison:
    """Both groups' figures and whether the promise held."""

    plain: dict[str, object]
    speculative: dict[str, object]
    texts: list[str]
    prompts: list[list[int]]
    exactness: str
    identical: bool
    first_difference: dict[str, object] | None
    divergences: list[dict[str, object]]
    rounding: float | None

    @property
    def held(self) -> bool:
        """Whether every difference is one that the tier allows."""
        return self.exactness == "distribution" or all(d["near_tie"] for d in self.divergences)

    @property
    def ratio(self) -> float:
        """Speculative over plain decoding speed."""
        plain = self.plain["tokens_per_s"]
        return self.speculative["tokens_per_s"] / plain if plain else 0.0

    def report(self) -> dict[str, object]:
        """As one JSON object."""
        return {
            "identical": self.identical,
            "first_difference": self.first_difference,
            "exactness": self.exactness,
            "held": self.held,
            "speed_ratio": self.ratio,
            "rounding": self.rounding,
            "divergences": self.divergences,
            "plain": self.plain,
            "speculative": self.speculative,
        }


def compare(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    draft: DraftConfig,
    on_progress: OnProgress | None = None,
) -> Comparison:
    """Decode token-id ``prompts`` plainly and with ``draft``; nothing of them stays in the engine."""
    engine, sequences = llm.engine, []
    report = on_progress or (lambda name, done, total: None)
    try:
        prefill_before = engine.stats.prefill_s
        for ids in prompts:
            sequences.append(engine.sequence(engine.add(ids, params)))
        _prefill(llm, sequences, report)
        prefill_s = engine.stats.prefill_s - prefill_before
        plain = Group("plain", list(sequences))
        speculative = Group("speculative", [])
        for seq in plain.sequences:
            forked = seq if seq.status is Status.FINISHED else engine.sequence(engine.fork(seq.id, draft=draft))
            forked.held = forked.status is not Status.FINISHED
            speculative.sequences.append(forked)
            sequences.append(forked)
        for group in (plain, speculative):
            group.first = [len(seq.output_ids) for seq in group.sequences]
        total = sum(seq.max_total - seq.num_prompt for seq in plain.sequences)
        while plain.running or speculative.running:
            for group in (plain, speculative):
                _turn(llm, group)
                done = sum(len(seq.output_ids) for seq in group.sequences)
                report(group.name, done, total if group.running else done)
    finally:
        for seq in sequences:
            if seq.status is not Status.FINISHED:
                engine.abort(seq.id)
    return _compared(llm, plain, speculative, params, draft, prefill_s)


def _prefill(llm: LLM, sequences: list[EngineSequence], report: OnProgress) -> None:
    """Fill the caches; each sequence is held once it has its first token."""
    total = sum(seq.num_prompt for seq in sequences)
    while llm.engine.has_work:
        for output in llm.engine.step():
            output.seq.held = True
        report("prefill", sum(min(seq.num_committed, seq.num_prompt) for seq in sequences), total)


def _turn(llm: LLM, group: Group) -> None:
    """Let ``group`` alone run for a few steps."""
    engine = llm.engine
    for seq in group.running:
        seq.held = False
    drafted, started = engine.stats.draft_s, time.perf_counter()
    for _ in range(TURN):
        if not engine.has_work:
            break
        engine.step()
    group.seconds += time.perf_counter() - started
    group.draft_s += engine.stats.draft_s - drafted
    for seq in group.running:
        seq.held = True


def _compared(
    llm: LLM, plain: Group, speculative: Group, params: SamplingParams, draft: DraftConfig, prefill_s: float
) -> Comparison:
    exactness = tier(llm.model, draft)
    divergences, noise = [], None
    for i, (a, b) in enumerate(zip(plain.sequences, speculative.sequences, strict=True)):
        if a.output_ids == b.output_ids:
            continue
        if noise is None and exactness == "near-tie":
            noise = rounding(llm.model, [seq.ids for seq in plain.sequences])
        divergences.append(_difference(llm, i, a, b, params, 4 * (noise or 0.0), exactness))
    figures = [group.figures(prefill_s) for group in (plain, speculative)]
    figures[1] |= _draft_bytes(llm, draft, speculative.sequences)
    decode = llm.tokenizer.decode if llm.tokenizer else lambda ids: ""
    return Comparison(
        plain=figures[0],
        speculative=figures[1],
        texts=[decode(seq.output_ids) for seq in speculative.sequences],
        prompts=[seq.ids[: seq.num_prompt] for seq in plain.sequences],
        exactness=exactness,
        identical=not divergences,
        first_difference=min(divergences, key=lambda d: d["position"], default=None),
        divergences=divergences,
        rounding=noise,
    )


def _draft_bytes(llm: LLM, draft: DraftConfig, sequences: list[EngineSequence]) -> dict[str, object]:
    """What the draft keeps beyond the target's cache, and what it and the target read of KV per token, at the end."""
    made, per_token = llm.engine.runner.draft(draft), llm.engine.store.bytes_per_token
    lengths = [len(seq.ids) for seq in sequences]
    return {
        "draft_kv_bytes": sum(made.bytes(n) for n in lengths),
        "kv_bytes_read_per_draft_token": sum(made.bytes_read(n) for n in lengths) / len(lengths),
        "kv_bytes_read_per_plain_token": sum(lengths) * per_token / len(lengths),
    }


def _difference(
    llm: LLM, i: int, a: EngineSequence, b: EngineSequence, params: SamplingParams, epsilon: float, exactness: str
) -> dict[str, object]:
    x, y = a.output_ids, b.output_ids
    at = next((n for n, (s, t) in enumerate(zip(x, y, strict=False)) if s != t), min(len(x), len(y)))
    row = {"prompt": i, "position": at, "plain": x[at : at + 1], "speculative": y[at : at + 1]}
    if exactness != "near-tie" or at >= min(len(x), len(y)):
        return {**row, "gap": None, "near_tie": False}
    ahead = gap(llm.model, a.ids[: a.num_prompt + at], params, a.seed)
    return {**row, "gap": ahead, "epsilon": epsilon, "near_tie": ahead <= epsilon}
