"""Tiny GGUF files for tests: sound ones by way of gguf-py's writer, broken ones byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from longdraft.models.config import ModelConfig
from longdraft.models.registry import RandomWeights

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
}


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Float32 tensors of every name that ``config`` calls for."""
    weights = RandomWeights(config, seed)
    return {name: weights.load(name) for name in weights.shapes()}


def gguf_name(name: str) -> str:
    """``model.layers.0.self_attn.q_proj.weight`` → ``blk.0.attn_q.weight``."""
    if name == "lm_head.weight":
        return "output.weight"
    stem, _, suffix = name.removeprefix("model.").rpartition(".")
    if stem.startswith("layers."):
        _, layer, part = stem.split(".", 2)
        return f"blk.{layer}.{_PARTS[part]}.{suffix}"
    return f"{_PARTS[stem]}.{suffix}"


def permute(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to the rows of q and k: [heads, 2, D/2] becomes [heads, D/2, 2]."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def write_llama_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    *,
    quant: str = "F32",
    rope_freqs: torch.Tensor | None = None,
    tokenizer: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
) -> Path:
    """Write ``tensors`` (Hugging Face names) as llama.cpp's converter would, for any family of ``config``.

    Matrices are stored as ``quant``, vectors as F32. ``tokenizer`` holds keys below ``tokenizer.ggml.`` (or whole ones
    with a dot), ``settings`` keys below the architecture that come on top of, or instead of, those of ``config``.
    """
    arch = "llama" if config.family == "mistral" else config.family
    writer = GGUFWriter(path, arch)
    for key, value in {**_settings(config), **(settings or {})}.items():
        add_value(writer, f"{arch}.{key}", value)
    for key, value in (tokenizer or {}).items():
        add_value(writer, key if "." in key else f"tokenizer.ggml.{key}", value)
    for name, tensor in tensors.items():
        if arch == "llama" and ".q_proj." in name:
            tensor = permute(tensor, config.num_heads)
        if arch == "llama" and ".k_proj." in name:
            tensor = permute(tensor, config.num_kv_heads)
        kind = GGMLQuantizationType[quant if tensor.dim() == 2 else "F32"]
        writer.add_tensor(gguf_name(name), quantize(tensor.contiguous().numpy(), kind), raw_dtype=kind)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.float().numpy())
    return finish(writer, path)


def write_blocks(path: Path, name: str, blocks: np.ndarray, quant: str) -> Path:
    """A llama file without settings and with one tensor, ``blocks`` (uint8, [rows, bytes]) being its raw data."""
    writer = GGUFWriter(path, "llama")
    writer.add_head_count(4)
    writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[quant])
    return finish(writer, path)


def add_value(writer: GGUFWriter, key: str, value: object) -> None:
    """Add a metadata value under the GGUF type that converters use for its Python type."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def finish(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _settings(config: ModelConfig) -> dict[str, object]:
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }


# ---- files byte by byte -------------------------------------------------------------------------------------------

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def array(kind: int, count: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + payload


def record(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0, rank: int | None = None) -> bytes:
    """A tensor record; ``dims`` in GGUF order, ``kind`` 0 is F32, ``rank`` lets the record lie about its length."""
    head = struct.pack("<I", len(dims) if rank is None else rank)
    return text(name) + head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def raw_gguf(
    pairs: list[bytes],
    records: list[bytes] = (),
    *,
    data: int = 0,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    """A file of these parts, padded to 32, with ``data`` zero bytes after it. ``counts``: (tensors, pairs) to claim."""
    tensors, keys = counts or (len(records), len(pairs))
    head = magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(pairs) + b"".join(records)
    return head + bytes(-len(head) % 32) + bytes(data)


def broken_files() -> dict[str, tuple[bytes, str]]:
    """What is wrong → (the file, a piece of the message that must come)."""
    return {**_broken_values(), **_broken_tensors()}


def _broken_values() -> dict[str, tuple[bytes, str]]:
    def one(kind: int, payload: bytes, key: bytes = b"k") -> bytes:
        return raw_gguf([pair(key, kind, payload)])

    long = struct.pack("<Q", 1 << 63)
    spinning = raw_gguf([pair(b"k", ARRAY, array(U8, 1 << 63))])[:49]
    assert len(spinning) == 49
    alignment = b"general.alignment"
    return {
        "empty file": (b"", "the file is empty"),
        "short magic": (b"GG", "not a GGUF file"),
        "magic": (raw_gguf([], magic=b"GGML"), "not a GGUF file"),
        "only magic": (b"GGUF", "the file ends"),
        "no counts": (raw_gguf([])[:8], "the file ends"),
        "version 1": (raw_gguf([], version=1), "version 1 is not supported"),
        "version 4": (raw_gguf([], version=4), "version 4 is not supported"),
        "big-endian": (raw_gguf([], version=3 << 24), "big-endian"),
        "2^63 keys": (raw_gguf([], counts=(0, 1 << 63)), "promises 9223372036854775808 metadata keys"),
        "2^63 tensors": (raw_gguf([], counts=(1 << 63, 0)), "promises 9223372036854775808 tensors"),
        "2^64-1 of both": (raw_gguf([], counts=((1 << 64) - 1,) * 2), "promises"),
        "one key too many": (raw_gguf([], counts=(0, 1)), "promises 1 metadata keys, but at most 0"),
        "too many keys for us": (raw_gguf([], counts=(0, 65537), data=1 << 20), "at most 65536 can follow"),
        "49 bytes": (spinning, "promises 9223372036854775808 elements"),
        "array of 2^61 words": (one(ARRAY, array(U64, 1 << 61, bytes(64))), "promises 2305843009213693952 elements"),
        "array of 2^63 strings": (one(ARRAY, array(STRING, 1 << 63)), "promises 9223372036854775808 elements"),
        "array past the end": (one(ARRAY, array(U32, 9, bytes(8))), "promises 9 elements"),
        "nested arrays": (one(ARRAY, array(ARRAY, 1, array(ARRAY, 1, array(U8, 0)))), "array of arrays"),
        "array of unknowns": (one(ARRAY, array(99, 1, bytes(8))), "unknown value type 99"),
        "array of half-truths": (one(ARRAY, array(BOOL, 3, b"\0\1\2")), "truth value"),
        "too many elements": (one(ARRAY, array(U8, (4 << 20) + 1, bytes((4 << 20) + 1))), "at most 4194304"),
        "value type": (one(13, bytes(8)), "unknown value type 13"),
        "half-true": (one(BOOL, b"\2"), "truth value"),
        "string of 2^63": (one(STRING, long), "at most 1048576 are allowed"),
        "string of 1 MiB + 1": (one(STRING, text(bytes((1 << 20) + 1))), "at most 1048576 are allowed"),
        "string past the end": (one(STRING, struct.pack("<Q", 100)), "the file ends"),
        "string not UTF-8": (one(STRING, text(b"\xff")), "not valid UTF-8"),
        "surrogate in a string": (one(STRING, text(b"\xed\xa0\x80")), "not valid UTF-8"),
        "token not UTF-8": (
            one(ARRAY, array(STRING, 2, text(b"a") + text(b"\xc3")), b"tokenizer.ggml.tokens"),
            "a string of 'tokenizer.ggml.tokens' is not valid UTF-8",
        ),
        "token past the end": (one(ARRAY, array(STRING, 1, long)), "at most 1048576 are allowed"),
        "key of 2^63": (raw_gguf([long + bytes(99)], counts=(0, 1)), "at most 65536 are allowed"),
        "key of 64 KiB + 1": (one(U8, b"\0", bytes(65537)), "at most 65536 are allowed"),
        "key not UTF-8": (one(U8, b"\0", b"\x80"), "not valid UTF-8"),
        "key twice": (raw_gguf([pair(b"k", U8, b"\0")] * 2), "metadata key 'k' appears twice"),
        "alignment 0": (one(U32, struct.pack("<I", 0), alignment), "not a power of two"),
        "alignment 3": (one(U32, struct.pack("<I", 3), alignment), "not a power of two"),
        "alignment 4": (one(U32, struct.pack("<I", 4), alignment), "not a power of two"),
        "alignment 2^17": (one(U32, struct.pack("<I", 1 << 17), alignment), "not a power of two"),
        "alignment 2^31": (one(U32, struct.pack("<I", 1 << 31), alignment), "not a power of two"),
        "alignment -32": (one(I32, struct.pack("<i", -32), alignment), "not a power of two"),
        "alignment 32.0": (one(F32, struct.pack("<f", 32), alignment), "not a power of two"),
        "alignment true": (one(BOOL, b"\1", alignment), "not a power of two"),
        "alignment in words": (one(STRING, text(b"32"), alignment), "not a power of two"),
    }


def _broken_tensors() -> dict[str, tuple[bytes, str]]:
    def one(*args: object, **kwargs: object) -> bytes:
        return raw_gguf([], [record(b"t", *args, **kwargs)], data=4096)

    huge = 1 << 32
    return {
        "0 dimensions": (one((), rank=0), "0 dimensions"),
        "5 dimensions": (one((1,) * 5), "5 dimensions"),
        "2^31 dimensions": (one((1,), rank=1 << 31), "2147483648 dimensions"),
        "empty dimension": (one((32, 0)), "empty dimension"),
        "2^32 x 2^32": (one((huge, huge)), "ends at byte 73786976294838206"),
        "2^62 x 4": (one((1 << 62, 4)), "ends at byte 73786976294838206"),
        "2^64-1 to the fourth": (one(((1 << 64) - 1,) * 4), "ends at byte"),
        "block multiple": (one((33,), 8), "not a multiple of the Q8_0 block of 32"),
        "half a super-block": (one((128,), 12), "not a multiple of the Q4_K block of 256"),
        "Q2_K": (one((256,), 10), "tensor 't' has the type Q2_K, which is not supported"),
        "F64": (one((4,), 28), "the type F64, which is not supported"),
        "unknown type": (one((4,), 99), "the unknown type 99"),
        "removed type": (one((32,), 4), "the type Q4_2, which is not supported"),
        "offset 8": (one((4,), offset=8), "not aligned to 32"),
        "offset 2^63": (one((4,), offset=1 << 63), "ends at byte"),
        "offset 2^64-32": (one((4,), offset=(1 << 64) - 32), "ends at byte"),
        "offset at the end": (one((4,), offset=4096), "ends at byte"),
        "one number too many": (one((1025,)), "ends at byte"),
        "record past the end": (raw_gguf([], counts=(1, 0), data=32), "0 dimensions"),
        "name of 2^63": (raw_gguf([], [struct.pack("<Q", 1 << 63) + bytes(64)]), "at most 65536 are allowed"),
        "name not UTF-8": (raw_gguf([], [record(b"\xff", (4,))], data=16), "not valid UTF-8"),
        "name twice": (
            raw_gguf([], [record(b"t", (4,)), record(b"t", (4,), offset=32)], data=64),
            "tensor 't' appears twice",
        ),
        "same place": (raw_gguf([], [record(b"t", (4,)), record(b"u", (4,))], data=64), "'t' and 'u' overlap"),
        "overlap": (
            raw_gguf([], [record(b"t", (4,), offset=32), record(b"u", (9,))], data=64),
            "'u' and 't' overlap",
        ),
    }
