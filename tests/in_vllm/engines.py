"""Engines of stock vLLM over a folder's model: plain, and with LongDraft's draft."""

from __future__ import annotations

VOCAB = 300
LENGTH = 1024  # of the model
GAMMA = 4
KINDS = {"vllm": {}, "native": {"attention": "native"}, "int8": {"attention": "native", "weights": "int8"}}


def engine(folder, dtype="float32", **more):
    """An engine; few tokens a step, so that prompts come in chunks beside decoding rows."""
    from vllm import LLM

    return LLM(
        str(folder),
        **{
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": LENGTH,
            "max_num_batched_tokens": 256,
            "num_gpu_blocks_override": 400,
            "disable_log_stats": False,
            **more,
        },
    )


def drafting(folder, kind, dtype="float32", gamma=GAMMA, **more):
    """An engine of a ``kind`` that drafts, over 64 recent tokens; for γ = 0 one that only attends like it."""
    from longdraft.integrations.vllm.args import engine_args
    from longdraft.integrations.vllm.settings import Settings

    return engine(folder, dtype, **{**engine_args(Settings(budget=64, **KINDS[kind]), gamma, "cpu"), **more})
