"""What ``LLM(draft=...)`` may be, and how a draft model is found and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from longdraft.checkpoint.base import Checkpoint
from longdraft.checkpoint.bundled import NAME as BUNDLED
from longdraft.checkpoint.load import HUB_ID, load_checkpoint, locate, look_up
from longdraft.checkpoint.pairing import check_pair
from longdraft.checkpoint.spire import SpireCheckpoint, is_spire, read_spire
from longdraft.config import DEFAULT_DRAFT, TARGETS, AutoDraft, DraftConfig
from longdraft.drafts import spire
from longdraft.drafts.registry import NAMED, check, check_int8, kept_tokens, named, page_note_bytes
from longdraft.drafts.spire import SpireModel, state_bytes, weight_bytes
from longdraft.errors import InvalidValueError
from longdraft.models.config import ModelConfig
from longdraft.models.transformer import Transformer
from longdraft.models.weights import num_parameters

Draft = DraftConfig | AutoDraft | str | Mapping[str, Any] | None
Loaded = Checkpoint | SpireCheckpoint


class Same(Enum):
    """A request's draft is that of its ``LLM``."""

    SAME = "same"


SAME = Same.SAME
BESIDE = f"{AutoDraft.label}+"  # and a path: a SPIRe draft that control may choose, too


def resolve_draft(draft: Draft) -> DraftConfig | AutoDraft | None:
    """The config that ``LLM(draft=...)`` stands for; ``InvalidValueError`` for names and fields that do not exist."""
    if draft is None or isinstance(draft, AutoDraft):
        return draft
    if isinstance(draft, DraftConfig):
        return check(draft)
    if isinstance(draft, (str, Path)):
        if str(draft) in (AutoDraft.label, DEFAULT_DRAFT):
            return AutoDraft(exact=str(draft) == DEFAULT_DRAFT)
        if str(draft).startswith(BESIDE):
            return AutoDraft(weights=_own_model(DraftConfig(str(draft).removeprefix(BESIDE))).weights)
        return named(str(draft)) or _own_model(DraftConfig(weights=str(draft)))
    if not isinstance(draft, Mapping):
        raise InvalidValueError("draft", draft, "must be a DraftConfig, a name, a model's path, a mapping, or None")
    try:
        return check(DraftConfig(**draft))
    except TypeError as error:
        names = ", ".join(DraftConfig.__dataclass_fields__)
        raise InvalidValueError("draft", dict(draft), f"may have the fields {names}") from error


def _own_model(config: DraftConfig) -> DraftConfig:
    """``config``, if its weights can be a model's; else they were meant to be a draft's name."""
    name = config.model
    if name.lower() == BUNDLED or HUB_ID.fullmatch(name) or any(look_up(name)[1:]):
        return config
    raise InvalidValueError(
        "draft",
        name,
        f"must be one of auto, {', '.join(NAMED)}, a selection with a format (full+quant8), or a model's path or name",
    )


def own_draft(draft: DraftConfig | AutoDraft | None) -> DraftConfig | None:
    """The draft whose weights have to be loaded beside the target's, if there is one."""
    one = draft.beside if isinstance(draft, AutoDraft) else draft
    return one if one is not None and one.own_model else None


def load_draft(config: DraftConfig, target: Checkpoint, download: bool) -> Loaded:
    """The checkpoint of a small model that shall draft for ``target``, or of a SPIRe draft made for it.

    Raises what ``load_checkpoint`` raises, ``VocabularyMismatchError`` unless a small model has the same tokenizer,
    ``TargetMismatchError`` if a SPIRe draft was made for another target, and ``InvalidValueError`` where the config
    asks for what the draft cannot do.
    """
    path, name = locate(config.model, download)
    if is_spire(path):
        draft = read_spire(path, name)
        draft.check_target(target)
        return draft
    check_int8(config)
    small = load_checkpoint(config.model, download=download)
    check_pair(target, small)
    return small


def on_kernels(draft: Loaded, target: Transformer) -> Transformer | SpireModel:
    """What was loaded, ready to run beside ``target``."""
    if isinstance(draft, SpireCheckpoint):
        return SpireModel(draft.config, draft.weights, target)
    types = {"dtype": target.dtype, "kv_dtype": target.kv_dtype, "device": target.device}
    return Transformer(draft.config, draft.weights, **types, page_size=target.layout.page_size)


def room_for(
    drafts: Sequence[DraftConfig],
    own: Loaded | None,
    target: ModelConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
) -> dict[str, Any]:
    """What ``size_engine`` must leave room for, as its arguments, where all of ``drafts`` may propose.

    ``own``: the model loaded beside the target, for the one of ``drafts`` that is not the target's.
    """
    int8 = any(draft.weights in TARGETS and draft.int8 for draft in drafts)
    tokens = [kept_tokens(draft) for draft in drafts]
    weights, kept = num_parameters(target) if int8 else 0, 0
    if isinstance(own, SpireCheckpoint):
        (draft,) = (draft for draft in drafts if draft.own_model)
        weights += weight_bytes(own.config, target, dtype, draft.int8)
        kept = state_bytes(own.config, target, kv_dtype, draft.gamma)
    return {
        "draft": own.config if isinstance(own, Checkpoint) else None,
        "draft_weights": weights,
        "kept": kept,
        "copied": sum(copied for copied, _ in tokens),
        "observed": sum(observed for _, observed in tokens),
        "page_notes": sum(page_note_bytes(draft, target, kv_dtype, page_size) for draft in drafts),
    }


def settled(draft: DraftConfig | AutoDraft | None, own: Loaded | None) -> DraftConfig | AutoDraft | None:
    """``draft`` with what a SPIRe draft reads in its place, if it is ``own``: its own sinks and window."""
    if not isinstance(own, SpireCheckpoint) or not isinstance(draft, DraftConfig) or not draft.own_model:
        return draft
    return spire.settled(draft, own.config)


def require_spire(draft: AutoDraft, own: Loaded | None) -> None:
    """Raise ``InvalidValueError`` if what control may choose besides is a small model: that it does not consider."""
    if isinstance(own, Checkpoint):
        raise InvalidValueError("weights", draft.weights, "must be a SPIRe draft's", "Name a small model as the draft.")
