"""parse_hf_config refuses what would change the output, by name, and values that make no sense."""

import pytest

from longdraft.errors import InvalidValueError, UnsupportedModelError
from longdraft.models.config import parse_hf_config
from tests.unit.test_model_config import LLAMA3, SIZES, YARN, parse, raw

UNSUPPORTED = [
    ("model_type", {"model_type": "mixtral"}),
    ("model_type", {"model_type": None}),
    ("model_type", {"model_type": ["llama"]}),
    ("architectures", {"architectures": ["LlamaForSequenceClassification"]}),
    ("architectures", {"architectures": ["MistralForCausalLM"]}),
    ("hidden_act", {"hidden_act": "gelu"}),
    ("rope_interleaved", {"rope_interleaved": True}),
    ("quantization_config", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ("num_local_experts", {"num_local_experts": 8}),
    ("num_experts", {"num_experts": 8}),
    ("logit_scale", {"logit_scale": 0.5}),
    ("attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
    ("no_rope_layers", {"no_rope_layers": [1, 0, 1]}),
    ("use_qk_norm", {"use_qk_norm": True}),
    ("residual_multiplier", {"residual_multiplier": 0.22}),
    ("text_config", {"text_config": {"hidden_size": 64}}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("layer_types", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}),
    ("layer_types", {"layer_types": ["full_attention"] * 2}),
    ("layer_types", {"layer_types": ["sliding_attention"] * 3}),
    ("rope_type", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
    ("rope_type", {"rope_scaling": {"type": "su"}}),
    ("rope_type", {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]}}),
    ("rope_type", {"rope_scaling": {"type": ["yarn"]}}),
    ("mrope_section", {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}),
    ("beta_fast", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 16}}),
    ("partial_rotary_factor", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    ("rope_parameters", {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}}),
    ("rope_scaling", {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}),
    ("original_max_position_embeddings", {"rope_scaling": YARN | {"rope_type": "dynamic"}}),
]


@pytest.mark.parametrize(("key", "settings"), UNSUPPORTED, ids=lambda value: value if isinstance(value, str) else "")
def test_unsupported_settings_are_refused_by_name(key, settings):
    with pytest.raises(UnsupportedModelError, match=key):
        parse(**settings)


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_a_bias_switch_that_the_family_does_not_read_is_refused(family):
    with pytest.raises(UnsupportedModelError, match="attention_bias"):
        parse(family, attention_bias=True)


@pytest.mark.parametrize("off", [None, False, "", [], {}])
def test_unknown_settings_that_are_off_pass(off):
    assert parse(some_new_setting=off) == parse()


SIZE_KEYS = [*SIZES, "head_dim", "max_position_embeddings", "sliding_window"]
NOT_SIZES = [0, -1, 2**63, 1.5, 64.0, float("nan"), float("inf"), True, "64", [], {}]


@pytest.mark.parametrize("key", SIZE_KEYS)
@pytest.mark.parametrize("value", NOT_SIZES, ids=repr)
def test_sizes_are_bounded_whole_numbers(key, value):
    with pytest.raises(InvalidValueError, match=key):
        parse("mistral", **{key: value})


NOT_NUMBERS = [0, -1.0, float("nan"), float("inf"), 10**400, True, "1", []]


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: str(value)[:9])
@pytest.mark.parametrize(
    ("key", "block"),
    [
        ("rms_norm_eps", None),
        ("rope_theta", None),
        ("factor", YARN),
        ("beta_slow", YARN),
        ("attention_factor", YARN),
        ("low_freq_factor", LLAMA3),
    ],
)
def test_numbers_are_finite_and_positive(key, block, value):
    with pytest.raises(InvalidValueError, match=key):
        parse(**({key: value} if block is None else {"rope_scaling": block | {key: value}}))


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("num_key_value_heads", {"num_key_value_heads": 3}),
        ("head_dim", {"head_dim": 15}),
        ("hidden_size", {"num_attention_heads": 6}),
        ("hidden_size", {"hidden_size": None}),
        ("tie_word_embeddings", {"tie_word_embeddings": 1}),
        ("attention_bias", {"attention_bias": "yes"}),
        ("rope_theta", {"rope_theta": 1.0}),
        ("rope_scaling", {"rope_scaling": "yarn"}),
        ("factor", {"rope_scaling": {"type": "linear"}}),
        ("low_freq_factor", {"rope_scaling": {"type": "llama3", "factor": 8.0}}),
        ("high_freq_factor", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}),
        ("truncate", {"rope_scaling": YARN | {"truncate": 1}}),
    ],
)
def test_values_that_do_not_fit_together(key, settings):
    with pytest.raises(InvalidValueError, match=key) as caught:
        parse_hf_config(raw(**settings), source="weights.gguf")
    assert str(caught.value).startswith("weights.gguf: ")


def test_long_values_do_not_flood_the_message():
    with pytest.raises(UnsupportedModelError) as caught:
        parse(quantization_config={"ignore": ["layer"] * 1000})
    assert len(str(caught.value)) < 300
