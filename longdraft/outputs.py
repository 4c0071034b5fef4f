"""What a finished request gives back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability under the model, and its rank among all tokens (1 is the best)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. ``finish_reason``: stop (end token or stop string), length, abort or error (see ``error``).

    ``text`` ends before a stop string; ``token_ids`` and ``logprobs`` end with the token that completed it.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    error: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # one per token, if asked for


@dataclass
class ControlStats:
    """What online control chose for some rows, what it expected of that, and what came of it.

    Sums over decode steps, each counted whole for every row that took part. Plain seconds are what plain decoding of
    the same batch was predicted to take for the same tokens.
    """

    rounds: Counter[tuple[str, int]] = field(default_factory=Counter)  # (draft, γ) → how often that was chosen
    off: Counter[str] = field(default_factory=Counter)  # why nothing was proposed → how often
    seconds: float = 0.0
    plain_s: float = 0.0  # for the tokens that came
    expected_s: float = 0.0
    expected_plain_s: float = 0.0  # for the tokens that were expected

    def note(self, chosen: tuple[str, int] | str, got: tuple[float, float], hoped: tuple[float, float]) -> None:
        """Count a step: (draft, γ) or why nothing was proposed; (seconds, plain seconds) as they were, as expected."""
        (self.off if isinstance(chosen, str) else self.rounds)[chosen] += 1
        self.seconds += got[0]
        self.plain_s += got[1]
        self.expected_s += hoped[0]
        self.expected_plain_s += hoped[1]

    def add(self, other: ControlStats, sign: int = 1) -> ControlStats:
        """Add ``other``, or take it away (``sign=-1``); itself."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, Counter):
                mine.update({key: sign * count for key, count in theirs.items()})
            else:
                setattr(self, item.name, mine + sign * theirs)
        return self

    @classmethod
    def total(cls, parts: Iterable[ControlStats]) -> ControlStats:
        """All of ``parts`` together; they stay as they are."""
        out = cls()
        for part in parts:
            out.add(part)
        return out

    @property
    def predicted_speedup(self) -> float:
        """Over plain decoding, as expected when it was chosen; 1 before any step."""
        return self.expected_plain_s / self.expected_s if self.expected_s > 0 else 1.0

    @property
    def realised_speedup(self) -> float:
        """Over the predicted time of plain decoding; 1 before any step."""
        return self.plain_s / self.seconds if self.seconds > 0 else 1.0

    @property
    def eq2_residual(self) -> float:
        """Time per token, T_round / Ω of MagicDec's Eq. 2: realised over predicted, less 1."""
        return self.predicted_speedup / self.realised_speedup - 1 if self.plain_s > 0 else 0.0

    @property
    def shares(self) -> list[tuple[str, int, float]]:
        """(draft, γ, its share of all rounds), the most frequent first; (``off``, 0, …) for plain steps."""
        counts = Counter({key: count for key, count in self.rounds.items() if count})
        counts["off", 0] = self.off.total()
        return [(*key, count / counts.total()) for key, count in counts.most_common() if count]

    def report(self) -> dict[str, object]:
        """As a JSON object."""
        return {
            "chosen": [{"draft": draft, "gamma": gamma, "share": share} for draft, gamma, share in self.shares],
            "off": {reason: count for reason, count in self.off.most_common() if count},
            "predicted_speedup": self.predicted_speedup,
            "realised_speedup": self.realised_speedup,
            "eq2_residual": self.eq2_residual,
        }


@dataclass(frozen=True)
class RequestStats:
    """Figures of one request. Seconds are wall time of the steps it took part in, shared steps counted whole."""

    prompt_tokens: int
    output_tokens: int
    prefill_s: float
    decode_s: float
    preemptions: int
    decode_tokens: int = 0  # tokens that decode steps gave; one that ends a prompt or a refill is not among them
    draft_s: float = 0.0  # the part of decode_s spent on proposing
    verify_passes: int = 0  # decode steps, with or without proposals
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    control: ControlStats | None = None  # with draft="auto"

    @property
    def drafted(self) -> int:
        """Tokens proposed."""
        return sum(self.drafted_by_position)

    @property
    def accepted(self) -> int:
        """Proposed tokens that were accepted."""
        return sum(self.accepted_by_position)

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each position in a block, the share of tokens proposed there that was accepted."""
        return [a / d for a, d in zip(self.accepted_by_position, self.drafted_by_position, strict=True)]

    @property
    def tokens_per_verify(self) -> float:
        """Mean tokens per pass of the target, its own one included (1 is plain decoding); 0 before any."""
        return self.decode_tokens / self.verify_passes if self.verify_passes else 0.0

    @property
    def verify_s(self) -> float:
        """The part of decode_s spent on the target's passes and the rest of the step."""
        return self.decode_s - self.draft_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Decoded tokens per second of decoding; 0 before any."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and what came of it. ``exactness`` is the tier of the promise that its output is repeatable."""

    prompt: str | None
    prompt_token_ids: list[int] = field(repr=False)  # thousands of numbers
    outputs: list[CompletionOutput]
    stats: RequestStats
    exactness: str
    prompt_logprobs: list[dict[int, Logprob] | None] | None = field(
        default=None, repr=False
    )  # None for the first token

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.outputs[0].text


@dataclass(frozen=True)
class StreamOutput:
    """What one step added to a streamed completion.

    ``text`` is the new text, never part of a character nor of a stop string that ends the output, and may be empty
    while either may be under way; ``token_ids`` are the new tokens (1…γ+1 of them, none when a request is aborted).
    Joined, the texts of a completion are its whole text. The last output of a request has ``finish_reason`` and, once
    all its completions are done, ``result``.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    error: str | None = None
    result: RequestOutput | None = None
