"""Curves that were measured when vLLM started, in a file of their own beside LongDraft's calibrations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from longdraft.errors import CalibrationError
from longdraft.planner.calibration import Setting, default_file, find, load, store
from longdraft.planner.curves import Curves

FIX = "vLLM then measures anew when it starts."


@dataclass(frozen=True)
class Stored:
    """What was measured in a setting; ``error``: the curves' median one, relative, where points were held out."""

    setting: Setting
    name: str
    made: str
    error: float
    curves: Curves


def file() -> Path:
    """``calibration.vllm.json`` where LongDraft's own calibrations are (``calibration.default_file``)."""
    return default_file().with_suffix(".vllm.json")


def curves_for(
    setting: Setting, name: str, measure: Callable[[], tuple[Curves, float]], warn: Callable[[str], None]
) -> Stored:
    """What is stored for ``setting``, or else what ``measure`` finds, which is stored for the next start.

    A file that is damaged, or cannot be written, is named by ``warn`` once and left alone.
    """
    where, damaged = file(), False
    try:
        found = find(load(where, Stored, FIX), setting)
    except CalibrationError as error:
        found, damaged = None, True
        warn(f"what was measured before is not used: {error}")
    if found is not None:
        return found
    curves, error = measure()
    new = Stored(setting, name, datetime.now(timezone.utc).isoformat(timespec="seconds"), error, curves)
    if not damaged:
        try:
            store(where, new)
        except CalibrationError as error:
            warn(f"what was measured is not kept: {error}")
    return new
