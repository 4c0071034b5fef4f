"""The machine under the measurement: what it is, how fast it reads memory, and who else was using it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from statistics import median

import psutil
import torch

from longdraft import __version__
from longdraft.kernels import native
from longdraft.models.transformer import Transformer
from longdraft.planner.cost import network, pass_work
from longdraft.planner.hardware import processor

ROOF_BYTES = 2**30  # beyond any cache
FOREIGN_SHARE, STEAL_SHARE = 0.02, 0.01  # of all cores' time; more disturbs a round
TICKS_S = 0.03  # three ticks of the counters, below which a share says nothing
PACKAGES = ("torch", "numpy", "scipy", "transformers")


class MemoryRoof:
    """Repeated readings of the memory bandwidth by the native kernels' reading loop, on all their threads."""

    def __init__(self, size: int = ROOF_BYTES) -> None:
        # Random: pages of zeros may all be one page, which a cache holds.
        random = torch.Generator().manual_seed(0)
        self._buffer = torch.empty(size // 8, dtype=torch.int64).random_(generator=random)
        self._readings: list[float] = []
        self.read()  # the first one also wakes the threads
        self._readings.clear()

    @staticmethod
    def available(device: torch.device) -> bool:
        """Whether there is such a loop for the memory of ``device``."""
        return native._native is not None and device.type == "cpu"

    def read(self) -> None:
        """Take a reading."""
        started = time.perf_counter()
        native.runtime().read(self._buffer.data_ptr(), self._buffer.nbytes)
        self._readings.append(self._buffer.nbytes / (time.perf_counter() - started))

    @property
    def bytes_per_s(self) -> float | None:
        """The median of the readings so far."""
        return median(self._readings) if self._readings else None


@dataclass(frozen=True)
class Load:
    """Counters of processor time in seconds, at one moment."""

    wall: float
    busy: float  # of all processes
    own: float  # of the process that is measured
    steal: float  # taken by other virtual machines

    @staticmethod
    def now(pid: int | None = None) -> Load:
        """Read the counters; ``own`` is that of process ``pid``, or of this one."""
        times, mine = psutil.cpu_times(), psutil.Process(pid).cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        steal = getattr(times, "steal", 0.0)
        # A guest's time is part of user and nice already.
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        busy = sum(times) - idle - steal - guests
        return Load(time.perf_counter(), busy, mine.user + mine.system, steal)


def disturbed(before: Load, after: Load) -> bool:
    """Whether others used so much of the processors in between that what was timed does not count."""
    all_cores = (after.wall - before.wall) * (psutil.cpu_count() or 1)
    stolen = after.steal - before.steal
    return foreign_s(before, after) > max(FOREIGN_SHARE * all_cores, TICKS_S) or stolen > max(
        STEAL_SHARE * all_cores, TICKS_S
    )


def foreign_s(before: Load, after: Load) -> float:
    """Seconds of processor time that others used in between."""
    return (after.busy - before.busy) - (after.own - before.own)


def describe_machine(roof: MemoryRoof | None) -> dict[str, object]:
    """What a reader of the figures has to know of the machine."""
    bandwidth = roof.bytes_per_s if roof else None
    built = native._native is not None
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "isa": native.runtime().isa if built else None,
        "threads": native.runtime().threads if built else torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "read_gb_s": bandwidth and round(bandwidth / 1e9, 2),
        "versions": versions(PACKAGES),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of this package, of Python, and of those of ``packages`` that are installed."""
    found = {"longdraft": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def plain_step_cost(model: Transformer, kv_bytes_per_token: int, batch: int, context: float) -> tuple[float, float]:
    """Bytes that a plain step must read (weights once, each row's K and V) and its floating-point operations."""
    work = pass_work(network(model.config), {context: batch})
    weight_bytes = model.weight_bytes  # as stored here, packing included
    if model.embedding is not None:  # a few rows of it are looked up; as a tied head it is read as a whole
        weight_bytes -= model.embedding.nbytes
    return weight_bytes + batch * context * kv_bytes_per_token, work.linear_flops + work.attention_flops
