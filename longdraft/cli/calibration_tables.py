"""A calibration as tables and as JSON objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from longdraft.planner.curves import DraftCurve, PassCurve, kind

if TYPE_CHECKING:
    from longdraft.bench.calibrate import Outcome
    from longdraft.planner.calibration import Calibration

WORST_SHOWN = 3
SAMPLE = 4096, 512  # tokens of a row, and those of them that a draft reads


def points(outcome: Outcome) -> Iterator[dict[str, object]]:
    """What was measured and predicted, as JSON objects."""
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


def figures(calibration: Calibration, file: Path) -> Table:
    """What was measured where, and how well it fits."""
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


def curves(calibration: Calibration) -> Table:
    """The curves' constants; of choosing and telling what they come to for one row."""
    out = Table(title="Curves", title_justify="left")
    headings = ("", "step, ms", "token, ms", "beyond", "1,000 keys, µs", "and query, µs", "beyond", "choosing, ms")
    for heading in (*headings, "telling, ms", "waking, ms"):
        out.add_column(heading, justify="right" if heading else "left")
    found = calibration.curves
    for name, draft in {"target": None, **found.drafts}.items():
        step = found.passes if draft is None else draft.step
        out.add_row(name, *(_constants(step) if step else [""] * 6), *(_beside(draft) if draft else [""] * 3))
    out.caption = "Choosing, telling and waking: one row of {:,} tokens, of which {} are read.".format(*SAMPLE)
    out.caption_justify = "left"
    return out


def _constants(step: PassCurve) -> list[str]:
    tokens = f"{1e3 * step.token_s:.3f}", f"+{1e3 * step.excess_s:.3f} from {step.knee + 1}"
    queries = f"{1e9 * step.query_s:.0f}", f"{step.queries:g}" if step.query_s else ""
    return [f"{1e3 * step.step_s:.2f}", *tokens, f"{1e9 * step.key_s:.0f}", *queries]


def _beside(draft: DraftCurve) -> list[str]:
    length, read = SAMPLE
    spent = draft.choice.seconds([length], [read]), draft.noting.seconds([length], [1]), length * draft.wake_s
    return [f"{1e3 * s:.3f}" if s else "" for s in spent]


def worst(outcome: Outcome) -> Table:
    """The held-out points that the curves miss by most."""
    pairs = zip(outcome.measured, outcome.predicted, strict=True)
    errors = [(predicted / m.seconds - 1, m, predicted) for m, predicted in pairs if m.point.held_out]
    out = Table(title="Largest errors of what was held out", title_justify="left")
    for heading in ("", "measured, ms", "predicted, ms", "error"):
        out.add_column(heading, justify="right" if heading else "left")
    for error, m, predicted in sorted(errors, key=lambda e: -abs(e[0]))[:WORST_SHOWN]:
        out.add_row(m.point.label, f"{1e3 * m.seconds:.3f}", f"{1e3 * predicted:.3f}", f"{error:+.1%}")
    return out
