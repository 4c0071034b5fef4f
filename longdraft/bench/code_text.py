"""Source code to go on with: the standard library of the running interpreter, which needs no network and no copy."""

from __future__ import annotations

import random
import sysconfig
from functools import cache
from pathlib import Path

from longdraft.bench.prompts import CHARACTERS_PER_TOKEN, SHIFT
from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.errors import InvalidValueError

LEAST_CHARACTERS = 8_000  # smaller modules are mostly imports and docstrings


def code_windows(tokenizer: Tokenizer, count: int, context: int, seed: int = 0) -> list[list[int]]:
    """``count`` different windows of ``context`` ids: modules in an order that ``seed`` gives, each from its start.

    A module that is too short goes on with the next one. ``InvalidValueError`` where there are no sources.
    """
    names = list(_modules())
    random.Random(seed).shuffle(names)  # noqa: S311 - no secret
    return [tokenizer.encode(_from(names, n, CHARACTERS_PER_TOKEN * context))[:context] for n in range(count)]


def _from(names: list[str], n: int, size: int) -> str:
    """At least ``size`` characters from the ``n``-th module on, those of further laps with a start of their own."""
    lap, at = divmod(n, len(names))
    text = _read(names[at])[lap * SHIFT % LEAST_CHARACTERS :]
    while len(text) < size:
        at = (at + 1) % len(names)
        text += f"\n\n# {names[at]}\n{_read(names[at])}"
    return text


@cache
def _modules() -> tuple[str, ...]:
    folder = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.name for path in folder.glob("*.py") if not path.name.startswith("_"))
    kept = tuple(name for name in names if len(_read(name)) >= LEAST_CHARACTERS)
    if not kept:
        raise InvalidValueError("--task", "code", f"needs the standard library's sources, and {folder} has none")
    return kept


@cache  # a few megabytes in all
def _read(name: str) -> str:
    return (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")
