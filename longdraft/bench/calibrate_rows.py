"""Rows whose caches hold random keys and values, and the time that passes and proposals over them take.

No prompt is computed: how long attention takes does not depend on what it reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from longdraft.bench.calibrate_points import ROOM, Point
from longdraft.bench.turns import OnProgress
from longdraft.capture import Seen
from longdraft.config import DraftConfig
from longdraft.core import Batch, Row, Status
from longdraft.core import Sequence as EngineSequence
from longdraft.drafts.base import Draft, DraftRow
from longdraft.drafts.registry import watches
from longdraft.engine.decide import decide
from longdraft.errors import KVCapacityError, LongDraftError
from longdraft.llm import LLM
from longdraft.sampling_params import SamplingParams

WINDOW = 32  # last tokens of a text that drafts are told of before they propose
TOLD_AT_ONCE = 4  # rows: what is captured takes memory
REPEATED = 8  # tokens at the end of a text that it has had before: something to look up
LEAST_S = 2e-3  # shorter measurements are repeated until they take as long


@dataclass(frozen=True)
class Timed:
    """Seconds of a pass or of proposing, and the part of them that telling the draft, or its choosing, took."""

    seconds: float
    extra_s: float = 0.0


Key = tuple[int, int]  # number and length of a row


class SyntheticRows:
    """Sequences of random tokens. Those of the same number and other lengths share pages."""

    def __init__(self, llm: LLM, points: Sequence[Point], report: OnProgress) -> None:
        """Reserves and fills the pages that ``points`` need; they must be there (see ``fitting``)."""
        self.model, self.runner, self.store = llm.model, llm.engine.runner, llm.engine.store
        self.random = torch.Generator().manual_seed(0)
        self._ids = count(-1, -1)  # the engine's own are not negative
        self._rows: dict[tuple[Key, bool], EngineSequence] = {}
        self._told: set[tuple[Draft, int]] = set()
        self._bases: list[int] = []
        lengths = _longest(points)
        for i, length in enumerate(lengths):
            self._fill(length)
            report("fill", sum(lengths[: i + 1]), sum(lengths), "tokens")

    def close(self) -> None:
        """Give everything back."""
        for seq in self._rows.values():
            self.runner.release(seq)
            self.store.free(seq.id)
        for row in self._bases:
            self.store.free(row)

    def time(self, point: Point) -> Timed:
        """One measurement."""
        if point.draft is None:
            return self._pass(point)
        draft = self._draft(point)
        self._tell(draft, point)
        return self._noted(point, draft) if point.noted else self._propose(point, draft)

    def wake(self, config: DraftConfig, length: int) -> float:
        """Seconds by which a proposal takes longer where the draft has lost its state of a row of that length."""
        point = Point((length,), (1,), config)
        draft, seq = self._draft(point), self._row((0, length))
        draft.release(seq.id)
        self._told.discard((draft, seq.id))
        self._tell(draft, point)
        return self._propose(point, draft, least_s=0.0).seconds - self._propose(point, draft).seconds

    def _draft(self, point: Point) -> Draft:
        """That of a point. It knows the rows, so it keeps its states of them however many drafts are measured."""
        for key in enumerate(point.lengths):
            self.runner.draft_of(self._row(key), point.draft)
        return self.runner.draft(point.draft)

    # --- what is timed

    def _pass(self, point: Point) -> Timed:
        batch = self._batch([self._row(key) for key in enumerate(point.lengths)], point.sizes)
        return Timed(self._repeated(lambda: self._decide(batch)))

    def _propose(self, point: Point, draft: Draft, least_s: float = LEAST_S) -> Timed:
        seqs = [self._row(key) for key in enumerate(point.lengths)]
        rows = [DraftRow(seq, gamma) for seq, gamma in zip(seqs, point.sizes, strict=True)]
        selected, calls = draft.select_s, 0

        def run() -> None:
            nonlocal calls
            calls += 1
            proposal = draft.propose(rows, sampled=False)
            if not all(proposal.tokens):
                raise LongDraftError(f"{point.draft.label} proposed nothing while it was measured.")

        seconds = self._repeated(run, least_s)
        looked_up = point.draft.weights == "ngram"  # there is nothing else to it
        return Timed(seconds, seconds if looked_up else (draft.select_s - selected) / calls)

    def _noted(self, point: Point, draft: Draft) -> Timed:
        """Copies of the rows that know what these know, fed as if all their tokens stood; then taken back."""
        seqs = []
        for key in enumerate(point.lengths):
            source, seq = self._row(key), self._row(key, copy=True)
            draft.release(seq.id)
            draft.fork(source, seq)
            seq.draft = point.draft
            seqs.append(seq)
        plain = self._pass(point).seconds
        batch = self._batch(seqs, point.sizes)
        started = self._now()
        self._decide(batch)
        for seq, size in zip(seqs, point.sizes, strict=True):
            seq.num_committed += size
        self.runner.follow(batch)
        if draft.needs.taps:  # it would take in what it was told when it proposes next
            draft.follow(seqs)
        seconds = self._now() - started
        for seq, size in zip(seqs, point.sizes, strict=True):
            seq.num_committed -= size
        return Timed(seconds, seconds - plain)

    def _decide(self, batch: Batch) -> None:
        """A pass of the target up to the tokens that it gives."""
        decide(batch.rows, self.runner.forward(batch), {})

    def _repeated(self, run: Callable[[], object], least_s: float = LEAST_S) -> float:
        started, times = self._now(), 0
        while True:
            run()
            times += 1
            spent = self._now() - started
            if spent > least_s:
                return spent / times

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()

    # --- the rows

    def _batch(self, seqs: Sequence[EngineSequence], sizes: Sequence[int]) -> Batch:
        """Each row's newest token, and proposals so that it feeds ``sizes[i]`` in all."""
        pairs = zip(seqs, sizes, strict=True)
        rows = [Row(seq, 1, n, proposal=tuple(self._tokens(n - 1)), choice=seq.own_choice) for seq, n in pairs]
        return Batch(rows, prefill=False)

    def _row(self, key: Key, copy: bool = False) -> EngineSequence:
        """The sequence of that number and length, or a second one."""
        if (key, copy) not in self._rows:
            number, length = key
            ids = self._tokens(length + 1)
            ids[-REPEATED:] = ids[: len(ids[-REPEATED:])]
            seq = EngineSequence(next(self._ids), ids, length, SamplingParams(temperature=0), 0, length + ROOM)
            seq.num_committed, seq.status = length, Status.RUNNING
            self.store.fork(self._bases[number], seq.id, length)
            self._rows[key, copy] = seq
            first = max(0, length - WINDOW)
            if not self.store.reserve(seq.id, first, length + ROOM - first):
                raise LongDraftError(f"The cache has no page left for a row of {length} tokens.")
        return self._rows[key, copy]

    def _fill(self, length: int) -> None:
        """A row of random keys and values, as large as normalised activations are; the same in all layers."""
        row, layout = next(self._ids), self.store.layout
        self._bases.append(row)
        if not self.store.reserve(row, 0, length):
            raise LongDraftError(f"The cache has no room left for a row of {length} tokens.")
        k, v = torch.randn(2, length, layout.num_kv_heads, layout.head_dim, generator=self.random).to(self.model.device)
        slots = self.store.slots(row, 0, length).to(self.model.device)
        for layer in range(len(self.store.layers)):
            self.store.write(layer, k, v, slots)

    def _tokens(self, n: int) -> list[int]:
        return torch.randint(self.model.config.vocab_size, (n,), generator=self.random).tolist()

    def _tell(self, draft: Draft, point: Point) -> None:
        """Let a draft that watches see the ends of the rows' texts, as a prompt's last chunk shows them."""
        seqs = [self._row(key) for key in enumerate(point.lengths)]
        new = [seq for seq in seqs if (draft, seq.id) not in self._told]
        if draft.needs.taps:
            self._tell_streams(draft, new)
        elif watches(point.draft):
            self._tell_ends(draft, point.draft, new)
        self._told.update((draft, seq.id) for seq in new)

    def _tell_streams(self, draft: Draft, new: Sequence[EngineSequence]) -> None:
        """Random residual streams, of the ends of the rows' texts and of their first tokens."""
        for seq in new:
            for start, stop in draft.needs.ranges(seq.num_committed, 0, seq.num_committed):
                size = len(draft.needs.taps), stop - start, self.model.config.hidden_size
                streams = torch.randn(size, generator=self.random).to(self.model.device, self.model.spec.compute_dtype)
                draft.observe(seq, Seen(start, hidden=streams))
        draft.follow(new)

    def _tell_ends(self, draft: Draft, config: DraftConfig, new: Sequence[EngineSequence]) -> None:
        for i in range(0, len(new), TOLD_AT_ONCE):
            rows = []
            for seq in new[i : i + TOLD_AT_ONCE]:
                window = min(WINDOW, seq.num_committed)
                seq.draft, seq.num_committed = config, seq.num_committed - window
                rows.append(Row(seq, window, 1, choice=seq.own_choice))
            newest = [row.seq.ids.pop() for row in rows]  # it comes of this pass
            batch = Batch(rows, prefill=True)
            self.runner.forward(batch)
            for row, token in zip(rows, newest, strict=True):
                row.seq.num_committed += row.num_tokens
                row.seq.ids.append(token)
            self.runner.follow(batch)
            for row in rows:
                row.seq.draft = None


def fitting(llm: LLM, points: Sequence[Point]) -> list[Point]:
    """Those ``points`` for all of which together the cache has pages; the first ones have precedence.

    Raises ``KVCapacityError`` where it has not even room for the first one.
    """
    store = llm.engine.store
    own = store.pages_for(WINDOW + ROOM) + 2
    kept: list[Point] = []
    keys: set[tuple[Key, bool]] = set()
    for point in points:
        copies = (False, True) if point.noted else (False,)
        more = keys | {(key, copy) for key in enumerate(point.lengths) for copy in copies}
        pages = sum(map(store.pages_for, _longest([*kept, point]))) + own * len(more)
        if pages <= store.num_free_pages:
            kept.append(point)
            keys = more
    if kept[:1] != list(points[:1]):
        room = store.num_free_pages * store.layout.page_size
        raise KVCapacityError(
            f"The cache holds {room:,} tokens, too few for {len(points[0].lengths)} rows of {points[0].lengths[0]:,}. "
            "Raise kv_cache_memory_bytes, or give a smaller --batch or --context."
        )
    return kept


def _longest(points: Iterable[Point]) -> list[int]:
    """The greatest length of each row's number."""
    longest: dict[int, int] = {}
    for point in points:
        for i, length in enumerate(point.lengths):
            longest[i] = max(length, longest.get(i, 0))
    return [longest[i] for i in range(len(longest))]
