"""Frozen settings of drafts and engines, and the checks that all settings share. Names are vLLM's."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Integral, Real
from os import PathLike
from pathlib import PurePath
from typing import ClassVar

from longdraft.errors import InvalidValueError

MAX_SEED = 2**63 - 1
MAX_GAMMA = 64  # tokens proposed per verify pass
DEFAULT_DRAFT = "default"  # what drafts where nobody says: ``AutoDraft(exact=True)``


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


INT8 = "@int8"
TARGETS = ("target", f"target{INT8}")
SAMPLING_RULES = ("coupled", "maximal")
LAYERS = re.compile("all|(every|first):[1-9][0-9]{0,3}")


@dataclass(frozen=True)
class DraftConfig:
    """What proposes tokens: whose weights, which part of the KV cache they read, and how many tokens at a time.

    ``weights``: ``target`` (the model's own), ``target@int8`` (8-bit copies of them: half the bytes, and lossless since
    the target verifies), ``ngram`` (none: earlier occurrences of the text's last tokens), or the path or name of a
    small model with the same tokenizer or of a SPIRe draft made for the target (``PATH@int8``: with 8-bit copies of
    its layers), which says itself what it reads. ``layers`` leaves layers of the target out: ``every:n`` runs each n-th
    and the last, ``first:n`` the first n. ``kv`` names a selection (``longdraft.drafts.registry`` lists
    them), and behind ``+`` the format in which chosen tokens are kept, if that is not the target's: ``snapkv+quant8``.
    ``budget`` is the selection's size in tokens per KV head, of which ``sinks`` are the first tokens of the text (at
    most half). A selection that looks at the text chooses anew when its budget is full, and besides as ``refresh``
    says: after so many rounds, never (0), when fewer of its proposals are accepted than before (``auto``), or as is
    usual for it (``None``). ``gamma`` is the most tokens proposed per verify pass. ``sampling_rule`` is ``coupled``
    (output equal to plain decoding, token for token) or ``maximal`` (the target's exact law, but ids depend on
    ``gamma``).
    """

    weights: str = "target"
    layers: str = "all"
    kv: str = "streaming_llm"
    budget: int = 512
    sinks: int = 16
    refresh: int | str | None = None
    gamma: int = 4
    sampling_rule: str = "coupled"

    def __post_init__(self) -> None:
        weights = str(self.weights) if isinstance(self.weights, (str, PathLike)) else ""
        if not weights:
            raise InvalidValueError(
                "weights", self.weights, "must be 'target', 'target@int8', 'ngram', or a model's path or name"
            )
        object.__setattr__(self, "weights", weights)
        if not isinstance(self.kv, str):
            raise InvalidValueError("kv", self.kv, "must be a selection's name, or 'selection+format'")
        if not isinstance(self.layers, str) or not LAYERS.fullmatch(self.layers):
            raise InvalidValueError("layers", self.layers, "must be 'all', 'every:n' or 'first:n'")
        if self.layers != "all" and weights not in TARGETS:
            raise InvalidValueError("layers", self.layers, "must be 'all' unless the weights are the target's")
        object.__setattr__(self, "budget", as_int("budget", self.budget, 1, 2**31 - 1))
        object.__setattr__(self, "sinks", as_int("sinks", self.sinks, 0, 2**31 - 1))
        if self.refresh not in (None, "auto"):
            fix = "Or pass 'auto', or None for what is usual."
            object.__setattr__(self, "refresh", as_int("refresh", self.refresh, 0, 2**31 - 1, fix))
        object.__setattr__(self, "gamma", as_int("gamma", self.gamma, 1, MAX_GAMMA))
        if self.sampling_rule not in SAMPLING_RULES:
            limit = f"must be one of {', '.join(SAMPLING_RULES)}"
            raise InvalidValueError("sampling_rule", self.sampling_rule, limit)

    @property
    def label(self) -> str:
        """The draft in a few words, for reports."""
        if self.weights == "ngram":
            return "ngram"
        who = self.short_name if self.own_model else self.weights.partition("@")[2]
        who = who if self.layers == "all" else f"{who} layers {self.layers}".strip()
        read = self.kv if self.selection == "full" else f"{self.kv}, budget {self.budget}"
        read += "" if self.refresh is None else f", refresh {self.refresh}"
        return f"{who} over {read}" if who else read

    @property
    def selection(self) -> str:
        """Which tokens are read: the first part of ``kv``."""
        return self.kv.partition("+")[0]

    @property
    def format(self) -> str:
        """In what form they are kept: the second part of ``kv``, empty for the target's own."""
        return self.kv.partition("+")[2]

    @property
    def own_model(self) -> bool:
        """Whether the weights are a model's that has to be loaded beside the target."""
        return self.weights not in (*TARGETS, "ngram")

    @property
    def int8(self) -> bool:
        """Whether 8-bit copies of the weights are used."""
        return self.weights.endswith(INT8)

    @property
    def short_name(self) -> str:
        """The weights' name without the folders they lie in; of what training wrote, STAGE/model, the stage's."""
        path = PurePath(self.model)
        written = path.name == "model" and path.parent.name
        return f"{path.parent.name if written else path.name}{INT8 * self.int8}"

    @property
    def model(self) -> str:
        """The weights without what is to be done to them: a path or a name."""
        return self.weights.removesuffix(INT8)


@lru_cache(maxsize=256)
def draft_key(config: DraftConfig) -> DraftConfig:
    """What a draft is made from, and known by: γ and the rule are the business of its rounds."""
    return replace(config, gamma=1, sampling_rule="coupled")


@dataclass(frozen=True)
class AutoDraft:
    """Who proposes, and how many tokens, is chosen anew at every step, by what it is predicted to gain.

    At most ``gamma`` tokens are proposed per verify pass. ``weights``: the path or name of a SPIRe draft made for the
    target (``PATH@int8``: with 8-bit copies of its layers), which is then one of those that may propose. The rule is
    the coupled one: what is returned is what plain decoding gives, whatever is chosen. ``exact``: nothing proposes on
    kernels that keep that up to near-ties only, where what is chosen by the clock might show.
    """

    gamma: int = 8
    weights: str | None = None
    exact: bool = False
    label: ClassVar[str] = "auto"
    sampling_rule: ClassVar[str] = "coupled"

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", as_int("gamma", self.gamma, 1, MAX_GAMMA))
        if self.weights is not None:
            beside = DraftConfig(self.weights)
            if not beside.own_model:
                raise InvalidValueError("weights", self.weights, "must be a SPIRe draft's path or name, or None")
            object.__setattr__(self, "weights", beside.weights)

    @property
    def beside(self) -> DraftConfig | None:
        """The draft that was named, as it proposes at most."""
        return None if self.weights is None else DraftConfig(self.weights, gamma=self.gamma)


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of one engine; no request may grow past ``max_model_len``.

    ``kv_tokens``: the longest request for which there are pages; ``None``: ``block_size`` tokens to each.
    """

    max_model_len: int
    num_pages: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    block_size: int = 16
    seed: int = 0
    kv_tokens: int | None = None

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
        return min(self.max_model_len, self.num_pages * self.block_size if self.kv_tokens is None else self.kv_tokens)
