"""Peaks of named accelerators, and the constants by which real passes fall short of them.

Owns ``Hardware`` and the table ``hardware.json``, which says for each figure where it comes from. Calibration fills the
same fields with what it measures (``calibration.py``).
"""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from longdraft.config import as_float, as_int
from longdraft.errors import InvalidValueError

GIB = 2**30
OVERLAPS = ("kernel", "pass", "none")
KINDS = ("cpu", "gpu")


@dataclass(frozen=True)
class Hardware:
    """One accelerator, or ``devices`` equal ones that share every layer (tensor parallelism).

    ``tflops`` (dense, bfloat16), ``bandwidth_gb_s`` (10^9 bytes) and ``memory_gib`` are one device's peaks.
    Of these ``compute_efficiency``, ``bandwidth_efficiency`` and ``memory_share`` are reached.
    ``layer_s`` is spent per layer of a pass (launches, and reductions between devices), ``row_s`` per row of a pass,
    ``round_s`` per round of speculation (accepting, host). ``overlap`` says what runs while memory is read: within each
    ``kernel`` its own arithmetic, in the whole ``pass`` all of it (as SPIRe assumes, arXiv:2504.06419), or ``none``.
    """

    name: str
    tflops: float
    bandwidth_gb_s: float
    memory_gib: float | None = None  # None: not known, nothing is checked
    devices: int = 1
    compute_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    memory_share: float = 1.0
    layer_s: float = 0.0
    row_s: float = 0.0
    round_s: float = 0.0
    overlap: str = "kernel"
    kind: str = "cpu"
    source: str = ""

    def __post_init__(self) -> None:
        as_float("tflops", self.tflops, 1e-6, 1e9)
        as_float("bandwidth_gb_s", self.bandwidth_gb_s, 1e-6, 1e9)
        if self.memory_gib is not None:
            as_float("memory_gib", self.memory_gib, 1e-6, 1e9)
        as_int("devices", self.devices, 1, 1024)
        for name in ("compute_efficiency", "bandwidth_efficiency", "memory_share"):
            as_float(name, getattr(self, name), 1e-6, 1.0)
        for name in ("layer_s", "row_s", "round_s"):
            as_float(name, getattr(self, name), 0.0, 1e3)
        for name, allowed in (("overlap", OVERLAPS), ("kind", KINDS)):
            if getattr(self, name) not in allowed:
                raise InvalidValueError(name, getattr(self, name), f"must be one of {', '.join(allowed)}")

    @property
    def flops_per_s(self) -> float:
        """Operations per second that linear layers reach, of all devices together."""
        return self.tflops * 1e12 * self.devices * self.compute_efficiency

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that passes read, of all devices together."""
        return self.bandwidth_gb_s * 1e9 * self.devices * self.bandwidth_efficiency

    @property
    def usable_bytes(self) -> float | None:
        """Memory for weights and cache, of all devices together; ``None`` where it is not known."""
        return None if self.memory_gib is None else self.memory_gib * GIB * self.devices * self.memory_share


@cache
def known_hardware() -> dict[str, Hardware]:
    """Every named accelerator, in the table's order."""
    table = json.loads((files(__package__) / "hardware.json").read_text())
    defaults = table["defaults"]["values"]
    return {name: Hardware(name, **(defaults | row)) for name, row in table["hardware"].items()}


def named_hardware(name: str) -> Hardware:
    """The accelerator ``name``, however its letters are cased; ``InvalidValueError`` with the list otherwise."""
    known = {key.lower(): value for key, value in known_hardware().items()}
    if name.lower() not in known:
        fix = "Or say calibrated for what longdraft calibrate measured, or give --bandwidth-gb-s and --tflops."
        raise InvalidValueError("--hardware", name, f"must be one of {', '.join(known_hardware())}", fix)
    return known[name.lower()]


def processor() -> str:
    """The name of this machine's processor; on Linux ``platform`` does not know it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def unmeasured_cpu(kernels: str, cores: int) -> Hardware:
    """A guess at a processor that nobody measured. ``kernels``: the native ones' instruction set, or ``torch``."""
    table = json.loads((files(__package__) / "hardware.json").read_text())["cores"]
    bandwidth = min(cores * table["bandwidth_gb_s"], table["most_bandwidth_gb_s"])
    name = f"{cores} cores, {kernels}"
    return Hardware(name, cores * table["tflops"][kernels], bandwidth, source=table["source"], **table["values"])
