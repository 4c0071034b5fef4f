"""The whole cache: no selection at all.

A self-draft that reads everything is the target itself, so every proposal must be accepted: the test subject of all.
"""

from __future__ import annotations

from dataclasses import dataclass

from longdraft.kv.select.base import ViewSelector
from longdraft.view import TableView


@dataclass(frozen=True)
class Full(ViewSelector):
    """Every token, whatever the budget."""

    def select(self, view: TableView) -> TableView:
        """See ``ViewSelector``."""
        return view

    def tokens_read(self, length: int) -> int:
        """All of them."""
        return length
