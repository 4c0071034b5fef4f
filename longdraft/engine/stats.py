"""Counters of a whole engine: what was computed in which phase, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from longdraft.core import Batch


@dataclass
class EngineStats:
    """Totals since the engine was made. Seconds are wall time inside ``Engine.step``."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_tokens: int = 0  # prompt tokens fed, recomputation included
    decode_tokens: int = 0  # tokens that decode steps returned
    decode_steps: int = 0
    preemptions: int = 0
    peak_kv_pages: int = 0

    @contextmanager
    def timed(self, batch: Batch) -> Iterator[None]:
        """Charge the wall time of the block to the batch's phase, in the totals and in each of its sequences."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        if batch.prefill:
            self.prefill_s += seconds
            self.prefill_tokens += batch.num_tokens
        else:
            self.decode_s += seconds
            self.decode_steps += 1
        for row in batch.rows:
            stats = row.seq.stats
            if batch.prefill:
                stats.prefill_s += seconds
                stats.prefill_tokens += row.num_tokens
            else:
                stats.decode_s += seconds
