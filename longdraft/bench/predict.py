"""What the prices at hand say of a measured speed-up, given the acceptance that came: MagicDec's Eq. 2."""

from __future__ import annotations

from collections.abc import Sequence

from longdraft.bench import Arm, Turn
from longdraft.config import DraftConfig, draft_key
from longdraft.llm import LLM
from longdraft.planner.batch import OTHER, draft_kind, target_kind
from longdraft.planner.control import Controller
from longdraft.planner.pace import paced


def predicted_speedup(llm: LLM, arm: Arm, prompts: Sequence[int], plain: Turn, fast: Turn) -> float | None:
    """Of an arm over plain decoding; ``prompts``: tokens of each row's prompt. ``None``: the draft has no price.

    Where drafts are chosen step by step: what their rounds, and plain decoding, were expected to take when they were
    chosen. Of a fixed draft: the prices at the mean length of its rows, at the pace that control has observed, if any.
    """
    if arm.config is None:
        return fast.control.plain_s / fast.control.expected_s
    control, draft = llm.engine.control, draft_key(arm.config)
    if not control.prices.knows(draft):
        return None
    lengths, before, rows = _grown(prompts, fast), _grown(prompts, plain), len(prompts)
    # Where a draft finds less than γ tokens rows differ: one in so many of them feeds that many.
    fed = [1 + sum(count / fast.passes > (i + 0.5) / rows for count in fast.drafted) for i in range(rows)]
    seconds = _pass(control, lengths, fed) + _drafting(control, draft, lengths, [arm.gamma] * rows)
    return fast.tokens / fast.passes * _pass(control, before, [1] * rows) / seconds


def _pass(control: Controller, lengths: Sequence[int], fed: Sequence[int]) -> float:
    plain, whole = (control.prices.target(lengths, tokens) for tokens in ([1] * len(lengths), fed))
    return paced(control.pace.factors(target_kind(lengths)), plain, whole)


def _drafting(control: Controller, draft: DraftConfig, lengths: Sequence[int], gammas: Sequence[int]) -> float:
    number = control.evidence.numbers.get(draft)
    kind = OTHER if number is None else draft_kind(number, lengths)
    return control.pace.factors(kind)[0] * control.prices.draft(draft, lengths, gammas)


def _grown(prompts: Sequence[int], turns: Turn) -> list[int]:
    """The rows' lengths halfway through their turns."""
    output = turns.context - sum(prompts) / len(prompts)
    return [round(length + output) for length in prompts]
