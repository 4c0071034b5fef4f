"""Steps that go by unwatched: where nothing was worth proposing for some time, only some steps are looked at.

Asking, choosing and taking note take some tens of microseconds per row and step, which is several per cent of a small
model's plain step. A text that begins to repeat itself is noticed some steps later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from longdraft.core import Choice

QUIET, REST = 8, 3  # after so many steps of the same rows with nothing proposed, so many go by unwatched after each


class Rest:
    """When control rests, and what it answers then. ``on``: whether the step under way goes by unwatched."""

    def __init__(self) -> None:
        self.on, self.left = False, 0
        self._quiet = 0
        self._ids: tuple[int, ...] = ()
        self._choices: list[Choice] = []

    def choices(self, ids: tuple[int, ...]) -> list[Choice] | None:
        """Those of a step that goes by unwatched, for the sequences ``ids``; ``None`` if it is to be watched."""
        self.on = self.left > 0 and ids == self._ids
        self.left = self.left - 1 if self.on else 0
        return self._choices if self.on else None

    def note(self, ids: tuple[int, ...], choices: Sequence[Choice], still: bool) -> None:
        """What was chosen in a watched step. ``still``: nothing proposes, tries anything or is measured."""
        self._quiet = self._quiet + 1 if still and ids == self._ids else 0
        self._ids = ids
        if self._quiet >= QUIET:
            self.left = REST
            self._choices = [replace(choice, dropped=()) for choice in choices]
