"""Calibrations in a file: for which model, types, kernels and machine curves hold, and where they lie.

The file is ``$LONGDRAFT_CALIBRATION``, or ``longdraft/calibration.json`` in the user's cache folder.
"""

from __future__ import annotations

import json
import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import partial
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from longdraft.errors import CalibrationError, LongDraftError
from longdraft.kernels import native
from longdraft.kernels.dispatch import select
from longdraft.models.config import ModelConfig
from longdraft.models.transformer import Transformer
from longdraft.planner.curves import Curves
from longdraft.planner.hardware import Hardware, processor

VERSION = 1
RUN = "Run: longdraft calibrate"


@dataclass(frozen=True)
class Setting:
    """All that times depend on besides the work itself: calibrations of one setting replace each other.

    ``model`` is the fingerprint of a config; the types are those in which weights, and K and V, are stored.
    """

    model: str
    dtype: str
    kv_dtype: str
    kernels: str
    threads: int
    machine: str

    def differences(self, other: Setting) -> list[str]:
        """In words, where they differ."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return [f"{name} {mine}, not {yours}" for name, mine, yours in pairs if mine != yours]


@dataclass(frozen=True)
class Errors:
    """Predicted over measured minus 1, of the points that were held out: of curves, and of the roofline model."""

    median: float
    worst: float
    points: int
    roofline_median: float
    roofline_worst: float


@dataclass(frozen=True)
class Calibration:
    """What was measured in a setting. ``hardware`` makes the roofline model fit it, ``anchor_s`` is the anchor's time.

    ``batch`` and ``context`` are the largest that were measured. ``noisy``: others were using the machine.
    """

    setting: Setting
    name: str
    made: str
    anchor_s: float
    batch: int
    context: int
    noisy: bool
    errors: Errors
    hardware: Hardware
    curves: Curves


class Kept(Protocol):
    """What a file of calibrations holds one of for each setting."""

    setting: Setting


K = TypeVar("K", bound=Kept)


def setting(model: Transformer) -> Setting:
    """That of a loaded model in this process."""
    names = [str(x).removeprefix("torch.") for x in (model.dtype, model.kv_dtype)]
    if model.device.type == "cuda":
        kernels = ", ".join(dict.fromkeys(select(op, model.spec).name for op in ("attention", "linear")))
        return Setting(fingerprint(model.config), *names, kernels, 0, torch.cuda.get_device_name(model.device))
    kernels = f"native {native.runtime().isa}" if model.fused else "torch"
    threads = native.runtime().threads if model.fused else torch.get_num_threads()
    return Setting(fingerprint(model.config), *names, kernels, threads, processor())


def fingerprint(config: ModelConfig | Mapping[str, object]) -> str:
    """The same for equal configs only."""
    values = config if isinstance(config, Mapping) else asdict(config)
    return sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def default_file() -> Path:
    """Where calibrations are stored unless a user says otherwise."""
    named = os.environ.get("LONGDRAFT_CALIBRATION")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else cache / "longdraft" / "calibration.json"


def load(file: Path, kind: type[K] = Calibration, fix: str = RUN) -> list[K]:
    """All calibrations of a file, oldest first; none where there is no file. ``CalibrationError`` if it is damaged."""
    damaged = partial(CalibrationError, file, fix=f"Remove it. {fix}")
    try:
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise damaged(f"cannot be read ({error})") from error
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != VERSION:
        raise damaged(f"is of version {version!r}, not {VERSION}")
    try:
        return _value(list[kind], raw.get("calibrations"), "calibrations")
    except (ValueError, LongDraftError) as error:
        raise damaged(f"is damaged: {error}") from error


def store(file: Path, new: Kept) -> None:
    """Add a calibration, or put it in the place of the one in its setting. A reader never sees half a file."""
    kept = [old for old in load(file, type(new)) if old.setting != new.setting]
    text = json.dumps({"version": VERSION, "calibrations": [asdict(c) for c in (*kept, new)]}, indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        part.write_text(text + "\n")
        os.replace(part, file)
    except OSError as error:
        raise CalibrationError(file, f"cannot be written ({error})", "Give another file by --out.") from error


def find(known: Iterable[K], wanted: Setting) -> K | None:
    """The calibration in that very setting, if there is one."""
    return next((c for c in known if c.setting == wanted), None)


def calibrated(model: Transformer, file: Path | None = None) -> Calibration:
    """The calibration of a loaded model in this process; ``CalibrationError`` says what is there instead."""
    file, wanted = file or default_file(), setting(model)
    known = load(file)
    found = find(known, wanted)
    if found is None:
        raise CalibrationError(file, _nearest(known, wanted), RUN)
    return found


def calibrated_here(config: ModelConfig, dtype: str, kv_dtype: str, file: Path | None = None) -> Calibration:
    """A calibration of this machine with those types: by that very model if there is one, else the latest.

    Raises ``CalibrationError`` where there is none.
    """
    file = file or default_file()
    known = load(file)
    devices = {processor(), *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))}
    here = [c for c in known if c.setting.machine in devices]
    typed = [c for c in here if (c.setting.dtype, c.setting.kv_dtype) == (dtype, kv_dtype)]
    if not typed:
        there = sorted({f"--dtype {c.setting.dtype} --kv-dtype {c.setting.kv_dtype}" for c in here})
        only = f"this machine was calibrated with {', '.join(there)} only, not with {dtype} weights, {kv_dtype} K and V"
        raise CalibrationError(file, only if there else _none_here(known), RUN)
    mine = fingerprint(config)
    return max(typed, key=lambda c: (c.setting.model == mine, c.made))


def _none_here(known: list[Calibration]) -> str:
    others = ", ".join(sorted({c.setting.machine for c in known}))
    return f"it has calibrations of {others}, none of this machine" if others else "there is no calibration in it"


def _nearest(known: list[Calibration], wanted: Setting) -> str:
    """Why none of ``known`` is what is wanted."""
    if not known:
        return "there is no calibration in it"
    nearest = min((c.setting.differences(wanted) for c in known), key=len)
    return f"none of its {len(known)} calibrations is for this; the nearest has {'; '.join(nearest)}"


def _value(kind: Any, raw: object, where: str) -> Any:  # noqa: ANN401 - whatever the annotation says
    """``raw`` as what an annotation asks for: no key too many or too few, no number below 0."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if raw is None else _value(args[0], raw, where)
    if origin is list and isinstance(raw, list):
        return [_value(args[0], x, f"{where}[{i}]") for i, x in enumerate(raw)]
    if origin is Mapping and isinstance(raw, dict):
        return {name: _value(args[1], x, f"{where}.{name}") for name, x in raw.items()}
    if is_dataclass(kind) and isinstance(raw, dict):
        hints, required = get_type_hints(kind), {f.name for f in fields(kind) if f.default is MISSING}
        if wrong := (raw.keys() - hints.keys()) | (required - raw.keys()):
            raise ValueError(f"{where} has unknown or missing fields: {', '.join(sorted(wrong))}")
        return kind(**{name: _value(hints[name], x, f"{where}.{name}") for name, x in raw.items()})
    number = kind is float and isinstance(raw, (int, float)) and not isinstance(raw, bool) and isfinite(raw)
    if (number or (kind in (int, str, bool) and type(raw) is kind)) and (kind is str or raw >= 0):
        return raw
    raise ValueError(f"{where} is {raw!r}, not {getattr(kind, '__name__', kind)}")
