"""Devices, types, context limits and the size of the KV cache."""

import pytest
import torch

from longdraft.config import DraftConfig
from longdraft.drafts.registry import page_note_bytes
from longdraft.engine import sizing
from longdraft.errors import InvalidValueError, KVCapacityError, OutOfMemoryError, UnsupportedModelError
from longdraft.models.config import RopeConfig
from longdraft.models.registry import RandomWeights, tiny_config

SIZES = {"max_num_seqs": 256, "max_num_batched_tokens": 512, "block_size": 16, "seed": 0}


def size(config=None, *, max_model_len=None, memory=2**20):
    config = config or tiny_config()
    kwargs = {"max_model_len": max_model_len, "kv_cache_memory_bytes": memory}
    return sizing.size_engine(config, torch.float32, torch.float32, torch.device("cpu"), **kwargs, **SIZES)


def test_pages_fill_the_memory_but_never_more_than_can_be_used():
    per_token = 2 * 3 * 2 * 16 * 4
    assert sizing.kv_bytes_per_token(tiny_config(), torch.float32) == per_token
    assert size(memory=per_token * 16 * 10 + 5).num_pages == 10
    assert size(memory=2**40).num_pages == 256 * 16


@pytest.mark.parametrize("max_num_seqs", [1, 3, 40, 256])
def test_what_drafts_keep_of_each_sequence_counts(max_num_seqs):
    """Copies of 96 tokens and 32 queries each: as many sequences as may run, and as their own pages allow."""
    config, memory = tiny_config(), 3_000_000
    kv, query = 2 * 3 * 2 * 16 * 4, 3 * 4 * 16 * 4
    sizes = SIZES | {"max_num_seqs": max_num_seqs, "max_model_len": None, "kv_cache_memory_bytes": memory}
    types = (config, torch.float32, torch.float32, torch.device("cpu"))
    plain = sizing.size_engine(*types, **sizes).num_pages
    pages = sizing.size_engine(*types, **sizes, copied=96, observed=32).num_pages

    def needed(pages):
        return pages * 16 * kv + min(max_num_seqs * (96 * kv + 32 * query), pages * 16 * (kv + query))

    assert needed(pages) <= memory
    assert needed(pages + 1) > memory or pages == plain == max_num_seqs * 16
    assert pages <= plain


def test_what_drafts_remember_of_pages_counts():
    config, kv = tiny_config(), torch.float32
    page = 16 * sizing.kv_bytes_per_token(config, kv)
    for name, notes in (("pages", page // 16), ("verified", 3 * 2 * 4), ("snapkv", 0)):
        assert page_note_bytes(DraftConfig(kv=name), config, kv) == notes
        got = sizing.size_engine(
            config,
            kv,
            kv,
            torch.device("cpu"),
            max_model_len=None,
            kv_cache_memory_bytes=10**6,
            **SIZES,
            page_notes=notes,
        )
        assert got.num_pages == 10**6 // (page + notes)


def test_a_context_that_was_asked_for_must_fit():
    with pytest.raises(KVCapacityError, match="256 tokens.*kv_cache_memory_bytes"):
        size(max_model_len=256, memory=100_000)
    assert size(memory=100_000).max_tokens_per_request == 128  # the model's own limit is cut instead


@pytest.mark.parametrize("bad", [257, 1, 0, -5, 2.0, "100"])
def test_bad_context_lengths(bad):
    with pytest.raises(InvalidValueError, match="max_model_len"):
        size(max_model_len=bad)


def test_scaled_rotary_embeddings_stretch_the_context():
    yarn = RopeConfig(kind="yarn", factor=4.0, original_max_len=256)
    assert tiny_config(rope=yarn).context_length == 1024
    assert tiny_config(rope=RopeConfig(kind="linear", factor=2.0)).context_length == 512
    assert tiny_config(rope=RopeConfig(kind="dynamic", factor=2.0)).context_length == 256


def test_a_sliding_window_is_full_attention_up_to_its_size_and_refused_beyond():
    config = tiny_config(sliding_window=100)
    with pytest.raises(UnsupportedModelError, match="sliding_window.*max_model_len=100"):
        size(config)
    assert size(config, max_model_len=100).max_model_len == 100


def test_types_and_devices():
    assert sizing.resolve_dtype("dtype", "float16") is torch.bfloat16
    with pytest.raises(InvalidValueError, match="kv_dtype.*int3.*bfloat16"):
        sizing.resolve_dtype("kv_dtype", "int3")
    assert sizing.resolve_device("cpu").type == "cpu"
    with pytest.raises(InvalidValueError, match="dtype"):
        sizing.resolve_dtype("dtype", [])
    for bad in ("tpu", "cuda:x", "cuda:99"):
        with pytest.raises(InvalidValueError, match="device"):
            sizing.resolve_device(bad)


def test_one_page_must_fit():
    with pytest.raises(InvalidValueError, match="kv_cache_memory_bytes"):
        size(memory=10)


def test_the_default_is_a_share_of_what_the_weights_leave(monkeypatch):
    config, cpu = tiny_config(), torch.device("cpu")
    weights = 4 * sum(t.numel() for t in map(RandomWeights(config).load, RandomWeights(config).shapes()))
    monkeypatch.setattr(sizing, "free_memory", lambda device: weights + 1000)
    assert sizing.memory_left([config], torch.float32, cpu) == 1000
    with pytest.raises(OutOfMemoryError, match="float64.*bfloat16"):
        sizing.memory_left([config], torch.float64, cpu)


@pytest.mark.parametrize(("limit", "used", "free"), [("1000", "400", 600), ("max", "400", None), ("100", "400", 0)])
def test_a_containers_limit_counts(monkeypatch, tmp_path, limit, used, free):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    monkeypatch.setattr(sizing, "CGROUP", tmp_path)
    got = sizing.free_memory(torch.device("cpu"))
    assert got == free if free is not None else got > 10**6
