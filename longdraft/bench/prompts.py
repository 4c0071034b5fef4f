"""Prose to go on with: the prompt set P8, two windows of each packaged novel and shifted ones for larger batches.

Also the hay in which generated tasks hide their facts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from longdraft.errors import InvalidValueError
from longdraft.prompts import require
from longdraft.train.corpora import NOVELS, novel

if TYPE_CHECKING:
    from longdraft.checkpoint.tokenizer import Tokenizer
    from longdraft.llm import LLM

SHIFT = 4001  # characters that each further set of eight windows starts behind the last one
CHARACTERS_PER_TOKEN = 8  # more than prose or code has, so that a slice of this many holds the window


def windows(llm: LLM, batch: int, context: int) -> list[list[int]]:
    """``batch`` different windows of ``context`` token ids: all novels from a third on, then all from two thirds on.

    ``InvalidValueError`` where a novel ends too early.
    """
    tokenizer, rows = require(llm.tokenizer), []
    for n in range(batch):
        name, part = NOVELS[n % 4], 1 + n // 4 % 2
        text = novel(name)
        start = len(text) * part // 3 + n // 8 * SHIFT
        ids = tokenizer.encode(text[start : start + max(60_000, CHARACTERS_PER_TOKEN * context)])[:context]
        if len(ids) < context:
            limit = f"must be at most {len(ids)} in a batch of {batch}, where {name} ends"
            raise InvalidValueError("--context", context, limit)
        rows.append(ids)
    return rows


def hay(tokenizer: Tokenizer, start: int, count: int) -> list[int]:
    """``count`` ids of all novels in a circle, from character ``start`` on; nothing is added around them."""
    text = "".join(novel(name) for name in NOVELS)
    start, size = start % len(text), CHARACTERS_PER_TOKEN * count
    circle = text * (1 + (start + size) // len(text))
    return tokenizer.encode(circle[start : start + size], add_special_tokens=False)[:count]
