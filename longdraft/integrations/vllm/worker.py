"""vLLM's workers, with the proposer bound to the runner it drafts for. Name one of them as ``--worker-cls``."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from longdraft.integrations.vllm import attention


class _Bound:
    """Binds the drafter as soon as there is one: on the last pipeline stage, once the device is up."""

    def init_device(self) -> None:
        """vLLM's, and the binding."""
        super().init_device()
        drafter = getattr(self.model_runner, "drafter", None)
        if hasattr(drafter, "bind"):
            drafter.bind(self.model_runner)

    def longdraft_set(self, **changes: object) -> dict[str, float]:
        """Change settings between requests, for ``LLM.collective_rpc``; returns the counts since the last time."""
        return self.model_runner.drafter.drafter.change(**changes)


class LongDraftWorker(_Bound, Worker):
    """For GPUs."""


class LongDraftCPUWorker(_Bound, CPUWorker):
    """For CPUs, where LongDraft's attention may take the place of vLLM's."""

    def init_device(self) -> None:
        """vLLM's, with the backend chosen first."""
        attention.install(self.vllm_config)
        super().init_device()
