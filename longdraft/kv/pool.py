"""Numbered units of memory: who is free, and how many hold each of the others. Owns counts, no storage."""

from __future__ import annotations

from collections.abc import Iterable


class Pool:
    """``size`` units, all free at first; one that is held may be shared, and is free again when all have let it go."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._references = [0] * size
        self._free = list(range(size - 1, -1, -1))  # a stack: low numbers go out first

    @property
    def num_free(self) -> int:
        """Units that nobody holds."""
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """``n`` free units, held from now on; there must be as many."""
        units = [self._free.pop() for _ in range(n)]
        for unit in units:
            self._references[unit] = 1
        return units

    def share(self, units: Iterable[int]) -> None:
        """One more holds these."""
        for unit in units:
            self._references[unit] += 1

    def shared(self, unit: int) -> bool:
        """Whether more than one holds it."""
        return self._references[unit] > 1

    def release(self, units: Iterable[int]) -> None:
        """One holder less for each of these."""
        for unit in reversed(list(units)):
            self._references[unit] -= 1
            if self._references[unit] == 0:
                self._free.append(unit)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise ``AssertionError`` unless the units are held exactly as the holders' ``tables`` say."""
        held = [0] * self.size
        for table in tables:
            for unit in table:
                held[unit] += 1
        if held != self._references or sorted(self._free) != [u for u, n in enumerate(held) if n == 0]:
            raise AssertionError("KV pages leaked or shared by mistake: counts and tables disagree")
