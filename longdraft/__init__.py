"""LongDraft: faster long-context batch decoding of large language models, without changing what they output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longdraft.config import DraftConfig
from longdraft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from longdraft.async_llm import AsyncLLM
    from longdraft.integrations.transformers import generate_with
    from longdraft.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "DraftConfig", "SamplingParams", "__version__", "generate_with"]


def __getattr__(name: str) -> object:
    """All bring in torch, which takes seconds: imported when first asked for, so that ``--help`` is quick."""
    if name == "LLM":
        from longdraft.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from longdraft.async_llm import AsyncLLM

        return AsyncLLM
    if name == "generate_with":
        from longdraft.integrations.transformers import generate_with

        return generate_with
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
