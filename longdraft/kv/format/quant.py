"""8-bit keys and values for drafts (KIVI, arXiv:2402.02750; QuantSpec, arXiv:2502.10424).

Keys have channels that are large in every token, and biases shift whole channels: so each channel of the keys is
rounded with the range that it has among the tokens of its group. Values have no such channels: each token's are rounded
with the range that they have. Ranges are those of one KV head, so neither the number of heads nor their size matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longdraft.kv.format.base import Format, Part

LEVELS = 254  # steps from the smallest to the largest value; a step rounded to bfloat16 may be a 256th short of it
OVER_TOKENS, OVER_CHANNELS = -2, -1


def quantise(x: torch.Tensor, over: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [..., T, D]`` → codes (uint8, same shape), and ranges: the smallest value and the step, along ``over``.

    Ranges are of the type of ``x``, in which the smallest value is exact. A value is off by half a step at most.
    """
    low, high = x.amin(over, keepdim=True), x.amax(over, keepdim=True)
    wide = torch.promote_types(x.dtype, torch.float32)
    step = ((high.to(wide) - low.to(wide)) / LEVELS).to(x.dtype)
    # Where all values are alike the step is zero, and so is every level.
    levels = (x.to(wide) - low.to(wide)) / step.to(wide).clamp(min=torch.finfo(wide).tiny)
    return levels.round().clamp(0, 255).to(torch.uint8), torch.cat([low, step], dim=over)


def dequantise(codes: torch.Tensor, ranges: torch.Tensor, over: int, dtype: torch.dtype) -> torch.Tensor:
    """The values ``[..., T, D]`` that ``quantise`` rounded to."""
    wide = torch.promote_types(dtype, torch.float32)
    low, step = ranges.to(wide).split(1, dim=over)
    return codes.to(wide).mul_(step).add_(low).to(dtype)


@dataclass(frozen=True)
class Quant8(Format):
    """Keys in 8 bits by channel within a group, values in 8 bits by token."""

    def parts(self, tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[Part, ...]:
        """See ``Format``: the keys' codes and ranges, and the values'."""
        codes = Part((tokens, head_dim), torch.uint8)
        return codes, Part((2, head_dim), dtype), codes, Part((tokens, 2), dtype)

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Sequence[torch.Tensor]:
        """See ``Format``."""
        return *quantise(k, OVER_TOKENS), *quantise(v, OVER_CHANNELS)

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Format``."""
        k, k_ranges, v, v_ranges = parts
        return dequantise(k, k_ranges, OVER_TOKENS, dtype), dequantise(v, v_ranges, OVER_CHANNELS, dtype)
