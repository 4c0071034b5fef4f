r"""Runs of ``longdraft bench decode`` with ``--draft auto`` and fixed drafts, put together: cells, gates and a picture.

    for text in prose code random; do
        longdraft bench decode --text $text --draft auto --draft int8 --draft streaming_llm --draft ngram \
            --batch 1 --batch 4 --batch 16 --context 512 --context 7000 --json $text.json
    done
    python bench/auto_cells.py prose.json code.json random.json --plot auto.png

A cell is a batch and context of one text. Prints a line per cell, as a table in Markdown, and what holds of the gates.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from longdraft.bench.plot import figure_class, heat_map

LEAST_OVER_PLAIN, LEAST_OVER_FIXED = 0.98, 0.95  # for the upper end of a cell's interval
MEAN_OVER_PLAIN, MEAN_OVER_FIXED = 1.0, 0.97  # for the geometric mean
NARROW, CLOSE = 0.05, 0.10  # an interval's half width, relative; how far off a prediction may be


@dataclass(frozen=True)
class Ratio:
    """A median and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def narrow(self) -> bool:
        """Whether a prediction can be held against it."""
        return self.high - self.low <= 2 * NARROW * self.value

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f})"


@dataclass(frozen=True)
class Row:
    """What auto did in one cell, and how far off the predictions of all its arms were."""

    text: str
    batch: int
    context: int
    mixed: bool
    plain: Ratio
    fixed: Ratio
    best: str
    chosen: str
    errors: list[tuple[Ratio, float]]  # of every arm: measured speed-up, predicted over it less 1
    noisy: bool


def read(file: Path) -> list[Row]:
    """The cells of one run that have an arm ``auto``."""
    report = json.loads(file.read_text())
    return [_row(report["text"], cell, report["cells"]) for cell in report["cells"] if "over_fixed" in cell]


def _row(text: str, auto: dict[str, Any], cells: Iterable[dict[str, Any]]) -> Row:
    where = ("batch", "context", "temperature", "row_contexts")
    arms = [cell for cell in cells if all(cell.get(name) == auto.get(name) for name in where)]
    errors = [(_speedup(arm), arm["predicted"] / arm["speedup"] - 1) for arm in arms if arm["predicted"]]
    over, chosen = auto["over_fixed"], auto["control"]["chosen"]
    names = [f"{one['share']:.0%} {one['draft'].partition(',')[0]} γ{one['gamma']}" for one in chosen[:2]]
    fixed = Ratio(over["ratio"], over["ci_low"], over["ci_high"])
    size = (auto["batch"], auto["context"], "row_contexts" in auto)
    return Row(text, *size, _speedup(auto), fixed, over["arm"], ", ".join(names), errors, auto["noisy"])


def _speedup(cell: dict[str, Any]) -> Ratio:
    return Ratio(cell["speedup"], cell["ci_low"], cell["ci_high"])


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = ["| text | batch x context | auto / plain | auto / best fixed | best fixed | chosen |", "| --- " * 6 + "|"]
    for row in rows:
        name = f"{row.batch} x {row.context:,}{' mixed' if row.mixed else ''}{', noisy' if row.noisy else ''}"
        chosen = row.chosen.replace("off γ0", "nothing")
        lines.append(f"| {row.text} | {name} | {row.plain} | {row.fixed} | {row.best} | {chosen} |")
    return "\n".join(lines)


def gates(rows: Sequence[Row]) -> list[str]:
    """What holds, with figures."""
    out = []
    for name, ratios, least, mean in (
        ("plain", [row.plain for row in rows], LEAST_OVER_PLAIN, MEAN_OVER_PLAIN),
        ("the best fixed", [row.fixed for row in rows], LEAST_OVER_FIXED, MEAN_OVER_FIXED),
    ):
        below, middle = sum(r.high < least for r in ratios), exp(sum(log(r.value) for r in ratios) / len(ratios))
        out.append(
            f"over {name}: {below} of {len(ratios)} upper ends below {least}, lowest median "
            f"{min(r.value for r in ratios):.2f}, geometric mean {middle:.3f} (wanted {mean:.2f})"
        )
    for name, errors in (
        ("auto", [row.errors[0] for row in rows]),
        ("fixed drafts", [error for row in rows for error in row.errors[1:]]),
    ):
        held = [error for measured, error in errors if measured.narrow]
        within = sum(abs(error) <= CLOSE for error in held)
        out.append(f"predicted within {CLOSE:.0%}, {name}: {within} of {len(held)} whose interval is narrow enough")
    return out


def draw(rows: Sequence[Row], file: Path) -> None:
    """Per text two maps over batch and context: auto over plain decoding, and over the best fixed arm."""
    rows = [row for row in rows if not row.mixed]
    texts = list(dict.fromkeys(row.text for row in rows))
    figure = figure_class()(figsize=(11, 0.6 + 2.9 * len(texts)), layout="constrained")
    for line, text in zip(figure.subplots(len(texts), 2, squeeze=False), texts, strict=True):
        mine = [row for row in rows if row.text == text]
        batches, contexts = sorted({row.batch for row in mine}), sorted({row.context for row in mine})
        for axes, name, label in zip(line, ("plain", "fixed"), ("plain decoding", "the best fixed arm"), strict=True):
            found = np.full((len(batches), len(contexts)), np.nan)
            for row in mine:
                found[batches.index(row.batch), contexts.index(row.context)] = getattr(row, name).value
            heat_map(figure, axes, found, batches, contexts, label="speed, ratio")
            axes.set_title(f"{text}: auto over {label}", fontsize=10)
    figure.savefig(file, dpi=120)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    rows = [row for file in asked.files for row in read(file)]
    print(table(rows), *gates(rows), sep="\n")
    if asked.plot:
        draw(rows, asked.plot)


if __name__ == "__main__":
    main()
