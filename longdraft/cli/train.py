"""``longdraft train``: drafts, and small targets, from a recipe."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longdraft.cli import options

if TYPE_CHECKING:
    from longdraft.cli.progress import Progress
    from longdraft.train.loop import Hooks, RunConfig
    from longdraft.train.stages import Outcome

STOPPED = 130
SHOWN = ("loss", "acceptance", "accuracy")


def train(
    config: Annotated[Path, typer.Option("--config", "-c", metavar="FILE.toml", help="The recipe.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Left out: runs/NAME of the recipe.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is there, bit by bit.")] = False,
    steps: Annotated[int | None, typer.Option(help="Other steps than the recipe's, of every stage.")] = None,
    seed: Annotated[int | None, typer.Option(help="Another seed than the recipe's.")] = None,
    arms: Annotated[str | None, typer.Option(metavar="A,B,…", help="The draft and its ablations, or all.")] = None,
    seeds: Annotated[int | None, typer.Option(help="So many of each arm, with seeds from the recipe's on.")] = None,
    evaluate: Annotated[
        bool | None,
        typer.Option("--evaluate/--no-evaluate", help="Count tokens per round. Left out: if there are arms."),
    ] = None,
    json: options.JsonFile = None,
    plot: Annotated[bool, typer.Option(help="Draw each stage's figures, and tokens per round.")] = True,
) -> None:
    """Train a draft for a model, or a small model from text, as a recipe says; docs/spire.md explains recipes.

    Each stage has a folder in DIR: what was trained is in model/, the steps' figures are in log.jsonl. A run that was
    killed goes on with --resume; Ctrl-C ends it after the step that is under way. In the end all drafts are measured
    together on held-out texts: tau.json and tau.png in DIR. The last line of stdout is one JSON object.
    """
    from longdraft.cli.bench import show, write
    from longdraft.cli.progress import Progress
    from longdraft.cli.train_tables import evaluated
    from longdraft.train.recipe import read_recipe
    from longdraft.train.stages import Workshop

    options.check_outputs(json, None)
    recipe = read_recipe(config).with_run(**_given(steps=steps, seed=seed))
    recipe = recipe.with_arms(**_given(names=arms and tuple(arms.split(",")), seeds=seeds))
    out = out or Path("runs") / recipe.name
    if evaluate is None:
        evaluate = recipe.arms is not None
    with Progress() as progress, _interruptible() as stop:
        workshop = Workshop(
            recipe,
            out,
            resume,
            lambda name, run: _hooks(progress, name, run, stop),
            lambda *done: _on_said(progress, stop, *done),
            lambda *done: _on_written(progress, stop, *done),
        )
        done = workshop.run()
    show([_table(done)])
    pictures = _draw(out, done) if plot else {}
    stages = {name: _figures(outcome) | pictures.get(name, {}) for name, outcome in done.items()}
    finished = all(outcome.finished for outcome in done.values())
    report = {"config": str(config), "out": str(out), "stages": stages}
    if evaluate and finished and recipe.draft is not None:
        report["tau"] = evaluated(workshop, done, plot)
    write(report, json)
    if not finished:
        typer.echo("Stopped; go on with --resume.", err=True)
        raise typer.Exit(STOPPED)


def _given(**values: object) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """The signals that came; the second Ctrl-C is the usual one."""
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        came.append(number)
        signal.signal(number, before[number])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, note)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hooks(progress: Progress, name: str, run: RunConfig, stop: list[int]) -> Hooks:
    """A stage's bar: tokens, with the newest figures."""
    from longdraft.train.loop import Hooks

    said: dict[str, object] = {}

    def on_step(record: Mapping[str, object]) -> None:
        held_out = record.get("held_out")
        said.update({f"held-out {k}": v for k, v in held_out.items()} if held_out else record)
        names = [*SHOWN, *(f"held-out {name}" for name in SHOWN[1:])]
        words = [f"{name} {said[name]:.3f}" for name in names if said.get(name) is not None]
        unit = ", ".join(["tokens", *words])
        progress.update(name, record["step"] * run.batch_tokens, run.steps * run.batch_tokens, unit)

    return Hooks(on_step, lambda: bool(stop))


def _on_said(progress: Progress, stop: list[int], length: int, done: int, total: int) -> None:
    """The bar of what the target says."""
    _on_target(progress, stop, f"target, {length}", done, total, "texts")


def _on_written(progress: Progress, stop: list[int], done: int, total: int) -> None:
    """The bar of what the target writes itself."""
    _on_target(progress, stop, "writing", done, total, "tokens")


def _on_target(progress: Progress, stop: list[int], name: str, done: int, total: int, unit: str) -> None:
    """A bar of the target's work: what is kept of it stays, so a stop may come at any moment."""
    progress.update(name, done, total, unit)
    if stop:
        raise KeyboardInterrupt


def _table(done: Mapping[str, Outcome]) -> object:
    from rich.table import Table

    table = Table(title="training", title_justify="left")
    for column in ("stage", "steps", "tokens", "skipped", "seconds", "held-out figures, before", "after", "folder"):
        table.add_column(column, overflow="fold")
    for name, outcome in done.items():
        at = outcome.progress
        counts = (f"{at.step:,}", f"{at.tokens:,}", str(at.skipped), f"{outcome.seconds:,.0f}")
        figures = (_words(outcome.before), _words(outcome.after))
        table.add_row(name, *counts, *figures, str(outcome.model))
    return table


def _words(figures: Mapping[str, object]) -> str:
    return "\n".join(f"{name} {value:.4f}" for name, value in figures.items() if isinstance(value, float))


def _figures(outcome: Outcome) -> dict[str, object]:
    return {
        **asdict(outcome.progress),
        "finished": outcome.finished,
        "seconds": round(outcome.seconds, 1),
        "held_out_before": dict(outcome.before),
        "held_out": dict(outcome.after),
        "model": str(outcome.model),
    }


def _draw(out: Path, done: Mapping[str, Outcome]) -> dict[str, dict[str, str]]:
    """A picture in each stage's folder, where matplotlib is installed."""
    from longdraft.bench.train_plot import plot_training
    from longdraft.errors import MissingDependencyError
    from longdraft.train.state import read_log

    files = {}
    for name in done:
        file = out / name / "training.png"
        try:
            plot_training(list(read_log(out / name)), file, f"{out.name}: {name}")
        except MissingDependencyError as error:
            typer.echo(str(error), err=True)
            return {}
        files[name] = {"plot": str(file)}
    return files
