"""The obvious KV store: one growing tensor per row and layer. The reference in every store test."""

from __future__ import annotations

import torch


class ContiguousStore:
    """Same contract as ``PagedStore`` with nothing shared and nothing paged; it also enforces what may be touched."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.shape = (num_layers, 2, 0, num_kv_heads, head_dim)
        self.dtype = dtype
        self._rows: dict[int, torch.Tensor] = {}  # [L, 2, reserved, G, D]

    def reserve(self, row: int, length: int, extra: int) -> bool:
        """Make ``[length, length + extra)`` of ``row`` writable; new tokens are zero."""
        data = self._rows.get(row, torch.empty(self.shape, dtype=self.dtype))
        missing = length + extra - data.shape[2]
        if missing > 0:
            grown = torch.zeros(*data.shape[:2], missing, *data.shape[3:], dtype=self.dtype)
            data = torch.cat([data, grown], dim=2)
        self._rows[row] = data
        return True

    def write(self, layer: int, row: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store ``k, v [n, G, D]`` as the tokens from ``start`` on."""
        stop = start + len(k)
        if stop > self._rows[row].shape[2]:
            raise IndexError(f"tokens [{start}, {stop}) of row {row} were not reserved")
        self._rows[row][layer, 0, start:stop] = k
        self._rows[row][layer, 1, start:stop] = v

    def read(self, layer: int, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first ``length`` tokens as ``[length, G, D]``."""
        return self._rows[row][layer, 0, :length], self._rows[row][layer, 1, :length]

    def truncate(self, row: int, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        self._rows[row] = self._rows[row][:, :, :length].clone()

    def fork(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of ``source`` to the new row ``target``."""
        self._rows[target] = self._rows[source][:, :, :length].clone()

    def free(self, row: int) -> None:
        """Forget ``row``."""
        self._rows.pop(row, None)
