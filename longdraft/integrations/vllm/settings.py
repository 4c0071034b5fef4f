"""What is set for a server (``additional_config``) and for one request (``vllm_xargs``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from longdraft.config import as_int
from longdraft.errors import InvalidValueError

KEY = "longdraft"  # of vLLM's additional_config
CHOICES = {
    "draft": ("streaming_llm", "auto", "full"),
    "attention": ("vllm", "native"),
    "weights": ("target", "int8"),
    "selection": ("streaming_llm", "pages"),
}
MOST = 2**20


@dataclass(frozen=True)
class Settings:
    """The draft: what it reads, and how many tokens it may guess.

    ``draft``: ``streaming_llm``, the first ``sinks`` and the last ``budget`` tokens in whole blocks, or ``full``, all,
    which is there to test with; ``auto``: as ``streaming_llm``, and how many tokens a row drafts, if any, is chosen at
    every step, unless ``gamma`` is given. ``gamma``: drafted tokens a round, at most what vLLM was started with.
    ``attention``: whose kernels attend, vLLM's or LongDraft's native ones (CPU); fixed at the start, with or without a
    draft. ``weights``: ``int8``, the draft's own in 8 bits, goes with the native attention. ``selection``: ``pages``,
    of the blocks that a draft reads the older ones are chosen, by their keys; goes with the native attention, too.
    ``graphs``: whether draft steps run as the CUDA graphs that vLLM has (GPU).
    """

    draft: str = "streaming_llm"
    budget: int = 512
    sinks: int = 16
    gamma: int | None = None
    attention: str = "vllm"
    weights: str = "target"
    selection: str = "streaming_llm"
    graphs: bool = True

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise InvalidValueError(name, getattr(self, name), f"must be one of {', '.join(known)}")
        if not isinstance(self.graphs, bool):
            raise InvalidValueError("graphs", self.graphs, "must be true or false")
        for name, value in (("weights", "int8"), ("selection", "pages")):
            if getattr(self, name) == value and self.attention != "native":
                raise InvalidValueError(name, value, "goes with attention native")
        object.__setattr__(self, "budget", as_int("budget", self.budget, 1, MOST))
        object.__setattr__(self, "sinks", as_int("sinks", self.sinks, 0, MOST))
        if self.gamma is not None:
            object.__setattr__(self, "gamma", as_int("gamma", self.gamma, 0, 64))

    @property
    def bounded(self) -> bool:
        """Whether the draft reads a budget of tokens."""
        return self.draft != "full"

    @property
    def chooses_blocks(self) -> bool:
        """Whether these are chosen by their keys."""
        return self.bounded and self.selection == "pages"

    @classmethod
    def of_server(cls, additional_config: Any) -> Settings:
        """Of vLLM's ``additional_config``; ``InvalidValueError`` names what it does not know."""
        given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise InvalidValueError(KEY, given, "must be an object with the draft's settings")
        known = {field.name for field in fields(cls)}
        for name in given:
            if name not in known:
                raise InvalidValueError(f"{KEY}.{name}", given[name], f"is not known; use {', '.join(sorted(known))}")
        return cls(**given)

    def of_request(self, extra_args: Mapping[str, Any] | None) -> Settings:
        """With a request's own ``longdraft_gamma``, ``longdraft_budget`` and ``longdraft_off``.

        Raises ``InvalidValueError`` for what they cannot be. ``longdraft_off``: 0 or 1, as HTTP passes no booleans.
        """
        given = {
            name.removeprefix("longdraft_"): value
            for name, value in (extra_args or {}).items()
            if name.startswith("longdraft_")
        }
        if not given:
            return self
        for name in given:
            if name not in ("gamma", "budget", "off"):
                raise InvalidValueError(f"longdraft_{name}", given[name], "is not known; use gamma, budget or off")
        off = as_int("longdraft_off", int(given.pop("off", 0)), 0, 1)
        return replace(self, **({**given, "gamma": 0} if off else given))
