"""The online control of an ``LLM``: which drafts it considers on this machine, and by which prices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from longdraft.config import AutoDraft, DraftConfig, EngineConfig
from longdraft.errors import CalibrationError, KVCapacityError, OutOfMemoryError
from longdraft.kernels import native
from longdraft.kernels.dispatch import CallSpec, select
from longdraft.models.config import ModelConfig
from longdraft.models.transformer import Transformer
from longdraft.planner.calibration import Calibration, default_file, find, load, setting
from longdraft.planner.candidates import CONSIDERED, Target, prior
from longdraft.planner.control import Controller
from longdraft.planner.hardware import Hardware, named_hardware, unmeasured_cpu
from longdraft.planner.prices import Partly, Prices
from longdraft.planner.roofline import Roofline

UNMEASURED_GPU = "A100-80GB"
log = logging.getLogger("longdraft")


def call_spec(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int
) -> CallSpec:
    """What the target's kernels will have to serve."""
    group = config.num_heads // config.num_kv_heads
    return CallSpec(device.type, dtype, kv_dtype, config.head_dim, group, page_size)


def kind_of(spec: CallSpec) -> str:
    """What a target's passes run on, as ``CONSIDERED`` names it."""
    if spec.device != "cpu":
        return "gpu"
    return "native" if select("linear", spec).name == "native" else "cpu"


def exact_only(draft: DraftConfig | AutoDraft | None, spec: CallSpec) -> DraftConfig | AutoDraft | None:
    """``draft``; ``None`` for one that is to be ``exact`` where kernels do not give the same bits in any batch."""
    near = kind_of(spec) != "native" and spec.dtype != torch.float64
    return None if isinstance(draft, AutoDraft) and draft.exact and near else draft


def considered(spec: CallSpec) -> tuple[DraftConfig, ...]:
    """The drafts that control chooses from."""
    return CONSIDERED[kind_of(spec)]


def affordable(
    drafts: Sequence[DraftConfig], beside: Sequence[DraftConfig], size: Callable[[Sequence[DraftConfig]], EngineConfig]
) -> tuple[EngineConfig, tuple[DraftConfig, ...]]:
    """The engine's sizes, and those of ``drafts`` that leave the cache half of the pages it would have without them.

    Where all of them do not, those without 8-bit copies of the weights are tried, then those that hold nothing.
    ``beside`` must fit in any case; ``size`` raises where it does not.
    """
    alone = size(beside)
    for some in (drafts, [draft for draft in drafts if not draft.int8]):
        try:
            sizes = size([*some, *beside])
        except (KVCapacityError, OutOfMemoryError):
            continue
        if 2 * sizes.num_pages >= alone.num_pages:
            return sizes, tuple(some)
    return alone, tuple(draft for draft in drafts if draft.weights == "ngram")


def make_control(
    name: str, model: Transformer, drafts: tuple[DraftConfig, ...], beside: tuple[DraftConfig, ...] = ()
) -> Controller:
    """Control for a target called ``name``, by curves where it was calibrated in its present setting.

    It chooses from ``drafts`` and ``beside``: SPIRe drafts that were loaded with it. Nothing is measured now: what
    passes take shows while they run.
    """
    spec, drafts, found = model.spec, drafts + beside, _calibration(model)
    curves = found and found.curves
    target = Target(name, model.config, _hardware(spec), model.bytes_per_weight, spec.kv_dtype.itemsize)
    prices: Prices = Roofline(target, drafts)
    if curves and any(curves.knows(draft) for draft in drafts):
        guessed = replace(target, hardware=found.hardware)
        prices = Partly(curves, Roofline(guessed, beside)) if beside else curves
    return Controller(prices, {draft: prior(draft, name) for draft in drafts if prices.knows(draft)})


def _calibration(model: Transformer) -> Calibration | None:
    """That of ``longdraft calibrate``, if there is one; a damaged file is as good as none."""
    if model.kv_format:  # other bytes, and decoding besides
        return None
    try:
        return find(load(default_file()), setting(model))
    except CalibrationError as error:
        log.warning("Online control goes by a guess of this machine: %s", error)
        return None


def _hardware(spec: CallSpec) -> Hardware:
    kind = kind_of(spec)
    if kind == "gpu":
        return named_hardware(UNMEASURED_GPU)
    if kind == "native":
        return unmeasured_cpu(native.runtime().isa, native.runtime().threads)
    return unmeasured_cpu("torch", torch.get_num_threads())
