"""Plain against speculative decoding of the same prompts: filled once, forked, decoded in turns, compared.

Both groups run in one engine on the same pages of the same prompts. They take turns of a few steps, so that a machine
whose speed drifts slows both alike. Only decode steps are timed: a refill after preemption is not decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longdraft.config import AutoDraft, DraftConfig
from longdraft.core import Sequence as EngineSequence
from longdraft.core import Status, sum_by_position
from longdraft.errors import InvalidValueError
from longdraft.exactness import LOSSY, certify, rounding, tier
from longdraft.llm import LLM
from longdraft.outputs import ControlStats
from longdraft.request import output_text
from longdraft.sampling_params import SamplingParams

TURN = 4  # decode steps that one group runs before the other
OnProgress = Callable[[str, int, int, float], None]  # prefill | plain | speculative, tokens done and in all, seconds


@dataclass
class Group:
    """One way of decoding: its sequences and what their decode steps took."""

    name: str
    sequences: list[EngineSequence]
    decode_s: float = 0.0
    draft_s: float = 0.0

    @property
    def running(self) -> list[EngineSequence]:
        """Sequences that are not finished."""
        return [seq for seq in self.sequences if seq.status is not Status.FINISHED]

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        return sum(len(seq.output_ids) for seq in self.sequences)

    def figures(self, prefill_s: float) -> dict[str, object]:
        """What every report says of a way of decoding. ``tokens_per_s`` is decoded tokens over decoding seconds."""
        stats = [seq.stats for seq in self.sequences]
        tokens, passes = sum(s.decode_tokens for s in stats), sum(s.verify_passes for s in stats)
        drafted, accepted = sum_by_position(s.drafted for s in stats), sum_by_position(s.accepted for s in stats)
        chose = any(isinstance(seq.draft, AutoDraft) for seq in self.sequences)
        control = ControlStats.total(s.control for s in stats).report() if chose else None
        return {
            **({"control": control} if control else {}),
            "tokens_per_s": tokens / self.decode_s if self.decode_s else 0.0,
            "tokens": self.tokens,
            "decode_tokens": tokens,
            "seconds": prefill_s + self.decode_s,
            "prefill_s": prefill_s,
            "decode_s": self.decode_s,
            "draft_s": self.draft_s,
            "verify_s": self.decode_s - self.draft_s,
            "verify_passes": passes,
            "tokens_per_verify": tokens / passes if passes else 0.0,
            "drafted": sum(drafted),
            "accepted": sum(accepted),
            "rejections": sum(s.rejections for s in stats),
            "acceptance_by_position": [a / d for a, d in zip(accepted, drafted, strict=True)],
        }


@dataclass(frozen=True)
class Comparison:
    """Both groups' figures and whether the promise held.

    ``divergences`` has one entry per prompt whose outputs differ: where, by which tokens, by what margin, and whether
    that is a near-tie. ``errors`` are requests that failed: a promise about nothing does not hold.
    """

    plain: dict[str, object]
    speculative: dict[str, object]
    prompts: list[list[int]]
    texts: list[str]
    exactness: str
    divergences: list[dict[str, object]]
    errors: list[str]
    lossless: bool = True  # whether the target is the model of its files

    @property
    def label(self) -> str:
        """What is said of the outputs: ``exactness``, or ``lossy``, where that holds relative to the target only."""
        return self.exactness if self.lossless else LOSSY

    @property
    def identical(self) -> bool:
        """Whether all outputs are equal: ids, how they ended, and their text."""
        return not self.divergences

    @property
    def held(self) -> bool:
        """Whether every request succeeded, and every difference is one that the tier allows."""
        near = self.exactness == "near-tie" and all(d["near_tie"] for d in self.divergences)
        return (self.identical or near or self.exactness == "distribution") and not self.errors

    @property
    def first_difference(self) -> dict[str, object] | None:
        """The earliest divergence."""
        return min(self.divergences, key=lambda d: d["position"], default=None)

    @property
    def ratio(self) -> float:
        """Speculative over plain decoding speed."""
        plain = self.plain["tokens_per_s"]
        return self.speculative["tokens_per_s"] / plain if plain else 0.0

    def report(self) -> dict[str, object]:
        """As one JSON object."""
        tokens = self.plain["decode_tokens"]
        return {
            "identical": self.identical,
            "first_difference": self.first_difference,
            "exactness": self.label,
            "tier": self.exactness,
            "held": self.held,
            "errors": self.errors,
            "speed_ratio": self.ratio,
            "divergences": self.divergences,
            "divergences_per_1000_tokens": 1000 * len(self.divergences) / tokens if tokens else 0.0,
            "plain": self.plain,
            "speculative": self.speculative,
        }


def compare(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    draft: DraftConfig | AutoDraft,
    on_progress: OnProgress | None = None,
) -> Comparison:
    """Decode token-id ``prompts`` plainly and with ``draft``; nothing of them stays in the engine.

    The engine must have no other requests: ``InvalidValueError`` otherwise.
    """
    engine, draft, report = llm.engine, llm.resolve(draft), on_progress or (lambda name, done, total, seconds: None)
    if engine.num_unfinished:
        raise InvalidValueError("unfinished requests", engine.num_unfinished, "must be 0 while decoding is compared")
    plain, speculative = Group("plain", []), Group("speculative", [])
    try:
        before, draft_before = engine.stats.prefill_s, engine.stats.draft_prefill_s
        for ids in prompts:
            speculative.sequences.append(engine.sequence(engine.add(ids, params, draft)))
        _prefill(llm, speculative, report)
        draft_s = engine.stats.draft_prefill_s - draft_before
        prefill_s = engine.stats.prefill_s - before - draft_s
        for seq in speculative.sequences:
            done = seq.status is Status.FINISHED
            plain.sequences.append(seq if done else engine.sequence(engine.fork(seq.id)))
        _hold(llm, plain, True)
        total = sum(seq.max_total - seq.num_prompt for seq in plain.sequences)
        while plain.running or speculative.running:
            for group in (plain, speculative):
                _turn(llm, group)
                report(group.name, group.tokens, total if group.running else group.tokens, group.decode_s)
    finally:
        for seq in plain.running + speculative.running:
            engine.abort(seq.id)
    return _compared(llm, plain, speculative, params, draft, (prefill_s, draft_s))


def _hold(llm: LLM, group: Group, held: bool) -> None:
    for seq in group.running:
        llm.engine.hold(seq.id, held)


def _prefill(llm: LLM, group: Group, report: OnProgress) -> None:
    """Fill the caches; each sequence is held once it has its first token."""
    total, before = sum(seq.num_prompt for seq in group.sequences), llm.engine.stats.prefill_s
    while llm.engine.has_work:
        for output in llm.engine.step():
            if not output.finish_reason:
                llm.engine.hold(output.seq.id)
        done = sum(min(seq.num_committed, seq.num_prompt) for seq in group.sequences)
        report("prefill", done, total, llm.engine.stats.prefill_s - before)


def _turn(llm: LLM, group: Group) -> None:
    """Let ``group`` alone run for a few decode steps, with whatever refilling they need first."""
    _hold(llm, group, False)
    stats = llm.engine.stats
    steps, decode_s, draft_s = stats.decode_steps, stats.decode_s, stats.draft_s
    while llm.engine.has_work and stats.decode_steps < steps + TURN:
        llm.engine.step()
    group.decode_s += stats.decode_s - decode_s
    group.draft_s += stats.draft_s - draft_s
    _hold(llm, group, True)


def _compared(
    llm: LLM,
    plain: Group,
    speculative: Group,
    params: SamplingParams,
    draft: DraftConfig | AutoDraft,
    prefill_s: tuple[float, float],  # the target's, and what the draft took besides
) -> Comparison:
    exactness = tier(llm.model, draft, greedy=params.greedy)
    differing = [
        (i, a, b)
        for i, (a, b) in enumerate(zip(plain.sequences, speculative.sequences, strict=True))
        if (a.output_ids, a.finish_reason, a.stop_text) != (b.output_ids, b.finish_reason, b.stop_text)
    ]
    epsilon = 0.0
    if differing and exactness == "near-tie":
        epsilon = 4 * rounding(llm.model, [seq.ids for seq in plain.sequences])
    divergences = []
    for i, a, b in differing:
        prompt = a.ids[: a.num_prompt]
        found = certify(llm.model, prompt, (a.output_ids, b.output_ids), params, a.seed, epsilon, a.stop_ids)
        # Equal ids that ended differently are no near-tie.
        divergences.append(
            {"prompt": i, **(found or {"position": len(a.output_ids), "margin": None, "near_tie": False})}
        )
    return Comparison(
        plain=plain.figures(prefill_s[0]),
        speculative=speculative.figures(sum(prefill_s)) | _draft_bytes(llm, draft, speculative.sequences),
        prompts=[seq.ids[: seq.num_prompt] for seq in plain.sequences],
        texts=[output_text(llm.tokenizer, seq) for seq in speculative.sequences],
        exactness=exactness,
        divergences=divergences,
        errors=[seq.error for seq in plain.sequences + speculative.sequences if seq.error],
        lossless=llm.model.lossless,
    )


def _draft_bytes(llm: LLM, draft: DraftConfig | AutoDraft, sequences: list[EngineSequence]) -> dict[str, object]:
    """What drafts keep beyond the target's cache, and what a draft (of several: the most) and the target read of KV
    per token, at the end."""
    engine, lengths = llm.engine, [len(seq.ids) for seq in sequences]
    made = [engine.runner.draft(config) for config in engine.drafts_of(draft)]
    return {
        "draft_kv_bytes": sum(one.bytes(n) for one in made for n in lengths),
        "draft_note_bytes": sum(one.note_bytes(n) for one in made for n in lengths),
        "kv_bytes_read_per_draft_token": max(sum(one.bytes_read(n) for n in lengths) for one in made) / len(lengths),
        "kv_bytes_read_per_plain_token": sum(map(engine.store.bytes_of, lengths)) / len(lengths),
    }
