"""parse_hf_config: published configs, defaults as in transformers, spellings of rotary settings (O15, O16, O17)."""

import json
from dataclasses import replace

import pytest
import transformers

from longdraft.errors import InvalidValueError
from longdraft.models.config import RopeConfig, parse_hf_config

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HF_CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
FAMILIES = list(HF_CONFIGS)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def raw(family="llama", **settings):
    return {"model_type": family, **SIZES, **settings}


def parse(family="llama", **settings):
    return parse_hf_config(raw(family, **settings))


# --- what a config means -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("absent", [(), ("num_key_value_heads",)])
def test_absent_keys_take_the_defaults_of_transformers(family, absent):
    given = {key: value for key, value in SIZES.items() if key not in absent} | {"num_attention_heads": 32}
    ours, theirs = parse_hf_config({"model_type": family, **given}), HF_CONFIGS[family](**given)
    derived = theirs.hidden_size // theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or derived)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])
    assert ours.sliding_window == (theirs.sliding_window if family == "mistral" else None)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_parses(family):
    theirs = HF_CONFIGS[family](**SIZES, head_dim=16, architectures=[f"{family.capitalize()}ForCausalLM"])
    ours = parse_hf_config(json.loads(theirs.to_json_string(use_diff=False)))
    assert (ours.head_dim, ours.num_kv_heads, ours.vocab_size) == (16, 2, 128)
    assert ours.rope == RopeConfig()


@pytest.mark.parametrize(
    ("family", "settings", "qkv", "o", "mlp", "norm"),
    [
        ("llama", {}, False, False, False, False),
        ("llama", {"attention_bias": True}, True, True, False, False),
        ("llama", {"mlp_bias": True}, False, False, True, False),
        ("mistral", {"attention_bias": False}, False, False, False, False),
        ("qwen2", {}, True, False, False, False),
        ("qwen2", {"attention_bias": False}, True, False, False, False),
        ("qwen3", {}, False, False, False, True),
        ("qwen3", {"attention_bias": True}, True, True, False, True),
    ],
)
def test_biases_and_norms(family, settings, qkv, o, mlp, norm):
    config = parse(family, **settings)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (qkv, o, mlp, norm)


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"num_key_value_heads": 1}, (4, 1, 16)),
        ({"num_key_value_heads": 4}, (4, 4, 16)),
        ({"num_key_value_heads": None}, (4, 4, 16)),
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}, (9, 3, 8)),
        ({"head_dim": 32}, (4, 2, 32)),
        ({"head_dim": None}, (4, 2, 16)),
        ({"num_attention_heads": 6, "head_dim": 12}, (6, 2, 12)),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_head_shapes(family, settings, shape):
    config = parse(family, **{"head_dim": None} | settings)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == shape


@pytest.mark.parametrize(
    ("family", "settings", "window"),
    [
        ("llama", {}, None),
        ("llama", {"sliding_window": 100}, 100),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 100}, 100),
        ("mistral", {"sliding_window": 100, "layer_types": ["full_attention"] * 3}, 100),
        ("qwen2", {"sliding_window": 100}, None),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 100, "max_window_layers": 0}, None),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 100}, None),  # 28 full layers come first
        ("qwen3", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 3}, None),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2}, 100),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 4096),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"] * 3}, None),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, 4096),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, None),
    ],
)
def test_sliding_window(family, settings, window):
    assert parse(family, **settings).sliding_window == window


# Shapes of public models, with the keys their files carry.
PUBLISHED = {
    "llama-3.1-8b": (
        raw(
            "llama",
            architectures=["LlamaForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            bos_token_id=128000,
            eos_token_id=[128001, 128008, 128009],
            hidden_act="silu",
            initializer_range=0.02,
            max_position_embeddings=131072,
            mlp_bias=False,
            pretraining_tp=1,
            rms_norm_eps=1e-05,
            rope_scaling=LLAMA3 | {"original_max_position_embeddings": 8192},
            rope_theta=500000.0,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
            transformers_version="4.43.0.dev0",
            use_cache=True,
        ),
        RopeConfig(500000.0, "llama3", 8.0, 8192, 1.0, 4.0),
    ),
    "smollm2-135m": (
        raw(
            "llama",
            architectures=["LlamaForCausalLM"],
            is_llama_config=True,
            rope_interleaved=False,
            rope_scaling=None,
            rope_theta=100000,
            tie_word_embeddings=True,
            **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
        ),
        RopeConfig(100000.0),
    ),
    "mistral-7b": (
        raw("mistral", architectures=["MistralForCausalLM"], sliding_window=4096, rope_theta=10000.0, use_cache=True),
        RopeConfig(),
    ),
    "qwen2.5-0.5b": (
        raw(
            "qwen2",
            use_sliding_window=False,
            sliding_window=32768,
            max_window_layers=21,
            rope_theta=1e6,
            use_mrope=False,
        ),
        RopeConfig(1e6),
    ),
    "qwen3-0.6b": (
        raw("qwen3", head_dim=128, attention_bias=False, max_window_layers=28, rope_theta=1000000, rope_scaling=None),
        RopeConfig(1e6),
    ),
    "fine-tune with extras": (
        raw("llama", unsloth_version="2024.9", _name_or_path="x", auto_map={"AutoModelForCausalLM": "m.M"}, top_p=0.9),
        RopeConfig(),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    settings, rope = PUBLISHED[name]
    assert parse_hf_config(settings).rope == rope


# --- rotary settings -----------------------------------------------------------------------------------------------

O15 = {key: value for key, value in LLAMA3.items() if key != "rope_type"}


def test_three_spellings_of_one_rope_setting():
    scaling = [
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "llama3"} | O15},
        {"rope_theta": 10000.0, "rope_scaling": {"type": "llama3"} | O15},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0} | O15},
        {"rope_parameters": {"full_attention": {"rope_type": "llama3", "rope_theta": 10000.0} | O15}},
        {"rope_scaling": {"rope_type": "llama3", "type": "llama3"} | O15, "rope_parameters": LLAMA3},
    ]
    ropes = {parse(max_position_embeddings=512, **form).rope for form in scaling}
    assert ropes == {RopeConfig(10000.0, "llama3", 8.0, 64, 1.0, 4.0)}
    other = parse(rope_parameters=LLAMA3 | {"rope_theta": 500000.0}, rope_theta=10000.0)
    assert other.rope.theta == 500000.0


@pytest.mark.parametrize(
    ("block", "rope"),
    [
        ({"type": "linear", "factor": 2}, RopeConfig(kind="linear", factor=2.0)),
        ({"type": "dynamic", "factor": 2.0}, RopeConfig(kind="dynamic", factor=2.0, original_max_len=256)),
        (YARN, RopeConfig(kind="yarn", factor=4.0, original_max_len=64)),
        (
            YARN | {"finetuned": True, "truncate": False},
            RopeConfig(kind="yarn", factor=4.0, original_max_len=64, truncate=False),
        ),
        (YARN | {"factor": None}, RopeConfig(kind="yarn", factor=4.0, original_max_len=64)),
        ({"type": "yarn", "factor": 3.0}, RopeConfig(kind="yarn", factor=3.0, original_max_len=256)),
        (
            YARN | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "mscale": 1, "mscale_all_dim": 0},
            RopeConfig(
                kind="yarn",
                factor=4.0,
                original_max_len=64,
                beta_fast=16.0,
                beta_slow=2.0,
                attention_factor=1.5,
                mscale=1.0,
                mscale_all_dim=0.0,
            ),
        ),
        ({"rope_type": "default", "partial_rotary_factor": 1.0}, RopeConfig()),
        ({}, RopeConfig()),
    ],
)
def test_rope_kinds(block, rope):
    assert parse(max_position_embeddings=256, rope_scaling=block).rope == rope
    assert parse(max_position_embeddings=256, rope_parameters=block).rope == rope


def test_original_length_at_the_top_wins_as_in_transformers():
    config = parse(max_position_embeddings=512, rope_scaling=YARN, original_max_position_embeddings=128)
    assert config.rope.original_max_len == 128


def test_gguf_frequency_factors():
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert parse(rope_freq_factors=factors).rope == replace(RopeConfig(), freq_factors=tuple(factors))
    for wrong in (factors[1:], factors[:7] + [0.0], factors[:7] + [float("nan")], factors[:7] + ["1"], 8):
        with pytest.raises(InvalidValueError, match="rope_freq_factors"):
            parse(rope_freq_factors=wrong)
