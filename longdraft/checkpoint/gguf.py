"""GGUF checkpoints in Hugging Face's words: tensor names and row order, and metadata as a ``config.json`` dict.

Owns what llama.cpp's converter does to a model and undoes it. Takes a checked ``GGUFHeader``; of the gguf library only
the block formats (``gguf.quants``) are used, never its reader.
"""

from __future__ import annotations

import math
import re
import reprlib

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from longdraft.checkpoint.gguf_header import GGUFHeader
from longdraft.errors import ModelFileError, UnsupportedModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # llama.cpp writes Mistral as llama, too
ROPE_FREQS = "rope_freqs.weight"

_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(0|[1-9]\d*)\.)?(\w+)\.(weight|bias)", re.ASCII)
_PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Keys below "<architecture>." that are read, and those accepted only with the one value that changes nothing.
_READ = {
    *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length"),
    *(f"attention.{k}" for k in ("head_count", "head_count_kv", "key_length", "value_length", "sliding_window")),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
    *(f"rope.scaling.{k}" for k in ("type", "factor", "original_context_length", "attn_factor", "finetuned")),
    *(f"rope.scaling.yarn_{k}" for k in ("attn_factor", "beta_fast", "beta_slow")),
}
_NEUTRAL = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "tensor_data_layout": "Meta AI original pth",  # the interleaved q/k rows that every llama file has
}


class GGUFWeights:
    """The tensors of one GGUF file as a ``WeightSource``; raises ``ModelFileError`` for one it has no name for."""

    def __init__(self, header: GGUFHeader) -> None:
        self._header = header
        self._names = {_hf_name(header, name): name for name in header.tensors if name != ROPE_FREQS}
        self._heads: dict[str, int] = {}
        meta = _Metadata(header)
        if meta.architecture == "llama":
            heads = meta.integer("attention.head_count")
            self._heads = {"q_proj": heads, "k_proj": meta.integer("attention.head_count_kv", heads)}

    @property
    def path(self) -> str:
        return self._header.path

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {hf: self._header.tensors[name].shape for hf, name in self._names.items()}

    def load(self, name: str) -> torch.Tensor:
        """Tensor ``name`` in its file's float dtype, or float32 where it was quantised; q/k rows in HF's order."""
        if name not in self._names:
            raise ModelFileError(self.path, f"tensor {name!r} is missing")
        tensor = _read_tensor(self._header, self._names[name])
        heads = self._heads.get(name.split(".")[-2])
        return tensor if heads is None else self._unpermute(name, tensor, heads)

    def _unpermute(self, name: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        """Per head, rows (0, D/2, 1, D/2+1, ...) back to (0, 1, ...): llama.cpp rotates neighbours, HF halves."""
        rows = tensor.shape[0]
        if rows % (2 * heads):
            raise ModelFileError(self.path, f"tensor {name!r} has {rows} rows, not {heads} heads of even size")
        pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)


def hf_config(header: GGUFHeader) -> dict[str, object]:
    """The metadata as a ``config.json`` dict, plus ``rope_freq_factors`` (list of D/2 floats) where the file has them.

    Raises ``UnsupportedModelError`` for settings that would change the output and are not supported, and
    ``ModelFileError`` for missing or senseless ones.
    """
    meta = _Metadata(header)
    meta.refuse_unsupported()
    heads, head_dim = meta.integer("attention.head_count"), _head_dim(meta)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(header.path, "there is no two-dimensional tensor 'token_embd.weight'")
    layers = meta.integer("block_count")
    if layers > len(header.tensors):  # else code that lists the tensors of every layer could run for ever
        raise ModelFileError(header.path, f"{meta.name('block_count')} is {layers}, more than there are tensors")
    config: dict[str, object] = {
        "model_type": meta.architecture,
        "hidden_act": "silu",
        "vocab_size": embedding.shape[0],
        "hidden_size": meta.integer("embedding_length"),
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.integer("context_length"),
        "rms_norm_eps": meta.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    if meta.architecture != "qwen2":  # whose q, k and v always have biases, without a setting
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if meta.architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    if meta.get("attention.sliding_window", 0) != 0:
        config["sliding_window"] = meta.integer("attention.sliding_window")
        if meta.architecture != "llama":  # where the words must also say that it counts, in every layer
            config |= {"use_sliding_window": True, "max_window_layers": 0}
    if ROPE_FREQS in header.tensors:
        config["rope_freq_factors"] = _rope_freq_factors(header, head_dim)
    return config


def eos_token_ids(header: GGUFHeader) -> tuple[int, ...]:
    """The ids that end a generation: end of sequence, of turn and of message, as far as the file names them."""
    ids = (_token_id(header, key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
    return tuple(dict.fromkeys(i for i in ids if i is not None))


class _Metadata:
    """Typed look-ups below ``<architecture>.``"""

    def __init__(self, header: GGUFHeader) -> None:
        self._header = header
        self.architecture = header.metadata.get("general.architecture")
        if self.architecture is None:
            raise ModelFileError(header.path, "metadata key 'general.architecture' is missing")
        if self.architecture not in ARCHITECTURES:
            known = f"only {', '.join(ARCHITECTURES)}"
            raise UnsupportedModelError("general.architecture", _brief(self.architecture), known)

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def get(self, key: str, default: object = None) -> object:
        return self._header.metadata.get(self.name(key), default)

    def integer(self, key: str, default: int | None = None) -> int:
        return self._number(key, default, (int,), "a whole number above 0")

    def real(self, key: str, default: float | None = None) -> float:
        value = self._number(key, default, (int, float), "a finite number above 0")
        # Stored as float32: its shortest decimal is what the original config said (1e-05, not 9.999999747e-06).
        short = float(str(np.float32(value)))
        return short if float(np.float32(short)) == value else float(value)

    def _number(self, key: str, default: float | None, types: tuple[type, ...], expected: str) -> int | float:
        value = self.get(key, default)
        if value is None:
            raise ModelFileError(self._header.path, f"metadata key {self.name(key)!r} is missing")
        if type(value) not in types or not 0 < value < math.inf:
            shown = reprlib.repr(value)
            raise ModelFileError(self._header.path, f"metadata key {self.name(key)!r} is {shown}, expected {expected}")
        return value

    def refuse_unsupported(self) -> None:
        """Raise ``UnsupportedModelError`` for the first key that could change the output and is not read here."""
        metadata = self._header.metadata
        if metadata.get("split.count", 1) not in (0, 1):
            fix = "Merge the parts with `llama-gguf-split --merge` first."
            raise UnsupportedModelError("split.count", _brief(metadata["split.count"]), "only files in one part", fix)
        if metadata.get("general.type", "model") != "model":
            raise UnsupportedModelError("general.type", _brief(metadata["general.type"]), "only 'model'")
        for name, value in metadata.items():
            prefix, _, key = name.partition(".")
            if prefix != self.architecture or key in _READ:
                continue
            if key not in _NEUTRAL:
                raise UnsupportedModelError(name, _brief(value), "LongDraft does not know this setting")
            if value != _NEUTRAL[key]:
                raise UnsupportedModelError(name, _brief(value), f"only {_NEUTRAL[key]!r}")


def _brief(value: object) -> object:
    """``value`` for a message: strings and lists come from the file and may be megabytes long."""
    return value if isinstance(value, (int, float)) else reprlib.repr(value).strip("'")


def _hf_name(header: GGUFHeader, name: str) -> str:
    match = _NAME.fullmatch(name)
    layer, part, suffix = match.groups() if match else (None, None, None)
    known = _MODEL_NAMES.get(part) if layer is None else _LAYER_NAMES.get(part)
    if known is None:
        raise ModelFileError(header.path, f"tensor {reprlib.repr(name)} is not one that LongDraft knows")
    return f"{known}.{suffix}" if layer is None else f"model.layers.{layer}.{known}.{suffix}"


def _read_tensor(header: GGUFHeader, name: str) -> torch.Tensor:
    """One tensor by its GGUF name, in the file's row order; quantised blocks become float32."""
    info = header.tensors[name]
    try:
        raw = np.memmap(header.path, np.uint8, mode="r", offset=info.offset, shape=(info.nbytes,))
    except (OSError, ValueError) as error:  # ValueError: shorter than when its header was read
        raise ModelFileError(header.path, f"tensor {name!r} cannot be read ({error})", offset=info.offset) from error
    if info.type in _PLAIN_DTYPES:
        return torch.from_numpy(np.array(raw)).view(_PLAIN_DTYPES[info.type]).reshape(info.shape)
    rows = np.asarray(raw).reshape(math.prod(info.shape[:-1]), -1)
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType[info.type])).reshape(info.shape)


def _head_dim(meta: _Metadata) -> int:
    """The size of a head. llama.cpp's defaults: keys and values have hidden/heads, and the whole head is rotated."""
    even_share = meta.integer("embedding_length") // meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", even_share)
    for key, default in (("attention.value_length", even_share), ("rope.dimension_count", head_dim)):
        if meta.integer(key, default) != head_dim:
            raise UnsupportedModelError(meta.name(key), meta.integer(key, default), f"only the head size {head_dim}")
    return head_dim


def _rope_freq_factors(header: GGUFHeader, head_dim: int) -> list[float]:
    """The divisors of the D/2 inverse frequencies, which is how llama.cpp stores the llama3 scaling."""
    if header.tensors[ROPE_FREQS].shape != (head_dim // 2,):
        shape = header.tensors[ROPE_FREQS].shape
        raise ModelFileError(header.path, f"tensor {ROPE_FREQS!r} has shape {shape}, expected ({head_dim // 2},)")
    factors = _read_tensor(header, ROPE_FREQS).tolist()
    if not all(0 < factor < math.inf for factor in factors):
        raise ModelFileError(header.path, f"tensor {ROPE_FREQS!r} holds a factor that is not a finite number above 0")
    return factors


def _rope_scaling(meta: _Metadata) -> dict[str, object] | None:
    """``rope_scaling`` of ``config.json``. As in llama.cpp, a factor without a type is linear."""
    kind = meta.get("rope.scaling.type", "linear")
    key = "rope.scaling.factor" if meta.get("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = meta.real(key, 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(meta.name("rope.scaling.type"), _brief(kind), "only none, linear and yarn")
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, **_yarn_settings(meta, factor)}
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        if meta.real(key, 1.0) != 1.0:
            raise UnsupportedModelError(meta.name(key), meta.real(key), "only 1.0 without yarn")
    return None if kind == "none" or factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _yarn_settings(meta: _Metadata, factor: float) -> dict[str, object]:
    """YaRN's lengths and magnitudes; what the file leaves out keeps the default of ``config.json``."""
    length = meta.integer("rope.scaling.original_context_length", meta.integer("context_length"))
    settings: dict[str, object] = {"original_max_position_embeddings": length}
    for word in ("beta_fast", "beta_slow"):
        if meta.get(f"rope.scaling.yarn_{word}") is not None:
            settings[word] = meta.real(f"rope.scaling.yarn_{word}")
    # The converter writes attention_factor as yarn_attn_factor; attn_factor multiplies that or what factor implies.
    implied = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    magnitude = meta.real("rope.scaling.yarn_attn_factor", implied) * meta.real("rope.scaling.attn_factor", 1.0)
    if magnitude != implied:
        settings["attention_factor"] = magnitude
    return settings


def _token_id(header: GGUFHeader, key: str) -> int | None:
    name = f"tokenizer.ggml.{key}"
    value = header.metadata.get(name)
    if value is None:
        return None
    embedding = header.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding else 0
    if type(value) is not int or not 0 <= value < rows:
        raise ModelFileError(header.path, f"{name} is {reprlib.repr(value)}, expected a token id below {rows}")
    return value
