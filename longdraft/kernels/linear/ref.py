"""Linear layers in plain torch."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from longdraft.kernels.dispatch import CallSpec


class TorchLinear:
    """y = x Wᵀ + b with inputs rounded to the weight's type, products summed in the spec's compute type."""

    name = "torch"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, spec: CallSpec) -> None:
        self.weight, self.bias, self.compute_dtype = weight, bias, spec.compute_dtype

    @staticmethod
    def supports(spec: CallSpec) -> str | None:
        """Serves every call."""
        return None

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, ``[len(ids), in]``: the embeddings of a tied model."""
        return self.weight[ids]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [N, in]`` → ``[N, out]``."""
        # Widening the weights keeps the sums in full precision; it costs time where they are stored in 16 bits.
        x = x.to(self.weight.dtype).to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return linear(x, self.weight.to(self.compute_dtype), bias)
