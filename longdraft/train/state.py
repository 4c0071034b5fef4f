"""A run on disk: one file with everything that the next step depends on, and a log of the steps before it.

The file is safetensors: parameters and the optimizer's tensors, with counters as JSON in its header. It is one file so
that no half of it can be older than the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from longdraft.errors import TrainingError
from longdraft.train.files import save_tensors
from longdraft.train.optim import Optimizer

STATE, LOG = "state.safetensors", "log.jsonl"
WEIGHTS, MOMENTS = "weights.", "moments."
RUN = "run"  # the header's only entry: of several the order would be left to chance, and so would the file's bytes


@dataclass
class Progress:
    """How far a run is: completed steps and their tokens, steps that were skipped, of these the last ones in a row."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    in_a_row: int = 0


def save_state(folder: Path, progress: Progress, optimizer: Optimizer, identity: str) -> None:
    """Write the file; ``TrainingError``, and the old file stays, where a weight is no number."""
    for name, x in optimizer.parameters.items():
        if not bool(x.isfinite().all()):
            raise TrainingError(f"{name} holds values that are no numbers at step {progress.step}. Lower optim.lr.")
    weights = {WEIGHTS + name: x for name, x in optimizer.parameters.items()}
    moments = {MOMENTS + name: x for name, x in optimizer.tensors().items()}
    header = json.dumps({"identity": identity, **asdict(progress)})
    save_tensors(folder / STATE, weights | moments, {RUN: header})


def load_state(folder: Path, optimizer: Optimizer, identity: str) -> Progress | None:
    """Put a run's parameters and moments back; ``None`` where nothing is saved.

    Raises ``TrainingError`` for a file of another run, or a damaged one.
    """
    path = folder / STATE
    if not path.is_file():
        return None
    again = "Give another --out, or start anew without --resume."
    try:
        with safe_open(path, "pt") as file:
            header = json.loads(file.metadata()[RUN])
            if header.pop("identity") != identity:
                raise TrainingError(f"{path} is of a run with another recipe or other texts. {again}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            progress = Progress(**header)
        with torch.no_grad():
            for name, p in optimizer.parameters.items():
                p.copy_(tensors[WEIGHTS + name])
        moments = {n.removeprefix(MOMENTS): x for n, x in tensors.items() if n.startswith(MOMENTS)}
        optimizer.restore(moments)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise TrainingError(f"{path} is damaged ({error}). {again}") from error
    return progress


def read_log(folder: Path) -> Iterator[dict[str, object]]:
    """The log's records; a line that was cut short is the last one, and is left out."""
    path = folder / LOG
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            return


class Log:
    """Adds records to a run's log; those of steps after ``step``, which are to be done again, are dropped first."""

    def __init__(self, folder: Path, step: int) -> None:
        kept = [record for record in read_log(folder) if record["step"] <= step] if step else []
        self._path = folder / LOG
        part = folder / f"{LOG}.part"
        part.write_text("".join(map(_line, kept)), "utf-8")
        os.replace(part, self._path)

    def add(self, record: Mapping[str, object]) -> None:
        """Append one; it is in the file when this returns."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(record))


def _line(record: Mapping[str, object]) -> str:
    return json.dumps(record) + "\n"
