"""The peer's end of the pipe: JSON lines in, JSON lines out. Needs the standard library only.

A request is ``{"do": method, argument: value, ...}``. Any number of ``{"progress": [name, done, total, unit]}`` may
come back before its ``{"answer": value}``. The first line answers no request: the engine's name and version, or
``{"missing": module}`` where it is not installed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

OnProgress = Callable[[str, int, int, str], None]  # of what, done, in all, unit


class Child(Protocol):
    """An engine as the other end sees it. All prompts are equally long; decoding is greedy."""

    name: str

    def load(self, model: str, dtype: str, threads: int) -> str:
        """Load the model's file or folder; the type of the weights that now run."""

    def fill(self, prompts: list[list[int]], room: int) -> str:
        """Prefill, leave ``room`` tokens per row, find the engine's fastest settings; those in words."""

    def decode(self, tokens: int) -> dict[str, Any]:
        """Decode from the end of the prompts: ``seconds``, and ``rows`` of the prompts' next token and these."""


def serve(make: Callable[[OnProgress], Child]) -> None:
    """Answer requests until the other end closes the pipe. ``make`` imports the engine."""
    # Whatever libraries print, from C too, must not be taken for an answer.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**message: object) -> None:
        out.write(json.dumps(message) + "\n")

    try:
        child = make(lambda *args: send(progress=args))
    except ModuleNotFoundError as error:
        send(missing=error.name)
        return
    send(answer=child.name)
    methods = {"load": child.load, "fill": child.fill, "decode": child.decode}
    for line in sys.stdin:
        request = json.loads(line)
        send(answer=methods[request.pop("do")](**request))
