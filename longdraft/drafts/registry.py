"""Names → drafts, selections and formats: the lists that every matrix test walks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache

import torch

from longdraft.capture import NOTHING, Needs
from longdraft.config import TARGETS, DraftConfig
from longdraft.drafts.base import Draft
from longdraft.drafts.coded_spec import CodedCopySpec, CodedViewSpec, coded_page_bytes
from longdraft.drafts.copy_spec import CopySpec, copied_tokens
from longdraft.drafts.layer_skip import choose_layers
from longdraft.drafts.ngram import NGram
from longdraft.drafts.page_spec import PageSpec
from longdraft.drafts.self_spec import SelfSpec
from longdraft.drafts.small_copies import SmallCopies
from longdraft.drafts.small_model import DraftModel, SmallModel
from longdraft.drafts.spire import Spire, SpireModel
from longdraft.errors import InvalidValueError
from longdraft.kv.format.base import Format
from longdraft.kv.format.quant import Quant8
from longdraft.kv.select.base import PageSelector, Selector, TokenSelector, ViewSelector
from longdraft.kv.select.full import Full
from longdraft.kv.select.pages import Pages
from longdraft.kv.select.snapkv import SnapKV
from longdraft.kv.select.streaming_llm import StreamingLLM
from longdraft.kv.select.topk import TopK
from longdraft.kv.select.verified import Verified
from longdraft.kv.store import PagedStore
from longdraft.models.config import ModelConfig
from longdraft.models.transformer import Transformer

SELECTORS: dict[str, type[Selector]] = {
    "streaming_llm": StreamingLLM,
    "full": Full,
    "snapkv": SnapKV,
    "topk": TopK,
    "pages": Pages,
    "verified": Verified,
}
VIEW_SELECTORS = [name for name, kind in SELECTORS.items() if issubclass(kind, ViewSelector)]
FORMATS: dict[str, type[Format]] = {"quant8": Quant8}
# All that drafts with the target's weights can read, as DraftConfig spells it. Pages are read in place, in their form.
KVS = [
    *SELECTORS,
    *(f"{name}+{fmt}" for fmt in FORMATS for name, kind in SELECTORS.items() if not issubclass(kind, PageSelector)),
]
# Those that small models with caches of their own can use, too.
FOR_SMALL_MODELS = [name for name, kind in SELECTORS.items() if not issubclass(kind, PageSelector)]
# Drafts that need nothing but the target, by the names that users may say for short.
NAMED: dict[str, DraftConfig] = {
    **{name: DraftConfig(kv=name) for name in SELECTORS},
    "layer_skip": DraftConfig(layers="every:2"),
    "int8": DraftConfig(weights="target@int8"),
    "ngram": DraftConfig(weights="ngram"),
}


def named(name: str) -> DraftConfig | None:
    """The draft that a user calls ``name``, if it needs nothing but the target."""
    return NAMED.get(name) or (DraftConfig(kv=name) if name in KVS else None)


def resolve_format(name: str | None) -> Format | None:
    """The format of that name, for the target's own cache; ``InvalidValueError`` if there is none."""
    if name is None:
        return None
    if name not in FORMATS:
        raise InvalidValueError("kv_format", name, f"must be None or one of {', '.join(FORMATS)}")
    return FORMATS[name]()


Beside = DraftModel | SpireModel  # what may be loaded beside a target to draft for it
NO_MODELS: Mapping[str, Beside] = {}


def check(config: DraftConfig) -> DraftConfig:
    """``config``, if every name in it is known; ``InvalidValueError`` otherwise."""
    if config.kv not in KVS:
        if config.selection in SELECTORS and config.format in FORMATS:
            limit = f"{config.selection} reads the target's own pages, in the form that these have"
            raise InvalidValueError("kv", config.kv, limit, f"Pass {config.selection!r}.")
        formats = " or ".join(f"'+{name}'" for name in FORMATS)
        raise InvalidValueError("kv", config.kv, f"must be one of {', '.join(SELECTORS)}, with {formats} behind or not")
    if config.own_model and config.kv not in FOR_SMALL_MODELS:
        limit = f"must be one of {', '.join(FOR_SMALL_MODELS)} for a small model, which has a cache of its own"
        raise InvalidValueError("kv", config.kv, limit)
    return config


def check_int8(config: DraftConfig) -> None:
    """Raise ``InvalidValueError`` where 8-bit copies of a small model's weights are asked for."""
    if config.int8:
        limit = "may end in @int8 only for a SPIRe draft or the target"
        raise InvalidValueError("weights", config.weights, limit, "Leave @int8 out.")


def needs(config: DraftConfig) -> Needs:
    """What such a draft wants to be told of the target's passes."""
    reader = selector(config)
    choosing = config.weights in TARGETS and isinstance(reader, (TokenSelector, PageSelector))
    return reader.needs if choosing else NOTHING


def kept_tokens(config: DraftConfig) -> tuple[int, int]:
    """Most tokens of one sequence of which such a draft keeps copies of K and V, and queries; for sizing memory.

    Those are the target's, or a small model's own. Encoded tokens are counted as whole ones, which leaves room for
    decoding them.
    """
    reader = selector(config)
    if config.weights == "ngram":
        return 0, 0
    if isinstance(reader, ViewSelector):
        return reader.budget if config.format and not isinstance(reader, Full) else 0, 0
    copied = copied_tokens(reader) if isinstance(reader, TokenSelector) else 0
    return copied, reader.needs.queries


def page_note_bytes(config: DraftConfig, model: ModelConfig, kv_dtype: torch.dtype, page_size: int = 16) -> int:
    """Bytes that such a draft keeps of every page of K and V, or knows of it; for sizing memory."""
    reader = selector(config)
    if config.weights in TARGETS and isinstance(reader, PageSelector):
        return model.num_layers * reader.page_note_bytes(model.num_kv_heads, model.head_dim, kv_dtype)
    if config.weights in TARGETS and config.format and isinstance(reader, Full):
        return coded_page_bytes(FORMATS[config.format](), model, kv_dtype, page_size)
    return 0


def make(
    config: DraftConfig,
    model: Transformer,
    store: PagedStore,
    small: Mapping[str, Beside] = NO_MODELS,
    max_rows: int = 256,
) -> Draft:
    """The draft that ``config`` describes, for a target and its store; ``small`` are the models loaded beside it.

    ``max_rows``: sequences that may run at once.

    Raises ``InvalidValueError`` for what does not exist.
    """
    check(config)
    if config.weights == "ngram":
        return NGram()
    reader = selector(config)
    if config.weights in TARGETS:
        model = model if config.weights == "target" else model.quantised()
        layers = choose_layers(config.layers, model.config.num_layers)
        if config.format and store.format:
            limit = "may have no format where the target's own cache is kept in one"
            raise InvalidValueError("kv", config.kv, limit, f"Pass {config.selection!r}: it reads the same.")
        if config.format:
            kind = CodedCopySpec if isinstance(reader, TokenSelector) else CodedViewSpec
            return kind(model, store, reader, FORMATS[config.format](), layers, max_rows)
        if isinstance(reader, TokenSelector):
            return CopySpec(model, store, reader, layers, max_rows)
        if isinstance(reader, PageSelector):
            return PageSpec(model, store, reader, layers)
        return SelfSpec(model, store, reader, layers)
    if config.model not in small:
        loaded = ", ".join(small) or "none was"
        limit = f"must be 'target', 'target@int8', 'ngram' or a draft model that was loaded ({loaded})"
        raise InvalidValueError("weights", config.weights, limit, "Name it as the draft when the LLM is made.")
    own = small[config.model]
    if isinstance(own, SpireModel):  # it says itself what it reads
        return Spire(own, max_rows, int8=config.int8)
    check_int8(config)
    if isinstance(reader, TokenSelector):
        return SmallCopies(own, reader, model.config.vocab_size, max_rows)
    return SmallModel(own, reader, model.config.vocab_size)


def watches(config: DraftConfig) -> bool:
    """Whether such a draft chooses what it reads by what passes say of the text: ``refresh`` is about that."""
    return config.weights != "ngram" and not isinstance(selector(config), ViewSelector)


@lru_cache(maxsize=256)
def selector(config: DraftConfig) -> Selector:
    """The selection by name, with those of the config's settings that it has and that are set."""
    kind = SELECTORS[config.selection]
    names = {field.name for field in fields(kind)} & {"budget", "sinks", "refresh"}
    settings = {name: getattr(config, name) for name in names}
    return kind(**{name: value for name, value in settings.items() if value is not None})
