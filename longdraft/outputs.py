"""What a finished request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field


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
