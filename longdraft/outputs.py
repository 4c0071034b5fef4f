"""What a finished request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. ``finish_reason``: stop (end token), length, abort or error (``error`` says what happened)."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    error: str | None = None


@dataclass(frozen=True)
class RequestStats:
    """Figures of one request. Seconds are wall time of the steps it took part in, shared steps counted whole."""

    prompt_tokens: int
    output_tokens: int
    prefill_s: float
    decode_s: float
    preemptions: int

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first (which the prompt's own pass gives) per second of decoding; 0 before any."""
        return (self.output_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and what came of it. ``exactness`` is the tier of the promise that its output is repeatable."""

    prompt: str | None
    prompt_token_ids: list[int] = field(repr=False)  # thousands of numbers
    outputs: list[CompletionOutput]
    stats: RequestStats
    exactness: str

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.outputs[0].text
