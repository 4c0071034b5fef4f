"""Plain data that flows through the engine. No device tensors, no computing.

Anything may read these records; only the scheduler writes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest
from typing import TYPE_CHECKING

from longdraft.config import AutoDraft, DraftConfig
from longdraft.outputs import ControlStats, Logprob
from longdraft.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch


class Status(Enum):
    """Where a sequence is: queued (new or preempted), holding KV pages, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class SequenceStats:
    """Counters of one request. Seconds are the wall time of the steps it took part in, shared steps counted whole."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0  # the part of decode_s spent on proposing
    prefill_tokens: int = 0  # tokens fed as prompt, recomputation after preemption included
    preemptions: int = 0
    decode_tokens: int = 0  # tokens that decode steps gave; those that end a prompt or a refill are not among them
    verify_passes: int = 0  # decode steps, with or without proposals
    rejections: int = 0  # passes in which a proposed token was refused
    drafted: list[int] = field(default_factory=list)  # by position in the block: how often a token was proposed there
    accepted: list[int] = field(default_factory=list)  # and how often it was accepted
    control: ControlStats = field(default_factory=ControlStats)  # what online control chose; empty without it

    def count(self, drafted: int, accepted: int, tokens: int) -> None:
        """Note one verify pass that gave ``tokens``: ``drafted`` proposals, the first ``accepted`` of which held."""
        self.verify_passes += 1
        self.decode_tokens += tokens
        self.rejections += accepted < drafted
        missing = drafted - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        for i in range(drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < accepted


def sum_by_position(lists: Iterable[Seq[int]]) -> list[int]:
    """Counts by position in a block, added up over requests whose blocks were of different lengths."""
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


@dataclass(eq=False)  # an identity, not a value
class Sequence:
    """One request: its token ids and how far its KV is final.

    ``ids`` is prompt + output. ``num_committed`` is the one length there is: tokens whose K/V are in the store and
    final. A decoding sequence has exactly one token (the newest) that is not committed yet.
    """

    id: int
    ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    max_total: int  # prompt + output may not exceed this many tokens
    draft: DraftConfig | AutoDraft | None = None  # None: plain decoding
    stop_ids: frozenset[int] = frozenset()  # tokens that end it
    source: Sequence | None = None  # one with the same prompt, whose cached prompt it shares once that is filled
    held: bool = False  # does not run; keeps its pages while nobody else needs them
    num_committed: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None  # stop | length | abort | error
    error: str | None = None
    stop_text: str | None = None  # the output's text, where a stop string ended it
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # one per output token, if asked for
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # of the prompt's second token and on
    stats: SequenceStats = field(default_factory=SequenceStats)

    @property
    def output_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.ids[self.num_prompt :]

    @property
    def num_pending(self) -> int:
        """Tokens known but not committed: 1 while decoding, more while (re)filling the cache."""
        return len(self.ids) - self.num_committed

    @property
    def decoding(self) -> bool:
        """Whether only the newest token is left to feed, and that token was generated."""
        return self.num_pending == 1 and len(self.ids) > self.num_prompt

    @property
    def own_choice(self) -> Choice:
        """What its own draft does at every step; nothing where it names none."""
        return Choice(self.draft, (self.draft,)) if isinstance(self.draft, DraftConfig) else Choice()


@dataclass(frozen=True)
class Place:
    """Where a token is drawn: after the ids of ``seq`` and the tokens ``drafted`` for it.

    All that a token's distribution depends on besides the logits, and all that its noise depends on.
    """

    seq: Sequence
    drafted: Seq[int] = ()

    @property
    def position(self) -> int:
        """The index that the token will have in its sequence."""
        return len(self.seq.ids) + len(self.drafted)

    @property
    def seed(self) -> int:
        """The sequence's seed."""
        return self.seq.seed

    @property
    def temperature(self) -> float:
        """The sequence's temperature."""
        return self.seq.params.temperature

    @property
    def num_output(self) -> int:
        """Output tokens before it."""
        return self.position - self.seq.num_prompt

    def last(self, n: int) -> list[int]:
        """The ``n`` tokens before it, or all of them where there are fewer."""
        have = [*self.seq.ids[-n:], *self.drafted] if n else []
        return have[len(have) - min(n, len(have)) :]


@dataclass(frozen=True)
class Choice:
    """Who proposes for a row in one step (γ in its config), who is told of the pass, whose state is dropped."""

    draft: DraftConfig | None = None
    told: tuple[DraftConfig, ...] = ()
    dropped: tuple[DraftConfig, ...] = ()


@dataclass(frozen=True)
class Row:
    """One sequence's share of a step: feed ``num_tokens`` of its pending tokens, then the tokens of ``proposal``.

    Tokens are drawn after the last ``num_logits`` of all these: none in the middle of a prompt, one for plain decoding
    and at the end of a prompt, 1…γ+1 when proposals are verified. ``room`` more tokens have pages reserved. After the
    first ``num_scored`` tokens logits are wanted to score the prompt's next token.
    """

    seq: Sequence
    num_tokens: int
    num_logits: int
    num_scored: int = 0
    room: int = 0
    proposal: tuple[int, ...] = ()
    choice: Choice = Choice()

    @property
    def tokens(self) -> list[int]:
        """What is fed, in order."""
        start = self.seq.num_committed
        return [*self.seq.ids[start : start + self.num_tokens], *self.proposal]


@dataclass(frozen=True)
class Batch:
    """The rows of one step, in order; pages for them are already reserved."""

    rows: list[Row]
    prefill: bool
    draft_s: dict[DraftConfig, float] = field(default_factory=dict)  # spent on proposing, by draft (with γ = 1)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return sum(row.num_tokens + len(row.proposal) for row in self.rows)


@dataclass(frozen=True)
class Proposal:
    """A draft's tokens for some rows, ragged; under the maximal rule with the distributions they were drawn from."""

    tokens: list[list[int]]
    log_q: torch.Tensor | None = None  # [sum of lengths, V] log-probabilities, rows in order


@dataclass(frozen=True)
class Round:
    """What a decode step did for one row: of up to ``asked`` proposed tokens ``accepted`` stood, ``tokens`` came."""

    row: Row
    asked: int
    accepted: int
    tokens: int


@dataclass(frozen=True)
class StepOutput:
    """What one step gave one sequence: 1…γ+1 new tokens (already cut at a stop) and, at its end, the reason."""

    seq: Sequence
    tokens: list[int]
    finish_reason: str | None = None
