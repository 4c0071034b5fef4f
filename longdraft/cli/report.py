"""Figures of a run as one dictionary, and that dictionary as a table: what ``demo`` and ``generate`` close with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from longdraft.cli.drafting import control_lines
from longdraft.core import sum_by_position
from longdraft.outputs import ControlStats

if TYPE_CHECKING:
    from longdraft.llm import LLM
    from longdraft.outputs import RequestOutput


def figures(llm: LLM, results: Sequence[RequestOutput]) -> dict[str, object]:
    """What the engine did for ``results`` (its only requests so far).

    ``tokens`` counts all output tokens. Each request's first one comes out of its prefill; ``decode_tokens`` are the
    others, and ``tokens_per_s`` is ``decode_tokens`` over ``decode_s``.
    """
    stats, store = llm.engine.stats, llm.engine.store
    return {
        "tokens": sum(result.stats.output_tokens for result in results),
        "decode_tokens": stats.decode_tokens,
        "tokens_per_s": rate(stats.decode_tokens, stats.decode_s),
        "seconds": stats.prefill_s + stats.decode_s,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "draft_s": stats.draft_s,
        "verify_s": stats.decode_s - stats.draft_s,
        "prefill_tokens": stats.prefill_tokens,
        "prefill_tokens_per_s": rate(stats.prefill_tokens, stats.prefill_s),
        "decode_steps": stats.decode_steps,
        "preemptions": stats.preemptions,
        **_drafting(results),
        "kv_bytes_per_token": store.bytes_per_token,
        "kv_bytes_used": stats.peak_kv_pages * store.page_bytes,
        "kv_tokens_capacity": store.longest,
    }


def _drafting(results: Sequence[RequestOutput]) -> dict[str, object]:
    """What the drafts did; without any, a pass gives one token."""
    stats = [result.stats for result in results]
    drafted, accepted = (
        sum_by_position(getattr(s, f"{name}_by_position") for s in stats) for name in ("drafted", "accepted")
    )
    controls = [s.control for s in stats if s.control is not None]
    return {
        **({"control": ControlStats.total(controls).report()} if controls else {}),
        "drafted": sum(drafted),
        "accepted": sum(accepted),
        "acceptance_by_position": [a / d for a, d in zip(accepted, drafted, strict=True)],
        "tokens_per_verify": rate(sum(s.decode_tokens for s in stats), sum(s.verify_passes for s in stats)),
    }


def setting(llm: LLM) -> dict[str, object]:
    """What the figures were measured on."""
    from longdraft.kernels.dispatch import select

    spec = llm.model.spec
    return {
        "model": llm.checkpoint.name,
        "device": str(llm.model.device),
        "weight_bytes": llm.model.weight_bytes,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "kv_dtype": str(spec.kv_dtype).removeprefix("torch."),
        "kv_format": llm.kv_format,
        "kernels": {op: select(op, spec).name for op in ("attention", "linear")},
        "exactness": llm.exactness,
    }


def table(title: str, run: dict[str, object], where: dict[str, object]) -> Table:
    """The figures a person wants to see."""
    out = Table(title=title, show_header=False, title_justify="left")
    out.add_column(style="bold")
    out.add_column(justify="right")
    out.add_row("output", f"{run['tokens']:,} tokens, each prompt's first one by its prefill")
    for phase in ("prefill", "decode"):
        tokens, seconds = run[f"{phase}_tokens"], run[f"{phase}_s"]
        out.add_row(phase, f"{tokens:,} tokens in {seconds:.1f} s: {rate(tokens, seconds):,.1f} tokens/s")
    if run["drafted"]:
        accepted = f"{run['accepted']:,} of {run['drafted']:,} proposals accepted"
        out.add_row("draft", f"{accepted}, {run['tokens_per_verify']:.2f} tokens per verify")
    if "control" in run:
        for name, value in control_lines(run["control"]):
            out.add_row(name, value)
    out.add_row("weights", f"{where['weight_bytes'] / 2**20:,.0f} MiB")
    used, per_token = run["kv_bytes_used"], run["kv_bytes_per_token"]
    out.add_row("KV cache", f"{used / 2**20:,.0f} MiB at most, {per_token / 2**10:,.1f} KiB per token")
    out.add_row("KV capacity", f"{run['kv_tokens_capacity']:,} tokens")
    if run["preemptions"]:
        out.add_row("preemptions", f"{run['preemptions']}")
    kernels = ", ".join(f"{op}: {name}" for op, name in where["kernels"].items())
    out.add_row("kernels", f"{kernels} ({where['dtype']}, KV {where['kv_dtype']}, {where['device']})")
    if where["kv_format"]:
        out.add_row("KV format", f"{where['kv_format']}, lossy")
    for name in ("exactness", "seed"):
        if name in where:
            out.add_row(name, str(where[name]))
    return out


def rate(count: int, seconds: float) -> float:
    """``count`` per second; 0 where nothing was timed."""
    return count / seconds if seconds > 0 else 0.0
