"""``auto``: how much each row drafts at every step, by LongDraft's online control over vLLM's rows. Imports no vLLM.

The control is ``planner/control.py``, and so are its reasons. Here a row of vLLM becomes a sequence of LongDraft's, of
which only lengths count, and a step what came of it: it lasts from one call of the proposer to the next, with all that
vLLM does in between.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count

from longdraft.config import AutoDraft, DraftConfig, draft_key
from longdraft.core import Choice, Round, Status
from longdraft.core import Row as EngineRow
from longdraft.core import Sequence as EngineSequence
from longdraft.integrations.vllm.rows import Row
from longdraft.outputs import ControlStats
from longdraft.planner.control import Controller
from longdraft.planner.prices import Prices


class Control:
    """Of one kind of draft, over all requests. Reads no clock."""

    def __init__(self, prices: Prices, draft: DraftConfig, prior: float, most: int) -> None:
        """``prior``: how often its tokens are assumed to stand before any was seen; ``most``: the largest γ."""
        self._draft, self._free = draft_key(draft), AutoDraft(gamma=most)
        self._controller = Controller(prices, {draft: prior}, most)
        self._numbers = count()
        self._seqs: dict[str, EngineSequence] = {}
        self._last: dict[str, tuple[Choice, int]] = {}  # what rows drafted before the step under way
        self._began = self._draft_s = 0.0
        self._told: dict[str, ControlStats] = {}

    def observe(self, step: Mapping[str, Sequence[int]], alive: Collection[str], now: float) -> None:
        """What a step that ends ``now`` gave all its rows, by request; those in their prompts got nothing.

        A step with prompts in it says what stood, not how long rows take. ``alive``: requests that may come again.
        """
        last, self._last = self._last, {}
        rounds = [self._round(name, tokens, *last[name]) for name, tokens in step.items() if tokens and name in last]
        if rounds:
            alone = all(tokens and name in last for name, tokens in step.items())
            drafted = {self._draft: self._draft_s} if any(r.row.room for r in rounds) else {}
            self._controller.observe(rounds, now - self._began if alone else None, drafted)
        for name in self._seqs.keys() - set(alive):
            self._controller.release(self._seqs.pop(name).id)
        self._began = now

    def choose(self, rows: Sequence[Row]) -> list[int]:
        """How many tokens each row drafts now. Those that somebody named a γ for draft what they want."""
        seqs = [self._sequence(row) for row in rows]
        choices = self._controller.choose(seqs)
        wanted = [choice.draft.gamma if choice.draft else 0 for choice in choices]
        gammas = [min(row.wanted, gamma) for row, gamma in zip(rows, wanted, strict=True)]
        self._last = {row.request: pair for row, pair in zip(rows, zip(choices, gammas, strict=True), strict=True)}
        self._draft_s = 0.0
        return gammas

    def took(self, draft_s: float) -> None:
        """Seconds that drafting took, of what was chosen last."""
        self._draft_s = draft_s

    def forget(self) -> None:
        """The step under way is not what was chosen."""
        self._last = {}

    def news(self, reader: str) -> ControlStats:
        """What was chosen, and came of it, since this ``reader`` last asked."""
        now = ControlStats.total([self._controller.stats])
        before = self._told.get(reader, ControlStats())
        self._told[reader] = now
        return ControlStats.total([now]).add(before, -1)

    def _sequence(self, row: Row) -> EngineSequence:
        seq = self._seqs.get(row.request)
        if seq is None or len(seq.ids) != row.known:  # a new one, or one that had lost its pages
            if seq is not None:
                self._controller.release(seq.id)
            ids = [0] * row.known  # their number counts
            seq = EngineSequence(next(self._numbers), ids, 0, row.params, 0, row.end, status=Status.RUNNING)
            self._seqs[row.request] = seq
        own = replace(self._draft, gamma=row.wanted) if row.wanted and not row.free else None
        seq.draft = self._free if row.free else own
        seq.num_committed = row.known - 1
        return seq

    def _round(self, name: str, tokens: Sequence[int], choice: Choice, drafted: int) -> Round:
        seq, accepted = self._seqs[name], len(tokens) - 1
        seq.ids.extend(tokens)
        seq.num_committed += len(tokens)
        seq.stats.count(drafted, accepted, len(tokens))
        row = EngineRow(seq, 1, 1 + drafted, room=drafted, proposal=(0,) * drafted, choice=choice)
        return Round(row, drafted, accepted, len(tokens))


def sentence(stats: ControlStats) -> str:
    """A log line: what was chosen of a draft's rounds, and what it gained as predicted and as it came."""
    shares = ", ".join(f"{f'γ {gamma}' if gamma else draft} {share:.0%}" for draft, gamma, share in stats.shares)
    why = ", ".join(f"{reason} {count:,}" for reason, count in stats.off.most_common() if count)
    speed = f"predicted {stats.predicted_speedup:.2f} x plain decoding, realised {stats.realised_speedup:.2f} x"
    rounds = stats.rounds.total() + stats.off.total()
    return f"{rounds:,} rounds of rows: {shares}{f' ({why})' if why else ''}; {speed}"
