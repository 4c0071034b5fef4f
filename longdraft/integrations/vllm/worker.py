"""vLLM's workers, with the proposer bound to the runner it drafts for. Name one of them as ``--worker-cls``.

Any speculation needs a message a step that takes the drafted tokens to the scheduler, be there any or not. Where
workers are processes of their own that is about a millisecond, so another message is saved: tokens are drawn as soon as
the model has run, in the same call.
"""

from __future__ import annotations

from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from longdraft.integrations.vllm.guard import version_refusal
from longdraft.integrations.vllm.settings import Settings

logger = init_logger("vllm.longdraft")


class _Bound:
    """Binds the drafter as soon as there is one: on the last pipeline stage, once the device is up."""

    _at_once = False  # whether tokens are drawn in the call that runs the model

    def init_device(self) -> None:
        """vLLM's, and the binding."""
        super().init_device()
        drafter = getattr(self.model_runner, "drafter", None)
        if hasattr(drafter, "bind"):
            drafter.bind(self.model_runner)
            self._at_once = drafter.drafter.off is None  # which pipeline stages and KV connectors set

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's, the last thing before requests; then what a draft may want to measure."""
        times = super().compile_or_warm_up_model()
        if self._at_once:
            self.model_runner.drafter.prepare()
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        """vLLM's; the scheduler is answered by what it would ask for next, unless a grammar is to come with that."""
        output = super().execute_model(scheduler_output)
        grammar = getattr(scheduler_output, "has_structured_output_requests", True)
        return self.sample_tokens(None) if output is None and self._at_once and not grammar else output

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
