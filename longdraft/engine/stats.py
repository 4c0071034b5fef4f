"""Counters of a whole engine: what was computed in which phase, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass

from longdraft.core import Batch, SequenceStats


@dataclass
class EngineStats:
    """Totals since the engine was made. Seconds are wall time inside ``Engine.step``."""

    prompt_tokens: int = 0  # of all requests so far, forks apart
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0  # the part of decode_s spent on proposing
    select_s: float = 0.0  # the part of draft_s spent on choosing what drafts read
    draft_prefill_s: float = 0.0  # the part of prefill_s in which drafts took in prompts
    prefill_tokens: int = 0  # prompt tokens fed, recomputation included
    decode_tokens: int = 0  # tokens that decode steps returned
    decode_steps: int = 0
    preemptions: int = 0
    peak_kv_pages: int = 0

    def record(self, batch: Batch, seconds: float, draft_s: float) -> None:
        """Charge a step to the batch's phase, in the totals and in each of its sequences."""
        if batch.prefill:
            self.prefill_s += seconds
            self.prefill_tokens += batch.num_tokens
        else:
            self.decode_s += seconds
            self.draft_s += draft_s
            self.decode_steps += 1
        for row in batch.rows:
            _charge(row.seq.stats, batch.prefill, seconds, row.num_tokens)


def _charge(stats: SequenceStats, prefill: bool, seconds: float, num_tokens: int) -> None:
    if prefill:
        stats.prefill_s += seconds
        stats.prefill_tokens += num_tokens
    else:
        stats.decode_s += seconds
