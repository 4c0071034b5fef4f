"""Linear layers in plain torch."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from longdraft.kernels.dispatch import CallSpec


class TorchLinear:
    """y = x Wᵀ + b with inputs rounded to the weight's type, products summed in the spec's compute type."""

    name = "torch"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, spec: CallSpec) -> None:
        self.weight, self.bias, self.spec = weight, bias, spec

    @staticmethod
    def supports(spec: CallSpec) -> str | None:
        """Serves every call."""
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight."""
        return self.weight.nbytes

    def part(self, start: int) -> TorchLinear:
        """The same layer without its first ``start`` outputs, over the same memory."""
        return TorchLinear(self.weight[start:], None if self.bias is None else self.bias[start:], self.spec)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, ``[len(ids), in]``: the embeddings of a tied model."""
        return self.weight[ids]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [N, in]`` → ``[N, out]``."""
        # Widening the weights keeps the sums in full precision; it costs time where they are stored in 16 bits.
        compute = self.spec.compute_dtype
        x = x.to(self.weight.dtype).to(compute)
        return linear(x, self.weight.to(compute), None if self.bias is None else self.bias.to(compute))
