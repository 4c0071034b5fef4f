"""Token ids to train on: documents in a row, cut into sequences of given lengths, in an order that is computed.

Which sequences a step trains on is a function of (texts, seed, step) and nothing else, so a run that was killed goes on
with what would have come next. Whether a document is held out is a function of its text alone: equal texts are on the
same side, whatever the seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.errors import InvalidValueError
from longdraft.train.corpora import Document
from longdraft.train.files import save_tensors

GOLDEN = 0.6180339887498949  # its multiples fill [0, 1) evenly, so lengths take turns by their shares
TRAIN, HELD_OUT = "train", "held_out"


@dataclass(frozen=True)
class Streams:
    """All documents' ids one after the other, each closed by the separator: ``train`` and ``held_out``, int32 each."""

    train: torch.Tensor
    held_out: torch.Tensor

    @property
    def digest(self) -> str:
        """What tells these ids from others."""
        parts = (self.train, self.held_out)
        return hashlib.sha256(b"".join(hashlib.sha256(x.numpy()).digest() for x in parts)).hexdigest()

    def with_texts(self, texts: torch.Tensor, end: int | None) -> Streams:
        """The same with ``texts [R, L]``, int32, to train on, each closed by the separator ``end``, if there is one."""
        closed = texts if end is None else torch.nn.functional.pad(texts, (0, 1), value=end)
        return replace(self, train=torch.cat([self.train, closed.flatten()]))


def is_held_out(document: Document, share: float) -> bool:
    """Whether a document is among the ``share`` that is never trained on."""
    digest = hashlib.sha256(document.text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def encode(document: Document, tokenizer: Tokenizer) -> list[int]:
    """A document's ids, whatever words for special tokens it has."""
    return tokenizer.encode(document.text, add_special_tokens=False, allow_special=False)


def tokenize(documents: Sequence[Document], tokenizer: Tokenizer, share: float, cache: Path | None = None) -> Streams:
    """The ids of all documents, ``share`` of them held out; the file ``cache`` has them the next time.

    Raises ``InvalidValueError`` where one of the two sides would be empty.
    """
    key = _key(documents, tokenizer, share)
    if cache is not None and (file := cache / f"tokens-{key}.safetensors").is_file():
        return Streams(**load_file(file))
    sides: dict[str, list[int]] = {TRAIN: [], HELD_OUT: []}
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for document in documents:
        sides[HELD_OUT if is_held_out(document, share) else TRAIN] += encode(document, tokenizer) + end
    for side, ids in sides.items():
        if not ids:
            fix = "Give more documents, or another share."
            limit = f"must leave some of the {len(documents)} documents for each side, and {side} has none"
            raise InvalidValueError("held_out", share, limit, fix)
    streams = {side: torch.tensor(ids, dtype=torch.int32) for side, ids in sides.items()}
    if cache is not None:
        save_tensors(file, streams)
    return Streams(**streams)


def _key(documents: Sequence[Document], tokenizer: Tokenizer, share: float) -> str:
    digest = hashlib.sha256(repr((share, tokenizer.eos_token_id, sorted(tokenizer.vocabulary().items()))).encode())
    for document in documents:
        digest.update(hashlib.sha256(document.text.encode()).digest())
    return digest.hexdigest()[:16]


class Batches:
    """Sequences of several lengths, each with its share of the tokens; a step's are all of one length."""

    def __init__(
        self, stream: torch.Tensor, shares: Mapping[int, float], batch_tokens: int, seed: int, fixed: bool = False
    ) -> None:
        """``shares``: length in tokens → share of all tokens that come in sequences of it; any positive weights.

        ``fixed``: sequences are cut at the same places in every epoch, so that there are no others than ``texts``.
        Every step has ``batch_tokens``. Raises ``InvalidValueError`` where the stream is too short for a length, or
        ``batch_tokens`` is no multiple of it.
        """
        self.stream, self.batch_tokens, self.seed, self.fixed = stream, batch_tokens, seed, fixed
        self.lengths = sorted(shares)
        weights = np.array([shares[length] for length in self.lengths], float)
        self._ends = np.cumsum(weights / weights.sum())
        for length in self.lengths:
            check_length(stream, length)
            if batch_tokens % length:
                fix = f"For example {-(-batch_tokens // length) * length}."
                raise InvalidValueError("batch_tokens", batch_tokens, f"must be a multiple of the length {length}", fix)
        self._order = lru_cache(maxsize=2 * len(self.lengths))(self._shuffled)

    def step(self, step: int) -> torch.Tensor:
        """``[B, L]``, int64: what step 0, 1, … trains on."""
        which = self._which(step + 1)
        length = self.lengths[which[step]]
        rows = self.batch_tokens // length
        first = int((which[:step] == which[step]).sum()) * rows  # sequences of this length so far
        return torch.stack([self._sequence(length, first + row) for row in range(rows)])

    def texts(self) -> Iterator[torch.Tensor]:
        """For each length all sequences ``[R, L]``, if they are ``fixed``."""
        for length in self.lengths:
            count = self._per_epoch(length)
            yield self.stream[: count * length].view(count, length)

    def _per_epoch(self, length: int) -> int:
        """One less than there is room for where their beginning moves."""
        count = len(self.stream) // length
        return count if self.fixed else max(1, count - 1)

    def _which(self, steps: int) -> np.ndarray:
        """For each of the first steps, the index of its length."""
        at = np.modf(self._draw(0) + GOLDEN * np.arange(steps))[0]
        return np.searchsorted(self._ends, at, side="right").clip(max=len(self.lengths) - 1)

    def _sequence(self, length: int, n: int) -> torch.Tensor:
        """The ``n``-th: every epoch goes through all sequences once, in an order and from a beginning of its own."""
        per_epoch = self._per_epoch(length)
        epoch, at = divmod(n, per_epoch)
        offset, order = self._order(length, epoch, per_epoch)
        start = offset + int(order[at]) * length
        return self.stream[start : start + length].long()

    def _shuffled(self, length: int, epoch: int, count: int) -> tuple[int, np.ndarray]:
        random = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, length, epoch]))
        room = 0 if self.fixed else len(self.stream) - count * length
        return int(random.integers(min(room, length) + 1)), random.permutation(count)

    def _draw(self, stream: int) -> float:
        return float(np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, stream])).random())


def held_out(stream: torch.Tensor, lengths: Sequence[int], tokens: int) -> Iterator[torch.Tensor]:
    """For each length ``[B, L]``, about ``tokens`` in all: pieces at even distances, always the same ones."""
    for length in lengths:
        check_length(stream, length, "held_out")
        count = max(1, min(tokens // length, len(stream) // length))
        starts = np.linspace(0, len(stream) - length, count).astype(int)
        yield torch.stack([stream[start : start + length] for start in starts]).long()


def check_length(stream: torch.Tensor, length: int, what: str = "lengths") -> None:
    """Raise ``InvalidValueError`` where the stream has not that many tokens."""
    if len(stream) < length:
        fix = "Give more text, or shorter lengths."
        raise InvalidValueError(what, length, f"must be at most the {len(stream)} tokens that there are", fix)
