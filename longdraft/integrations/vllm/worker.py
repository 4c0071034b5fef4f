"""vLLM's workers, with the proposer bound to the runner it drafts for. Name one of them as ``--worker-cls``."""

from __future__ import annotations

import vllm
from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from longdraft.integrations.vllm.guard import version_refusal
from longdraft.integrations.vllm.settings import Settings

logger = init_logger("vllm.longdraft")


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
        """vLLM's, with the backend chosen first; what it needs of vLLM's is imported only where it is wanted."""
        if Settings.of_server(self.vllm_config.additional_config).attention == "native":
            why = version_refusal(vllm.__version__)
            if why:
                logger.warning("LongDraft: vLLM's own attention runs: %s", why)
            else:
                from longdraft.integrations.vllm import attention

                attention.install()
        super().init_device()
