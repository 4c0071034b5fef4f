"""``longdraft calibrate``: what decoding, drafting and verifying cost on this machine, measured and stored."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longdraft.cli import drafting, options
from longdraft.cli.numbers import parse_numbers
from longdraft.config import DraftConfig
from longdraft.errors import InvalidValueError

if TYPE_CHECKING:
    from longdraft.bench.calibrate import Outcome
    from longdraft.llm import LLM
    from longdraft.planner.calibration import Calibration

INTERRUPTED = 130
DRAFTS = ("streaming_llm", "int8", "layer_skip", "verified", "pages", "snapkv", "ngram")
QUICK_DRAFTS = ("streaming_llm", "int8", "ngram")
QUICK_MINUTES, MINUTES = 0.5, 2.0
MOST_ROWS = 512  # of all sizes together
GOOD = 0.10, 0.25  # errors of held-out points: median, worst


def calibrate(
    model: options.Model = None,
    draft: Annotated[
        list[str],
        typer.Option(
            help=f"Which drafts: {drafting.UNCODED}, or a SPIRe draft's path. Repeatable. Left out: all but topk and "
            "full."
        ),
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
    from longdraft.cli.calibration_tables import points
    from longdraft.config import as_float
    from longdraft.planner.calibration import default_file, load, store

    file = out or default_file()
    known = load(file)  # says now if it is damaged
    if show:
        _show_stored(file, known)
        write({"file": str(file), "calibrations": [asdict(c) for c in known]}, json)
        return
    options.check_outputs(json, plot)
    minutes = as_float("--minutes", QUICK_MINUTES if quick else MINUTES if minutes is None else minutes, 0.0, 600.0)
    texts = {"--batch": batch, "--context": context, "--budget": budget}
    numbers = {name: parse_numbers(name, values) for name, values in texts.items()}
    settings = {"dtype": dtype, "kv_dtype": kv_dtype, "kv_cache_memory_bytes": kv_cache_memory_bytes, "device": device}
    llm = options.make_llm(model, draft=trained(draft), max_num_seqs=MOST_ROWS, download=download, **settings)
    drafts = make_drafts(llm, draft, QUICK_DRAFTS if quick else DRAFTS)
    outcome = _measure(llm, numbers, drafts, 60 * minutes, force)
    store(file, outcome.calibration)
    _show(outcome, file)
    if plot:
        from longdraft.bench.calibrate_plot import plot_calibration

        plot_calibration(outcome, plot)
    write({"file": str(file), **asdict(outcome.calibration), "points": list(points(outcome))}, json)


def trained(names: list[str]) -> DraftConfig | None:
    """The SPIRe draft among ``names``, which has to be loaded; ``InvalidValueError`` for what is not calibrated."""
    from longdraft.bench import Arm
    from longdraft.cli.bench import own_model
    from longdraft.drafts.registry import NAMED
    from longdraft.planner.catalogue import find_spire

    own = [DraftConfig(name) for name in names if name not in NAMED]
    for one in own:
        if find_spire(one.model) is None:
            limit = f"must be one of {drafting.UNCODED}, or a SPIRe draft's path"
            fix = "What small models and formats cost is not calibrated."
            raise InvalidValueError("--draft", one.weights, limit, fix)
    return own_model(tuple(Arm(one.weights, one) for one in own))


def make_drafts(llm: LLM, names: list[str], default: tuple[str, ...]) -> list[DraftConfig]:
    """The named drafts, or those of ``default`` that this model has here and those that control considers."""
    from longdraft.drafts.registry import NAMED
    from longdraft.llm_control import considered
    from longdraft.planner.curves import kind

    possible = [name for name in default if name != "int8" or llm.model.fused]
    drafts = [NAMED.get(name) or llm.resolve(name) for name in names or possible]
    drafts += () if names else considered(llm.model.spec)  # what draft="auto" chooses from
    return list({kind(draft): draft for draft in reversed(drafts)}.values())[::-1]


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


def _show_stored(file: Path, known: list[Calibration]) -> None:
    from longdraft.cli.bench import show
    from longdraft.cli.calibration_tables import curves, figures

    if not known:
        typer.echo(f"{file}: no calibrations yet")
    for calibration in known:
        show([figures(calibration, file), curves(calibration)])


def _show(outcome: Outcome, file: Path) -> None:
    """Tables, and what to do if the fit is poor."""
    from longdraft.cli.bench import show
    from longdraft.cli.calibration_tables import curves, figures, worst

    calibration = outcome.calibration
    show([figures(calibration, file), curves(calibration), worst(outcome)])
    errors = calibration.errors
    if errors.median > GOOD[0] or errors.worst > GOOD[1] or calibration.noisy:
        said = "Others used the machine while it was measured" if calibration.noisy else "The curves fit poorly"
        typer.secho(f"{said}: expect errors. A longer run (--minutes) on a quiet machine is better.", err=True)
