"""``longdraft calibrate``: what decoding, drafting and verifying cost on this machine, measured and stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longdraft.cli import drafting, options
from longdraft.cli.numbers import parse_numbers
from longdraft.errors import InvalidValueError

if TYPE_CHECKING:
    from rich.table import Table

    from longdraft.bench.calibrate import Outcome
    from longdraft.config import DraftConfig
    from longdraft.llm import LLM
    from longdraft.planner.calibration import Calibration
    from longdraft.planner.curves import DraftCurve

INTERRUPTED = 130
DRAFTS = ("streaming_llm", "int8", "layer_skip", "verified", "pages", "snapkv", "ngram")
QUICK_DRAFTS = ("streaming_llm", "int8", "ngram")
QUICK_MINUTES, MINUTES = 0.6, 2.5
MOST_ROWS = 512  # of all sizes together
GOOD = 0.10, 0.25  # errors of held-out points: median, worst
WORST_SHOWN = 3


def calibrate(
    model: options.Model = None,
    draft: Annotated[
        list[str], typer.Option(help=f"Which drafts: {drafting.NAMES}. Repeatable. Left out: all but topk and full.")
    ] = [],  # noqa: B006
    batch: Annotated[list[str], typer.Option(help="Rows decoded together: 1,4,16 or 1..64.")] = ["1,4,8,16"],  # noqa: B006
    context: Annotated[
        list[str],
        typer.Option(help="Tokens per row: 512,8k or 1k..32k. Left out: 512,2k,8k or the model's limit."),
    ] = [],  # noqa: B006
    budget: Annotated[list[str], typer.Option(help="Tokens a draft reads of a row.")] = ["128,512"],  # noqa: B006
    minutes: Annotated[float | None, typer.Option(help=f"Time to measure. Left out: {MINUTES}.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{QUICK_MINUTES} minutes, {', '.join(QUICK_DRAFTS)} only.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Measure even if others use the machine.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print what is stored, and measure nothing.")] = False,
    dtype: options.Dtype = "auto",
    kv_dtype: options.KVDtype = None,
    kv_cache_memory_bytes: options.KVMemory = None,
    device: options.Device = "auto",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Store there. Left out: $LONGDRAFT_CALIBRATION, or the cache.")
    ] = None,
    json: options.JsonFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw predicted against measured.")] = None,
    download: options.Download = False,
) -> None:
    """Measure this machine: curves of decoding, drafting and verifying, for `plan --hardware calibrated`.

    Times passes over synthetic caches (no prompt is computed), fits curves, checks them on points that were held out,
    and stores them by model, types, kernels, threads and machine; docs/planning.md says how. The last line of stdout is
    one JSON object. Leave the machine alone meanwhile.
    """
    from longdraft.cli.bench import write
    from longdraft.config import as_float
    from longdraft.planner.calibration import default_file, load, store

    file = out or default_file()
    known = load(file)  # says now if it is damaged
    if show:
        _show_stored(file, known)
        write({"file": str(file), "calibrations": [_report(c) for c in known]}, json)
        return
    options.check_outputs(json, plot)
    minutes = as_float("--minutes", QUICK_MINUTES if quick else MINUTES if minutes is None else minutes, 0.0, 600.0)
    texts = {"--batch": batch, "--context": context, "--budget": budget}
    numbers = {name: parse_numbers(name, values) for name, values in texts.items()}
    settings = {"dtype": dtype, "kv_dtype": kv_dtype, "kv_cache_memory_bytes": kv_cache_memory_bytes, "device": device}
    llm = options.make_llm(model, max_num_seqs=MOST_ROWS, download=download, **settings)
    drafts = make_drafts(llm, draft, QUICK_DRAFTS if quick else DRAFTS)
    outcome = _measure(llm, numbers, drafts, 60 * minutes, force)
    store(file, outcome.calibration)
    _show(outcome, file)
    if plot:
        from longdraft.bench.calibrate_plot import plot_calibration

        plot_calibration(outcome, plot)
    write({"file": str(file), **_report(outcome.calibration), "points": list(_points(outcome))}, json)


def make_drafts(llm: LLM, names: list[str], default: tuple[str, ...]) -> list[DraftConfig]:
    """The named drafts, or those of ``default`` that this model has here."""
    from longdraft.drafts.registry import NAMED

    for name in names:
        if name not in NAMED:
            limit = f"must be one of {drafting.NAMES}"
            raise InvalidValueError("--draft", name, limit, "What a small model costs is not calibrated.")
    possible = [name for name in default if name != "int8" or llm.model.fused]
    return [NAMED[name] for name in dict.fromkeys(names or possible)]


def _measure(
    llm: LLM, numbers: dict[str, tuple[int, ...]], drafts: list[DraftConfig], seconds: float, force: bool
) -> Outcome:
    """The outcome; interrupted, nothing is stored."""
    from longdraft.bench.calibrate import calibrate
    from longdraft.bench.calibrate_points import make_grid
    from longdraft.cli.progress import Progress

    grid = make_grid(*numbers.values(), llm.engine.config.max_tokens_per_request)
    try:
        with Progress() as progress:
            return calibrate(llm, grid, drafts, seconds, progress.update, force)
    except KeyboardInterrupt:
        typer.echo("Nothing was stored.", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _report(calibration: Calibration) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(calibration)


def _points(outcome: Outcome) -> Iterator[dict[str, object]]:
    from longdraft.planner.curves import kind

    for m, predicted in zip(outcome.measured, outcome.predicted, strict=True):
        point = m.point
        yield {
            "kind": "target" if point.draft is None else kind(point.draft),
            "noted": point.noted,
            "budget": point.draft and point.draft.budget,
            "lengths": point.lengths,
            "sizes": point.sizes,
            "held_out": point.held_out,
            "measured_ms": 1e3 * m.seconds,
            "extra_ms": 1e3 * m.extra_s,
            "predicted_ms": 1e3 * predicted,
        }


def _show_stored(file: Path, known: list[Calibration]) -> None:
    from longdraft.cli.bench import show

    if not known:
        typer.echo(f"{file}: no calibrations yet")
    for calibration in known:
        show([_figures(calibration, file), _curves(calibration)])


def _show(outcome: Outcome, file: Path) -> None:
    """Tables, and what to do if the fit is poor."""
    from longdraft.cli.bench import show

    calibration = outcome.calibration
    show([_figures(calibration, file), _curves(calibration), *_worst(outcome)])
    errors = calibration.errors
    if errors.median > GOOD[0] or errors.worst > GOOD[1] or calibration.noisy:
        said = "Others used the machine while it was measured" if calibration.noisy else "The curves fit poorly"
        typer.secho(f"{said}: expect errors. A longer run (--minutes) on a quiet machine is better.", err=True)


def _figures(calibration: Calibration, file: Path) -> Table:
    from rich.table import Table

    where, errors, hardware = calibration.setting, calibration.errors, calibration.hardware
    out = Table(title=f"{calibration.name} on {where.machine}", show_header=False, title_justify="left")
    out.add_column(style="bold")
    out.add_column()
    out.add_row("setting", f"{where.dtype}, KV {where.kv_dtype}, {where.kernels}, {where.threads} threads")
    out.add_row("memory read", f"{hardware.bandwidth_gb_s:.1f} GB/s")
    out.add_row("arithmetic", f"{1e3 * hardware.tflops:,.0f} GFLOP/s")
    out.add_row("overheads", f"{1e6 * hardware.layer_s:.0f} µs per layer, {1e6 * hardware.row_s:.0f} µs per row")
    out.add_row("anchor", f"{1e3 * calibration.anchor_s:.2f} ms")
    median, worst = f"median {errors.median:.1%}, worst {errors.worst:.1%}", errors.roofline_worst
    out.add_row("curves, held out", f"{median} of {errors.points} points")
    out.add_row("roofline, held out", f"median {errors.roofline_median:.1%}, worst {worst:.1%}")
    out.add_row("measured up to", f"{calibration.batch} rows, {calibration.context:,} tokens")
    out.add_row("made", calibration.made + (", NOISY" if calibration.noisy else ""))
    out.add_row("stored in", str(file))
    return out


def _curves(calibration: Calibration) -> Table:
    """The curves' constants; of choosing and telling what they come to for one row of 4,096 tokens."""
    from rich.table import Table

    out = Table(title="Curves", title_justify="left")
    headings = ("", "step, ms", "token, ms", "beyond", "1,000 keys, µs", "and query, µs", "beyond", "choosing, ms")
    for heading in (*headings, "telling, ms", "waking, ms"):
        out.add_column(heading, justify="right" if heading else "left")
    curves = calibration.curves
    for name, draft in {"target": None, **curves.drafts}.items():
        step = curves.passes if draft is None else draft.step
        out.add_row(name, *(_constants(step) if step else [""] * 6), *(_beside(draft) if draft else [""] * 3))
    out.caption = "Choosing, telling and waking: one row of 4,096 tokens, of which 512 are read."
    out.caption_justify = "left"
    return out


def _constants(step: object) -> list[str]:
    tokens = f"{1e3 * step.token_s:.3f}", f"+{1e3 * step.excess_s:.3f} from {step.knee + 1}"
    queries = f"{1e9 * step.query_s:.0f}", f"{step.queries}" if step.query_s else ""
    return [f"{1e3 * step.step_s:.2f}", *tokens, f"{1e9 * step.key_s:.0f}", *queries]


def _beside(draft: DraftCurve) -> list[str]:
    length, read = 4096, 512
    spent = draft.choice.seconds([length], [read]), draft.noting.seconds([length], [1]), length * draft.wake_s
    return [f"{1e3 * s:.3f}" if s else "" for s in spent]


def _worst(outcome: Outcome) -> Iterator[Table]:
    from rich.table import Table

    pairs = zip(outcome.measured, outcome.predicted, strict=True)
    errors = [(predicted / m.seconds - 1, m, predicted) for m, predicted in pairs if m.point.held_out]
    out = Table(title="Largest errors of what was held out", title_justify="left")
    for heading in ("", "measured, ms", "predicted, ms", "error"):
        out.add_column(heading, justify="right" if heading else "left")
    for error, m, predicted in sorted(errors, key=lambda e: -abs(e[0]))[:WORST_SHOWN]:
        out.add_row(m.point.label, f"{1e3 * m.seconds:.3f}", f"{1e3 * predicted:.3f}", f"{error:+.1%}")
    yield out
