"""vLLM's ``custom_class`` proposer: the target itself drafts, over shortened block tables (MagicDec, arXiv:2408.11049).

A draft step is a forward pass of one token a row, with the row's true position: vLLM's own, or that of ``twin.py``. Its
keys and values go where verification writes the same tokens' next, layer by layer before it reads them; nothing that
vLLM publishes or hashes ever holds them.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample import rejection_sampler

from longdraft.errors import LongDraftError
from longdraft.integrations.vllm.drafter import Drafter
from longdraft.integrations.vllm.guard import config_refusals, twin_refusals, version_refusal
from longdraft.integrations.vllm.repair import repair
from longdraft.integrations.vllm.settings import Settings
from longdraft.integrations.vllm.tables import DraftTables, Step
from longdraft.integrations.vllm.twin import Twin

logger = init_logger("vllm.longdraft")  # below vLLM's own, so that its handlers print it


class SparseProposer:
    """Drafts for the rows of each step; ``propose`` is vLLM's protocol, ``bind`` is called by our workers."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.config, self.model = vllm_config, None
        self.twin: Twin | None = None
        self.drafter = Drafter(
            Settings.of_server(vllm_config.additional_config),
            most=vllm_config.speculative_config.num_speculative_tokens,
            seed=vllm_config.model_config.seed or 0,
            forward=self.forward,
            warn=lambda sentence: logger.warning("LongDraft: %s", sentence),
            off=version_refusal(vllm.__version__) or next(config_refusals(vllm_config), None),
        )

    def load_model(self, target_model: torch.nn.Module) -> None:
        """vLLM hands over the target, which is the draft, too, if that has no weights of its own."""
        self.model = target_model
        if self.drafter.settings.weights == "int8" and self.drafter.off is None:
            self.twin = self._load_twin()

    def _load_twin(self) -> Twin | None:
        model = self.config.model_config
        why = next(twin_refusals(self.config), None)
        if why is None:
            try:
                return Twin.load(model.model, model.dtype, model.max_model_len)
            except LongDraftError as error:
                why = str(error)
        logger.warning("LongDraft: the draft runs the target's own weights: %s", why)
        return None

    def bind(self, runner: Any) -> None:
        """Drafts are made for this model runner."""
        self.drafter.runner = runner
        # vLLM would replace all rows' drafts by zeros once one row comes near the limit; here rows are cut singly.
        runner.effective_drafter_max_model_len = 1 << 30
        for sentence in repair(rejection_sampler, runner.device):
            logger.warning("LongDraft: %s; repaired.", sentence)

    @torch.inference_mode()
    def propose(
        self, sampled: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Drafted token ids of each row; an empty list for rows that draft none. Never raises."""
        return self.drafter.propose(sampled, num_tokens_no_spec, token_ids_cpu)

    def forward(self, ids: torch.Tensor, step: Step, tables: DraftTables, index: int) -> torch.Tensor:
        """Logits ``[R, V]`` after ``ids [R]``."""
        group = self.drafter.runner.attn_groups[0][0]
        pages = getattr(group.get_metadata_builder(0), "pages", None)
        if self.twin is not None and self.twin.fits(pages) and self.drafter.settings.weights == "int8":
            layers = self.config.compilation_config.static_forward_context
            names = sorted(group.layer_names, key=extract_layer_index)
            return self.twin.forward(ids, step, tables, pages, [layers[name].kv_cache for name in names])
        return self._target(ids, step, tables, index, group)

    def _target(self, ids: torch.Tensor, step: Step, tables: DraftTables, index: int, group: Any) -> torch.Tensor:
        """vLLM's own pass."""
        count = len(ids)
        starts = torch.arange(count + 1, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(ids.device),
            query_start_loc_cpu=starts,
            seq_lens=step.lengths,
            seq_lens_cpu_upper_bound=torch.full((count,), tables.longest, dtype=torch.int32),
            num_reqs=count,
            num_actual_tokens=count,
            max_query_len=1,
            max_seq_len=tables.longest,
            block_table_tensor=tables.table,
            slot_mapping=step.slots,
            causal=True,
            positions=step.positions,
        )
        builder = group.get_metadata_builder(0)
        metadata = builder.build_for_drafting(common_attn_metadata=common, draft_index=index)
        layers = group.layer_names
        with set_forward_context(
            dict.fromkeys(layers, metadata),
            self.config,
            num_tokens=count,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=dict.fromkeys(layers, step.slots),
        ):
            hidden = self.model(input_ids=ids, positions=step.positions, intermediate_tensors=None, inputs_embeds=None)
        return self.model.compute_logits(hidden)
