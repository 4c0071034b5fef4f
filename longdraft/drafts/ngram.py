"""Prompt lookup: what followed an earlier occurrence of the text's own last tokens is proposed to follow again.

A suffix automaton of each sequence knows the longest such occurrence in constant time per token, without a model and
without KV. The ideas: prompt lookup decoding (Saxena 2023) and drafting from a suffix automaton (SAM decoding,
arXiv:2411.10666).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from itertools import cycle, islice

from longdraft.core import Proposal, Sequence
from longdraft.drafts.base import Draft, DraftRow

MIN_MATCH = 2  # tokens: the last token alone has occurred nearly always, and what followed it says little
MAX_TOKENS = 65_536  # per sequence
# Links along which `end` moves up per token. On novels 4 give the latest occurrence at 99.98 % of the positions, 1 at
# 82 %; without, proposals fit a tenth less well.
FRESH_LINKS = 4
# Traced at 1 to 65 thousand tokens: 112 to 129 on a novel, 85 to 162 on random ids out of 64 or more, 20 on periodic
# text. The worst case found, random ids out of two, takes 294.
BYTES_PER_TOKEN = 160
BYTES_PER_SEQUENCE = 2_048
ROOT, NONE = 0, -1


class SuffixAutomaton:
    """The substrings of a growing text from its token ``start`` on; positions count from the text's beginning.

    A state stands for the substrings that end at the same places. In prose four of five states have one edge at most,
    so the first edge lies in arrays and only further ones take a dict: a third of the memory of a dict per state.
    """

    def __init__(self, start: int = 0) -> None:
        self.start, self.known = start, start  # the first token taken in, and the one after the last
        self._last = ROOT  # the state of the whole text
        self._length = array("i", [0])  # of a state's longest substring
        self._link = array("i", [NONE])  # the state of the longest suffix that ends at more places
        self._end = array("i", [NONE])  # index of the last token of one occurrence
        self._token = array("i", [NONE])  # the first edge
        self._target = array("i", [NONE])
        self._more: dict[int, dict[int, int]] = {}  # state → token → target: the edges after the first

    def match(self) -> tuple[int, int]:
        """Length of the longest suffix that also occurs earlier, and the index of that occurrence's last token.

        (0, −1) if there is none. The two occurrences may overlap.
        """
        state = max(self._link[self._last], ROOT)
        return self._length[state], self._end[state]

    def extend(self, token: int) -> None:
        """Add a token to the text; amortised constant time."""
        self._refresh()
        firsts, targets, link = self._token, self._target, self._link
        new = self._add(self._length[self._last] + 1, self.known, ROOT)
        state, target = self._last, NONE
        while state != NONE:
            first = firsts[state]
            if first == token:
                target = targets[state]
                break
            if first == NONE:
                firsts[state], targets[state] = token, new
            else:
                target = self._more.setdefault(state, {}).setdefault(token, new)
                if target != new:
                    break
            state = link[state]
        if state != NONE:
            link[new] = self._exact(state, token, target)
        self._last = new
        self.known += 1

    def _refresh(self) -> None:
        """Move the longest matches' ends to the newest token.

        Done only when a further token comes: until then the newest token is the text's end, no earlier occurrence.
        """
        state = self._link[self._last]
        for _ in range(FRESH_LINKS):
            if state <= ROOT:
                return
            self._end[state] = self.known - 1
            state = self._link[state]

    def _add(self, length: int, end: int, link: int) -> int:
        self._length.append(length)
        self._end.append(end)
        self._link.append(link)
        self._token.append(NONE)
        self._target.append(NONE)
        return len(self._length) - 1

    def _exact(self, state: int, token: int, target: int) -> int:
        """The state whose longest substring is that of ``state`` and ``token``, split off from ``target`` if need be.

        The longer substrings of ``target`` do not end at the newest token; this one does.
        """
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._add(length, self._end[target], self._link[target])
        self._token[clone], self._target[clone] = self._token[target], self._target[target]
        if target in self._more:
            self._more[clone] = self._more[target].copy()
        self._link[target] = clone
        while state != NONE:
            if self._token[state] == token:
                if self._target[state] != target:
                    break
                self._target[state] = clone
            else:
                edges = self._more[state]
                if edges[token] != target:
                    break
                edges[token] = clone
            state = self._link[state]
        return clone


class NGram(Draft):
    """Copies from the sequence's own text, as many tokens as matched.

    Of a text longer than ``max_tokens`` the last part is looked at, at least half of ``max_tokens``.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        assert max_tokens >= 2
        self.max_tokens = max_tokens
        self._states: dict[int, SuffixAutomaton] = {}

    def propose(self, rows: Seq[DraftRow], *, sampled: bool) -> Proposal:
        """See ``Draft``. Nothing is drawn, so there are no distributions."""
        return Proposal([self._continuation(row.seq, row.gamma) for row in rows])

    def follow(self, seqs: Seq[Sequence]) -> None:
        """See ``Draft``."""
        for seq in seqs:
            self._take_in(seq, seq.num_committed)

    def release(self, seq_id: int) -> None:
        """See ``Draft``."""
        self._states.pop(seq_id, None)

    def bytes(self, length: int) -> int:
        """See ``Draft``. Host memory."""
        return BYTES_PER_SEQUENCE + BYTES_PER_TOKEN * min(length, self.max_tokens)

    def _continuation(self, seq: Sequence, gamma: int) -> list[int]:
        matched, end = self._take_in(seq, len(seq.ids)).match()
        if matched < MIN_MATCH:
            return []
        count = min(gamma, matched)
        # At the end of the text the copy goes on in what it has copied: a text that repeats goes on repeating.
        return list(islice(cycle(seq.ids[end + 1 : end + 1 + count]), count))

    def _take_in(self, seq: Sequence, length: int) -> SuffixAutomaton:
        """The sequence's automaton, with its first ``length`` tokens."""
        state = self._states.get(seq.id)
        assert state is None or state.known <= len(seq.ids), f"sequence {seq.id} has become shorter"
        start = self._start(length)
        if state is None or state.start < start:
            state = self._states[seq.id] = SuffixAutomaton(start)  # the old one goes before the new one grows
        for token in seq.ids[state.known : length]:
            state.extend(token)
        return state

    def _start(self, length: int) -> int:
        """First token looked at: it moves by half of ``max_tokens`` at a time, so that starting anew is rare.

        A function of the length alone: a state that catches up equals one that was always up to date.
        """
        half = self.max_tokens // 2
        return -(-max(length - self.max_tokens, 0) // half) * half
