"""The line that starts stock vLLM with a LongDraft draft."""

from __future__ import annotations

import json
import shlex

from longdraft.config import as_int
from longdraft.errors import InvalidValueError
from longdraft.integrations.vllm.settings import KEY, Settings

HERE = "longdraft.integrations.vllm"
WORKERS = {"cpu": f"{HERE}.worker.LongDraftCPUWorker", "gpu": f"{HERE}.worker.LongDraftWorker"}
GAMMA, MOST_GAMMA = 3, 8  # drafted tokens a round: where nobody says, and at most where it is chosen
BLOCK_SIZE = {"cpu": 32, "gpu": 16}  # small blocks: what a draft reads is rounded up to whole ones


def engine_args(settings: Settings, gamma: int | None, device: str) -> dict[str, object]:
    """Keyword arguments for ``vllm.LLM``; ``gamma``: tokens a round at most, for all requests; 0: without a draft.

    ``None``: 3, and at most 8 where it is chosen at every step.
    """
    if gamma is None:
        gamma = MOST_GAMMA if settings.draft == "auto" else GAMMA
    if device not in WORKERS:
        raise InvalidValueError("device", device, f"must be one of {', '.join(WORKERS)}")
    if settings.attention == "native" and device != "cpu":
        raise InvalidValueError("attention", settings.attention, "is for device cpu; use vllm")
    speculation = {
        "method": "custom_class",
        "model": f"{HERE}.proposer.SparseProposer",
        "num_speculative_tokens": as_int("gamma", gamma, 0, 64),
    }
    return {
        **({"speculative_config": speculation} if gamma else {}),
        "worker_cls": WORKERS[device],
        "block_size": BLOCK_SIZE[device],
        "additional_config": {KEY: {name: value for name, value in vars(settings).items() if value is not None}},
    }


def serve_line(model: str, settings: Settings, gamma: int | None, device: str) -> str:
    """The whole ``vllm serve`` line, quoted for a shell."""
    words = ["vllm", "serve", model]
    for name, value in engine_args(settings, gamma, device).items():
        words += [f"--{name.replace('_', '-')}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return shlex.join(words)
