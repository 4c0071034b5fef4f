"""The rows of one call: their ids so far, where each stands in the cache, and which of them have ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.integrations.transformers.scores import Scores, by_length


class Kept:
    """Logits or scores of every new token, by row, if the call wants them returned."""

    def __init__(self, batch: int, wanted: bool) -> None:
        self.wanted = wanted
        self._rows: list[list[torch.Tensor]] = [[] for _ in range(batch)]

    def add(self, row: int, values: torch.Tensor) -> None:
        """``values [n, V]`` of the row's next n tokens."""
        if self.wanted:
            self._rows[row] += values.clone()

    def cut(self, counts: Sequence[int]) -> None:
        """Keep what belongs to the first ``counts[b]`` new tokens of each row."""
        for row, count in zip(self._rows, counts, strict=True):
            del row[count:]

    def until(self, count: int) -> tuple[torch.Tensor, ...] | None:
        """``[B, V]`` of each of the first ``count`` new tokens; zeros for rows that have fewer."""
        if not self.wanted:
            return None
        zero = torch.zeros_like(next(row[0] for row in self._rows if row))
        return tuple(torch.stack([row[i] if i < len(row) else zero for row in self._rows]) for i in range(count))


class Rows:
    """Ids ``[B, capacity]`` and their lengths. The prompt's ids end at column ``width`` of the cache.

    Where padding is given, a row that has ended is padded; else it goes on until all have ended, as in ``generate``.
    """

    def __init__(self, prompt: torch.Tensor, visible: torch.Tensor, limit: int, room: int, pad: int | None) -> None:
        """``prompt [B, n]``; ``visible [B, width]``: which columns of the cache hold tokens.

        ``limit``: the most ids that a row may have; ``room``: how many may be tentative behind them.
        """
        batch, self.prompt = prompt.shape
        self.width, self.limit, self.pad = visible.shape[1], max(limit, self.prompt + 1), pad
        self.ids = prompt.new_full((batch, self.limit + room), pad or 0)
        self.ids[:, : self.prompt] = prompt
        self.lengths = [self.prompt] * batch
        self.ends: dict[int, int] = {}  # row → its length when it ended
        self.visible = visible
        self.front = [row.nonzero().flatten() for row in visible.cpu()]  # the columns of each row's prompt

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def wanted(self) -> dict[int, int]:
        """Rows that want another token → how many more they can have."""
        last = max(self.ends.values()) if len(self.ends) == len(self) else self.limit
        ended = self.ends if self.pad is not None else ()
        return {b: last - n for b, n in enumerate(self.lengths) if n < last and b not in ended}

    def cached(self, row: int) -> int:
        """How many tokens of a row are in the cache: all but the newest."""
        return len(self.front[row]) + self.lengths[row] - self.prompt - 1

    def columns(self, row: int) -> torch.Tensor:
        """In which columns these lie, in order."""
        front = self.front[row]
        return torch.cat([front, torch.arange(self.width, self.width + self.cached(row) - len(front))])

    def newest(self, count: int) -> torch.Tensor:
        """Where each row's newest id and those drafted behind it lie in ``ids``: ``[B, count]``."""
        last = torch.tensor(self.lengths, device=self.ids.device) - 1
        return last[:, None] + torch.arange(count, device=last.device)

    def sees(self, columns: torch.Tensor) -> torch.Tensor | None:
        """Which columns queries in ``columns [B, n]`` see, ``[B, n, S]`` bool up to the last; ``None`` if all do."""
        at = torch.arange(int(columns.max()) + 1, device=columns.device)
        mask = at <= columns[..., None]
        mask[..., : self.width] &= self.visible[:, None, : len(at)]
        blind = ~mask.any(dim=-1, keepdim=True)  # padding; a softmax over nothing is no number
        mask |= blind & (at == columns[..., None])
        return None if bool(mask.all()) else mask

    def write(self, tokens: Sequence[Sequence[int]]) -> None:
        """Put ids behind each row's, which may be taken back."""
        for row, new in enumerate(tokens):
            if new:
                start = self.lengths[row]
                self.ids[row, start : start + len(new)] = torch.tensor(new, device=self.ids.device)

    def extend(self, tokens: Sequence[Sequence[int]], scores: Scores, kept: Kept) -> list[int]:
        """Ids that are final, up to where a row ends; how many new ones each row has now. ``kept`` is cut to them."""
        self.write(tokens)
        places = [(row, self.lengths[row] + i + 1) for row, new in enumerate(tokens) for i in range(len(new))]
        for length, _, rows in by_length(places):
            going = [row for row in rows if self.pad is None or row not in self.ends]
            for row in going:
                self.lengths[row] = length
            if going:
                seen = None if scores.stopped_by_row else kept.until(length - self.prompt)
                for row, ended in zip(going, scores.stopped(length, going, seen), strict=True):
                    if ended:
                        self.ends.setdefault(row, length)
        counts = [length - self.prompt for length in self.lengths]
        kept.cut(counts)
        return counts

    def sequences(self) -> torch.Tensor:
        """All ids, rows that ended early padded: ``[B, n]``."""
        for row, length in enumerate(self.lengths):
            self.ids[row, length:] = self.pad or 0
        return self.ids[:, : max(self.ends.values())].clone()
