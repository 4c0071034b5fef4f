"""``longdraft bench acceptance``: how often drafts' proposals stand, on several kinds of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longdraft.cli import drafting, options
from longdraft.cli.bench import INTERRUPTED, as_promised, describe_model, make_arms, own_model, show, unique, write

if TYPE_CHECKING:
    from rich.table import Table

    from longdraft.bench.acceptance import AcceptancePlan
    from longdraft.bench.acceptance_cells import AcceptanceCell, Difference, Result
    from longdraft.llm import LLM

TASKS = "prose, code, random, and needle, multikey and variables, each also with -early or -second behind it"
BASELINE = "streaming_llm"


def acceptance(
    model: options.Model = None,
    task: Annotated[list[str], typer.Option(help=f"Kind of text: {TASKS}. Repeatable.")] = ["prose", "code", "needle"],  # noqa: B006
    context: Annotated[list[int], typer.Option(help="Prompt tokens. Repeatable.")] = [4000],  # noqa: B006
    draft: Annotated[
        list[str],
        typer.Option(help=f"Who proposes: {drafting.NAMES}, or {drafting.OWN}. Repeatable."),
    ] = [BASELINE],  # noqa: B006
    kv: drafting.Kv = None,
    budget: Annotated[list[int], typer.Option(help="Tokens the draft reads. Repeatable.")] = [256],  # noqa: B006
    refresh: drafting.Refreshes = None,
    gamma: Annotated[list[int], typer.Option(help="Most tokens proposed per pass. Repeatable.")] = [3],  # noqa: B006
    temperature: Annotated[list[float], typer.Option(help="0 is greedy. Repeatable.")] = [0.0, 1.0],  # noqa: B006
    prompts: Annotated[int, typer.Option(help="Prompts per cell.")] = 32,
    positions: Annotated[int, typer.Option(help="Positions per prompt at which a draft is asked.")] = 64,
    after: Annotated[int, typer.Option(help="Output tokens before the first position.")] = 0,
    batch: Annotated[int, typer.Option(help="Prompts examined together.")] = 8,
    mass_positions: Annotated[int, typer.Option(help="Positions per prompt at which attention is looked at.")] = 4,
    baseline: Annotated[
        str | None, typer.Option(help=f"Draft that others are compared with. Left out: {BASELINE}, if it is measured.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides on the tasks and the sampling.")] = 0,
    dtype: options.Dtype = "auto",
    kv_dtype: options.KVDtype = None,
    kv_cache_memory_bytes: options.KVMemory = None,
    device: options.Device = "auto",
    json: options.JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="NAME.png",
            help="Draw NAME-budget.png, NAME-context.png (where there are several), NAME-position.png.",
        ),
    ] = None,
    earlier: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", metavar="FILE", help="Show and draw what --json wrote, and measure nothing. Repeatable."
        ),
    ] = None,
    download: options.Download = False,
) -> None:
    """Measure how often each draft's proposals stand; the protocol is in docs/acceptance.md.

    The last line of stdout is one JSON object. Exit status 1 if an output differs from plain decoding's where the
    exactness tier promises equality. Ctrl-C prints what is measured so far.
    """
    if earlier:
        options.check_outputs(json, plot)
        _show_earlier(earlier, json, plot)
        return
    from longdraft.bench import interval
    from longdraft.bench.acceptance import CHUNK, ROWS, AcceptancePlan
    from longdraft.bench.tasks import check_task

    arms = make_arms(draft, budget, [max(gamma)], kv, refresh)
    if baseline is None and BASELINE in [arm.name for arm in arms]:
        baseline = BASELINE
    sizes = {"prompts": prompts, "positions": positions, "after": after, "batch": batch}
    sizes["mass_positions"] = mass_positions
    for name in task:
        check_task(name)
    cells = (unique(task), unique(context), arms, unique(gamma), unique(temperature))
    plan = AcceptancePlan(*cells, **sizes, baseline=baseline, seed=seed)
    options.check_outputs(json, plot)
    interval([1.0, 1.0])  # says now if scipy is missing
    llm = options.make_llm(
        model,
        draft=own_model(arms),
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        max_num_seqs=ROWS * min(batch, prompts),
        max_num_batched_tokens=CHUNK,
        device=device,
        download=download,
    )
    raise typer.Exit(_run(llm, plan, json, plot))


def _run(llm: LLM, plan: AcceptancePlan, json: Path | None, plot: Path | None) -> int:
    """Measure, show, write; the exit status."""
    from longdraft.bench.acceptance import measure
    from longdraft.bench.acceptance_cells import Result
    from longdraft.bench.machine import describe_machine
    from longdraft.cli.progress import Progress

    found, status = Result(), 0

    def add(result: Result) -> None:
        found.cells.extend(result.cells)
        found.differences.extend(result.differences)

    try:
        with Progress() as progress:
            measure(llm, plan, add, progress.update)
    except KeyboardInterrupt:
        status = INTERRUPTED
    about = describe_model(llm)
    show(tables(found, about))
    _draw(found.cells, plot, about)
    write({"machine": describe_machine(None), "model": about, **found.report()}, json)
    return status if as_promised(llm, found.cells) else 1


def _show_earlier(files: list[Path], json: Path | None, plot: Path | None) -> None:
    """Tables of each file, pictures of all together; the JSON has the cells and differences of all."""
    from longdraft.bench.acceptance_cells import Result
    from longdraft.bench.acceptance_files import read_reports

    reports = read_reports(files)
    for report in reports:
        show(tables(report.result, report.model))
    every = Result([c for r in reports for c in r.result.cells], [d for r in reports for d in r.result.differences])
    first = reports[0]
    _draw(every.cells, plot, first.model)
    write({"machine": first.machine, "model": first.model, **every.report()}, json)


def _draw(cells: list[AcceptanceCell], plot: Path | None, about: dict[str, object]) -> None:
    """Pictures, and on stderr where they are."""
    from longdraft.bench.acceptance_plot import plot as draw

    if plot and cells:
        files = draw(cells, plot, f"{about['name']}, {about['dtype']}")
        typer.echo(f"drawn: {', '.join(map(str, files))}", err=True)


def tables(found: Result, about: dict[str, object]) -> Iterator[Table]:
    """Per task, context and temperature one table of figures, and one of differences if there are any."""
    from longdraft.bench.acceptance_cells import by_setting

    compared = {key: list(group) for key, group in by_setting(found.differences)}
    for key, cells in by_setting(found.cells):
        task, context, temperature = key
        where = f"{about['name']}, {about['dtype']}: {task}, {context:,} tokens, T {temperature:g}"
        yield _figures(cells, where)
        if key in compared:
            yield _differences(compared[key], where)


def _figures(cells: list[AcceptanceCell], title: str) -> Table:
    from rich.table import Table

    one = cells[0]
    table = Table(title=title, title_justify="left")
    columns = ("draft", "budget", "γ", "acceptance", "95 %", "by position", "expected", "tokens/verify", "95 %")
    measured = ("overlap", "coupled", "mass", "KiB read", "KiB more", "KiB notes", "select ms", "output")
    for n, heading in enumerate((*columns, *measured)):
        table.add_column(heading, justify="right" if n else "left", no_wrap=True)
    for cell in cells:
        table.add_row(
            cell.draft,
            "" if cell.budget is None else str(cell.budget),
            str(cell.gamma),
            _number(cell.acceptance),
            _ends([cell.ci_low, cell.ci_high]),
            " ".join(_number(x) for x in cell.acceptance_by_position),
            _number(cell.expected_tokens),
            _number(cell.tokens_per_verify),
            _ends(cell.tokens_per_verify_ci),
            *(_number(x) for x in (cell.overlap, cell.coupled_overlap, cell.captured_mass)),
            f"{cell.bytes_per_token / 2**10:,.0f}",
            f"{cell.extra_bytes / 2**10:,.0f}",
            f"{cell.note_bytes / 2**10:,.0f}",
            _number(cell.select_ms),
            "identical" if cell.identical else "DIFFERS",
        )
    answered = "" if one.answered is None else f", answered by plain decoding {one.answered:.0%}"
    after = f" after {one.after} tokens" if one.after else ""
    table.caption = (
        f"{one.prompts} prompts x {one.positions} positions{after}, repeated 8-grams {one.repeated_8gram:.0%}"
    )
    table.caption += answered
    return table


def _differences(rows: list[Difference], title: str) -> Table:
    from rich.table import Table

    table = Table(title=f"{title}: less {rows[0].baseline}, on the same prompts", title_justify="left")
    for n, heading in enumerate(("draft", "budget", "against budget", "measure", "γ", "difference", "95 %", "")):
        table.add_column(heading, justify="right" if n in (1, 2, 4, 5, 6) else "left", no_wrap=True)
    for row in rows:
        sizes = ("" if x is None else str(x) for x in (row.budget, row.baseline_budget))
        gamma = "" if row.gamma is None else str(row.gamma)
        ends = f"{row.ci_low:+.3f} – {row.ci_high:+.3f}"
        verdict = "" if row.significant else "not significant"
        table.add_row(row.draft, *sizes, row.measure, gamma, f"{row.difference:+.3f}", ends, verdict)
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _ends(ends: list[float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.3f} – {ends[1]:.3f}"
