"""Two engines of stock vLLM over one tiny random model: plain, and with LongDraft's draft."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm does that in an environment of its own")

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB = 300
LENGTH = 1024  # of the model
GAMMA = 4


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A Llama of two layers whose words are neither certain nor all alike."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LENGTH,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def reference(folder):
    """The model in float64, by transformers."""
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


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


def drafting(folder, dtype="float32", **more):
    """An engine that drafts, over 64 recent tokens."""
    from longdraft.integrations.vllm.args import engine_args
    from longdraft.integrations.vllm.settings import Settings

    return engine(folder, dtype, **{**engine_args(Settings(budget=64), GAMMA, "cpu"), **more})


@pytest.fixture(scope="session")
def plain(folder):
    return engine(folder)


@pytest.fixture(scope="session")
def draft(folder):
    return drafting(folder)
