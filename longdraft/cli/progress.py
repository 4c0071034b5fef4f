"""Progress of long work on stderr: live bars on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

if TYPE_CHECKING:
    from longdraft.core import StepOutput
    from longdraft.engine.engine import Engine
    from longdraft.llm import OnStep

PLAIN_EVERY_S = 10.0


class Progress:
    """Named bars. ``with Progress() as p: p.update("prefill", 512, 16000, "tokens")``."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._live = console.is_terminal
        columns = [
            TextColumn("[bold]{task.description:>8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TextColumn("{task.fields[rate]:>12}"),
            TimeRemainingColumn(),
        ]
        self._bars = Bars(*columns, console=console, disable=not self._live)
        self._console, self._tasks, self._started, self._last_line = console, {}, {}, time.monotonic()

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._bars.stop()

    def update(self, name: str, done: int, total: int, unit: str, seconds: float | None = None) -> None:
        """Set a bar. ``seconds`` is the time spent on it, where that is not the time since its first update."""
        now = time.monotonic()
        started = self._started.setdefault(name, now)
        spent = now - started if seconds is None else seconds
        rate = f"{done / spent:,.0f} /s" if spent > 0 and done else ""
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, unit=unit, rate=rate)
        self._bars.update(self._tasks[name], completed=done, total=total, rate=rate)
        if not self._live and now - self._last_line > PLAIN_EVERY_S:
            self._last_line = now
            self._console.print(f"{name}: {done} of {total} {unit} {rate}", highlight=False)


def track(progress: Progress, num_output_tokens: int) -> OnStep:
    """An ``on_step`` callback that shows prefill and decoding of an engine's only requests.

    ``num_output_tokens`` is an upper bound: requests may stop early.
    """
    generated = 0

    def on_step(engine: Engine, outputs: list[StepOutput]) -> None:
        nonlocal generated
        generated += sum(len(output.tokens) for output in outputs)
        stats = engine.stats
        total = max(stats.prompt_tokens, stats.prefill_tokens)  # preempted rows are filled again
        progress.update("prefill", stats.prefill_tokens, total, "tokens", stats.prefill_s)
        total = num_output_tokens if engine.has_work else generated
        progress.update("decode", generated, total, "tokens", stats.decode_s)

    return on_step
