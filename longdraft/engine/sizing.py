"""How large the engine is on this machine: device, types, context limit and KV pages."""

from __future__ import annotations

import psutil
import torch

from longdraft.config import EngineConfig, check_int
from longdraft.errors import InvalidValueError, KVCapacityError, UnsupportedModelError
from longdraft.models.config import ModelConfig

DTYPES = {
    "auto": torch.float32,  # bfloat16 where kernels exist that multiply in it at speed
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.bfloat16,  # same size, and no overflow
    "float64": torch.float64,
}
FREE_MEMORY_SHARE = 0.4


def resolve_dtype(what: str, name: str) -> torch.dtype:
    """``auto``, ``float32``, ``bfloat16``, ``float16`` or ``float64`` → the storage type."""
    if name not in DTYPES:
        raise InvalidValueError(what, name, f"must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def resolve_device(name: str) -> torch.device:
    """``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:N``."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = str(name).partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise InvalidValueError("device", name, "must be auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        limit = f"must exist; this machine has {torch.cuda.device_count()} CUDA devices"
        raise InvalidValueError("device", name, limit, "Use device='cpu'.")
    return torch.device(name)


def size_engine(
    config: ModelConfig,
    kv_dtype: torch.dtype,
    device: torch.device,
    *,
    max_model_len: int | None,
    kv_cache_memory_bytes: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
    seed: int,
) -> EngineConfig:
    """The engine's sizes. A ``max_model_len`` that was asked for must fit in the KV cache; the model's own is cut.

    Raises ``InvalidValueError``, ``KVCapacityError`` or ``UnsupportedModelError``.
    """
    length = context_limit(config, max_model_len)
    check_int("block_size", block_size, 1, 4096)
    check_int("max_num_seqs", max_num_seqs, 1, 65536)
    page_bytes = kv_bytes_per_token(config, kv_dtype) * block_size
    memory = kv_cache_memory_bytes
    if memory is None:
        memory = int(_free_memory(device) * FREE_MEMORY_SHARE)
    check_int("kv_cache_memory_bytes", memory, page_bytes, 2**63 - 1, f"One page alone takes {page_bytes} bytes.")
    pages_for_one = -(-length // block_size)
    num_pages = min(memory // page_bytes, max_num_seqs * pages_for_one)
    if max_model_len is not None and num_pages < pages_for_one:
        raise KVCapacityError(
            f"A context of max_model_len = {length} tokens takes {pages_for_one * page_bytes / 2**20:.0f} MiB of KV, "
            f"but the cache has {memory / 2**20:.0f} MiB ({num_pages * block_size} tokens). "
            "Lower max_model_len or raise kv_cache_memory_bytes."
        )
    return EngineConfig(length, num_pages, max_num_seqs, max_num_batched_tokens, block_size, seed)


def context_limit(config: ModelConfig, max_model_len: int | None) -> int:
    """The context length in tokens: what was asked for, checked against what the model can do, or the model's own."""
    own = config.context_length
    if max_model_len is None:
        max_model_len = own
    check_int("max_model_len", max_model_len, 2, own, "The model was not made for longer contexts.")
    window = config.sliding_window
    if window is not None and window < max_model_len:
        fix = f"Pass max_model_len={window} or less: up to there a window is full attention."
        raise UnsupportedModelError("sliding_window", window, f"below max_model_len = {max_model_len}", fix)
    return max_model_len


def kv_bytes_per_token(config: ModelConfig, kv_dtype: torch.dtype) -> int:
    """Bytes of K and V that one token takes over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_dtype.itemsize


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
