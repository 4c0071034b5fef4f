"""What ``LLM(draft=...)`` may be, and how a draft model is found and checked."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from longdraft.checkpoint.base import Checkpoint
from longdraft.checkpoint.bundled import NAME as BUNDLED
from longdraft.checkpoint.load import HUB_ID, load_checkpoint, look_up
from longdraft.checkpoint.pairing import check_pair
from longdraft.config import AutoDraft, DraftConfig
from longdraft.drafts.registry import NAMED, check, named
from longdraft.errors import InvalidValueError

Draft = DraftConfig | AutoDraft | str | Mapping[str, Any] | None


class Same(Enum):
    """A request's draft is that of its ``LLM``."""

    SAME = "same"


SAME = Same.SAME


def resolve_draft(draft: Draft) -> DraftConfig | AutoDraft | None:
    """The config that ``LLM(draft=...)`` stands for; ``InvalidValueError`` for names and fields that do not exist."""
    if draft is None or isinstance(draft, AutoDraft):
        return draft
    if isinstance(draft, DraftConfig):
        return check(draft)
    if isinstance(draft, (str, Path)):
        if str(draft) == AutoDraft.label:
            return AutoDraft()
        return named(str(draft)) or DraftConfig(weights=_model_name(str(draft)))
    if not isinstance(draft, Mapping):
        raise InvalidValueError("draft", draft, "must be a DraftConfig, a name, a model's path, a mapping, or None")
    try:
        return check(DraftConfig(**draft))
    except TypeError as error:
        names = ", ".join(DraftConfig.__dataclass_fields__)
        raise InvalidValueError("draft", dict(draft), f"may have the fields {names}") from error


def _model_name(name: str) -> str:
    """``name``, if it can be a model's; else it was meant to be a draft's."""
    if name.lower() == BUNDLED or HUB_ID.fullmatch(name) or any(look_up(name)[1:]):
        return name
    raise InvalidValueError(
        "draft",
        name,
        f"must be one of auto, {', '.join(NAMED)}, a selection with a format (full+quant8), or a model's path or name",
    )


def load_draft(name: str, target: Checkpoint, download: bool) -> Checkpoint:
    """The checkpoint of a small model that shall draft for ``target``.

    Raises what ``load_checkpoint`` raises, and ``VocabularyMismatchError`` unless both have the same tokenizer.
    """
    draft = load_checkpoint(name, download=download)
    check_pair(target, draft)
    return draft
