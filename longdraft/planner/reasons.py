"""Why nothing is proposed for a row, in a few words."""

from __future__ import annotations

from longdraft.planner.joint import Offer, Plan, Problem

NEAR_END = "near its end"
MEASURING = "measuring plain decoding"
LOW_ACCEPTANCE = "acceptance too low"
SHORT_CONTEXT = "too short a context"
LARGE_BATCH = "batch too large"


def why_off(problem: Problem, plan: Plan, plain: Plan) -> list[str | None]:
    """For each row of a plan; ``None`` where something is proposed."""
    if not any(problem.caps):
        return [NEAR_END] * len(problem.caps)
    rest = _costs(problem, plain) if plan.off else LOW_ACCEPTANCE
    pairs = zip(plan.gammas, problem.caps, strict=True)
    return [None if gamma else rest if cap else NEAR_END for gamma, cap in pairs]


def _costs(problem: Problem, plain: Plan) -> str:
    """What stands in the way if not acceptance: a draft pass that costs like a plain one, or verification."""
    best = plain
    for offer in problem.offers:
        sure = Offer(offer.number, [[1.0] * max(problem.caps)] * len(problem.caps))
        plan = Problem(problem.costs, [sure], problem.caps, problem.others).alone(sure, plain.rate)
        best = max(best, plan, key=lambda p: p.rate)
    if not best.off:
        return LOW_ACCEPTANCE
    rows, ones = range(len(problem.caps)), [1] * len(problem.caps)
    drafting = min((problem.costs.draft(offer.number, rows, ones) for offer in problem.offers), default=0.0)
    verifying = problem.costs.target([2] * len(ones)) - plain.seconds
    return LARGE_BATCH if verifying > drafting else SHORT_CONTEXT
