"""What choosing γ goes by in this vLLM: the curves of its passes, stored or measured now. Imports no vLLM."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from longdraft.config import DraftConfig
from longdraft.integrations.vllm.control import Control
from longdraft.integrations.vllm.guard import auto_refusals, runner_refusals
from longdraft.integrations.vllm.measure import Bench, measure, points_of
from longdraft.integrations.vllm.stored import curves_for
from longdraft.planner.calibration import Setting, fingerprint
from longdraft.planner.candidates import prior
from longdraft.planner.curves import Curves
from longdraft.planner.hardware import processor

if TYPE_CHECKING:
    from longdraft.integrations.vllm.proposer import SparseProposer


def prepare(proposer: SparseProposer) -> None:
    """Give the proposer's drafter its control; where there can be none, a sentence says why. Never raises."""
    drafter = proposer.drafter
    why = next(auto_refusals(proposer.config), None) or next(runner_refusals(drafter.runner), None)
    try:
        if why is None:
            drafter.control = _control(proposer)
    except Exception as error:  # measuring is never worth an engine
        why = f"{type(error).__name__}: {error}"
    if why:
        drafter.warn(f"γ is not chosen: {why}")


def _control(proposer: SparseProposer) -> Control:
    drafter, model = proposer.drafter, proposer.config.model_config
    settings = drafter.settings
    weights = "target@int8" if proposer.drafts_int8 else "target"
    draft = DraftConfig(weights, budget=settings.budget + settings.sinks, sinks=settings.sinks)
    started = time.perf_counter()
    found = curves_for(setting(proposer, draft), model.model, lambda: _measured(proposer, draft), drafter.warn)
    took = time.perf_counter() - started
    timed = f"passes timed {found.made} (in {took:.1f} s, the curves' median error is {found.error:.1%})"
    drafter.log(f"γ, at most {drafter.most}, is chosen by {timed}")
    return Control(found.curves, draft, prior(draft, model.model), drafter.most)


def setting(proposer: SparseProposer, draft: DraftConfig) -> Setting:
    """All that the curves depend on."""
    config, device = proposer.config, proposer.drafter.runner.device
    model, cuda = config.model_config, device.type == "cuda"
    hub = {k: v for k, v in model.hf_text_config.to_dict().items() if k[0] != "_" and k != "transformers_version"}
    how = "eager" if model.enforce_eager else "compiled"
    how += " with CUDA graphs" if proposer.graphs else ""
    size = config.cache_config.block_size
    kernels = f"{'vLLM' if proposer.pages is None else 'native'} attention, blocks of {size}, {how}, {draft.label}"
    return Setting(
        fingerprint(hub),
        str(model.dtype).removeprefix("torch."),
        str(proposer.caches()[0].dtype).removeprefix("torch."),
        kernels,
        0 if cuda else torch.get_num_threads(),
        torch.cuda.get_device_name(device) if cuda else processor(),
    )


def _measured(proposer: SparseProposer, draft: DraftConfig) -> tuple[Curves, float]:
    """Over blocks that are written first: memory that was never touched may be all one page, which a cache holds."""
    drafter, config = proposer.drafter, proposer.config
    settings, scheduler = drafter.settings, config.scheduler_config
    caches = proposer.caches()
    sizes = config.cache_config.num_gpu_blocks, drafter.runner.input_batch.block_table[0].block_size
    bench = Bench(proposer.verify, proposer.forward, *sizes, settings.sinks, settings.budget, drafter.runner.device)
    tokens = scheduler.max_num_batched_tokens
    points = points_of(bench, draft, scheduler.max_num_seqs, drafter.runner.max_model_len, tokens)
    used = slice(0, 1 + max(map(bench.blocks_of, points)))
    bench.run(min(points, key=bench.blocks_of))  # the attention says now how it wants its memory
    drafter.log(f"{len(points)} passes and proposals are timed")
    for cache in caches:
        cache[used].zero_()
    try:
        return measure(bench, points, drafter.log)
    finally:
        for cache in caches:
            cache[used].zero_()
