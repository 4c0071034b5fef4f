"""Which implementation serves an operation: asked in order, the first that supports the call wins.

``explain`` says what was chosen and why the others were not. ``LONGDRAFT_KERNELS=NAME`` puts one implementation (by
name, e.g. ``ref``) in front of all others wherever it supports the call.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from longdraft.errors import InvalidValueError, KernelError

# Operation → implementations in order of preference, as "module:attribute"; imported only when asked.
IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "attention": {
        "native": "longdraft.kernels.native:NativeAttention",
        "torch": "longdraft.kernels.attention.padded:PaddedAttention",
        "ref": "longdraft.kernels.attention.ref:ReferenceAttention",
    },
    "linear": {
        "native": "longdraft.kernels.linear.native:NativeLinear",
        "torch": "longdraft.kernels.linear.ref:TorchLinear",
        "ref": "longdraft.kernels.linear.ref:TorchLinear",
    },
}


@dataclass(frozen=True)
class CallSpec:
    """What a kernel has to serve; one per model and device, not per call."""

    device: str  # cpu | cuda
    dtype: torch.dtype  # weights and activations entering a product
    kv_dtype: torch.dtype
    head_dim: int
    group_size: int  # query heads per KV head
    page_size: int

    @property
    def compute_dtype(self) -> torch.dtype:
        """What sums, softmax, norms and the residual stream are kept in: float32, or float64 for proofs."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def _candidates(op: str, spec: CallSpec) -> Iterator[tuple[str, Any, str | None]]:
    """(name, implementation, why it cannot serve) in order of preference, each imported when its turn comes."""
    forced = os.environ.get("LONGDRAFT_KERNELS", "")
    known = {name for names in IMPLEMENTATIONS.values() for name in names}
    if forced and forced not in known:
        raise InvalidValueError("LONGDRAFT_KERNELS", forced, f"must be one of {', '.join(sorted(known))}")
    for name in sorted(IMPLEMENTATIONS[op], key=lambda name: name != forced):  # stable: the forced one first
        module, attribute = IMPLEMENTATIONS[op][name].split(":")
        try:
            kernel = getattr(import_module(module), attribute)
        except ImportError as error:
            yield name, None, f"cannot be imported ({error})"
        else:
            yield name, kernel, kernel.supports(spec)


def explain(op: str, spec: CallSpec) -> list[tuple[str, str]]:
    """(implementation, verdict) in order; the verdict is ``"used"``, ``"also fits"`` or the reason it cannot serve."""
    rows, used = [], False
    for name, _, reason in _candidates(op, spec):
        rows.append((name, reason or ("also fits" if used else "used")))
        used = used or reason is None
    return rows


def select(op: str, spec: CallSpec) -> Any:  # noqa: ANN401 - the class that implements ``op``
    """The implementation class for ``op``; ``KernelError`` with every reason when none fits."""
    reasons = []
    for name, kernel, reason in _candidates(op, spec):
        if reason is None:
            return kernel
        reasons.append(f"{name}: {reason}")
    raise KernelError(f"No {op} kernel serves {spec}: " + "; ".join(reasons))
