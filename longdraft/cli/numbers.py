"""Lists of whole numbers as a user writes them: ``64``, ``16k``, ``1,8,64``, ``1k..128k``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from longdraft.errors import InvalidValueError

_NUMBER = re.compile(r"([0-9]{1,12})(k?)", re.IGNORECASE | re.ASCII)


def parse_numbers(what: str, texts: Iterable[str]) -> tuple[int, ...]:
    """All numbers of ``texts``, ascending and once each; ``k`` stands for 1,024.

    A range goes on by doubling and ends with its end: ``1k..10k`` is 1k, 2k, 4k, 8k, 10k. Raises ``InvalidValueError``
    naming the option ``what``.
    """
    found: set[int] = set()
    for text in texts:
        for part in text.split(","):
            low, dots, high = part.partition("..")
            found.update(_doubling(what, low, high) if dots else [parse_number(what, part)])
    return tuple(sorted(found))


def parse_number(what: str, text: str) -> int:
    """One number; see ``parse_numbers``."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or not int(match[1]):
        limit = "must be whole numbers from 1 on, such as 64, 16k, 1,8,64 or 1k..128k"
        raise InvalidValueError(what, text, limit)
    return int(match[1]) * (1024 if match[2] else 1)


def _doubling(what: str, low: str, high: str) -> list[int]:
    value, end = parse_number(what, low), parse_number(what, high)
    if value > end:
        raise InvalidValueError(what, f"{low}..{high}", "must go from the smaller to the larger number")
    steps = []
    while value < end:
        steps.append(value)
        value *= 2
    return [*steps, end]
