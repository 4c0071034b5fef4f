"""A proposer for tests: passes are fed as for CUDA graphs, by vLLM's own dispatcher. Workers find it by its name.

CPUs have no graphs, so what is fed runs as it is; what is tested is that padding disturbs nothing.
"""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace

from vllm.config import CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from longdraft.integrations.vllm.graphs import Graphs
from longdraft.integrations.vllm.guard import graphs_refusals
from longdraft.integrations.vllm.proposer import SparseProposer

SIZES = [5]  # a multiple of 1 + γ, as whole passes have graphs here, too; larger batches have none


class PaddedProposer(SparseProposer):
    """``SparseProposer`` as if on a GPU."""

    @cached_property
    def _graphs(self):
        runner, mode = self.drafter.runner, CUDAGraphMode.FULL_AND_PIECEWISE
        compilation = SimpleNamespace(
            cudagraph_mode=mode,
            is_attention_compiled_piecewise=lambda: True,
            max_cudagraph_capture_size=max(SIZES),
            cudagraph_capture_sizes=SIZES,
            compile_sizes=None,
        )
        config = SimpleNamespace(
            compilation_config=compilation,
            num_speculative_tokens=self.drafter.most,
            scheduler_config=self.config.scheduler_config,
            lora_config=None,
        )
        runner.cudagraph_dispatcher = CudagraphDispatcher(config)
        runner.cudagraph_dispatcher.initialize_cudagraph_keys(mode, 1 + self.drafter.most)
        assert not list(graphs_refusals(runner, config))
        graphs = Graphs(runner, CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE)
        feed = graphs.feed

        def counted(ids, step):
            fed = feed(ids, step)
            self.drafter.counts["padded"] += len(fed.ids) - len(ids)
            self.drafter.counts["plain"] += fed.mode is CUDAGraphMode.NONE
            return fed

        graphs.feed = counted
        return graphs
