"""vLLM's ``custom_class`` proposer: the target itself drafts, over shortened block tables (MagicDec, arXiv:2408.11049).

A draft step is a forward pass of one token a row, with the row's true position: vLLM's own, or that of ``twin.py``. Its
keys and values go where verification writes the same tokens' next, layer by layer before it reads them; nothing that
vLLM publishes or hashes ever holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
import vllm
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample import rejection_sampler

from longdraft.errors import LongDraftError
from longdraft.integrations.vllm.auto import prepare
from longdraft.integrations.vllm.choice import Chooser
from longdraft.integrations.vllm.drafter import Drafter
from longdraft.integrations.vllm.graphs import Feed, Graphs
from longdraft.integrations.vllm.guard import config_refusals, graphs_refusals, twin_refusals, version_refusal
from longdraft.integrations.vllm.pages import Pages
from longdraft.integrations.vllm.ranks import parted
from longdraft.integrations.vllm.repair import repair
from longdraft.integrations.vllm.rows import Row
from longdraft.integrations.vllm.settings import Settings
from longdraft.integrations.vllm.tables import DraftTables, Step
from longdraft.integrations.vllm.twin import Twin

logger = init_logger("vllm.longdraft")  # below vLLM's own, so that its handlers print it


class SparseProposer:
    """Drafts for the rows of each step; ``propose`` is vLLM's protocol, ``bind`` is called by our workers."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.config = vllm_config
        self.twin: Twin | None = None
        self.chooser: Chooser | None = None
        self.drafter = Drafter(
            Settings.of_server(vllm_config.additional_config),
            most=vllm_config.speculative_config.num_speculative_tokens,
            seed=vllm_config.model_config.seed or 0,
            forward=self.forward,
            warn=lambda sentence: logger.warning("LongDraft: %s", sentence),
            off=version_refusal(vllm.__version__) or next(config_refusals(vllm_config), None),
            log=lambda sentence: logger.info("LongDraft: %s", sentence),
            choose=self.choose,
        )

    def load_model(self, target_model: torch.nn.Module) -> None:
        """vLLM's protocol. The target is taken of the runner, where it is in what replays its graphs."""
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
        self.drafter.parted = partial(parted, get_tp_group().cpu_group if get_tp_group().world_size > 1 else None)
        # vLLM would replace all rows' drafts by zeros once one row comes near the limit; here rows are cut singly.
        runner.effective_drafter_max_model_len = 1 << 30
        for sentence in repair(rejection_sampler, runner.device):
            logger.warning("LongDraft: %s; repaired.", sentence)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Once there is a cache, and no request yet: what choosing blocks and γ goes by. Never raises."""
        if self.drafter.settings.chooses_blocks:
            self._note_keys()
        if self.drafter.settings.draft == "auto":
            prepare(self)

    @torch.inference_mode()
    def propose(
        self, sampled: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Drafted token ids of each row; an empty list for rows that draft none. Raises what the drafter raises."""
        return self.drafter.propose(sampled, num_tokens_no_spec, token_ids_cpu)

    def forward(self, ids: torch.Tensor, step: Step, tables: DraftTables, index: int) -> torch.Tensor:
        """Logits ``[R, V]`` after ``ids [R]``."""
        if self.drafts_int8:
            return self.twin.forward(ids, step, tables, self.pages, self.caches())
        common = self._common(step, tables.table, [1] * len(ids), tables.longest)
        metadata = self._builder.build_for_drafting(common_attn_metadata=common, draft_index=index)
        return self._run(ids, step, metadata)

    def choose(self, tables: DraftTables, table: torch.Tensor, rows: list[Row]) -> DraftTables:
        """``tables`` with blocks chosen by their keys; see ``choice.py``."""
        self._note_keys()
        return self.chooser.choose(tables, table, rows, self.drafter.settings.sinks) if self.chooser else tables

    def _note_keys(self) -> None:
        """From now on the target's passes note what blocks are chosen by."""
        if self.pages is None:
            self.drafter.warn("the first and the last blocks are read: choosing them goes with the native attention")
        elif self.chooser is None:
            self.chooser = Chooser(self.pages, self.caches(), self._layers(), self.drafter.most)
            self._builder.notes = self.chooser.notes

    def verify(self, ids: torch.Tensor, step: Step, table: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Logits ``[N, V]`` after ``ids [N]`` of rows that feed ``sizes [R]``, as the target's pass gives them."""
        common = self._common(step, table, sizes, int(step.lengths.max()))
        return self._run(ids, step, self._builder.build(common_prefix_len=0, common_attn_metadata=common))

    @property
    def drafts_int8(self) -> bool:
        """Whether the draft has weights of its own, and they serve the attention that runs."""
        return self.twin is not None and self.drafter.settings.weights == "int8" and self.twin.fits(self.pages)

    @property
    def pages(self) -> Pages | None:
        """The cache as the native attention reads it; ``None``: vLLM's own attention runs."""
        return getattr(self._builder, "pages", None)

    def caches(self) -> list[torch.Tensor]:
        """Of each layer, in order."""
        layers = self.config.compilation_config.static_forward_context
        return [layers[name].kv_cache for name in self._layers()]

    def _layers(self) -> list[str]:
        return sorted(self._group.layer_names, key=extract_layer_index)

    @property
    def _group(self) -> Any:
        return self.drafter.runner.attn_groups[0][0]

    @property
    def _builder(self) -> Any:
        return self._group.get_metadata_builder(0)

    def _common(self, step: Step, table: torch.Tensor, sizes: Sequence[int], longest: int) -> CommonAttentionMetadata:
        starts = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)
        there = starts.to(table.device) if max(sizes) > 1 else torch.arange(len(starts), device=table.device).int()
        return CommonAttentionMetadata(
            query_start_loc=there,
            query_start_loc_cpu=starts,
            seq_lens=step.lengths,
            seq_lens_cpu_upper_bound=torch.full((len(sizes),), longest, dtype=torch.int32),
            num_reqs=len(sizes),
            num_actual_tokens=sum(sizes),
            max_query_len=max(sizes),
            max_seq_len=longest,
            block_table_tensor=table,
            slot_mapping=step.slots,
            causal=True,
            positions=step.positions,
        )

    @property
    def graphs(self) -> Graphs | None:
        """What passes run as, if they run as graphs."""
        return self._graphs if self.drafter.settings.graphs else None

    @cached_property
    def _graphs(self) -> Graphs | None:
        """Found out at the first pass, when all is captured."""
        runner = self.drafter.runner
        if runner.device.type != "cuda":
            return None
        why = next(graphs_refusals(runner, self.config), None)
        if why:
            self.drafter.warn(f"draft steps run without CUDA graphs: {why}")
            return None
        return Graphs(runner, CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE)

    def _run(self, ids: torch.Tensor, step: Step, metadata: Any) -> torch.Tensor:
        """vLLM's own pass."""
        layers, model = self._group.layer_names, self.drafter.runner.model
        plain = Feed(ids, step.positions, step.slots, CUDAGraphMode.NONE)
        feed = self.graphs.feed(ids, step) if self.graphs else plain
        with set_forward_context(
            dict.fromkeys(layers, metadata),
            self.config,
            num_tokens=len(feed.ids),
            cudagraph_runtime_mode=feed.mode,
            batch_descriptor=feed.key,
            slot_mapping=dict.fromkeys(layers, feed.slots),
            is_padding=feed.padding,
        ):
            hidden = model(input_ids=feed.ids, positions=feed.positions, intermediate_tensors=None, inputs_embeds=None)
        return model.compute_logits(hidden[: len(ids)])
