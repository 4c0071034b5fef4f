"""In what form keys and values are kept that are only read: the interface of every format.

A format is arithmetic alone: it says what a group of tokens becomes and how it is read again. Which tokens are encoded,
where they are kept and when they are decoded is ``kv/coded.py``'s business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from longdraft.config import MAX_GAMMA

LAG = MAX_GAMMA + 1  # final tokens at the end of a row that are never encoded: as many as a step may add, or more


def old_tokens(length: int, group: int) -> int:
    """How many of ``length`` final tokens may be encoded: whole groups, as far as they lie before the last ``LAG``."""
    return max(0, length - LAG) // group * group


@dataclass(frozen=True)
class Part:
    """One tensor of what is kept of a group of one KV head."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Format(ABC):
    """Encodes groups of tokens, each KV head for itself; a pure function of their keys and values."""

    tokens: ClassVar[int] = 32  # to a group; more where pages are larger, or no divisors of it

    @abstractmethod
    def parts(self, tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[Part, ...]:
        """What is kept of a group of ``tokens`` whose K and V are of type ``dtype``."""

    @abstractmethod
    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Sequence[torch.Tensor]:
        """``k, v [n, G, T, D]``, rotated keys of T tokens and their values → ``[n, G, *shape]`` for each part."""

    @abstractmethod
    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """``[n, G, *shape]`` for each part → ``k, v [n, G, T, D]`` of type ``dtype``."""

    def group_size(self, page_size: int) -> int:
        """Tokens to a group beside a cache with such pages: whole pages."""
        return -(-self.tokens // page_size) * page_size

    def group_bytes(self, tokens: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that a group of one KV head takes."""
        return sum(prod(part.shape) * part.dtype.itemsize for part in self.parts(tokens, head_dim, dtype))
