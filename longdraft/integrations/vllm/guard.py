"""When the plug-in steps aside: sentences for what it cannot draft for or attend to, and for what this vLLM lacks.

The plug-in reaches parts of vLLM that are not its public interface. So each attribute used is looked up once before the
first draft, and whatever is missing or not foreseen means plain decoding and one warning, never a failed request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from longdraft.kernels import native
from longdraft.kernels.dispatch import CallSpec

VERSIONS = ((0, 32), (0, 34))  # from, and below

# Attributes of the runner, by what they belong to; a trailing "()" is a method.
RUNNER = (
    "input_batch.block_table",
    "input_batch.req_ids",
    "input_batch.sampling_metadata",
    "requests",
    "model",
    "attn_groups",
    "effective_drafter_max_model_len",
    "device",
    "max_model_len",
    "_draft_probs",
    "_draft_prob_req_ids",
)
GRAPHS = (
    "cudagraph_dispatcher.dispatch",
    "cudagraph_dispatcher.cudagraph_mode",
    "input_ids.gpu",
    "positions",
    "_prepare_padding_mask",
    "supports_mm_inputs",
)
GROUP = ("layer_names", "get_metadata_builder")
TABLE = ("block_size", "num_blocks_per_row", "get_device_tensor")

# What a layer of vLLM's may have that the native attention has not, and how its ``impl`` says so.
ATTENTION = {
    "a sliding window": lambda impl: impl.sliding_window not in (None, -1),
    "ALiBi": lambda impl: impl.alibi_slopes is not None,
    "a soft cap on scores": lambda impl: bool(impl.logits_soft_cap),
    "sink weights": lambda impl: impl.sinks is not None,
    "keys that all tokens see (an encoder's)": lambda impl: impl.attn_type != "decoder",
    "another layer's KV cache": lambda impl: impl.kv_sharing_target_layer_name is not None,
    "a scale other than 1/sqrt(head_dim)": lambda impl: not math.isclose(impl.scale * math.sqrt(impl.head_size), 1),
}


def version_refusal(version: str) -> str | None:
    """Why vLLM of this ``version`` is not drafted for, or ``None``."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if VERSIONS[0] <= numbers < VERSIONS[1]:
        return None
    known = " to ".join(".".join(map(str, v)) for v in (VERSIONS[0], (VERSIONS[1][0], VERSIONS[1][1] - 1)))
    return f"vLLM {version} is not known to this plug-in; use {known}"


def config_refusals(config: Any) -> Iterator[str]:
    """Why an engine with vLLM's ``config`` is not drafted for: a sentence each."""
    model, parallel = config.model_config, config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        yield "with pipeline parallelism the draft would see the last stage's layers only; use tensor parallelism"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        yield "with decode context parallelism a block table names a part of each sequence only"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        yield "with prefill context parallelism a block table names a part of each sequence only"
    experts = getattr(parallel, "enable_expert_parallel", False) or getattr(parallel, "is_moe_model", False)
    if parallel.data_parallel_size > 1 and experts:
        yield "with data-parallel experts all ranks would have to draft in step"
    if config.kv_transfer_config is not None:
        yield "a KV connector would take a draft's step for the target's"
    if config.lora_config is not None:
        yield "LoRA adapters are set for the verified batch, not for the draft's"
    if model.is_encoder_decoder:
        yield "encoder-decoder models are not supported"
    if model.uses_mrope:
        yield "rotary embeddings in several dimensions (M-RoPE) are not supported"
    if model.is_hybrid or model.is_attention_free:
        yield "recurrent layers (Mamba and the like) have a state that a draft would overwrite"
    if getattr(model, "enable_prompt_embeds", False):
        yield "prompts given as embeddings are not supported"


def runner_refusals(runner: Any) -> Iterator[str]:
    """What of a bound ``runner`` is not as the plug-in needs it: a sentence each."""
    missing = [name for name in RUNNER if not _has(runner, name)]
    if missing:
        yield f"this vLLM's model runner lacks {', '.join(missing)}"
        return
    groups = [group for of_kind in runner.attn_groups for group in of_kind]
    if len(groups) != 1:
        yield f"the model's layers share {len(groups)} kinds of KV cache (sliding windows, say); 1 is supported"
        return
    table = runner.input_batch.block_table[0]
    lacking = [f"attention group {name}" for name in GROUP if not _has(groups[0], name)]
    lacking += [f"block table {name}" for name in TABLE if not _has(table, name)]
    if lacking:
        yield f"this vLLM lacks {', '.join(lacking)}"


def graphs_refusals(runner: Any, config: Any) -> Iterator[str]:
    """Why passes of ``runner``, which is bound and not refused, do not run as the CUDA graphs it has: a sentence each.

    None where vLLM does without graphs, too.
    """
    lacking = [f"model runner {name}" for name in GRAPHS if not _has(runner, name)]
    lacking += ["block table slot_mapping.gpu"] * (not _has(runner.input_batch.block_table[0], "slot_mapping.gpu"))
    lacking += ["is_attention_compiled_piecewise"] * (
        not _has(config, "compilation_config.is_attention_compiled_piecewise")
    )
    if lacking:
        yield f"this vLLM lacks {', '.join(lacking)}"
        return
    mode = runner.cudagraph_dispatcher.cudagraph_mode
    if mode.name == "NONE":
        return
    if mode.mixed_mode().name != "PIECEWISE":
        yield f"cudagraph_mode {mode.name} captures none for the parts of a pass; FULL_AND_PIECEWISE does"
    elif not config.compilation_config.is_attention_compiled_piecewise():
        yield "attention does not run between them"
    if runner.supports_mm_inputs:
        yield "a multimodal model's read embeddings instead of tokens"


def attention_refusals(spec: CallSpec, block_size: int, config: Any, layers: Iterable[Any]) -> Iterator[str]:
    """Why the native attention does not serve ``layers`` of vLLM's that share a KV cache's kind: a sentence each."""
    why = native.unsupported(spec)
    if why:
        yield why
    if block_size % spec.page_size:
        yield f"its blocks must hold a multiple of {spec.page_size} tokens, not {block_size}"
    if config.kv_transfer_config is not None:
        yield "a KV connector expects keys and values as vLLM lays them out"
    if config.model_config.is_hybrid:
        yield "recurrent layers share the cache's memory"
    if config.model_config.is_mm_prefix_lm:
        yield "the model's prefixes see all of their tokens"
    impls = [layer.impl for layer in layers]
    for name, has in ATTENTION.items():
        if any(has(impl) for impl in impls):
            yield f"its layers have {name}"


def twin_refusals(config: Any) -> Iterator[str]:
    """Why a draft cannot have 8-bit weights of its own beside an engine with vLLM's ``config``: a sentence each."""
    if config.parallel_config.tensor_parallel_size > 1:
        yield "with tensor parallelism each rank holds a part of the heads"
    if config.model_config.quantization is not None:
        yield "the target's weights are quantised already"


def auto_refusals(config: Any) -> Iterator[str]:
    """Why γ is not chosen at every step in an engine with vLLM's ``config``: a sentence each."""
    if config.parallel_config.tensor_parallel_size > 1:
        yield "with tensor parallelism each rank would choose by a clock of its own"


def _has(thing: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(thing, name):
            return False
        thing = getattr(thing, name)
    return True
