"""Linear layers on the native kernels, over weights in blocks of 16 outputs.

Bfloat16 weights are kept in 12 bits each where the processor can multiply them so (``csrc/compact.h``): exactly, with
the same sums bit by bit, and a quarter less memory to read, which is what limits a step of few rows.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import torch

from longdraft.kernels import native
from longdraft.kernels.native import address, runtime

if TYPE_CHECKING:
    from longdraft.kernels.dispatch import CallSpec

TYPES = {torch.float32: (0, 1), torch.bfloat16: (1, 2), torch.int8: (2, 4)}  # number, inputs to a word
COMPACT = 3  # the number of the type of bfloat16 weights in 12 bits
GROUP = 8  # inputs that are made compact together
WORTH = 0.9  # of the bytes, at most, or weights stay as they are


class NativeLinear:
    """y = x Wᵀ + b with one order of summation for every number of rows; the weights are stored packed."""

    name = "native"

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        spec: CallSpec | None,
        dtype: torch.dtype | None = None,
        compact: bool = True,
    ) -> None:
        """``dtype``: what the weights are stored in if not in the spec's type; int8 is for drafts only.

        ``compact``: bfloat16 weights may be kept in 12 bits each.
        """
        self.n, self.k = weight.shape
        self.dtype = dtype or spec.dtype
        self.type, step = TYPES[self.dtype]
        self.spill = 0
        blocks = -(-self.n // 16)
        self.packed = torch.empty((blocks, -(-self.k // step), 16, step), dtype=self.dtype)
        native.use_huge_pages(self.packed)
        self.bias = None if bias is None else bias.float().contiguous()
        int8 = self.dtype == torch.int8
        self.scales = torch.empty(16 * blocks) if int8 else None
        self.sums = torch.empty(16 * blocks, dtype=torch.int32) if int8 else None
        self._point()
        wide = weight.float().contiguous()
        runtime().pack(wide.data_ptr(), self.handle)
        if compact and self.dtype == torch.bfloat16 and self.k % GROUP == 0 and runtime().has_compact:
            self._make_compact()

    def _point(self) -> None:
        """What the kernels know of the layer: addresses alone."""
        packed, bias, scales, sums = (address(x) for x in (self.packed, self.bias, self.scales, self.sums))
        self.handle = native._native.Weight(packed, bias, self.n, self.k, self.type, scales, sums, self.spill)

    def _make_compact(self) -> None:
        """From now on in 12 bits, unless exponents are too many for that to be worth while."""
        raw, whole, spill = self.handle, self.packed, runtime().spill(self.handle)
        size = native._native.compact_bytes(self.k // 2, spill)
        if size * len(whole) > WORTH * whole.nbytes:
            return
        self.packed, self.type, self.spill = torch.empty((len(whole), size), dtype=torch.uint8), COMPACT, spill
        native.use_huge_pages(self.packed)
        self._point()
        runtime().compact(raw, self.handle)

    @staticmethod
    def supports(spec: CallSpec) -> str | None:
        """See ``native.unsupported``."""
        return native.unsupported(spec)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [N, in]`` → ``[N, out]``."""
        x = x.float().contiguous()
        y = torch.empty(len(x), self.n)
        runtime().linear(x.data_ptr(), len(x), self.handle, 0, y.data_ptr())
        return y

    @property
    def num_bytes(self) -> int:
        """What of the weight a pass reads."""
        return sum(x.nbytes for x in (self.packed, self.scales, self.sums) if x is not None)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it is used, ``[out, in]`` float32."""
        if self.type == COMPACT:
            return self.rows(torch.arange(self.n)).float()
        flat = self.packed.transpose(1, 2).flatten(2).flatten(0, 1)[: self.n, : self.k].float()
        return flat if self.scales is None else flat * self.scales[: self.n, None]

    def quantised(self) -> NativeLinear:
        """The same layer with 8-bit weights: one scale per output, inputs rounded to 8 bits row by row."""
        return NativeLinear(self.weight, self.bias, None, torch.int8)

    def part(self, start: int) -> NativeLinear:
        """The same layer without its first ``start`` outputs, a multiple of 16, over the same memory."""
        assert start % 16 == 0, "weights are packed in blocks of 16 outputs"
        rest = copy(self)
        rest.n, rest.packed = self.n - start, self.packed[start // 16 :]
        rest.bias, rest.scales, rest.sums = (
            None if x is None else x[start:] for x in (self.bias, self.scales, self.sums)
        )
        rest._point()
        return rest

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, ``[len(ids), in]``: the embeddings of a tied model."""
        if self.type != COMPACT:
            return self.packed[ids // 16, :, ids % 16].flatten(1)[:, : self.k]
        ids, out = ids.contiguous(), torch.empty(len(ids), self.k, dtype=torch.bfloat16)
        runtime().rows(self.handle, ids.data_ptr(), len(ids), out.data_ptr())
        return out
