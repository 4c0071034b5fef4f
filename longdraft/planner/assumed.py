"""How many drafted tokens are assumed to stand before anything has been measured: ``acceptance.json``, with sources."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import log

from longdraft.config import DraftConfig, as_float
from longdraft.planner.catalogue import find_spire, known_name
from longdraft.planner.cost import Acceptance


@dataclass(frozen=True)
class Assumed:
    """Acceptance by context length, and where it comes from. What is measured online has the same shape."""

    rate: Callable[[int], Acceptance]
    source: str


def given(acceptance: Acceptance) -> Assumed:
    """The user's own figure, for every draft and length; ``InvalidValueError`` for what is no probability."""
    for value in [acceptance] if isinstance(acceptance, (int, float)) else acceptance:
        as_float("acceptance", value, 0.0, 1.0)
    return Assumed(lambda length: acceptance, "given")


def assumed(draft: DraftConfig, target: str) -> Assumed | None:
    """What is published or was measured for such a draft; ``None`` where there is no figure."""
    if draft.own_model:
        return _trained(draft) if find_spire(draft.model) else _pair(draft, target)
    table = _table()["self"].get(draft.kv)
    if draft.weights == "ngram" or draft.layers != "all" or table is None:
        return None
    refusals = _interpolate(_numbers(table["refusals_by_budget"]), draft.budget)
    if draft.budget < min(map(int, table["refusals_by_budget"])):
        return None
    sources = [table["source"]] if draft.budget >= table["budget"] else [table["source"], table["budget_source"]]
    if draft.weights == "target@int8":
        refusals *= _table()["int8"]["refusals"]
        sources.append(_table()["int8"]["source"])
    points = _numbers(table["by_context"])
    return Assumed(lambda length: 1 - refusals * (1 - _interpolate(points, length)), "; ".join(sources))


def published_pair(target: str) -> str | None:
    """The small model whose acceptance for ``target`` is published, if there is one."""
    return next((row["draft"] for row in _table()["pairs"] if row["target"] == known_name(target)), None)


def _trained(draft: DraftConfig) -> Assumed:
    row, refusals, sources = _table()["spire"], 1.0, [_table()["spire"]["source"]]
    if draft.int8:
        refusals = _table()["int8"]["refusals"]
        sources.append(_table()["int8"]["source"])
    return Assumed(lambda length: 1 - refusals * (1 - row["rate"]), "; ".join(sources))


def _pair(draft: DraftConfig, target: str) -> Assumed | None:
    names = known_name(target), known_name(draft.weights)
    rows = [row for row in _table()["pairs"] if (row["target"], row["draft"]) == names]
    row = rows[0] if rows else _table()["other_pairs"]
    if draft.kv != "full" and draft.budget < row["budget"]:
        return None
    return Assumed(lambda length: row["rate"], row["source"])


@cache
def _table() -> dict:
    return json.loads((files(__package__) / "acceptance.json").read_text())


def _numbers(points: Mapping[str, float]) -> list[tuple[int, float]]:
    return [(int(at), value) for at, value in points.items()]


def _interpolate(points: list[tuple[int, float]], at: int) -> float:
    """Linear in the logarithm of ``at``; level beyond the ends."""
    right = bisect_left([x for x, _ in points], at)
    if right in (0, len(points)):
        return points[min(right, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * log(at / x0) / log(x1 / x0)
