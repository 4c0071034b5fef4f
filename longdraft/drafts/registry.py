"""Names → drafts and selections: the lists that every matrix test walks."""

from __future__ import annotations

from collections.abc import Mapping

from longdraft.config import TARGETS, DraftConfig
from longdraft.drafts.base import Draft
from longdraft.drafts.layer_skip import choose_layers
from longdraft.drafts.ngram import NGram
from longdraft.drafts.self_spec import SelfSpec
from longdraft.drafts.small_model import DraftModel, SmallModel
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
# Drafts that need nothing but the target, by the names that users may say for short.
NAMED: dict[str, DraftConfig] = {
    **{name: DraftConfig(kv=name) for name in SELECTORS},
    "layer_skip": DraftConfig(layers="every:2"),
    "int8": DraftConfig(weights="target@int8"),
    "ngram": DraftConfig(weights="ngram"),
}


NO_MODELS: Mapping[str, DraftModel] = {}


def check(config: DraftConfig) -> DraftConfig:
    """``config``, if every name in it is known; ``InvalidValueError`` otherwise."""
    if config.kv not in SELECTORS:
        raise InvalidValueError("kv", config.kv, f"must be one of {', '.join(SELECTORS)}")
    return config


def make(
    config: DraftConfig, model: Transformer, store: PagedStore, small: Mapping[str, DraftModel] = NO_MODELS
) -> Draft:
    """The draft that ``config`` describes, for a target and its store; ``small`` are the models loaded beside it.

    Raises ``InvalidValueError`` for what does not exist.
    """
    check(config)
    if config.weights == "ngram":
        return NGram()
    reader = selector(config)
    if config.weights in TARGETS:
        model = model if config.weights == "target" else model.quantised()
        return SelfSpec(model, store, reader, choose_layers(config.layers, model.config.num_layers))
    if config.weights not in small:
        loaded = ", ".join(small) or "none was"
        limit = f"must be 'target', 'target@int8', 'ngram' or a draft model that was loaded ({loaded})"
        raise InvalidValueError("weights", config.weights, limit, "Name it as the draft when the LLM is made.")
    return SmallModel(small[config.weights], reader, model.config.vocab_size)


def selector(config: DraftConfig) -> Selector:
    """What the draft reads of a cache."""
    kind = SELECTORS[config.kv]
    return kind(config.budget, config.sinks) if kind is StreamingLLM else kind(config.budget)
