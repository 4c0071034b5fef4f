"""Progress of long work on stderr: live bars on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

if TYPE_CHECKING:
    from longdraft.compare import OnProgress
    from longdraft.core import StepOutput
    from longdraft.engine.engine import Engine
    from longdraft.llm import OnStep

PLAIN_EVERY_S = 10.0


class Progress:
    """Named bars. ``with Progress() as p: p.update("prefill", 512, 16000, "tokens")``."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = self._console.is_terminal
        columns = [
            TextColumn("[bold]{task.description:>11}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}{task.fields[speed]}"),
        ]
        self._bars = Bars(*columns, console=self._console, disable=not self._live)
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, tuple[float, int]] = {}  # when each name's first update was, and how far it was then
        self._printed: dict[str, float] = {}  # when each name last had a plain line

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._bars.stop()
        if kind is KeyboardInterrupt:
            self._console.print("interrupted", style="red")

    def update(self, name: str, done: int, total: int, unit: str, seconds: float | None = None) -> None:
        """Set a bar. ``seconds`` is the time spent on it, where that is not the time since its first update."""
        now = time.monotonic()
        since, before = self._started.setdefault(name, (now, done)) if seconds is None else (now - seconds, 0)
        spent, new = now - since, done - before
        speed = ""
        if spent > 0 and new > 0:
            rate = new / spent
            speed = f", {rate:,.0f} /s" if rate >= 1 else f", {1 / rate:,.0f} s each"
            speed += f", {(total - done) / rate:,.0f} s left"
        if not self._live:
            if now - self._printed.setdefault(name, now) > PLAIN_EVERY_S:
                self._printed[name] = now
                self._console.print(f"{name}: {done:,} of {total:,} {unit}{speed}", highlight=False)
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, unit=unit, speed=speed)
        self._bars.update(self._tasks[name], completed=done, total=total, unit=unit, speed=speed)


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
        if stats.decode_steps:
            progress.update("decode", generated, total, "tokens", stats.decode_s)

    return on_step


def track_comparison(progress: Progress) -> OnProgress:
    """The same for a comparison: one bar each for prefill, plain and speculative decoding."""
    return lambda name, done, total, seconds: progress.update(name, done, total, "tokens", seconds)
