"""How one request is decoded: ``SamplingParams``, in vLLM's names, every value checked where it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from longdraft.config import MAX_SEED, as_float, as_int
from longdraft.errors import InvalidValueError

MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH = 1024, 256
MAX_N = 128
MAX_ID = 2**31 - 1
BadWord = str | tuple[int, ...]
LogitsProcessor = Callable[..., Any]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Names and meanings are vLLM's.

    A token's distribution comes from the logits in this order: ``allowed_token_ids``, ``bad_words``, ``min_tokens``,
    ``logit_bias``, penalties, ``logits_processors``, ``temperature``, ``min_p``, ``top_k``, ``top_p`` (renormalising
    after each). ``temperature=0`` is greedy. Each of these is a function of the logits and of the tokens before, so
    that it acts under speculation exactly as without.

    Sampling is coupled (arXiv:2408.07978): the token drawn at a position is a pure function of (seed, position,
    distribution), so a seeded request repeats whatever it is batched with.

    ``repetition_penalty`` counts the tokens of prompt and output; ``presence_penalty`` and ``frequency_penalty`` those
    of the output. ``bad_words`` are strings, or sequences of token ids, of which the last token may not complete the
    word; a string is forbidden with and without a space before it. Before ``min_tokens`` tokens neither stop token nor
    end-of-sequence token is drawn, and no stop string counts.

    ``logits_processors`` are functions of ``(output_ids, logits)`` or ``(prompt_ids, output_ids, logits)`` that return
    logits ``[V]``. They are called for each position with the tokens before it, drafted ones included, and must be
    pure: they are called for drafts, too.

    ``stop_token_ids`` and the model's end-of-sequence tokens end a request and stay in its ``token_ids``. ``stop``
    strings end it, too, wherever token borders lie; the text ends before them, unless ``include_stop_str_in_output``.

    ``logprobs=k`` returns for each token its own log-probability and those of the ``k`` most probable ones, before all
    of the above; ``prompt_logprobs`` the same for the prompt. ``n`` completions have seeds of their own, of which the
    first is ``seed``. ``truncate_prompt_tokens=k`` keeps the last ``k`` tokens of the prompt, −1 as many as fit.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Any = ()  # a mapping of token id to −100…100; kept as sorted pairs
    bad_words: tuple[BadWord, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = 16  # None: up to the context limit; larger values are cut to it
    seed: int | None = None  # None: drawn from the engine's seed and the request's number
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # a string, or up to 16
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # 0 to 20
    prompt_logprobs: int | None = None  # 0 to 20
    truncate_prompt_tokens: int | None = None
    structured_outputs: None = None  # refused by name, rather than ignored

    def __post_init__(self) -> None:
        for field in fields(self):
            check = _CHECKS.get(field.name)
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, check(field.name, value) if check else value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidValueError("min_tokens", self.min_tokens, f"must be at most max_tokens = {self.max_tokens}")

    @property
    def greedy(self) -> bool:
        """Whether every token is the most probable one (the post-filter distribution is one-hot)."""
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether some tokens are cut off before drawing."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        """Whether a penalty counts earlier tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed before temperature and filters."""
        fixed = self.logit_bias or self.bad_words or self.allowed_token_ids is not None
        return bool(fixed or self.logits_processors or self.min_tokens or self.penalised)


def _integer(low: int, high: int, fix: str = "") -> Callable[[str, object], int]:
    return lambda name, value: as_int(name, value, low, high, fix)


def _number(low: float, high: float) -> Callable[[str, object], float]:
    return lambda name, value: as_float(name, value, low, high)


def _or_none(check: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidValueError(name, value, "must be True or False")
    return value


def _top_p(name: str, value: object) -> float:
    number = as_float(name, value, 0.0, 1.0)
    if number == 0:
        raise InvalidValueError(name, value, "must be above 0", "For the best token alone: temperature=0.")
    return number


def _repetition(name: str, value: object) -> float:
    number = as_float(name, value, 0.0, 100.0)
    if number < 0.01:
        raise InvalidValueError(name, value, "must be at least 0.01 (1 is no penalty)")
    return number


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Iterable):
        raise InvalidValueError(name, ids, "must be a sequence of token ids")
    return tuple(as_int(name, token, 0, MAX_ID) for token in ids)


def _allowed(name: str, ids: object) -> tuple[int, ...]:
    allowed = _token_ids(name, ids)
    if not allowed:
        raise InvalidValueError(name, ids, "must hold at least one token id", "None allows all.")
    return tuple(sorted(set(allowed)))


def _bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """A mapping, or pairs; keys may be strings of digits, as JSON makes them."""
    if value is None:
        return ()
    limit = "must map token ids to numbers from -100 to 100"
    try:
        pairs = dict(value.items() if isinstance(value, Mapping) else value)  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        raise InvalidValueError(name, value, limit) from error
    keys = {k: int(k) if isinstance(k, str) and k.isdecimal() and len(k) <= 10 else k for k in pairs}
    checked = {as_int(name, keys[k], 0, MAX_ID): as_float(name, v, -100.0, 100.0) for k, v in pairs.items()}
    if len(checked) < len(pairs):
        raise InvalidValueError(name, value, "must name each token id once")
    return tuple(sorted(checked.items()))


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    for string in strings:
        if not isinstance(string, str) or not 0 < len(string) <= MAX_STOP_LENGTH:
            raise InvalidValueError(name, string, f"must be strings of 1 to {MAX_STOP_LENGTH} characters")
    if len(strings) > MAX_STOPS:
        raise InvalidValueError(name, len(strings), f"may hold at most {MAX_STOPS} strings")
    return strings


def _bad_words(name: str, value: object) -> tuple[BadWord, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidValueError(name, value, "must be a list of strings or of sequences of token ids")
    words = [word if isinstance(word, str) else _token_ids(name, word) for word in value]
    for word in words:
        if not 0 < len(word) <= MAX_BAD_WORD_LENGTH:
            raise InvalidValueError(name, word, f"must hold 1 to {MAX_BAD_WORD_LENGTH} characters or token ids")
    if len(words) > MAX_BAD_WORDS:
        raise InvalidValueError(name, len(words), f"may hold at most {MAX_BAD_WORDS} words")
    return tuple(words)


def _processors(name: str, value: object) -> tuple[LogitsProcessor, ...]:
    functions = tuple(value) if isinstance(value, Iterable) else (value,)
    for function in functions:
        if not callable(function):
            raise InvalidValueError(name, function, "must be functions of (output_ids, logits)")
    return functions


def _truncation(name: str, value: object) -> int:
    number = as_int(name, value, -1, MAX_ID)
    if number == 0:
        raise InvalidValueError(name, value, "must be -1 or at least 1")
    return number


def _unsupported(name: str, value: object) -> None:
    if value is not None:
        fix = "Leave it out and check the text yourself, or use vLLM with LongDraft's plug-in."
        raise InvalidValueError(name, value, "is not supported", fix)


def _none_is_empty(check: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    return lambda name, value: () if value is None else check(name, value)


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "n": _integer(1, MAX_N),
    "temperature": _number(0.0, 100.0),
    "top_k": _integer(-1, MAX_ID),
    "top_p": _top_p,
    "min_p": _number(0.0, 1.0),
    "repetition_penalty": _repetition,
    "presence_penalty": _number(-2.0, 2.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "logit_bias": _bias,
    "bad_words": _none_is_empty(_bad_words),
    "allowed_token_ids": _or_none(_allowed),
    "logits_processors": _none_is_empty(_processors),
    "min_tokens": _integer(0, MAX_ID),
    "max_tokens": _or_none(_integer(1, 2**63 - 1, "Use None to decode up to the context limit.")),
    "seed": _or_none(_integer(0, MAX_SEED)),
    "ignore_eos": _flag,
    "stop_token_ids": _none_is_empty(_token_ids),
    "stop": _none_is_empty(_strings),
    "include_stop_str_in_output": _flag,
    "skip_special_tokens": _flag,
    "logprobs": _or_none(_integer(0, MAX_LOGPROBS)),
    "prompt_logprobs": _or_none(_integer(0, MAX_LOGPROBS)),
    "truncate_prompt_tokens": _or_none(_truncation),
    "structured_outputs": _unsupported,
}


_FROM_FILE = {"max_new_tokens": "max_tokens"} | {
    name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
}


def from_generation_config(settings: Mapping[str, object]) -> SamplingParams:
    """What a request gets that says nothing of sampling: the settings of a generation_config.json, else the defaults.

    As in vLLM, but ``do_sample: false`` is greedy. Raises ``InvalidValueError`` for values out of range.
    """
    found = {ours: settings[theirs] for theirs, ours in _FROM_FILE.items() if settings.get(theirs) is not None}
    if settings.get("do_sample") is False:
        found["temperature"] = 0.0
    return SamplingParams(**found)  # type: ignore[arg-type]
