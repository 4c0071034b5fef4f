"""What a model is, read from ``config.json`` (or GGUF metadata put in the same words).

Owns the reading and checking of architecture settings. Settings that would change the output and are not supported
are refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from longdraft.errors import InvalidValueError, UnsupportedModelError
from longdraft.models.settings import MAX_LENGTH, REQUIRED, Settings


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and scaling rule."""

    theta: float = 10000.0
    kind: str = "default"  # default | linear | dynamic | yarn | llama3
    factor: float = 1.0
    original_max_len: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None = derived
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    freq_factors: tuple[float, ...] | None = None  # GGUF rope_freqs.weight: each inverse frequency is divided by it


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama/Mistral/Qwen2/Qwen3 family."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None  # only a window >= max_model_len is accepted (= full attention)

    @property
    def context_length(self) -> int:
        """Longest context in tokens: position scaling by a factor stretches the length it starts from (as in vLLM)."""
        own, rope = self.max_position_embeddings, self.rope
        if rope.kind == "yarn":
            return max(own, int(rope.factor * (rope.original_max_len or own)))
        return int(rope.factor * own) if rope.kind == "linear" else own

    @property
    def full_attention_length(self) -> int:
        """Longest context in which every token sees all before it: a window ends that earlier."""
        return min(self.context_length, self.sliding_window or self.context_length)

    @property
    def kv_elements_per_layer(self) -> int:
        """Elements of K and V that one token takes in one layer."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class _Family:
    """What ``transformers`` assumes for one ``model_type`` where the file is silent, and the bias switches it reads."""

    architecture: str
    max_position_embeddings: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    sliding_window: int | None = None
    bias_flags: tuple[str, ...] = ()


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", 2048, bias_flags=("attention_bias", "mlp_bias")),
    "mistral": _Family("MistralForCausalLM", 131072, num_kv_heads=8, sliding_window=4096),
    "qwen2": _Family("Qwen2ForCausalLM", 32768, num_kv_heads=32, sliding_window=4096),
    "qwen3": _Family("Qwen3ForCausalLM", 32768, 32, head_dim=128, sliding_window=4096, bias_flags=("attention_bias",)),
}

_READ = frozenset(
    """model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rms_norm_eps hidden_act tie_word_embeddings layer_types
    sliding_window use_sliding_window max_window_layers rope_theta rope_scaling rope_parameters rope_freq_factors
    partial_rotary_factor original_max_position_embeddings""".split()
)
# Training, initialisation, bookkeeping and generation defaults: none of them changes a logit. ``pretraining_tp`` only
# splits sums. ``auto_map`` names Python files beside the model: a known family needs none, and none is ever imported.
_HARMLESS = frozenset(
    """transformers_version torch_dtype dtype use_cache use_bfloat16 initializer_range attention_dropout hidden_dropout
    attention_probs_dropout_prob hidden_dropout_prob resid_pdrop embd_pdrop classifier_dropout gradient_checkpointing
    neftune_noise_alpha pretraining_tp auto_map name_or_path is_llama_config transformers.js_config model_max_length
    max_sequence_length bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
    decoder_start_token_id tokenizer_class attn_implementation use_flash_attn is_decoder return_dict torchscript
    return_dict_in_generate output_attentions output_hidden_states output_scores chunk_size_feed_forward
    finetuning_task id2label label2id num_labels problem_type prefix task_specific_params do_sample temperature top_p
    top_k min_p typical_p repetition_penalty length_penalty diversity_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size max_length max_new_tokens min_length num_beams num_beam_groups num_return_sequences
    early_stopping bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id
    exponential_decay_length_penalty remove_invalid_values""".split()
)
_QUANTIZED = ("float weights only", "Use the checkpoint that was not quantised, or a GGUF file.")
_EXPERTS = ("dense models only", "A mixture-of-experts model cannot be run.")
_MULTIMODAL = ("text-only models", "Save its language model as a checkpoint of its own.")
_REFUSED = {
    "quantization_config": _QUANTIZED,
    "quantization": _QUANTIZED,
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "text_config": _MULTIMODAL,
    "vision_config": _MULTIMODAL,
    "rope_interleaved": ("half-split rotary pairs only", "Reorder the rows of q and k as the Hugging Face models do."),
}
_UNKNOWN = (
    "not a setting that LongDraft knows",
    "Remove it from the file if it does not change the model's output; if it does, the model cannot be run.",
)

_ROPE_SHARED = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_ROPE_KEYS = {
    "default": _ROPE_SHARED,
    "linear": _ROPE_SHARED | {"factor"},
    "dynamic": _ROPE_SHARED | {"factor"},
    "llama3": _ROPE_SHARED | {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": _ROPE_SHARED
    | {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    | {"finetuned"},  # a remark that the first YaRN models carry
}


def parse_hf_config(raw: Mapping[str, object], *, source: str = "config.json") -> ModelConfig:
    """Check and translate a Hugging Face ``config.json`` (or GGUF metadata put in the same words).

    Absent keys take the defaults of ``transformers``. ``source`` is the file's name for messages. Raises
    ``UnsupportedModelError`` for a setting that would change the output and is not supported, also for one that is not
    known at all, and ``InvalidValueError`` for a value of the wrong kind or out of range.
    """
    top = Settings(raw, f"{source}: ")
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in _FAMILIES:
        top.refuse("model_type", f"known: {', '.join(_FAMILIES)}")
    family = _FAMILIES[name]
    if raw.get("architectures") not in (None, [], [family.architecture]):
        top.refuse("architectures", f"for model_type {name!r}: {family.architecture}")
    if raw.get("hidden_act") not in (None, "silu", "swish"):
        top.refuse("hidden_act", "silu only")
    _refuse_others(top, _READ | _HARMLESS | set(family.bias_flags))

    heads, kv_heads, head_dim = _head_shape(top, family)
    layers = top.integer("num_hidden_layers", most=10_000)
    max_len = top.integer("max_position_embeddings", family.max_position_embeddings, most=MAX_LENGTH)
    attention_bias = "attention_bias" in family.bias_flags and top.flag("attention_bias")
    return ModelConfig(
        family=name,
        vocab_size=top.integer("vocab_size"),
        hidden_size=top.integer("hidden_size"),
        intermediate_size=top.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_len,
        norm_eps=top.number("rms_norm_eps", 1e-6),
        rope=_rope(top, head_dim, max_len),
        qkv_bias=attention_bias or name == "qwen2",
        o_bias=attention_bias,
        mlp_bias="mlp_bias" in family.bias_flags and top.flag("mlp_bias"),
        qk_norm=name == "qwen3",
        tie_embeddings=top.flag("tie_word_embeddings"),
        sliding_window=_sliding_window(top, name, layers),
    )


def _refuse_others(settings: Settings, known: frozenset[str] | set[str]) -> None:
    """Refuse by name every key that is neither known, nor private, nor switched off (null, false or empty)."""
    for key in sorted(settings.raw.keys() - known):
        value = settings.raw[key]
        off = value is None or value is False or (isinstance(value, (str, list, tuple, Mapping)) and not value)
        if not off and not key.startswith(("_", "unsloth_")):
            settings.refuse(key, *_REFUSED.get(key, _UNKNOWN))


def _head_shape(top: Settings, family: _Family) -> tuple[int, int, int]:
    """Query heads, KV heads and head size: ``null`` means "derive it", an absent key the family's default."""
    hidden, heads = top.integer("hidden_size"), top.integer("num_attention_heads")
    kv_default = None if "num_key_value_heads" in top.raw else family.num_kv_heads
    kv_heads = top.integer("num_key_value_heads", kv_default or heads)
    if heads % kv_heads:
        limit = f"it must divide num_attention_heads, which is {heads}"
        raise InvalidValueError(f"{top.where}num_key_value_heads", kv_heads, limit)
    head_dim = top.integer("head_dim", None if "head_dim" in top.raw else family.head_dim)
    if head_dim is None:
        if hidden % heads:
            limit = f"without head_dim it must be a multiple of num_attention_heads, which is {heads}"
            raise InvalidValueError(f"{top.where}hidden_size", hidden, limit)
        head_dim = hidden // heads
    if head_dim % 2:
        raise InvalidValueError(f"{top.where}head_dim", head_dim, "it must be even, as rotary embedding turns pairs")
    return heads, kv_heads, head_dim


def _sliding_window(top: Settings, family: str, layers: int) -> int | None:
    """The window of the layers that have one; None when every layer attends to everything."""
    qwen = family.startswith("qwen")
    window = None
    if not qwen or top.flag("use_sliding_window"):
        absent = None if "sliding_window" in top.raw else _FAMILIES[family].sliding_window
        window = top.integer("sliding_window", absent, most=MAX_LENGTH)
    kinds = top.raw.get("layer_types")
    if kinds is None:
        first = top.integer("max_window_layers", 28, least=0) if qwen else 0
        return window if first < layers else None
    known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    if not known or len(kinds) != layers:
        top.refuse("layer_types", f"one full_attention or sliding_attention for each of {layers} layers")
    slides = "sliding_attention" in kinds
    if slides and window is None:
        top.refuse("layer_types", "sliding_attention needs a sliding_window that is switched on")
    return window if slides or not qwen else None  # Llama and Mistral apply a window whatever layer_types says


def _rope(top: Settings, head_dim: int, max_len: int) -> RopeConfig:
    """Rotary settings from ``rope_scaling``, from ``rope_parameters``, or from ``rope_theta`` alone."""
    if top.number("partial_rotary_factor", 1.0) != 1:
        top.refuse("partial_rotary_factor", "1 only: rotary embedding of the whole head")
    given = [key for key in ("rope_scaling", "rope_parameters") if top.raw.get(key)] or ["rope_parameters"]
    rope = _rope_block(top, given[0], max_len)
    if _rope_block(top, given[-1], max_len) != rope:
        top.refuse("rope_scaling", "it contradicts rope_parameters", "Keep the one that is right.")
    factors = top.raw.get("rope_freq_factors")
    if factors is None:
        return rope
    if not isinstance(factors, (list, tuple)) or len(factors) != head_dim // 2:
        limit = f"it must be a list of head_dim / 2 = {head_dim // 2} numbers"
        raise InvalidValueError(f"{top.where}rope_freq_factors", factors, limit)
    entries = Settings({str(i): factor for i, factor in enumerate(factors)}, f"{top.where}rope_freq_factors.")
    return replace(rope, freq_factors=tuple(entries.number(key) for key in entries.raw))


def _rope_block(top: Settings, key: str, max_len: int) -> RopeConfig:
    """One block of rotary settings. A theta inside it wins over ``rope_theta`` at the top, as in ``transformers``."""
    raw = top.raw.get(key) or {}
    if not isinstance(raw, Mapping):
        raise InvalidValueError(f"{top.where}{key}", raw, "it must be an object")
    if any(isinstance(value, Mapping) for value in raw.values()):
        if len(raw) > 1:
            top.refuse(key, "one rotary setting for all layers")
        (raw,) = raw.values()
    block = Settings(raw, f"{top.where}{key}.")
    kinds = [raw[word] for word in ("rope_type", "type") if raw.get(word) is not None] or ["default"]
    kind = kinds[0]
    if kinds[-1] != kind or not isinstance(kind, str) or kind not in _ROPE_KEYS:
        shown = kind if kinds[-1] == kind else kinds
        raise UnsupportedModelError(f"{block.where}rope_type", shown, f"known: {', '.join(_ROPE_KEYS)}")
    _refuse_others(block, _ROPE_KEYS[kind])
    if block.number("partial_rotary_factor", 1.0) != 1:
        block.refuse("partial_rotary_factor", "1 only: rotary embedding of the whole head")
    return RopeConfig(**_rope_fields(top, block, kind, max_len))


def _rope_fields(top: Settings, block: Settings, kind: str, max_len: int) -> dict[str, object]:
    """The fields of ``RopeConfig`` that ``kind`` uses, checked."""
    fields: dict[str, object] = {"kind": kind}
    fields["theta"] = theta = block.number("rope_theta", top.number("rope_theta", RopeConfig.theta))
    if theta <= 1:
        raise InvalidValueError(f"{top.where}rope_theta", theta, "it must be above 1")
    original = block.integer("original_max_position_embeddings", max_len, most=MAX_LENGTH)
    original = top.integer("original_max_position_embeddings", original, most=MAX_LENGTH)
    if kind == "dynamic" and original != max_len:
        raise UnsupportedModelError(
            f"{top.where}original_max_position_embeddings", original, f"dynamic: {max_len} only"
        )
    if kind in ("dynamic", "llama3", "yarn"):
        fields["original_max_len"] = original
    if kind != "default":
        fields["factor"] = block.number("factor", max_len / original if kind == "yarn" else REQUIRED)
    if kind == "llama3":
        fields["low_freq_factor"] = low = block.number("low_freq_factor")
        fields["high_freq_factor"] = high = block.number("high_freq_factor")
        if high <= low:
            raise InvalidValueError(f"{block.where}high_freq_factor", high, f"it must be above low_freq_factor, {low}")
    if kind == "yarn":
        for name in ("beta_fast", "beta_slow", "attention_factor"):
            fields[name] = block.number(name, getattr(RopeConfig, name))
        for name in ("mscale", "mscale_all_dim"):
            fields[name] = block.number(name, None, zero_ok=True)
        fields["truncate"] = block.flag("truncate", True)
    return fields
