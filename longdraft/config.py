"""Frozen settings and their validation; nothing else.

``SamplingParams`` belongs to one request, ``EngineConfig`` to one engine. Names are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real

from longdraft.errors import InvalidValueError

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_LENGTH = 16, 256


def as_int(what: str, value: object, low: int, high: int, fix: str = "") -> int:
    """``value`` (an int or NumPy integer, not a bool) in [low, high]; ``InvalidValueError`` otherwise."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidValueError(what, value, f"must be an integer from {low} to {high}", fix)
    return int(value)


def as_float(what: str, value: object, low: float, high: float) -> float:
    """``value`` (a number, not a bool) in [low, high], which no NaN is; ``InvalidValueError`` otherwise."""
    if not isinstance(value, Real) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidValueError(what, value, f"must be a number from {low:g} to {high:g}")
    return float(value)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded.

    The filters act in this order: temperature, ``min_p``, ``top_k``, ``top_p`` (renormalising after each).
    ``temperature=0`` is greedy. Sampling is coupled (arXiv:2408.07978): the token drawn at a position is a pure
    function of (seed, position, distribution), so a seeded request repeats whatever it is batched with.
    ``stop_token_ids`` and the model's end-of-sequence tokens end a request and stay in its ``token_ids``. ``stop``
    strings end it, too, wherever token borders lie; the text ends before them. ``logprobs=n`` returns for each token
    its own log-probability and those of the ``n`` most probable ones.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 16  # None: up to the context limit; larger values are cut to it
    seed: int | None = None  # None: drawn from the engine's seed and the request's number
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # a string, or up to 16
    logprobs: int | None = None  # 0 to 20

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "temperature": as_float("temperature", self.temperature, 0.0, 100.0),
            "top_k": as_int("top_k", self.top_k, -1, 2**31 - 1),
            "top_p": as_float("top_p", self.top_p, 0.0, 1.0),
            "min_p": as_float("min_p", self.min_p, 0.0, 1.0),
            "stop_token_ids": _token_ids(self.stop_token_ids),
        }
        checked["stop"] = _stop_strings(self.stop)
        if self.logprobs is not None:
            checked["logprobs"] = as_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if checked["top_p"] == 0:
            raise InvalidValueError("top_p", self.top_p, "must be above 0", "For the best token alone: temperature=0.")
        if self.max_tokens is not None:
            fix = "Use None to decode up to the context limit."
            checked["max_tokens"] = as_int("max_tokens", self.max_tokens, 1, 2**63 - 1, fix)
        if self.seed is not None:
            checked["seed"] = as_int("seed", self.seed, 0, MAX_SEED)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidValueError("ignore_eos", self.ignore_eos, "must be True or False")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether every token is the most probable one (the post-filter distribution is one-hot)."""
        return self.temperature == 0


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    for string in strings:
        if not isinstance(string, str) or not 0 < len(string) <= MAX_STOP_LENGTH:
            raise InvalidValueError("stop", string, f"must be strings of 1 to {MAX_STOP_LENGTH} characters")
    if len(strings) > MAX_STOPS:
        raise InvalidValueError("stop", len(strings), f"may hold at most {MAX_STOPS} strings")
    return strings


SAMPLING_RULES = ("coupled", "maximal")


@dataclass(frozen=True)
class DraftConfig:
    """What proposes tokens: whose weights, which part of the KV cache they read, and how many tokens at a time.

    ``kv`` names a selection (``longdraft.drafts.registry`` lists them), ``budget`` is its size in tokens per KV head,
    sinks included. ``gamma`` is the most tokens proposed per verify pass. ``sampling_rule`` is ``coupled`` (output
    equal to plain decoding, token for token) or ``maximal`` (the target's exact law, but ids depend on ``gamma``).
    """

    weights: str = "target"
    kv: str = "streaming_llm"
    budget: int = 512
    gamma: int = 4
    sampling_rule: str = "coupled"

    def __post_init__(self) -> None:
        if self.weights != "target":
            raise InvalidValueError("weights", self.weights, "must be 'target' (the model's own)")
        object.__setattr__(self, "budget", as_int("budget", self.budget, 1, 2**31 - 1))
        object.__setattr__(self, "gamma", as_int("gamma", self.gamma, 1, 64))
        if self.sampling_rule not in SAMPLING_RULES:
            limit = f"must be one of {', '.join(SAMPLING_RULES)}"
            raise InvalidValueError("sampling_rule", self.sampling_rule, limit)


def _token_ids(ids: object) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise InvalidValueError("stop_token_ids", ids, "must be a sequence of token ids")
    return tuple(as_int("stop_token_ids", token, 0, 2**31 - 1) for token in ids)


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of one engine. ``num_pages * block_size`` tokens of KV; no request may grow past ``max_model_len``."""

    max_model_len: int
    num_pages: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    block_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        as_int("max_model_len", self.max_model_len, 2, 2**31 - 1)
        as_int("num_pages", self.num_pages, 1, 2**31 - 1)
        as_int("max_num_seqs", self.max_num_seqs, 1, 65536)
        as_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20)
        as_int("block_size", self.block_size, 1, 4096)
        as_int("seed", self.seed, 0, MAX_SEED)

    @property
    def max_tokens_per_request(self) -> int:
        """Longest prompt + output of one request: the context limit, or the whole KV pool where that is smaller."""
        return min(self.max_model_len, self.num_pages * self.block_size)
