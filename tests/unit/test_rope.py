"""Rotary frequencies and tables: the same bits as transformers (O15), and independent of how the table grew."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from longdraft.errors import InvalidValueError
from longdraft.models.config import RopeConfig, parse_hf_config
from longdraft.models.rope import RotaryTable, apply_rotary, inverse_frequencies

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
BLOCKS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "theta": {"rope_type": "default", "rope_theta": 1000000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": LLAMA3,
    "llama3-32": LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0},
    "yarn": YARN,
    "yarn-ratio": YARN | {"factor": None},
    "yarn-no-original": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    "yarn-betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn-attention": YARN | {"attention_factor": 1.5},
    "yarn-mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn-one-mscale": YARN | {"mscale": 0.707},
    "yarn-shrink": YARN | {"factor": 0.5},
    "yarn-step": YARN | {"original_max_position_embeddings": 6},  # the ramp begins and ends at pair 0
}
SIZES = {"vocab_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
POSITIONS = torch.arange(4001)


def both(block, head_dim, max_len=4096):
    """Our config and that of transformers for one block of rotary settings."""
    given_settings = SIZES | {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "max_position_embeddings": max_len}
    ours = parse_hf_config({"model_type": "llama", **given_settings, "rope_parameters": dict(block)})
    return ours, LlamaConfig(**given_settings, rope_parameters=dict(block))


@pytest.mark.parametrize("head_dim", [8, 16, 64, 128])
@pytest.mark.parametrize("name", BLOCKS)
def test_table_has_the_bits_of_transformers(name, head_dim):
    ours, theirs = both(BLOCKS[name], head_dim)
    embedding = LlamaRotaryEmbedding(theirs)
    inv_freq, scaling = inverse_frequencies(ours.rope, head_dim, ours.max_position_embeddings)
    assert torch.equal(inv_freq, embedding.inv_freq)
    assert scaling == embedding.attention_scaling
    cos, sin = RotaryTable(ours.rope, head_dim, ours.max_position_embeddings).lookup(POSITIONS)
    their_cos, their_sin = embedding(torch.empty(0), POSITIONS[None])
    assert torch.equal(cos, their_cos[0, :, : head_dim // 2])
    assert torch.equal(sin, their_sin[0, :, : head_dim // 2])


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["linear", "dynamic", "yarn", "llama3"]),
    theta=st.floats(1e3, 1e7),
    factor=st.floats(1.0, 64.0),
    original=st.sampled_from([64, 1000, 4096, 8192]),
    low=st.floats(0.5, 4.0),
    spread=st.floats(0.5, 30.0),
    truncate=st.booleans(),
)
def test_any_setting_agrees_with_transformers(kind, theta, factor, original, low, spread, truncate):
    block = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "llama3":
        block |= {
            "low_freq_factor": low,
            "high_freq_factor": low + spread,
            "original_max_position_embeddings": original,
        }
    if kind == "yarn":
        block |= {"beta_slow": low, "beta_fast": low + spread, "original_max_position_embeddings": original}
        block["truncate"] = truncate
    ours, theirs = both(block, 64, 16384)
    inv_freq, scaling = inverse_frequencies(ours.rope, 64, 16384)
    their_inv_freq, their_scaling = ROPE_INIT_FUNCTIONS[kind](theirs)
    torch.testing.assert_close(inv_freq, their_inv_freq, rtol=1e-6, atol=0)
    assert math.isclose(scaling, their_scaling)


def test_o15_frequencies():
    rope = RopeConfig(10000.0, "llama3", 8.0, 64, 1.0, 4.0)
    expected = [1, 0.244385, 0.0130423, 0.00395285, 0.00125, 0.000395285, 0.000125, 3.95285e-05]
    inv_freq, scaling = inverse_frequencies(rope, 16, 512)
    assert inv_freq.tolist() == pytest.approx(expected, rel=1e-5)
    assert scaling == 1.0
    table, plain = RotaryTable(rope, 16, 512), RotaryTable(RopeConfig(), 16, 512)
    at = torch.tensor([10, 100, 300])
    assert ((table.lookup(at)[0] - plain.lookup(at)[0]).abs().amax(dim=-1) > 0.01).all()


def test_frequency_factors_of_a_gguf_file_act_like_llama3():
    llama3, plain = RopeConfig(10000.0, "llama3", 8.0, 64, 1.0, 4.0), RopeConfig()
    want, _ = inverse_frequencies(llama3, 16, 512)
    factors = tuple((inverse_frequencies(plain, 16, 512)[0] / want).tolist())
    got, scaling = inverse_frequencies(replace(plain, freq_factors=factors), 16, 512)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert scaling == 1.0


def test_unknown_kind_is_refused():
    with pytest.raises(InvalidValueError, match="longrope"):
        inverse_frequencies(RopeConfig(kind="longrope"), 16, 512)


def test_entries_do_not_depend_on_how_the_table_grew():
    rope = RopeConfig(500000.0, "llama3", 8.0, 1024, 1.0, 4.0)
    at_once, stepwise = RotaryTable(rope, 128, 4096), RotaryTable(rope, 128, 4096)
    for last in (0, 3, 300, 301, 777, 3000):
        stepwise.lookup(torch.tensor([last]))
    for ours, theirs in zip(stepwise.lookup(POSITIONS), at_once.lookup(POSITIONS), strict=True):
        assert torch.equal(ours, theirs)
    shuffled = POSITIONS[torch.randperm(len(POSITIONS), generator=torch.Generator().manual_seed(0))]
    assert torch.equal(at_once.lookup(shuffled)[0], at_once.lookup(POSITIONS)[0][shuffled])


def test_lookup_bounds():
    table = RotaryTable(RopeConfig(), 16, 64)
    assert table.lookup(torch.empty(0, dtype=torch.long))[0].shape == (0, 8)
    assert table.lookup(torch.tensor([100]))[0].shape == (1, 8)  # the caller owns the model's length limit
    with pytest.raises(InvalidValueError, match="-1"):
        table.lookup(torch.tensor([5, -1]))


def test_dynamic_ends_at_the_original_length():
    table = RotaryTable(RopeConfig(kind="dynamic", factor=2.0, original_max_len=300), 16, 300)
    table.lookup(torch.tensor([299]))
    with pytest.raises(InvalidValueError, match="dynamic"):
        table.lookup(torch.tensor([300]))


def test_table_made_under_inference_mode_serves_training():
    table = RotaryTable(RopeConfig(), 16, 64)
    with torch.inference_mode():
        table.lookup(torch.tensor([7]))
    x = torch.randn(1, 2, 16, requires_grad=True)
    apply_rotary(x, *table.lookup(torch.tensor([7]))).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_apply_rotary_has_the_bits_of_transformers(dtype):
    random = torch.Generator().manual_seed(1)
    q, k = (torch.randn(7, heads, 16, generator=random, dtype=dtype) for heads in (4, 2))
    ours, theirs = both(BLOCKS["yarn"], 16)
    positions = torch.tensor([0, 1, 2, 100, 1000, 2000, 4000])
    their_cos, their_sin = LlamaRotaryEmbedding(theirs)(q, positions[None])
    their_q, their_k = apply_rotary_pos_emb(q, k, their_cos[0], their_sin[0])
    rotary = RotaryTable(ours.rope, 16, 4096).lookup(positions)
    assert torch.equal(apply_rotary(q, *rotary), their_q)
    assert torch.equal(apply_rotary(k, *rotary), their_k)


def test_apply_rotary_keeps_the_type():
    cos, sin = RotaryTable(RopeConfig(), 16, 64).lookup(torch.tensor([3]))
    assert apply_rotary(torch.ones(1, 1, 16, dtype=torch.bfloat16), cos, sin).dtype == torch.bfloat16
