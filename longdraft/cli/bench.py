"""``longdraft bench decode``: how fast plain and speculative decoding are here, over batches and contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from longdraft.cli import drafting, options
from longdraft.cli.numbers import parse_number
from longdraft.config import AutoDraft, DraftConfig
from longdraft.errors import InvalidValueError

if TYPE_CHECKING:
    from rich.table import Table

    from longdraft.bench import Arm, Cell, Lengths, PeerCell, Plan
    from longdraft.bench.acceptance_cells import AcceptanceCell
    from longdraft.bench.decode import Contest
    from longdraft.cli.progress import Progress
    from longdraft.llm import LLM

INTERRUPTED = 130
FILE_WIDTH = 240  # where no terminal sets one: several arms side by side
PEER_NAMES = "hf, llama-cpp or llama-cpp-unpacked"
T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback()
def bench() -> None:
    """Measure speed, and how often drafts are right."""


@app.command()
def decode(
    model: options.Model = None,
    batch: Annotated[list[int], typer.Option(help="Rows decoded together. Repeatable.")] = [8],  # noqa: B006
    context: Annotated[
        list[str], typer.Option(help="Prompt tokens per row; 500+7000: rows of both together, in turn. Repeatable.")
    ] = ["4000"],  # noqa: B006
    text: Annotated[str, typer.Option(help="What the prompts are: prose, code or random.")] = "prose",
    draft: Annotated[
        list[str],
        typer.Option(help=f"Who proposes: {drafting.NAMES}, {drafting.OWN}, auto or auto+PATH. Repeatable."),
    ] = ["streaming_llm"],  # noqa: B006
    kv: drafting.Kv = None,
    budget: Annotated[list[int], typer.Option(help="Tokens the draft reads. Repeatable.")] = [256],  # noqa: B006
    refresh: drafting.Refreshes = None,
    gamma: Annotated[list[int], typer.Option(help="Most tokens proposed per pass. Repeatable.")] = [3],  # noqa: B006
    temperature: Annotated[list[float], typer.Option(help="0 is greedy. Repeatable.")] = [0.0],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Rounds in which all arms take turns.")] = 8,
    round_tokens: Annotated[int, typer.Option(help="Tokens that each row gets at least in a turn.")] = 32,
    assume_acceptance: Annotated[
        float | None, typer.Option(help="Simulate: every proposed token is right with this probability.")
    ] = None,
    dtype: options.Dtype = "auto",
    kv_dtype: options.KVDtype = None,
    kv_format: options.KVFormat = None,
    kv_cache_memory_bytes: options.KVMemory = None,
    device: options.Device = "auto",
    peer: Annotated[str | None, typer.Option(help=f"Also time another engine's plain decoding: {PEER_NAMES}.")] = None,
    peer_python: Annotated[
        str | None, typer.Option(metavar="PATH", help="The Python that has that engine. Left out: this one.")
    ] = None,
    json: options.JsonFile = None,
    plot: options.Plot = None,
    download: options.Download = False,
) -> None:
    """Time plain against speculative decoding, of passages of four novels by default; docs/performance.md has how.

    The last line of stdout is one JSON object. Exit status 1 if an output differs from plain decoding's where the
    exactness tier promises equality. Ctrl-C prints what is measured so far.
    """
    from longdraft.bench import Plan, interval
    from longdraft.bench.peers import PEERS
    from longdraft.bench.tasks import TEXTS

    arms = make_arms(draft, budget, gamma, kv, refresh)
    sizes = {"rounds": rounds, "round_tokens": round_tokens, "assume_acceptance": assume_acceptance}
    plan = Plan(unique(batch), unique(_lengths(c) for c in context), arms, unique(temperature), **sizes)
    options.check_outputs(json, plot)
    if text not in TEXTS:
        raise InvalidValueError("--text", text, f"must be one of {', '.join(TEXTS)}")
    if peer and peer not in PEERS:
        raise InvalidValueError("--peer", peer, f"must be {PEER_NAMES}")
    interval([1.0, 1.0])  # says now if scipy is missing
    llm = options.make_llm(
        model,
        draft=own_model(arms),
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_format=kv_format,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        max_num_seqs=max(256, max(plan.batches) * (2 * len(arms) + 3)),
        device=device,
        download=download,
    )
    raise typer.Exit(_run(llm, plan, text, _Peer(peer, peer_python), json, plot))


def _lengths(text: str) -> Lengths:
    """``4000``, or several that are together in a batch: ``500+4000``."""
    lengths = [parse_number("--context", part) for part in text.split("+")]
    return lengths[0] if len(lengths) == 1 else tuple(lengths)


def make_arms(
    drafts: list[str], budgets: list[int], gammas: list[int], kv: str | None, refreshes: list[str] | None = None
) -> tuple[Arm, ...]:
    """Every draft with every budget and γ, and with every ``refresh`` if it chooses what it reads, which its name says.

    A draft that has no budget is there once per γ.
    """
    from longdraft.bench import Arm

    arms = {}
    for name, budget, gamma in product(unique(drafts), unique(budgets), unique(gammas)):
        config = drafting.require_draft(drafting.draft_config(name, budget, gamma, "coupled", kv))
        arm = Arm(_name(name, config), config)
        arms.setdefault((name, arm.budget, arm.gamma), arm)
    found = tuple(arms.values())
    return tuple(_refreshed(found, unique(refreshes))) if refreshes else found


def _name(name: str, draft: DraftConfig | AutoDraft) -> str:
    """What an arm is called, whose draft a user called ``name``."""
    if isinstance(draft, AutoDraft):
        return draft.label
    return draft.short_name if draft.own_model else name


def _refreshed(arms: tuple[Arm, ...], refreshes: tuple[str, ...]) -> Iterator[Arm]:
    from longdraft.bench import Arm
    from longdraft.drafts.registry import watches

    values = {text: drafting.parse_refresh(text, [arm.draft for arm in arms]) for text in refreshes}
    for arm in arms:
        if arm.config and watches(arm.config):
            yield from (Arm(f"{arm.name} (refresh {n})", replace(arm.config, refresh=v)) for n, v in values.items())
        else:
            yield arm


def unique(values: Iterable[T]) -> tuple[T, ...]:
    """``values`` without repetitions, in order."""
    return tuple(dict.fromkeys(values))


def own_model(arms: tuple[Arm, ...]) -> object:
    """The draft whose weights have to be loaded, of which an ``LLM`` has one at most; control's, if it may choose one.

    There may be arms of it with and without 8-bit copies of its weights.
    """
    from longdraft.llm_draft import own_draft

    own = {one.model: arm.draft for arm in arms if (one := own_draft(arm.draft))}
    if len(own) > 1:
        raise InvalidValueError("--draft", list(own), "may name one model at most", "Measure them one by one.")
    auto = [arm.draft for arm in arms if isinstance(arm.draft, AutoDraft) and arm.draft.beside]
    return next(iter([*auto, *own.values()]), None)


@dataclass(frozen=True)
class _Peer:
    """Another engine, if one was named, and the Python that has it."""

    name: str | None
    python: str | None


def _run(llm: LLM, plan: Plan, text: str, peer: _Peer, json: Path | None, plot: Path | None) -> int:
    """Measure, show, write; the exit status."""
    from longdraft.bench.decode import measure
    from longdraft.bench.machine import MemoryRoof, describe_machine
    from longdraft.bench.plot import plot as draw
    from longdraft.bench.tasks import make_prompts
    from longdraft.cli.progress import Progress

    cells: list[Cell] = []
    peers: list[PeerCell] = []
    roof = MemoryRoof() if MemoryRoof.available(llm.model.device) else None
    status = 0

    def prompts(batch: int, context: int) -> list[list[int]]:
        return [prompt.ids for prompt in make_prompts(llm, text, batch, context)]

    try:
        with Progress() as progress, _peer(llm, peer, progress, peers) as after_cell:
            measure(llm, plan, prompts, cells.append, progress.update, roof, after_cell)
    except KeyboardInterrupt:
        status = INTERRUPTED
    about = describe_model(llm)
    show(tables(cells, peers, about))
    if plot and cells:
        drafts = ", ".join(dict.fromkeys(arm.name for arm in plan.arms))
        draw(cells, plot, f"{about['name']}, {about['dtype']}, draft {drafts}")
    report = {
        "machine": describe_machine(roof),
        "model": about,
        "text": text,
        "cells": [cell.report() for cell in cells],
        "peers": [row.report() for row in peers],
    }
    write(report, json)
    return status if as_promised(llm, cells) else 1


def show(shown: Iterable[Table]) -> None:
    """Print tables, wide ones whole where no terminal sets a width."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    for table in shown:
        console.print(table)


def write(report: dict[str, object], file: Path | None) -> None:
    """One line of JSON, the last of stdout, and in ``file`` where there is one."""
    import json

    line = json.dumps(report)
    if file:
        file.write_text(line + "\n")
    print(line, flush=True)


def as_promised(llm: LLM, cells: Iterable[Cell | AcceptanceCell]) -> bool:
    """Whether outputs are plain decoding's wherever the exactness tier promises equality."""
    return all(cell.identical for cell in cells) or llm.tier not in ("bit-identical", "identical")


def describe_model(llm: LLM) -> dict[str, object]:
    """The model and how it runs."""
    from longdraft.cli.report import setting

    about = setting(llm)
    return {"name": about.pop("model"), **about, "kv_bytes_per_token": llm.engine.store.bytes_per_token}


@contextmanager
def _peer(
    llm: LLM, peer: _Peer, progress: Progress, rows: list[PeerCell]
) -> Iterator[Callable[[Contest], None] | None]:
    """What runs another engine against plain decoding after each cell; ``None`` where no peer was named."""
    if peer.name is None:
        yield None
        return
    from longdraft.bench.peers import PEERS
    from longdraft.bench.peers.measure import measure
    from longdraft.bench.peers.process import running

    with running(PEERS[peer.name], llm, peer.python, progress.update) as process:
        yield lambda contest: rows.extend(row for row in [measure(contest, process)] if row)


def tables(cells: list[Cell], peers: list[PeerCell], about: dict[str, object]) -> Iterator[Table | str]:
    """One table per batch, context and temperature: plain decoding, beside it every arm, and a line per peer."""
    from rich.table import Table

    for (batch, context, temperature, rows), group in groupby(cells, _place):
        arms = list(group)
        simulated = ", SIMULATED acceptance" if arms[0].simulated else ""
        size = f"{context:,} tokens" + (f" on average, {min(rows):,} to {max(rows):,}" if rows else "")
        title = f"{about['name']}, {about['dtype']}: {batch} x {size}, T {temperature:g}{simulated}"
        table = Table(title=title, title_justify="left")
        table.add_column("")
        for heading in ("plain", *(cell.shown.label for cell in arms)):
            table.add_column(heading, justify="right")
        for name, plain, values in _lines(arms):
            table.add_row(f"[bold]{name}", plain, *values)
        yield table
        for row in peers:
            if (row.batch, row.context, temperature) == (batch, context, 0):
                speeds = f"{row.tok_s:.1f} tokens/s, ours {row.ratio:.2f} x [{row.ci_low:.2f}, {row.ci_high:.2f}]"
                yield f"{row.peer}, {row.dtype}: {speeds}; {row.shown}"


def _place(cell: Cell) -> tuple[int, int, float, tuple[int, ...]]:
    """What cells of one table have in common; rows of several lengths may have the same mean as others."""
    return cell.batch, cell.context, cell.temperature, tuple(cell.row_contexts or ())


def _lines(arms: list[Cell]) -> Iterator[tuple[str, str, list[str]]]:
    """Name, plain figure and every arm's."""
    one, shown = arms[0], arms[0].shown
    yield "tokens/s", f"{one.plain_tok_s:.1f}", [f"{c.spec_tok_s:.1f}" for c in arms]
    yield "speed-up", "1", [f"{c.speedup:.3f} x" for c in arms]
    yield "95 % interval", "", [f"{c.ci_low:.3f} – {c.ci_high:.3f}" for c in arms]
    yield "", "", ["" if c.significant else "not significant" for c in arms]
    if any(c.predicted for c in arms):
        yield "predicted", "", [f"{c.predicted:.3f} x" if c.predicted else "" for c in arms]
    yield "output", "", ["identical" if c.identical else "DIFFERS" for c in arms]
    yield "tokens per verify", "1", [f"{c.tokens_per_verify:.2f}" for c in arms]
    yield "acceptance", "", [" ".join(f"{x:.2f}" for x in c.acceptance_by_position) for c in arms]
    yield "ms per step", f"{one.t_plain_ms:.2f}", ["" for _ in arms]
    yield "ms per draft step", "", [f"{c.t_draft_ms:.2f}" for c in arms]
    yield "ms per verify", "", [f"{c.t_verify_ms:.2f}" for c in arms]
    yield "verify / plain", "", [f"{c.t_verify_ms / c.t_plain_ms:.2f}" for c in arms]
    if shown.roof_ms is not None:
        yield "memory roof, ms", f"{shown.roof_ms:.2f} ({one.roof_share:.0%} reached)", ["" for _ in arms]
    yield "per plain step", f"{shown.read_bytes / 2**20:,.0f} MiB, {shown.flops / 1e9:,.2f} GFLOP", ["" for _ in arms]
    yield "repeated 8-grams", f"{one.repeated_8gram:.0%}", ["" for _ in arms]
    overs = [c.over_fixed for c in arms]
    if any(overs):
        fixed = [f"{o.ratio:.3f} x {o.arm} ({o.ci_low:.3f} – {o.ci_high:.3f})" if o else "" for o in overs]
        yield "over the best fixed", "", fixed
    if any(c.control for c in arms):
        for name, values in _control(arms):
            yield name, "", values
    yield "rounds", "", [f"{c.shown.rounds}{', NOISY' if c.noisy else ''}" for c in arms]


def _control(arms: list[Cell]) -> Iterator[tuple[str, list[str]]]:
    """What online control did, of the arms that had it."""
    shown = [dict(drafting.control_lines(c.control)) if c.control else {} for c in arms]
    for name in dict.fromkeys(name for lines in shown for name in lines):
        yield name, [lines.get(name, "") for lines in shown]
