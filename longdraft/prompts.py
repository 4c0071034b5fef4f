"""The forms a prompt may have, and how they become token ids. Knows no engine and no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.errors import InvalidValueError
from longdraft.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]  # arrays and tensors with one dimension count as sequences


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's token ids, and its text where it was given as text."""

    ids: list[int]
    text: str | None = None


def as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several → several. Integers alone are one prompt."""
    prompts = _to_list(prompts)
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise InvalidValueError("prompts", prompts, "must be text, token ids, or a list of these")
    prompts = list(prompts)
    return [prompts] if prompts and all(isinstance(p, Integral) for p in prompts) else prompts


def encode(prompt: Prompt, tokenizer: Tokenizer | None) -> EncodedPrompt:
    """Token ids of a prompt: text, ids, or a mapping with ``prompt`` or ``prompt_token_ids``.

    Raises ``InvalidValueError`` for anything else, and for text without a tokenizer or without a token.
    """
    may_be_text = True
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise InvalidValueError("prompt", prompt, "as a mapping must hold 'prompt' or 'prompt_token_ids' alone")
        may_be_text = "prompt" in prompt
        (prompt,) = prompt.values()
    if isinstance(prompt, str) and may_be_text:
        ids = require(tokenizer).encode(prompt)
        if not ids:
            raise InvalidValueError("prompt", prompt, "must not be empty: this model has no token to start from")
        return EncodedPrompt(ids, prompt)
    ids = _to_list(prompt)
    if isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Sequence):
        raise InvalidValueError("prompt", prompt, "must be text or a sequence of token ids")
    return EncodedPrompt([int(i) if isinstance(i, Integral) and not isinstance(i, bool) else i for i in ids])


def require(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer; ``InvalidValueError`` where there is none."""
    if tokenizer is None:
        fix = "Name a folder with a tokenizer.json as the tokenizer, or give prompts as token ids."
        raise InvalidValueError("tokenizer", None, "is needed for text, and the model comes without one", fix)
    return tokenizer


def one_each(
    params: SamplingParams | Iterable[SamplingParams] | None, n: int, default: SamplingParams
) -> list[SamplingParams]:
    """Sampling parameters for each of ``n`` prompts: one for all, one each, or the default."""
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * n
    several = list(params) if isinstance(params, Iterable) else [params]
    if len(several) != n or not all(isinstance(p, SamplingParams) for p in several):
        limit = f"must be one SamplingParams, or one for each of {n} prompts"
        raise InvalidValueError("sampling_params", params, limit)
    return several


def _to_list(value: Any) -> Any:  # noqa: ANN401 - anything a caller may pass
    """NumPy arrays and torch tensors as lists; all else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
