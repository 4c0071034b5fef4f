"""Reports of earlier runs of the acceptance bench, read back from their JSON, to be shown and drawn together."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from longdraft.bench.acceptance_cells import AcceptanceCell, Difference, Result
from longdraft.errors import InvalidValueError


@dataclass(frozen=True)
class Report:
    """What one run printed. ``model`` says which and how it ran, ``machine`` on what."""

    machine: dict[str, object]
    model: dict[str, object]
    result: Result


def read_reports(files: Iterable[Path]) -> list[Report]:
    """The reports, of one model in one form. ``InvalidValueError`` for another file, and for one of another model."""
    reports: list[Report] = []
    for file in files:
        reports.append(_read(file))
        own, first = (_form(report) for report in (reports[-1], reports[0]))
        if own != first:
            raise InvalidValueError("--from", str(file), f"must be of {' in '.join(first)}, not of {' in '.join(own)}")
    return reports


def _read(file: Path) -> Report:
    limit = "must be a JSON file of this version's longdraft bench acceptance"
    try:
        found = json.loads(file.read_text())
        cells = [AcceptanceCell(**cell) for cell in found["cells"]]
        report = Report(
            found["machine"], found["model"], Result(cells, [Difference(**d) for d in found["differences"]])
        )
        _form(report)
    except OSError as error:
        raise InvalidValueError("--from", str(file), f"must be a readable file ({error.strerror})") from error
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidValueError("--from", str(file), limit, "Measure anew with --json.") from error
    return report


def _form(report: Report) -> tuple[str, str]:
    return str(report.model["name"]), str(report.model["dtype"])
