"""Typed, bounded look-ups in an untrusted mapping, such as a JSON file's object.

Owns the wording of "this key has a value of the wrong kind"; knows nothing of what the keys mean.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from longdraft.errors import InvalidValueError, UnsupportedModelError

REQUIRED = object()
MAX_SIZE = 2**24  # of a dimension; a larger one is a typing error, or an attempt to exhaust memory
MAX_LENGTH = 2**31 - 1  # of a context


@dataclass(frozen=True)
class Settings:
    """Typed look-ups in one mapping; complaints name the file and the key. ``null`` counts as absent."""

    raw: Mapping[str, object]
    where: str

    def _get(self, key: str, default: object, limit: str) -> object:
        value = self.raw.get(key)
        if value is None and default is REQUIRED:
            raise InvalidValueError(f"{self.where}{key}", None, limit, "The file may be incomplete.")
        return default if value is None else value

    def integer(self, key: str, default: object = REQUIRED, *, least: int = 1, most: int = MAX_SIZE) -> int | None:
        limit = f"it must be a whole number from {least} to {most}"
        value = self._get(key, default, limit)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and least <= value <= most):
            return value
        raise InvalidValueError(f"{self.where}{key}", value, limit)

    def number(self, key: str, default: object = REQUIRED, *, zero_ok: bool = False) -> float | None:
        limit = f"it must be a finite number {'of at least' if zero_ok else 'above'} 0"
        value = self._get(key, default, limit)
        if value is None:
            return None
        # NaN fails the comparison; so do integers that no float can hold.
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
            if value > 0 or zero_ok:
                return float(value)
        raise InvalidValueError(f"{self.where}{key}", value, limit)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default, "")
        if not isinstance(value, bool):
            raise InvalidValueError(f"{self.where}{key}", value, "it must be true or false")
        return value

    def refuse(self, key: str, supported: str, fix: str = "") -> None:
        """Raise ``UnsupportedModelError`` for ``key``; a long value is shown by its type alone."""
        value = self.raw.get(key)
        shown = value if len(repr(value)) <= 120 else f"({type(value).__name__})"
        raise UnsupportedModelError(f"{self.where}{key}", shown, supported, fix)
