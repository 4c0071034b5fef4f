"""From what a user asks of an ``LLM`` to its engine: who drafts, in which types, how large, and on which kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from longdraft.checkpoint.base import Checkpoint
from longdraft.checkpoint.spire import SpireCheckpoint
from longdraft.config import AutoDraft, DraftConfig, EngineConfig
from longdraft.drafts.registry import resolve_format
from longdraft.engine.engine import Engine
from longdraft.engine.sizing import auto_dtype, resolve_block_size, resolve_device, resolve_dtype, size_engine
from longdraft.llm_control import affordable, call_spec, considered, exact_only, make_control
from longdraft.llm_draft import (
    Draft,
    Loaded,
    load_draft,
    on_kernels,
    own_draft,
    require_spire,
    resolve_draft,
    room_for,
    settled,
)
from longdraft.models.transformer import Transformer


@dataclass(frozen=True)
class Wanted:
    """What ``LLM`` was asked for: its docstring says what the fields mean."""

    draft: Draft
    dtype: str | torch.dtype
    kv_dtype: str | torch.dtype | None
    kv_format: str | None
    device: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int | None
    block_size: int
    seed: int
    download: bool


@dataclass(frozen=True)
class Built:
    """The engine, what drafts in it unless a call says otherwise, and the draft's own weights, if it has some."""

    engine: Engine
    draft: DraftConfig | AutoDraft | None
    own: Loaded | None


def build(checkpoint: Checkpoint, wanted: Wanted, on_load: Callable[[int, int], None] | None) -> Built:
    """The engine of ``checkpoint``. Raises what ``LLM`` raises; nothing large is read before the sizes fit."""
    draft = resolve_draft(wanted.draft)
    own_weights, own = None, own_draft(draft)
    if own:
        own_weights = load_draft(own, checkpoint, wanted.download)
        own, draft = settled(own, own_weights), settled(draft, own_weights)
    beside = (own,) if isinstance(own_weights, SpireCheckpoint) else ()  # what control may choose, too
    types = _types(checkpoint, wanted)
    spec = call_spec(checkpoint.config, types["device"], types["dtype"], types["kv_dtype"], types["page_size"])
    draft, drafts = exact_only(draft, spec), considered(spec)

    def size(some: Sequence[DraftConfig]) -> EngineConfig:
        return _size(checkpoint, own_weights, some, types, wanted)

    if isinstance(draft, AutoDraft):
        require_spire(draft, own_weights)
        sizes, drafts = affordable(drafts, beside, size)
    else:
        sizes = size(() if draft is None else (draft,))
    model = Transformer(checkpoint.config, checkpoint.weights, **types, progress=on_load)
    own_models = {own.model: on_kernels(own_weights, model)} if own else {}
    control = make_control(checkpoint.name, model, drafts, beside)
    engine = Engine(model, sizes, checkpoint.eos_token_ids, checkpoint.tokenizer, own_models, control)
    engine.check(draft)
    return Built(engine, draft, own_weights)


def _types(checkpoint: Checkpoint, wanted: Wanted) -> dict[str, Any]:
    """Where and as what the target's numbers are stored, in ``Transformer``'s words."""
    device, page_size = resolve_device(wanted.device), resolve_block_size(wanted.block_size)
    auto = auto_dtype(checkpoint.config, device, page_size)
    dtype = resolve_dtype("dtype", wanted.dtype, auto)
    kv_dtype = dtype if wanted.kv_dtype is None else resolve_dtype("kv_dtype", wanted.kv_dtype, auto)
    fmt = resolve_format(wanted.kv_format)
    return {"dtype": dtype, "kv_dtype": kv_dtype, "device": device, "page_size": page_size, "kv_format": fmt}


def _size(
    checkpoint: Checkpoint, own: Loaded | None, drafts: Sequence[DraftConfig], types: dict[str, Any], wanted: Wanted
) -> EngineConfig:
    config, dtype, kv_dtype, page_size = checkpoint.config, types["dtype"], types["kv_dtype"], types["page_size"]
    return size_engine(
        config,
        dtype,
        kv_dtype,
        types["device"],
        **room_for(drafts, own, config, dtype, kv_dtype, page_size),
        kv_format=types["kv_format"],
        max_model_len=wanted.max_model_len,
        max_num_seqs=wanted.max_num_seqs,
        max_num_batched_tokens=wanted.max_num_batched_tokens,
        kv_cache_memory_bytes=wanted.kv_cache_memory_bytes,
        block_size=page_size,
        seed=wanted.seed,
    )
