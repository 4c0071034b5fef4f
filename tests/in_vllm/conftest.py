"""Two engines of stock vLLM over one tiny random model: plain, and with LongDraft's draft."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from tests.in_vllm.engines import KINDS, LENGTH, VOCAB, drafting, engine

if find_spec("vllm") is None:  # make test-vllm installs it, in an environment of its own
    collect_ignore_glob = ["test_*.py"]

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


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


@pytest.fixture(scope="session")
def plain(folder):
    return engine(folder)


@pytest.fixture(scope="session", params=KINDS)
def kind(request):
    """Whose attention and whose weights the drafting engine runs."""
    return request.param


@pytest.fixture(scope="session")
def draft(folder, kind):
    return drafting(folder, kind)
