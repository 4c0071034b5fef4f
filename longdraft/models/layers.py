"""The parts of a decoder layer between its attention kernel and its linear kernels: norms and the gated MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import silu

Linear = Callable[[torch.Tensor], torch.Tensor]


class RMSNorm:
    """x / rms(x) · weight over the last dimension, in the type of ``x``."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [..., D]`` → same shape."""
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps) * self.weight


class GatedMLP:
    """down(silu(gate(x)) · up(x)); gate and up are one product."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [N, hidden]`` → ``[N, hidden]``."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(silu(gate) * up)
