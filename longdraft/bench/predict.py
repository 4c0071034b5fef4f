"""What the prices at hand say of a measured speed-up, given the acceptance that came: MagicDec's Eq. 2."""

from __future__ import annotations

from collections.abc import Sequence

from longdraft.bench import Arm, Turn
from longdraft.config import draft_key
from longdraft.llm import LLM


def predicted_speedup(llm: LLM, arm: Arm, prompts: Sequence[int], plain: Turn, fast: Turn) -> float | None:
    """Of an arm over plain decoding; ``prompts``: tokens of each row's prompt. ``None``: the draft has no price.

    Where drafts are chosen step by step: what their rounds, and plain decoding, were expected to take when they were
    chosen. Of a fixed draft: the prices at the mean length of its rows, with nothing observed added.
    """
    if arm.config is None:
        return fast.control.plain_s / fast.control.expected_s
    control, draft = llm.engine.control, draft_key(arm.config)
    if not control.prices.knows(draft):
        return None
    lengths, rows = _grown(prompts, fast), len(prompts)
    proposed = sum(fast.drafted) / fast.passes  # fewer than γ where a draft finds nothing
    seconds = control.prices.target(lengths, [1 + proposed] * rows)
    seconds += control.prices.draft(draft, lengths, [arm.gamma] * rows)
    return fast.tokens / fast.passes * control.prices.target(_grown(prompts, plain), [1] * rows) / seconds


def _grown(prompts: Sequence[int], turns: Turn) -> list[int]:
    """The rows' lengths halfway through their turns."""
    output = turns.context - sum(prompts) / len(prompts)
    return [round(length + output) for length in prompts]
