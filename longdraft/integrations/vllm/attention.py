"""LongDraft's native attention in the place of vLLM's on CPUs, registered as its ``CPU_ATTN``.

vLLM's kernel checks 4 tokens in twice the time of one, as it turns keys and values into float32 for each; the native
ones read a page once for all tokens and heads that want it. The backend is vLLM's own but for that: what
``attention_refusals`` names goes on as it was. Which of the two runs is decided for a whole group of layers, before
anything is in its cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from longdraft.errors import LongDraftError
from longdraft.integrations.vllm.guard import attention_refusals
from longdraft.integrations.vllm.notes import Notes
from longdraft.integrations.vllm.pages import PAGE, Pages
from longdraft.kernels import native
from longdraft.kernels.dispatch import CallSpec
from longdraft.view import LayerKV

logger = init_logger("vllm.longdraft")


def install() -> None:
    """Register the backend in this worker; before the model is loaded."""
    os.environ.setdefault("LONGDRAFT_THREADS", "openmp")  # vLLM's own threads, bound to its cores and awake
    try:
        if not native.WHY_NOT:
            native.runtime()
    except LongDraftError as error:
        logger.warning("LongDraft: vLLM's own attention runs: %s", error)
    else:
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.NativeBackend")


@dataclass
class NativeMetadata:
    """What a step's layers share."""

    attention: native.NativeAttention
    slots: torch.Tensor
    pages: Pages
    num_actual_tokens: int
    notes: Notes | None  # of the target's passes, where drafts choose by them


class NativeBackend(CPUAttentionBackend):
    """vLLM's, with another implementation and builder; writes K and V in the same call."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[NativeImpl]:
        """See vLLM's."""
        return NativeImpl

    @staticmethod
    def get_builder_cls() -> type[NativeBuilder]:
        """See vLLM's."""
        return NativeBuilder


class NativeBuilder(CPUAttentionMetadataBuilder):
    """Lays out a step; vLLM's own where its layers are refused."""

    notes: Notes | None = None

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        group = self.num_heads // self.num_kv_heads
        spec = CallSpec(device.type, self.dtype, kv_cache_spec.dtype, self.head_dim, group, PAGE)
        why = next(attention_refusals(spec, self.block_size, vllm_config, layers), None)
        self.pages = None if why else Pages(self.block_size, self.num_kv_heads, spec)
        logger.info("LongDraft: %s", f"vLLM's own attention runs: {why}" if why else "the native attention runs")

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata | NativeMetadata:
        """See vLLM's."""
        common = common_attn_metadata
        if self.pages is None:
            return super().build(common_prefix_len, common, fast_build)
        assert common.causal is True, "a decoder's attention is causal"
        rows, tokens = common.num_reqs, common.num_actual_tokens
        plan = self.pages.plan(
            common.block_table_tensor[:rows],
            common.seq_lens[:rows],
            common.query_start_loc[: rows + 1],
            common.slot_mapping[:tokens],
        )
        notes = None if fast_build else self.notes  # a draft's steps are built fast
        if notes is not None:
            notes.begin(common.query_start_loc[: rows + 1], common.seq_lens[:rows], common.slot_mapping[:tokens])
        return NativeMetadata(self.pages.attention(plan), plan.slots, self.pages, tokens, notes)


class NativeImpl(CPUAttentionBackendImpl):
    """A layer's attention; vLLM's own where the builder laid the step out for that."""

    _kv: LayerKV | None = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | NativeMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See vLLM's; ``output [N, H, D]`` is filled."""
        metadata = attn_metadata
        if not isinstance(metadata, NativeMetadata):
            if metadata is not None and key is not None and self.kv_sharing_target_layer_name is None:
                self.do_kv_cache_update(layer, key, value, kv_cache, metadata.slot_mapping)
            return super().forward(
                layer, query, key, value, kv_cache, metadata, output, output_scale, output_block_scale
            )
        if self._kv is None or self._kv.k.data_ptr() != kv_cache.data_ptr():
            self._kv = metadata.pages.storage(kv_cache)
        n = metadata.num_actual_tokens
        if metadata.notes is not None:
            metadata.notes.note(layer.layer_name, query[:n])
        metadata.attention.write(self._kv, metadata.slots, key[:n], value[:n])
        output[:n] = metadata.attention(query[:n], self._kv)
        return output
