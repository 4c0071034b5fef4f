"""Sections of a recipe as frozen records: fields with bounds, keys that nobody knows refused with the nearest known."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from longdraft.config import as_float, as_int
from longdraft.errors import InvalidValueError

T = TypeVar("T")


def whole(default: int, low: int, high: int) -> Any:  # noqa: ANN401 - a field, whose type the annotation gives
    """A field that holds an integer from ``low`` to ``high``."""
    return field(default=default, metadata={"check": lambda what, x: as_int(what, x, low, high)})


def number(default: float, low: float, high: float) -> Any:  # noqa: ANN401
    """A field that holds a number from ``low`` to ``high``."""
    return field(default=default, metadata={"check": lambda what, x: as_float(what, x, low, high)})


def choice(default: T, known: Iterable[T]) -> Any:  # noqa: ANN401
    """A field that holds one of a few words, or yes or no."""
    known = tuple(known)

    def check(what: str, value: object) -> T:
        if value not in known or type(value) is not type(default):
            raise InvalidValueError(what, value, f"must be one of {', '.join(map(str, known))}")
        return value

    return field(default=default, metadata={"check": check})


def as_words(what: str, value: object) -> tuple[str, ...]:
    """A list of words."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
        raise InvalidValueError(what, value, "must be a list of words")
    return tuple(value)


def as_list(check: Callable[..., T], low: float, high: float) -> Callable[[str, object], tuple[T, ...]]:
    """A check of a list of at least one number, each by ``check``."""

    def all_of(what: str, value: object) -> tuple[T, ...]:
        if not isinstance(value, (list, tuple)) or not value:
            raise InvalidValueError(what, value, "must be a list of numbers")
        return tuple(check(what, x, low, high) for x in value)

    return all_of


def as_shares(what: str, value: object) -> dict[int, float]:
    """Lengths in tokens, each with its share of all: positive numbers that add up to 1. TOML's keys are words."""
    limit = "must have lengths of at least 2 tokens and shares that add up to 1, as in { 512 = 0.75, 2048 = 0.25 }"
    if not isinstance(value, Mapping) or not all(str(length).isdecimal() for length in value):
        raise InvalidValueError(what, value, limit)
    lengths = {as_int(what, int(length), 2, 2**24): as_float(what, share, 0, 1) for length, share in value.items()}
    if abs(sum(lengths.values()) - 1) > 1e-6 or 0 in lengths.values():
        raise InvalidValueError(what, value, limit)
    return lengths


@dataclass(frozen=True)
class Section:
    """A record whose fields check themselves."""

    def __post_init__(self) -> None:
        for f in fields(self):
            if check := f.metadata.get("check"):
                object.__setattr__(self, f.name, check(f.name, getattr(self, f.name)))


def read_section(kind: type[T], raw: object, where: str) -> T:
    """A record of ``kind``, a dataclass, of a table; ``InvalidValueError`` names the key behind ``where``."""
    known = fields(kind)
    raw = refuse_others(raw, [f.name for f in known], where)
    for f in known:
        if f.name not in raw and f.default is MISSING and f.default_factory is MISSING:
            raise InvalidValueError(f"{where}.{f.name}", None, "must be given")
    try:
        return kind(**raw)
    except InvalidValueError as error:
        raise InvalidValueError(f"{where}.{error.what}", error.value, error.limit, error.fix) from error


def refuse_others(raw: object, known: Iterable[str], where: str) -> Mapping[str, object]:
    """``raw`` if it is a table with no other keys than the ``known``; ``InvalidValueError`` otherwise."""
    if not isinstance(raw, Mapping):
        raise InvalidValueError(where, raw, "must be a table")
    known = list(known)
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            fix = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
            raise InvalidValueError(f"{where}.{key}".removeprefix("."), raw[key], "there is no such setting", fix)
    return raw
