"""Who runs next, and with how many tokens. Decides and keeps the books; never computes.

The only writer of sequences. Prefill and decode steps alternate while both have work, so a decoding row waits for at
most one chunk. When pages run out, the most recently admitted sequence gives up its pages and is computed again later
from its ids (prompt and output), which with position-keyed noise changes nothing in what it returns. One sequence
always fits alone (``EngineConfig.max_tokens_per_request``), so the oldest one always gets on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from longdraft.config import DraftConfig, EngineConfig
from longdraft.core import Batch, Choice, Row, Sequence, Status
from longdraft.engine.control import Control, OwnDrafts
from longdraft.kv.store import PagedStore


class Scheduler:
    """Queues, admission by pages, chunked prefill, preemption."""

    def __init__(
        self,
        config: EngineConfig,
        store: PagedStore,
        on_fork: Callable[[Sequence, Sequence], None] | None = None,
        on_release: Callable[[Sequence], None] | None = None,
        control: Control | None = None,
        choose: Callable[[list[Sequence]], list[Choice]] | None = None,
    ) -> None:
        """Who else keeps something by sequence is told when one shares the pages of another, or loses its own.

        ``choose`` answers for the decoding rows of a step; without it all have the drafts that they named.
        """
        self.config, self.store, self.control = config, store, control or OwnDrafts()
        self._on_fork = on_fork or (lambda source, child: None)
        self._on_release = on_release or (lambda seq: None)
        self._choose = choose or (lambda seqs: [seq.own_choice for seq in seqs])
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        self._decode_next = False

    @property
    def has_work(self) -> bool:
        """Whether any sequence can go on: unfinished and not held."""
        return any(_able(seq) for queue in (self.waiting, self.running) for seq in queue)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(seq)

    def fork(self, source: Sequence, child: Sequence, length: int) -> None:
        """Start ``child`` beside ``source``, sharing the first ``length`` tokens of its cache."""
        room = len(self.running) < self.config.max_num_seqs
        if source.status is Status.RUNNING and room and self.store.can_fork(source.id, length):
            self.store.fork(source.id, child.id, length)
            child.num_committed, child.status = length, Status.RUNNING
            self._on_fork(source, child)
            self.running.append(child)
        else:
            _forget_scores(child)
            self.waiting.append(child)

    def schedule(self) -> Batch | None:
        """The next step's rows with their pages reserved; ``None`` when nothing is left to do."""
        if not self.has_work:
            return None
        decode_first = self._decode_next
        for decode in (decode_first, not decode_first):
            rows = self._decode_rows() if decode else self._prefill_rows()
            if rows:
                self._decode_next = not decode
                return Batch(rows, prefill=not decode)
        # Only sequences that are held stand in the way: the oldest one always fits alone.
        self.preempt([seq for seq in self.running if seq.held][-1])
        return self.schedule()

    def finish(self, seq: Sequence, reason: str, error: str | None = None) -> None:
        """End ``seq`` and give back its pages. Ending a finished sequence again changes nothing."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        else:
            return
        self._release(seq)
        seq.status, seq.finish_reason, seq.error = Status.FINISHED, reason, error

    def commit(self, row: Row, tokens: list[int]) -> None:
        """After a forward: the row's own tokens are in the cache, and ``tokens`` are new.

        All of them but the newest were accepted from the row's proposal, so their K/V are there too; what else the
        proposal wrote is given back.
        """
        seq = row.seq
        seq.num_committed += row.num_tokens + max(0, len(tokens) - 1)
        seq.ids.extend(tokens)
        if row.room:
            self.store.truncate(seq.id, seq.num_committed)

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's pages; it goes on from its ids when there is room again."""
        self.running.remove(seq)
        self._release(seq)
        seq.num_committed = 0
        _forget_scores(seq)
        seq.status = Status.WAITING
        seq.stats.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)

    def _decode_rows(self) -> list[Row]:
        rows = []
        for seq in [s for s in self.running if s.decoding and not s.held]:
            if seq.status is Status.RUNNING and self._reserve(seq, 1):
                rows.append(Row(seq, num_tokens=1, num_logits=1))
        rows = [row for row in rows if row.seq.status is Status.RUNNING]
        # Only when every row has room for its one token do proposals get what is left; nobody is preempted for them.
        choices = self._choose([row.seq for row in rows]) if rows else []
        pairs = zip(rows, choices, strict=True)
        return [replace(row, choice=choice, room=self._room(row.seq, choice.draft)) for row, choice in pairs]

    def _room(self, seq: Sequence, draft: DraftConfig | None) -> int:
        """How many tokens ``draft`` may propose for ``seq``: γ, less near its length limit or where pages are short."""
        if draft is None:
            return 0
        room = min(draft.gamma, seq.max_total - len(seq.ids) - 1)
        while room > 0 and not self.store.reserve(seq.id, seq.num_committed, 1 + room):
            room -= 1
        return max(room, 0)

    def _prefill_rows(self) -> list[Row]:
        budget, rows = self.config.max_num_batched_tokens, []
        self.share_prompts()
        for seq in [s for s in self.running if not s.decoding and not s.held]:
            n = self._fed(seq, budget)
            if n and seq.status is Status.RUNNING and self._reserve(seq, n):
                rows.append(self._chunk(seq, n))
                budget -= n
        rows = [row for row in rows if row.seq.status is Status.RUNNING]
        while budget and self.waiting and len(self.running) < self.config.max_num_seqs:
            seq = next((s for s in self.waiting if _able(s)), None)
            if seq is None:
                break
            # One page of headroom per running row: else it would be thrown out again at the next page border.
            headroom = self.store.num_free_pages - len(self.running)
            if self.running and self.store.takes(len(seq.ids)) > headroom:
                break
            if not self.store.reserve(seq.id, 0, len(seq.ids)):
                break
            self.waiting.remove(seq)
            self.running.append(seq)
            seq.status = Status.RUNNING
            n = self._fed(seq, budget)
            rows.append(self._chunk(seq, n))
            budget -= n
        return rows

    def share_prompts(self) -> None:
        """Start new sequences on their sources' cached prompts; the last token is fed again, to draw after it."""
        for seq in [s for s in self.waiting if s.source and s.source.status is Status.RUNNING and _able(s)]:
            fits = self.store.num_free_pages > len(self.running) < self.config.max_num_seqs
            there = self.store.can_fork(seq.source.id, seq.num_prompt - 1)
            if fits and there and len(seq.ids) == seq.num_prompt:
                self.waiting.remove(seq)
                self.fork(seq.source, seq, seq.num_prompt - 1)

    def _fed(self, seq: Sequence, budget: int) -> int:
        """How many of its tokens a sequence is fed in a step that has room for ``budget``."""
        return min(seq.num_pending, budget, self.store.longest_feed)

    def _chunk(self, seq: Sequence, n: int) -> Row:
        scored = 0
        if seq.params.prompt_logprobs is not None and len(seq.prompt_logprobs) < seq.num_prompt - 1:
            scored = min(n, seq.num_prompt - 1 - seq.num_committed)
        told = Choice(told=self.control.told(seq))
        return Row(seq, num_tokens=n, num_logits=int(n == seq.num_pending), num_scored=scored, choice=told)

    def _release(self, seq: Sequence) -> None:
        self.store.free(seq.id)
        self._on_release(seq)

    def _reserve(self, seq: Sequence, n: int) -> bool:
        """Room for ``n`` more tokens of ``seq``, taken from the latest arrivals if need be, at last from itself."""
        while not self.store.reserve(seq.id, seq.num_committed, n):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        return True


def _forget_scores(seq: Sequence) -> None:
    """A sequence that starts anew in mid-prompt will score its tokens once more."""
    if len(seq.prompt_logprobs) < seq.num_prompt - 1:
        seq.prompt_logprobs.clear()


def _able(seq: Sequence) -> bool:
    """Whether ``seq`` can go on now: it is not held, and the prompt that it will share is filled or gone."""
    source = seq.source
    filling = source is not None and source.status is not Status.FINISHED and source.num_committed < seq.num_prompt
    return not seq.held and not (filling and seq.status is Status.WAITING)
