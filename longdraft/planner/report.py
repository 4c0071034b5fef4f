"""A plan as JSON objects: what ``longdraft plan`` prints last, and draws its tables from."""

from __future__ import annotations

from longdraft.planner.explain import why
from longdraft.planner.memory import memory
from longdraft.planner.plan import Choice, Planner


def report(
    planner: Planner, batch: int, context: int, break_even: int | None, target: float | None = None
) -> dict[str, object]:
    """A plan for one batch and context as a JSON object; something must fit (see ``require_one_row``).

    ``break_even``: the batch's ``Planner.break_even_context``.
    """
    ranking = planner.ranking(batch, context)
    best = ranking[0]
    plain, drafted = (memory(planner.target, draft, batch, context) for draft in (None, best.draft))
    return {
        "batch": batch,
        "context": context,
        "best": row(best, context, target),
        "ranking": [row(choice, context, target) for choice in ranking],
        "why": why(planner, ranking, batch, context, break_even),
        "break_even_context": break_even,
        "memory": drafted.report() | {"largest_batch_plain": plain.largest_batch},
    }


def row(choice: Choice, context: int, target: float | None = None) -> dict[str, object]:
    """A line of a ranking. ``target``: also say which acceptance would make it that many times as fast as plain."""
    draft, found = choice.draft, choice.round
    out: dict[str, object] = {
        "draft": draft.key if draft else "off",
        "weights": draft.config.weights if draft else None,
        "kv": draft.config.kv if draft and draft.network else None,
        "budget": draft.budget if draft else None,
        "gamma": found.gamma,
        "speedup": round(choice.speedup, 4),
        "tokens_per_s": round(found.tokens_per_s, 2),
        "rows": found.rows,
        "tokens_per_verify": round(found.tokens, 4),
        "draft_ms": round(found.draft_s * 1e3, 4),
        "verify_ms": round(found.verify_s * 1e3, 4),
        "plain_ms": round(choice.plain.seconds * 1e3, 4),
    }
    return out | _acceptance(choice, context, target) if draft else out


def _acceptance(choice: Choice, context: int, target: float | None) -> dict[str, object]:
    """What is assumed, and what is needed, at whatever γ is best for it, to break even or to reach ``target``."""
    needed = {"break_even_acceptance": 1.0} | ({"target_acceptance": target} if target else {})
    rates = {name: choice.min_acceptance(goal) for name, goal in needed.items()}
    assumed, rate = choice.draft.acceptance, choice.draft.acceptance.rate(context)
    return {
        "acceptance": round(rate, 4) if isinstance(rate, (int, float)) else list(rate),
        "acceptance_source": assumed.source,
        "note": choice.draft.note,
        **{name: None if value is None else round(value, 4) for name, value in rates.items()},
    }
