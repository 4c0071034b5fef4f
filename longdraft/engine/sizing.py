"""How large the engine is on this machine: device, types, context limit and KV pages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil
import torch

from longdraft.config import EngineConfig, as_int
from longdraft.errors import InvalidValueError, KVCapacityError, OutOfMemoryError, UnsupportedModelError
from longdraft.kernels.dispatch import CallSpec, select
from longdraft.kv.format.base import Format
from longdraft.kv.packing import Packing
from longdraft.models.config import ModelConfig
from longdraft.models.weights import num_parameters

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.bfloat16,  # same size, and no overflow
    "float64": torch.float64,
}
FREE_MEMORY_SHARE = 0.4
CGROUP = Path("/sys/fs/cgroup")


def resolve_dtype(what: str, name: str | torch.dtype, auto: torch.dtype = torch.float32) -> torch.dtype:
    """``auto``, ``float32``, ``bfloat16``, ``float16`` or ``float64``, by name or as torch's → the storage type."""
    if isinstance(name, torch.dtype):
        name = str(name).removeprefix("torch.")
    if not isinstance(name, str) or name not in (*DTYPES, "auto"):
        raise InvalidValueError(what, name, f"must be one of auto, {', '.join(DTYPES)}")
    return DTYPES.get(name, auto)


def auto_dtype(config: ModelConfig, device: torch.device, block_size: int) -> torch.dtype:
    """What ``auto`` stands for: bfloat16 where native kernels multiply in it at speed, else float32."""
    half, group = torch.bfloat16, config.num_heads // config.num_kv_heads
    spec = CallSpec(device.type, half, half, config.head_dim, group, block_size)
    return half if select("linear", spec).name == "native" else torch.float32


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


def resolve_block_size(tokens: int) -> int:
    """Tokens to a page."""
    return as_int("block_size", tokens, 1, 4096)


def size_engine(
    config: ModelConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    *,
    kv_format: Format | None = None,
    draft: ModelConfig | None = None,
    draft_weights: int = 0,
    kept: int = 0,
    copied: int = 0,
    observed: int = 0,
    page_notes: int = 0,
    max_model_len: int | None,
    kv_cache_memory_bytes: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
    seed: int,
) -> EngineConfig:
    """The engine's sizes, worked out before the weights are loaded.

    A ``max_model_len`` that was asked for must fit in the KV cache; where it was not, requests end at the cache's size.
    A ``draft`` model's weights and cache take their share: each token may have its K and V in both. So do other
    ``draft_weights`` in bytes, what a draft keeps of each sequence (copies of ``copied`` tokens' K and V, the queries
    of ``observed`` tokens, those of ``draft`` if it has weights of its own, and ``kept`` bytes), and the ``page_notes``
    bytes that it remembers of every page's tokens. With a ``kv_format`` a page may hold more tokens than a block.
    Raises ``InvalidValueError``, ``KVCapacityError``, ``OutOfMemoryError`` or ``UnsupportedModelError``.
    """
    length = context_limit(config, max_model_len)
    block_size = resolve_block_size(block_size)
    max_num_seqs = as_int("max_num_seqs", max_num_seqs, 1, 65536)
    models = [config] if draft is None else [config, draft]
    page = Page(config, kv_dtype, block_size, kv_format)
    others = [kv_bytes_per_token(m, kv_dtype) for m in models[1:]]
    page_bytes = page.bytes + sum(others) * page.tokens + page_notes * page.tokens // block_size
    left = max(0, memory_left(models, dtype, device) - draft_weights)
    if kv_cache_memory_bytes is None:
        memory = int(left * FREE_MEMORY_SHARE)
    else:
        fix = f"One page alone takes {page_bytes} bytes."
        memory = as_int("kv_cache_memory_bytes", kv_cache_memory_bytes, page_bytes, 2**63 - 1, fix)
    pages_for_one = page.needed(length)
    source = draft or config
    kept += copied * kv_bytes_per_token(source, kv_dtype) + observed * query_bytes_per_token(source)
    copied_page = page.tokens * kv_bytes_per_token(config, kv_dtype) if kv_format else page_bytes
    noted_page = copied_page + page.tokens * query_bytes_per_token(source)
    fitting = pages_beside(memory, page_bytes, max_num_seqs * kept, noted_page)
    num_pages = min(fitting if kept else memory // page_bytes, max_num_seqs * pages_for_one)
    if num_pages < (1 if max_model_len is None else pages_for_one):
        raise KVCapacityError(
            f"A context of {length} tokens takes {pages_for_one * page_bytes / 2**20:.0f} MiB of KV, but the cache has "
            f"{memory / 2**20:.0f} MiB ({page.longest(num_pages)} tokens). Lower max_model_len or raise "
            "kv_cache_memory_bytes."
        )
    return EngineConfig(length, num_pages, max_num_seqs, max_num_batched_tokens, block_size, seed)


class Page:
    """A page of the target's cache: its ``bytes``, the ``tokens`` that it holds at most, and how far pages reach."""

    def __init__(self, config: ModelConfig, kv_dtype: torch.dtype, block_size: int, kv_format: Format | None) -> None:
        """With a format, one layer of all tokens is counted besides: that is where passes decode them to."""
        self.tokens, self.bytes = block_size, block_size * kv_bytes_per_token(config, kv_dtype)
        self._packing = None
        if kv_format:
            self._packing = packing = Packing(kv_format, block_size, config.head_dim, kv_dtype)
            self.tokens = packing.held
            scratch = self.tokens * config.kv_elements_per_layer * kv_dtype.itemsize
            self.bytes = config.num_layers * config.num_kv_heads * packing.page_bytes + scratch

    def needed(self, length: int) -> int:
        """Pages for a row of ``length`` tokens."""
        return self._packing.takes(length) if self._packing else -(-length // self.tokens)

    def longest(self, num_pages: int) -> int:
        """The longest row that fits in so many pages."""
        return self._packing.longest(num_pages) if self._packing else num_pages * self.tokens


def pages_beside(memory: int, page_bytes: int, kept: int, kept_per_page: int) -> int:
    """Pages for which there is room in ``memory`` beside copies and queries that drafts keep of running sequences.

    These take ``kept`` bytes at most; nor do they take more than the pages that the sequences themselves hold, each
    copied as a whole and with the queries of its tokens: ``kept_per_page`` bytes.
    """
    return max((memory - kept) // page_bytes, memory // (page_bytes + kept_per_page))


def memory_left(models: Iterable[ModelConfig], dtype: torch.dtype, device: torch.device) -> int:
    """Bytes free on the device once all weights are loaded; ``OutOfMemoryError`` where they do not fit."""
    weights = sum(num_parameters(m) for m in models) * dtype.itemsize
    free = free_memory(device)
    if weights >= free:
        name, gib = str(dtype).removeprefix("torch."), 2**30
        raise OutOfMemoryError(
            f"The weights take {weights / gib:.1f} GiB as {name}, but only {free / gib:.1f} GiB of memory are free. "
            + ("Use a smaller model." if dtype.itemsize <= 2 else "Use dtype bfloat16 or a smaller model.")
        )
    return free - weights


def context_limit(config: ModelConfig, max_model_len: int | None) -> int:
    """The context length in tokens: what was asked for, checked against what the model can do, or the model's own."""
    own = config.context_length
    if max_model_len is None:
        max_model_len = own
    max_model_len = as_int("max_model_len", max_model_len, 2, own, f"The model was made for contexts up to {own}.")
    window = config.sliding_window
    if window is not None and window < max_model_len:
        fix = f"Pass max_model_len={window} or less: up to there a window is full attention."
        raise UnsupportedModelError("sliding_window", window, f"below max_model_len = {max_model_len}", fix)
    return max_model_len


def kv_bytes_per_token(config: ModelConfig, kv_dtype: torch.dtype) -> int:
    """Bytes of K and V that one token takes over all layers."""
    return config.num_layers * config.kv_elements_per_layer * kv_dtype.itemsize


def query_bytes_per_token(config: ModelConfig) -> int:
    """Bytes of the queries of one token over all layers, as they are handed to drafts."""
    return config.num_layers * config.num_heads * config.head_dim * torch.float32.itemsize


def free_memory(device: torch.device) -> int:
    """Bytes free on the device; on the CPU, within the container's limit if there is one."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such files, or a limit of "max"
        return free
    return max(0, min(free, limit - used))
