"""``longdraft plan``: does speculation pay for a model on a machine, with what, and what does it gain? No weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longdraft.cli import drafting, options
from longdraft.cli.numbers import parse_numbers
from longdraft.errors import ContextLengthError, InvalidValueError

if TYPE_CHECKING:
    from rich.table import Table

    from longdraft.planner.candidates import Target
    from longdraft.planner.hardware import Hardware
    from longdraft.planner.plan import Planner

WIDTH = 150  # where no terminal sets one
DEFAULT_CONTEXT = 16384
MOST_ROWS = 65536
MOST_CELLS = 400
CALIBRATED = "calibrated"


def plan(
    model: Annotated[
        str | None,
        typer.Argument(help="Known name, config.json, folder, GGUF file or hub id. Left out: the embedded model."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="An accelerator's name (a wrong one lists them), or calibrated: see longdraft calibrate."),
    ] = None,
    batch: Annotated[list[str], typer.Option(help="Rows decoded together: 64, 1,8,64 or 1..256.")] = ["32"],  # noqa: B006
    context: Annotated[
        list[str], typer.Option(help="Tokens per row: 16k, 4k,64k or 1k..128k. Left out: 16k, or the model's limit.")
    ] = [],  # noqa: B006
    draft: Annotated[
        list[str],
        typer.Option(
            help=f"Who may propose: {drafting.UNCODED}, or {drafting.OWN}. Repeatable. Left out: what has figures."
        ),
    ] = [],  # noqa: B006
    budget: Annotated[list[int], typer.Option(help="Tokens a draft reads of a row. Repeatable.")] = [256, 512],  # noqa: B006
    max_gamma: Annotated[int, typer.Option(help="Most tokens proposed per verification.")] = 8,
    acceptance: Annotated[
        str | None,
        typer.Option(help="Chance that a drafted token stands: 0.8, or by position 0.9,0.85,0.8. Left out: published."),
    ] = None,
    target_speedup: Annotated[
        float | None, typer.Option(help="Also say which acceptance would reach this speed-up.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Stored type of the weights.")] = "bfloat16",
    kv_dtype: Annotated[str, typer.Option(help="Stored type of K and V.")] = "bfloat16",
    bandwidth_gb_s: Annotated[float | None, typer.Option(help="Your own machine: GB read per second.")] = None,
    tflops: Annotated[float | None, typer.Option(help="Your own machine: tera-operations per second.")] = None,
    memory_gib: Annotated[float | None, typer.Option(help="Your own machine: GiB for weights and cache.")] = None,
    json: options.JsonFile = None,
    plot: options.Plot = None,
) -> None:
    """Predict whether speculation pays, by a roofline model; docs/planning.md says what it counts and assumes.

    The last line of stdout is one JSON object, for the largest batch at the longest context that fits; `cells` has all.

    Try: longdraft plan Llama-3.1-8B --hardware H200 --batch 64 --context 16k --plot plan.png
    """
    from longdraft.planner.candidates import candidates
    from longdraft.planner.plan import Planner

    options.check_outputs(json, plot)
    target = make_target(model, make_hardware(hardware, bandwidth_gb_s, tflops, memory_gib), dtype, kv_dtype)
    batches = checked("--batch", parse_numbers("--batch", batch), MOST_ROWS)
    contexts = context_lengths(target, context)
    if len(batches) * len(contexts) > MOST_CELLS:
        raise InvalidValueError("--batch and --context", len(batches) * len(contexts), f"at most {MOST_CELLS} pairs")
    rates = parse_acceptance(acceptance)
    if isinstance(rates, tuple):
        max_gamma = min(max_gamma, len(rates))
    if target_speedup is not None:
        from longdraft.config import as_float

        as_float("--target-speedup", target_speedup, 1e-3, 1e3)
    from longdraft.planner.assumed import given

    chosen = candidates(target, draft, budget, None if rates is None else given(rates))
    _run(Planner(target, tuple(chosen), max_gamma), batches, contexts, target_speedup, json, plot)


def make_hardware(
    name: str | None, bandwidth: float | None, tflops: float | None, memory: float | None
) -> Hardware | None:
    """The named accelerator, or one of the user's own figures, taken as they are reached; ``None``: as calibrated."""
    from longdraft.planner.hardware import Hardware, known_hardware, named_hardware

    own = {"--bandwidth-gb-s": bandwidth, "--tflops": tflops, "--memory-gib": memory}
    if name is not None:
        for option, value in own.items():
            if value is not None:
                raise InvalidValueError(
                    option, value, "it describes another machine than --hardware", "Give one of both."
                )
        return None if name.lower() == CALIBRATED else named_hardware(name)
    if bandwidth is None or tflops is None:
        names = ", ".join(known_hardware())
        limit = f"must name what to plan for: {CALIBRATED}, {names}"
        raise InvalidValueError(
            "--hardware", name, limit, "Or give both --bandwidth-gb-s and --tflops of your machine."
        )
    return Hardware("your machine", tflops, bandwidth, memory, source="given")


def make_target(model: str | None, hardware: Hardware | None, dtype: str, kv_dtype: str) -> Target:
    """The model on the machine (``None``: this one, as calibrated), in the types that were asked for."""
    from longdraft.planner.calibration import calibrated_here, fingerprint
    from longdraft.planner.candidates import Target
    from longdraft.planner.catalogue import find_model
    from longdraft.planner.cost import BYTES

    for option, value in (("--dtype", dtype), ("--kv-dtype", kv_dtype)):
        if value not in BYTES:
            raise InvalidValueError(option, value, f"must be one of {', '.join(BYTES)}")
    name, config = find_model(model)
    curves = None
    if hardware is None:
        found = calibrated_here(config, dtype, kv_dtype)
        hardware = found.hardware
        curves = found.curves if found.setting.model == fingerprint(config) else None
    return Target(name, config, hardware, BYTES[dtype], BYTES[kv_dtype], curves)


def checked(what: str, values: tuple[int, ...], most: int) -> tuple[int, ...]:
    """``values``, none above ``most``."""
    from longdraft.config import as_int

    return tuple(as_int(what, value, 1, most) for value in values)


def context_lengths(target: Target, texts: list[str]) -> tuple[int, ...]:
    """What was asked for, within what the model can do; ``ContextLengthError`` otherwise."""
    longest = target.config.full_attention_length
    lengths = parse_numbers("--context", texts) if texts else (min(DEFAULT_CONTEXT, longest),)
    if lengths[-1] > longest:
        fix = f"Plan for {longest} tokens at most, or for a model with a longer context."
        raise ContextLengthError("--context", lengths[-1], f"{target.name} was made for up to {longest} tokens", fix)
    return lengths


def parse_acceptance(text: str | None) -> float | tuple[float, ...] | None:
    """``0.8`` for all positions, ``0.9,0.8`` by position."""
    if text is None:
        return None
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidValueError("--acceptance", text, "must be a number from 0 to 1, or several: 0.9,0.8") from None
    return rates if len(rates) > 1 else rates[0]


def _run(
    planner: Planner,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    target_speedup: float | None,
    json: Path | None,
    plot: Path | None,
) -> None:
    """Plan, show, write."""
    import json as jsonlib

    from rich.console import Console

    from longdraft.planner.memory import require_one_row
    from longdraft.planner.report import report

    require_one_row(planner.target, contexts[0])
    frontier = {batch: planner.break_even_context(batch) for batch in batches}
    cells = [
        report(planner, batch, context, frontier[batch], target_speedup)
        for context in contexts
        for batch in batches
        if planner.plain(batch, context)
    ]
    main = max(cells, key=lambda cell: (cell["memory"]["fits"], cell["batch"], cell["context"]))
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    if len(cells) > 1:
        console.print(_grid(planner, cells, frontier))
    console.print(_ranking(planner, main, target_speedup))
    console.print(_memory(main))
    verdict, *reasons = main["why"]
    console.print(verdict, style="bold", highlight=False)
    for sentence in reasons:
        console.print(sentence, highlight=False)
    if plot:
        from longdraft.bench.plan_plot import plot_plan

        plot_plan(planner, main["batch"], main["context"], batches, contexts, plot)
    line = jsonlib.dumps(summary(planner, cells, main, frontier))
    if json:
        json.write_text(line + "\n")
    print(line, flush=True)


def summary(planner: Planner, cells: list[dict], main: dict, frontier: dict[int, int | None]) -> dict[str, object]:
    """The last line of stdout."""
    target = planner.target
    model = {"name": target.name, "weight_bytes": target.held_bytes}
    model |= {"kv_bytes_per_token": target.network.kv_bytes_per_token, "calibrated": target.curves is not None}
    small = ("batch", "context", "best", "break_even_context", "memory")
    return {
        **main,
        "frontier": {str(batch): context for batch, context in frontier.items()},
        "model": model,
        "hardware": vars(target.hardware),
        "cells": [{name: cell[name] for name in small} for cell in cells],
    }


def _grid(planner: Planner, cells: list[dict], frontier: dict[int, int | None]) -> Table:
    from rich.table import Table

    out = Table(title=f"{planner.target.name} on {planner.target.hardware.name}: best speed-up", title_justify="left")
    contexts = sorted({cell["context"] for cell in cells})
    by_place = {(cell["batch"], cell["context"]): cell for cell in cells}
    for heading in ("batch", *(f"{n:,}" for n in contexts), "pays from"):
        out.add_column(heading, justify="right")
    for batch, start in frontier.items():
        shown = [_cell(by_place.get((batch, context))) for context in contexts]
        out.add_row(str(batch), *shown, "never" if start is None else f"{start:,}")
    winners = dict.fromkeys(f"{best['draft']} {best['budget'] or ''}".strip() for best in (c["best"] for c in cells))
    out.caption = f"Best of all: {', '.join(winners)}. (n): only n rows fit at a time."
    out.caption_justify = "left"
    return out


def _cell(cell: dict | None) -> str:
    if cell is None:
        return "does not fit"
    best = cell["best"]
    name = f"{best['speedup']:.2f} x γ{best['gamma']}" if best["gamma"] else "off"
    return name if cell["memory"]["fits"] else f"{name} ({best['rows']})"


def _memory(main: dict) -> Table:
    from rich.table import Table

    held = main["memory"]
    names = {
        "weights": "weights",
        "draft_weights": f"weights of {main['best']['draft']}",
        "cache": "cache",
        "draft_cache": "cache of the draft's own",
        "total": "total",
        "usable": "usable",
    }
    out = Table(title="Memory", title_justify="left", show_header=False)
    for name, shown in names.items():
        size = held[f"{name}_gib"]
        if size != 0:
            out.add_row(shown, "not known" if size is None else f"{size:,.1f} GiB")
    for name, shown in (("largest_batch", "largest batch"), ("largest_batch_plain", "decoded plainly")):
        out.add_row(shown, "not known" if held[name] is None else f"{held[name]:,}")
    return out


def _ranking(planner: Planner, main: dict, target_speedup: float | None) -> Table:
    from rich.table import Table

    title = f"{planner.target.name} on {planner.target.hardware.name}: {main['batch']} x {main['context']:,} tokens"
    out = Table(title=title, title_justify="left")
    headings = ["draft", "reads", "γ", "speed-up", "tokens/s", "tokens per verify", "ms: draft, verify", "acceptance"]
    headings += ["needed to gain"] + ([f"for {target_speedup:g} x"] if target_speedup else [])
    for heading in headings:
        out.add_column(heading, justify="left" if heading in ("draft", "reads") else "right")
    for row in main["ranking"]:
        out.add_row(*_ranking_row(row, bool(target_speedup)))
    texts = [row["acceptance_source"] for row in main["ranking"] if row["gamma"]]
    sources = dict.fromkeys(part for text in texts for part in text.split("; "))
    notes = dict.fromkeys(f"{row['draft']}: {row['note']}" for row in main["ranking"] if row.get("note"))
    out.caption = "Acceptance is ASSUMED. " + ". ".join([*sources, *notes]) + "."
    out.caption_justify = "left"
    return out


def _ranking_row(row: dict, with_target: bool) -> list[str]:
    speeds = [f"{row['speedup']:.2f} x", f"{row['tokens_per_s']:,.0f}"]
    if not row["gamma"]:
        return ["off: plain decoding", "", "0", *speeds, "1", f"{row['plain_ms']:.2f}", "", "", *[""] * with_target]

    def rate(value: float | list[float] | None) -> str:
        if isinstance(value, list):
            return " ".join(f"{v:.2f}" for v in value)
        return "impossible" if value is None else f"{value:.2f}"

    reads = f"{row['kv']} {row['budget'] or ''}".strip() if row["kv"] else "text"
    return [
        row["draft"],
        reads,
        str(row["gamma"]),
        *speeds,
        f"{row['tokens_per_verify']:.2f}",
        f"{row['draft_ms']:.2f}, {row['verify_ms']:.2f}",
        rate(row["acceptance"]),
        rate(row["break_even_acceptance"]),
        *([rate(row["target_acceptance"])] if with_target else []),
    ]
