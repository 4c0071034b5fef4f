"""GGUF tensors and settings: blocks against a dequantisation of our own, names, row order, config words, refusals."""

import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from longdraft.checkpoint.gguf import GGUFWeights, eos_token_ids, hf_config
from longdraft.checkpoint.gguf_header import GGML_TYPES, read_header
from longdraft.errors import ModelFileError, UnsupportedModelError
from longdraft.models.config import RopeConfig, parse_hf_config
from longdraft.models.registry import tiny_config
from longdraft.models.weights import check_names_and_shapes
from tests.unit.gguf_files import permute, random_tensors, write_blocks, write_llama_gguf

NORM = "model.norm.weight"
LLAMA = tiny_config()
FAMILIES = {
    "llama": LLAMA,
    "tied llama": tiny_config(tie_embeddings=True),
    "llama with biases": tiny_config(qkv_bias=True, o_bias=True, mlp_bias=True),
    "llama with wide heads": tiny_config(head_dim=32, num_kv_heads=1),
    "qwen2": tiny_config(family="qwen2", qkv_bias=True),
    "qwen3": tiny_config(family="qwen3", qk_norm=True, head_dim=32),
    "qwen3 with biases": tiny_config(family="qwen3", qk_norm=True, qkv_bias=True, o_bias=True, tie_embeddings=True),
}


# ---- blocks -------------------------------------------------------------------------------------------------------
# Each function turns one block (uint8 bytes) into its weights in float32, one weight at a time, from the format's
# layout: little-endian halves d (scale) and m (minimum), then packed integers.


def half(block, at):
    return np.float32(block[at : at + 2].view(np.float16)[0])


def nibbles(qs):
    """The 32 four-bit numbers of 16 bytes: first all low halves, then all high ones."""
    return [int(q) & 15 for q in qs] + [int(q) >> 4 for q in qs]


def fifth_bits(block, at):
    word = int.from_bytes(block[at : at + 4].tobytes(), "little")
    return [(word >> i & 1) << 4 for i in range(32)]


def q8_0(block):
    return [half(block, 0) * np.float32(q) for q in block[2:].view(np.int8)]


def q4_0(block):
    return [half(block, 0) * np.float32(q - 8) for q in nibbles(block[2:])]


def q4_1(block):
    return [half(block, 0) * np.float32(q) + half(block, 2) for q in nibbles(block[4:])]


def q5_0(block):
    return [
        half(block, 0) * np.float32((q | h) - 16) for q, h in zip(nibbles(block[6:]), fifth_bits(block, 2), strict=True)
    ]


def q5_1(block):
    both = zip(nibbles(block[8:]), fifth_bits(block, 4), strict=True)
    return [half(block, 0) * np.float32(q | h) + half(block, 2) for q, h in both]


def k_scales(packed):
    """Eight six-bit (scale, minimum) pairs from 12 bytes."""
    p = [int(b) for b in packed]
    low = [(p[j] & 63, p[j + 4] & 63) for j in range(4)]
    high = [(p[j + 4] & 15 | p[j - 4] >> 6 << 4, p[j + 4] >> 4 | p[j] >> 6 << 4) for j in range(4, 8)]
    return low + high


def q45_k(block, fifth):
    """Q4_K and Q5_K: eight groups of 32; ``fifth(i, l)`` is the fifth bit of weight ``l`` of group ``i``."""
    d, minimum, qs = half(block, 0), half(block, 2), block[-128:]
    weights = []
    for i, (scale, least) in enumerate(k_scales(block[4:16])):
        for at in range(32):
            q = (int(qs[i // 2 * 32 + at]) >> i % 2 * 4) & 15 | fifth(i, at)
            weights.append(d * np.float32(scale) * np.float32(q) - minimum * np.float32(least))
    return weights


def q4_k(block):
    return q45_k(block, lambda i, at: 0)


def q5_k(block):
    return q45_k(block, lambda i, at: (int(block[16 + at]) >> i & 1) << 4)


def q6_k(block):
    low, high, scales, d = block[:128], block[128:192], block[192:208].view(np.int8), half(block, 208)
    weights = []
    for n in range(256):
        part, lane, at = n // 128, n % 128 // 32, n % 32  # two halves of four lanes of 32
        q = int(low[part * 64 + lane % 2 * 32 + at]) >> lane // 2 * 4 & 15
        q |= (int(high[part * 32 + at]) >> lane * 2 & 3) << 4
        weights.append(d * np.float32(scales[n // 16]) * np.float32(q - 32))
    return weights


BLOCKS = {f.__name__.upper(): f for f in (q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k)}
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # else (0,)


@pytest.mark.parametrize("quant", BLOCKS)
def test_quantised_blocks(quant, tmp_path):
    _, block, block_bytes = next(t for t in GGML_TYPES.values() if t[0] == quant)
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (5 * 2, block_bytes), dtype=np.uint8)
    for at in HALVES.get(quant, (0,)):
        blocks[:, at : at + 2] = rng.normal(0, 0.02, 10).astype(np.float16).view(np.uint8).reshape(10, 2)
    blocks[0, :] = 255 if quant == "Q6_K" else blocks[0, :]  # the extremes of every packed integer
    blocks[0, 208:210] = [0, 60] if quant == "Q6_K" else blocks[0, 208:210]
    header = read_header(write_blocks(tmp_path / "x.gguf", "output.weight", blocks.reshape(5, -1), quant))
    assert header.tensors["output.weight"].type == quant
    loaded = GGUFWeights(header).load("lm_head.weight")
    expected = np.array([BLOCKS[quant](b) for b in blocks], dtype=np.float32).reshape(5, 2 * block)
    assert loaded.dtype == torch.float32
    assert loaded.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_floats_keep_every_bit(kind, tmp_path):
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    raw = np.random.default_rng(1).integers(0, 256, (6, 32 * dtype.itemsize), dtype=np.uint8)  # NaNs and all
    header = read_header(write_blocks(tmp_path / "x.gguf", "output.weight", raw, kind))
    loaded = GGUFWeights(header).load("lm_head.weight")
    assert (loaded.dtype, loaded.shape) == (dtype, (6, 32))
    assert loaded.view(torch.uint8).numpy().tobytes() == raw.tobytes()
    loaded += 1  # a copy: writing to it must not touch the file
    assert torch.equal(GGUFWeights(header).load("lm_head.weight").view(torch.uint8), torch.from_numpy(raw))


# ---- tensors and config: case O21 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_and_config_come_back(family, tmp_path):
    config = FAMILIES[family]
    tensors = random_tensors(config)
    header = read_header(write_llama_gguf(tmp_path / "x.gguf", config, tensors))
    weights = GGUFWeights(header)
    assert parse_hf_config(hf_config(header)) == config
    check_names_and_shapes(config, weights)
    assert weights.shapes() == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert torch.equal(weights.load(name), tensor), name


def test_llama_rows_really_are_stored_in_another_order(tmp_path):
    tensors = random_tensors(LLAMA)
    header = read_header(write_llama_gguf(tmp_path / "x.gguf", LLAMA, tensors))
    query = tensors["model.layers.0.self_attn.q_proj.weight"]
    stored = np.fromfile(header.path, np.float32, 64 * 64, offset=header.tensors["blk.0.attn_q.weight"].offset)
    rows = stored.reshape(64, 64)
    assert (rows[1] == query[8].numpy()).all() and (rows[17] == query[24].numpy()).all()  # of heads 0 and 1
    assert not torch.equal(permute(query, 4), query)


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "BF16", "F16"])
def test_quantised_llama_is_unpermuted_too(quant, tmp_path):
    tensors = random_tensors(LLAMA)
    weights = GGUFWeights(read_header(write_llama_gguf(tmp_path / "x.gguf", LLAMA, tensors, quant=quant)))
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        name = f"model.layers.2.{part}.weight"
        error = (weights.load(name).float() - tensors[name]).abs().max()
        assert error < {"Q8_0": 0.01, "Q4_0": 0.2, "BF16": 0.01, "F16": 0.001}[quant] and error > 0


def test_same_as_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    loader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    tokenizer = {"model": "gpt2", "tokens": [chr(33 + i) for i in range(128)], "merges": ["! !"]}
    path = write_llama_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA), tokenizer=tokenizer)
    raw = {k: v for k, v in hf_config(read_header(path)).items() if v is not None}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**raw))
    theirs = loader.load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    weights = GGUFWeights(read_header(path))
    assert theirs.keys() == weights.shapes().keys()
    for name, tensor in theirs.items():
        assert torch.equal(weights.load(name), tensor), name


def test_rope_freqs_become_settings(tmp_path):
    factors = torch.linspace(1, 8, 8)
    path = write_llama_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA), rope_freqs=factors)
    header = read_header(path)
    weights = GGUFWeights(header)
    assert hf_config(header)["rope_freq_factors"] == factors.tolist()
    config = parse_hf_config(hf_config(header))
    assert config == replace(LLAMA, rope=RopeConfig(freq_factors=tuple(factors.tolist())))
    check_names_and_shapes(config, weights)
    assert not any("rope" in name for name in weights.shapes())


@pytest.mark.parametrize(
    "factors", [torch.ones(7), torch.ones(16), torch.tensor([1.0] * 7 + [0.0]), torch.full((8,), math.nan)]
)
def test_senseless_rope_freqs(factors, tmp_path):
    path = write_llama_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA), rope_freqs=factors)
    with pytest.raises(ModelFileError, match="rope_freqs.weight"):
        hf_config(read_header(path))


def test_embedded_model(embedded_path):
    header = read_header(embedded_path)
    weights = GGUFWeights(header)
    config = parse_hf_config(hf_config(header))
    assert config == replace(
        LLAMA,
        **{"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_layers": 30, "num_heads": 9},
        **{"num_kv_heads": 3, "head_dim": 64, "max_position_embeddings": 8192, "tie_embeddings": True},
        rope=RopeConfig(theta=100000.0),
    )
    check_names_and_shapes(config, weights)
    assert eos_token_ids(header) == (2,)
    for name in ("model.layers.29.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight", NORM):
        tensor = weights.load(name)
        assert tensor.dtype == torch.float32 and tensor.isfinite().all() and 0.01 < tensor.std() < 10


# ---- settings -----------------------------------------------------------------------------------------------------


def config_of(tmp_path, config=LLAMA, tokenizer=None, **settings):
    """``hf_config`` of a file of ``config`` with ``settings`` (dots as double underscores) on top."""
    extra = {key.replace("__", "."): value for key, value in settings.items()}
    path = tmp_path / "x.gguf"
    write_llama_gguf(path, config, random_tensors(config), settings=extra, tokenizer=tokenizer)
    return hf_config(read_header(path))


def rope_of(tmp_path, **settings):
    scaling = {f"rope__scaling__{key}": value for key, value in settings.items()}
    raw = config_of(tmp_path, **scaling)
    parse_hf_config(raw)  # in words that the config parser takes
    return raw["rope_scaling"]


def test_rope_scaling_words(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    linear = {"rope_type": "linear", "factor": 2.0}
    assert rope_of(tmp_path) is None
    assert rope_of(tmp_path, type="none", factor=2.0) is None
    assert rope_of(tmp_path, type="linear", factor=1.0) is None
    assert rope_of(tmp_path, type="linear", factor=2.0, finetuned=True) == linear
    assert rope_of(tmp_path, factor=2.0) == linear
    assert config_of(tmp_path, rope__scale_linear=2.0)["rope_scaling"] == linear
    assert rope_of(tmp_path, type="yarn", factor=4.0) == yarn
    assert rope_of(tmp_path, type="yarn", factor=4.0, original_context_length=64) == {
        **yarn,
        "original_max_position_embeddings": 64,
    }
    betas = {"yarn_beta_fast": 30.0, "yarn_beta_slow": 2.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
    assert rope_of(tmp_path, type="yarn", factor=4.0, **betas) == {**yarn, "beta_fast": 30.0, "beta_slow": 2.0}
    assert rope_of(tmp_path, type="yarn", factor=4.0, yarn_attn_factor=1.25)["attention_factor"] == 1.25
    implied = 0.1 * math.log(4) + 1
    assert rope_of(tmp_path, type="yarn", factor=4.0, attn_factor=0.5)["attention_factor"] == implied / 2


def test_theta_and_eps_keep_their_decimals(tmp_path):
    raw = config_of(tmp_path, rope__freq_base=1234567.0, attention__layer_norm_rms_epsilon=1e-6)
    assert (raw["rope_theta"], raw["rms_norm_eps"]) == (1234567.0, 1e-6)


def test_defaults_of_absent_keys(tmp_path):
    absent = ("rope.freq_base", "rope.dimension_count", "attention.key_length", "attention.value_length", "vocab_size")
    header = read_header(write_llama_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA)))
    metadata = {k: v for k, v in header.metadata.items() if k.removeprefix("llama.") not in absent}
    assert parse_hf_config(hf_config(replace(header, metadata=metadata))) == LLAMA
    del metadata["llama.attention.head_count_kv"]
    assert hf_config(replace(header, metadata=metadata))["num_key_value_heads"] == 4


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_sliding_window(family, tmp_path):
    config = tiny_config(family=family, qkv_bias=family == "qwen2", qk_norm=family == "qwen3")
    raw = config_of(tmp_path, config, attention__sliding_window=32)
    assert parse_hf_config(raw) == replace(config, sliding_window=32)
    assert parse_hf_config(config_of(tmp_path, config, attention__sliding_window=0)) == config


NEUTRAL = {"attention.causal": True, "expert_count": 0, "expert_used_count": 0}
NEUTRAL |= {"tensor_data_layout": "Meta AI original pth"}


def test_settings_that_change_nothing_pass(tmp_path):
    others = {"general.file_type": 7, "general.type": "model", "quantize.imatrix.file": "x", "split.count": 1}
    others |= {"tokenizer.chat_template": "{{ x }}", "mradermacher.quantize_version": "2"}
    raw = config_of(tmp_path, tokenizer=others, **{k.replace(".", "__"): v for k, v in NEUTRAL.items()})
    assert parse_hf_config(raw) == LLAMA


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("expert_count", 8), ("expert_used_count", 2), ("logit_scale", 8.0), ("attn_logit_softcapping", 50.0)],
        *[("final_logit_softcapping", 30.0), ("embedding_scale", 12.0), ("residual_scale", 0.22)],
        *[("attention.scale", 0.1), ("attention.causal", False), ("attention.max_alibi_bias", 8.0)],
        *[("attention.clamp_kqv", 8.0), ("attention.sliding_window_pattern", [True, False]), ("pooling_type", 1)],
        *[("rope.dimension_count", 8), ("rope.dimension_sections", [1, 2, 3]), ("attention.value_length", 8)],
        *[("rope.scaling.type", "longrope"), ("rope.scaling.attn_factor", 1.5), ("rope.scaling.yarn_ext_factor", 0.5)],
        *[("rope.scaling.yarn_log_multiplier", 0.1), ("rope.scaling.alpha", 1000.0), ("new_setting", 1)],
        *[("rope.scaling.yarn_attn_factor", 1.5), ("tensor_data_layout", "other"), ("use_parallel_residual", True)],
        *[("long_setting", [1.5] * 100_000), ("wordy_setting", "x" * 100_000)],
    ],
)
def test_setting_is_refused_by_name(key, value, tmp_path):
    with pytest.raises(UnsupportedModelError) as caught:
        config_of(tmp_path, **{key.replace(".", "__"): value})
    assert f"llama.{key} = " in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("key", "value"), [("split.count", 3), ("general.type", "adapter"), ("general.architecture", "gemma3")]
)
def test_other_file_is_refused_by_name(key, value, tmp_path):
    path = write_llama_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA))
    header = read_header(path)
    with pytest.raises(UnsupportedModelError, match=f"{key} = "):
        hf_config(replace(header, metadata={**header.metadata, key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("block_count", 0), ("block_count", 2**32 - 1), ("embedding_length", "64"), ("embedding_length", 64.0)],
        *[("feed_forward_length", [128, 128, 64]), ("attention.head_count", True), ("context_length", 0)],
        *[("attention.layer_norm_rms_epsilon", 0.0), ("attention.layer_norm_rms_epsilon", math.nan)],
        *[("rope.freq_base", math.inf), ("rope.freq_base", -1.0), ("rope.scaling.factor", math.nan)],
        ("attention.sliding_window", "32"),
    ],
)
def test_senseless_number(key, value, tmp_path):
    with pytest.raises(ModelFileError, match="llama"):
        config_of(tmp_path, **{key.replace(".", "__"): value})


@pytest.mark.parametrize(
    "key", ["general.architecture", "llama.block_count", "llama.context_length", "llama.attention.head_count"]
)
def test_missing_key(key, tmp_path):
    header = read_header(write_llama_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA)))
    metadata = {k: v for k, v in header.metadata.items() if k != key}
    with pytest.raises(ModelFileError, match=f"{key}' is missing"):
        hf_config(replace(header, metadata=metadata))


# ---- tensors that are not as they should be -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_qkv.weight", "blk.0.ffn_gate_inp.weight", "rope_factors_long.weight", "blk.00.attn_q.weight"]
    + ["blk.0.attn_q.weight.lora_a", "blk.0.output.weight", "attn_q.weight", "token_embd", "blk.0.attn_q.scale"],
)
def test_unknown_tensor_is_refused_by_name(name, tmp_path):
    header = read_header(write_blocks(tmp_path / "x.gguf", name, np.zeros((2, 128), np.uint8), "F32"))
    with pytest.raises(ModelFileError, match=name[:10]):
        GGUFWeights(header)


def test_missing_tensors(tmp_path):
    tensors = random_tensors(LLAMA)
    for gone in ("model.embed_tokens.weight", NORM):
        path = write_llama_gguf(tmp_path / "x.gguf", LLAMA, {k: v for k, v in tensors.items() if k != gone})
        header = read_header(path)
        with pytest.raises(ModelFileError, match="token_embd.weight|model.norm.weight"):
            check_names_and_shapes(parse_hf_config(hf_config(header)), GGUFWeights(header))
        with pytest.raises(ModelFileError, match="is missing"):
            GGUFWeights(header).load(gone)


def test_rows_that_are_no_heads(tmp_path):
    header = read_header(write_blocks(tmp_path / "x.gguf", "blk.0.attn_q.weight", np.zeros((12, 128), np.uint8), "F32"))
    with pytest.raises(ModelFileError, match="12 rows, not 4 heads of even size"):
        GGUFWeights(header).load("model.layers.0.self_attn.q_proj.weight")


def test_file_cut_after_its_header_was_read(tmp_path):
    header = read_header(write_llama_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA)))
    os.truncate(header.path, 4096)
    with pytest.raises(ModelFileError, match="cannot be read"):
        GGUFWeights(header).load("lm_head.weight")
    os.remove(header.path)
    with pytest.raises(ModelFileError, match="cannot be read"):
        GGUFWeights(header).load("lm_head.weight")


def test_end_and_begin_tokens(tmp_path):
    def header(**ids):
        return read_header(write_llama_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA), tokenizer=ids))

    none = header()
    assert eos_token_ids(none) == ()
    full = header(eos_token_id=2, eot_token_id=7, eom_token_id=2, bos_token_id=0, unknown_token_id=5)
    assert eos_token_ids(full) == (2, 7)
    for wrong in (128, 2**32 - 1, "2", True):
        with pytest.raises(ModelFileError, match="eos_token_id"):
            eos_token_ids(header(eos_token_id=wrong))
