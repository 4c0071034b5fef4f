"""What cannot be drafted for inside transformers, refused by name with the way out."""

from __future__ import annotations

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerationMode
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from longdraft.errors import InvalidValueError, UnsupportedModelError

PLAIN = "Leave out custom_generate for this call."
_LEARNED = f"{PLAIN} Prompts learned by PEFT are put in there."
# What a call may bring besides ids. All else would have to be prepared anew for each pass.
_INPUTS = {"attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep"}
_WITH_STATE = ("SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor")


def check_model(model: PreTrainedModel, positions: torch.Tensor | None, new: int) -> None:
    """``UnsupportedModelError`` unless the model is a decoder of text whose layers all attend to the whole cache.

    ``positions``: those of the prompt, if the model takes any; ``new``: the most tokens that may come behind it.
    """
    config, name = model.config, type(model).__name__
    if config.is_encoder_decoder:
        raise UnsupportedModelError("an encoder-decoder model", name, "decoder-only ones are", PLAIN)
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedModelError("a model of more than text", name, "text models are", PLAIN)
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        limit = "models whose attention goes through AttentionInterface are"
        raise UnsupportedModelError("attention of its own", name, limit, PLAIN)
    if "prepare_inputs_for_generation" in vars(model):
        raise UnsupportedModelError("prepare_inputs_for_generation", "replaced", "a model's own is", _LEARNED)
    kinds = sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers} - {DynamicLayer.__name__})
    if kinds:
        limit = "layers that attend to all tokens are"
        raise UnsupportedModelError("a layer's cache", kinds[0], limit, PLAIN)
    if positions is None or positions.dim() != 2:
        what = "None" if positions is None else f"of {positions.dim()} dimensions"
        raise UnsupportedModelError("position_ids", what, "one position for each token is", PLAIN)
    longest = int(positions.max()) + 1 + new
    every = getattr(config, "rope_parameters", None) or {}
    for rope in (every, *every.values()):  # some have one for each kind of layer
        if not isinstance(rope, dict) or rope.get("rope_type") not in ("dynamic", "longrope"):
            continue
        border = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if longest > border:  # the angles would hang on how many tokens a pass feeds
            limit = f"up to {border} tokens it is, and this call may reach {longest}"
            raise UnsupportedModelError("rope_type", rope["rope_type"], limit, "Lower max_new_tokens.")


def check_call(
    config: GenerationConfig, processors: list, criteria: list, inputs: dict[str, object], batch: int
) -> None:
    """``InvalidValueError`` for a way of decoding that is another algorithm, or needs what drafts cannot give."""
    mode = config.get_generation_mode(inputs.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        limit = "only greedy_search and sample can be drafted for here"
        fix = "Leave out custom_generate, or num_beams, assistant_model and prompt_lookup_num_tokens."
        raise InvalidValueError("generation mode", mode.value, limit, fix)
    for option in ("output_attentions", "output_hidden_states"):
        if getattr(config, option):
            raise InvalidValueError(option, True, "must be False: a verify pass computes several tokens at once", PLAIN)
    if not config.use_cache:
        raise InvalidValueError("use_cache", False, "must be True: drafts read the cache", "Leave it out.")
    if inputs.get("streamer") is not None and batch > 1:
        limit = "must be None with more than one row, since rows are not at the same place"
        raise InvalidValueError("streamer", type(inputs["streamer"]).__name__, limit, "Pass one prompt.")
    others = [n for n, value in inputs.items() if value is not None and n not in _INPUTS | {"streamer"}]
    if others:
        raise InvalidValueError("an input", others[0], f"must be one of {', '.join(sorted(_INPUTS))}", PLAIN)
    if config._pad_token_tensor is None and any(hasattr(c, "eos_token_id") for c in criteria):
        raise InvalidValueError("pad_token_id", None, "must be set where text ends by a token", "Pass pad_token_id.")
    for processor in processors:
        if type(processor).__name__ in _WITH_STATE:
            limit = "must be a function of the ids alone, since tokens that it has seen may be taken back"
            raise InvalidValueError("a logits processor", type(processor).__name__, limit, PLAIN)


def check_prompt(ids: torch.Tensor, columns: int, past: int, positions: torch.Tensor) -> None:
    """``InvalidValueError`` unless ``ids [B, n]`` are all tokens, or all behind the ``past`` ones that are cached.

    ``columns``: how many tokens there are in all, as the mask says; ``positions``: of the new ones at least.
    """
    new, given = columns - past, ids.shape[1]
    if new < 1 or given not in (columns, new):
        limit = f"must be all {columns} tokens of the attention_mask or those behind the {past} in the cache, 1 or more"
        fix = "Pass the mask of all tokens, and crop the cache if it has the last one."
        raise InvalidValueError("the length of input_ids", given, limit, fix)
    if positions.shape[1] < new:
        limit = f"must be at least the {new} that are new"
        raise InvalidValueError("the length of position_ids", positions.shape[1], limit, "Leave them out.")


def check_cache(cache: object) -> None:
    """``InvalidValueError`` unless the cache is a stock ``DynamicCache`` of layers that keep all tokens."""
    fix = "Leave out cache_implementation, or pass a DynamicCache."
    layers = getattr(cache, "layers", None)
    names = [type(x).__name__ for x in layers or () if type(x) is not DynamicLayer]
    if type(cache) is not DynamicCache or names or cache.offloading:
        name = names[0] if names else type(cache).__name__
        raise InvalidValueError("cache", name, "must be a DynamicCache whose layers keep all tokens in place", fix)


def check_distributed(model: PreTrainedModel) -> None:
    """``UnsupportedModelError`` where other processes would wait for passes that this one does not make."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model):
            limit = "weights that are whole in each process, or split by tensor, are"
            raise UnsupportedModelError("sharded weights", "FSDP or ZeRO-3", limit, PLAIN)
