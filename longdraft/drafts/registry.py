"""Names → drafts and selections: the list that every matrix test walks."""

from __future__ import annotations

from longdraft.config import DraftConfig
from longdraft.drafts.base import Draft
from longdraft.drafts.self_spec import SelfSpec
from longdraft.errors import InvalidValueError
from longdraft.kv.select.base import Selector
from longdraft.kv.select.full import Full
from longdraft.kv.select.streaming_llm import StreamingLLM
from longdraft.kv.store import PagedStore
from longdraft.models.transformer import Transformer

SELECTORS: dict[str, type[Selector]] = {
    "streaming_llm": StreamingLLM,
    "full": Full,
}


def check(config: DraftConfig) -> DraftConfig:
    """``config``, if every name in it is known; ``InvalidValueError`` otherwise."""
    if config.kv not in SELECTORS:
        raise InvalidValueError("kv", config.kv, f"must be one of {', '.join(SELECTORS)}")
    return config


def make(config: DraftConfig, model: Transformer, store: PagedStore) -> Draft:
    """The draft that ``config`` describes, for a target and its store."""
    return SelfSpec(model, store, SELECTORS[check(config).kv](config.budget))
