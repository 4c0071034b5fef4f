"""Our forward against transformers, every family and option (cases O15, O16, O17): whole, chunked, cached, verify."""

import pytest
import torch

from longdraft.checkpoint.load import load_checkpoint
from longdraft.kernels.native import _native
from longdraft.models.transformer import Transformer
from tests.parity.forward import chunked_logits
from tests.parity.models import VARIANTS, reference_logits, tiny_checkpoint
from tests.unit.gguf_files import random_tensors, write_llama_gguf

# One pass; prefill by 16 then one token at a time; chunks that straddle pages; verify-like groups of 5.
CHUNKINGS = {"whole": [200], "decode": [190, 1], "chunks": [17, 30, 9], "verify": [180, 5]}


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 128, (200,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize(("family", "overrides"), [v[1:] for v in VARIANTS], ids=[v[0] for v in VARIANTS])
def test_logits_match_transformers(tmp_path, ids, family, overrides):
    folder = tiny_checkpoint(tmp_path, family, **overrides)
    want = reference_logits(folder, ids)
    assert want.std() > 0.1  # not flat: the comparison means something
    checkpoint = load_checkpoint(folder)
    model = Transformer(checkpoint.config, checkpoint.weights)
    for name, chunks in CHUNKINGS.items():
        (got,) = chunked_logits(model, [ids], chunks)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(("family", "overrides"), [v[1:] for v in VARIANTS], ids=[v[0] for v in VARIANTS])
def test_ragged_rows_equal_their_single_rows(tmp_path, ids, family, overrides):
    """Rows of 1, 7, 33 and 64 tokens together, in float64 (case O10): equal to each alone, and to transformers."""
    folder = tiny_checkpoint(tmp_path, family, **overrides)
    checkpoint = load_checkpoint(folder)
    model = Transformer(checkpoint.config, checkpoint.weights, dtype=torch.float64)
    rows = [ids[:1], ids[5:12], ids[20:53], ids[60:124]]
    together = chunked_logits(model, rows, [6, 1, 3])
    for row, got in zip(rows, together, strict=True):
        assert got.isfinite().all()
        (alone,) = chunked_logits(model, [row], [len(row)])
        torch.testing.assert_close(got, alone, rtol=0, atol=1e-10)
    torch.testing.assert_close(together[2].float(), reference_logits(folder, rows[2]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", ["rope_scaling", "type", "rope_parameters"])
def test_llama3_scaling_reaches_the_logits(tmp_path, form):
    """Three spellings of one setting give transformers' logits, which differ from the unscaled ones (case O15)."""
    import json

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    ids = [(5 * i) % 128 for i in range(301)]
    sizes = {"max_position_embeddings": 512}
    parameters = {"rope_type": "llama3", "rope_theta": 10000.0, **scaling}
    scaled = tiny_checkpoint(tmp_path / "a", "llama", rope_parameters=parameters, **sizes)
    plain = tiny_checkpoint(tmp_path / "b", "llama", **sizes)
    want = reference_logits(scaled, ids)
    assert (want[300] - reference_logits(plain, ids)[300]).abs().max() > 1e-2
    config = json.loads((scaled / "config.json").read_text())
    del config["rope_parameters"]
    if form == "rope_parameters":
        config["rope_parameters"] = parameters
    else:
        config |= {
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type" if form != "type" else "type": "llama3", **scaling},
        }
    (scaled / "config.json").write_text(json.dumps(config))
    checkpoint = load_checkpoint(scaled)
    (got,) = chunked_logits(Transformer(checkpoint.config, checkpoint.weights), [ids], [100])
    torch.testing.assert_close(got[[10, 100, 300]], want[[10, 100, 300]], rtol=0, atol=1e-4)


def test_bfloat16_stays_near_float32(tmp_path, ids):
    folder = tiny_checkpoint(tmp_path, "qwen3")
    checkpoint = load_checkpoint(folder)
    (got,) = chunked_logits(Transformer(checkpoint.config, checkpoint.weights, dtype=torch.bfloat16), [ids], [64])
    want = reference_logits(folder, ids)
    assert (got - want).abs().max() < 0.05 * want.abs().max()
    assert got.dtype == torch.float32


def test_the_embedded_model_matches_transformers(embedded_path, monkeypatch):
    """The real SmolLM2 on real ids: prefill, chunks and cached decode close to transformers in float32.

    Against float64, the largest error of torch's kernels is 1.0e-4 and that of the native ones 1.3e-4.
    """
    from transformers import AutoModelForCausalLM

    ids = load_checkpoint().tokenizer.encode("It is a truth universally acknowledged, that a single man " * 12)
    theirs = AutoModelForCausalLM.from_pretrained(
        embedded_path.parent, gguf_file=embedded_path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits[0]
    del theirs
    checkpoint = load_checkpoint()
    tolerances = {"torch": 1e-4, "native": 2.5e-4} if _native else {"torch": 1e-4}
    for kernels, tolerance in tolerances.items():
        monkeypatch.setenv("LONGDRAFT_KERNELS", kernels)
        model = Transformer(checkpoint.config, checkpoint.weights)
        for chunks in ([len(ids)], [100, 7, 1, 1, len(ids)]):
            (got,) = chunked_logits(model, [ids], chunks)
            torch.testing.assert_close(got, want, rtol=0, atol=tolerance, msg=lambda m, k=kernels: f"{k}: {m}")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_gives_the_logits_of_the_folder(tmp_path, family):
    """T0 written under llama.cpp's conventions equals the safetensors model at positions 10 and 200 (case O21)."""
    folder = tiny_checkpoint(tmp_path / "hf", family)
    checkpoint = load_checkpoint(folder)
    tensors = {name: checkpoint.weights.load(name) for name in checkpoint.weights.shapes()}
    path = tmp_path / "model.gguf"
    write_llama_gguf(path, checkpoint.config, tensors)
    again = load_gguf_without_tokenizer(path)
    ids = [(3 * i) % 128 for i in range(201)]
    (want,) = chunked_logits(Transformer(checkpoint.config, checkpoint.weights), [ids], [64])
    (got,) = chunked_logits(Transformer(*again), [ids], [64])
    torch.testing.assert_close(got[[10, 200]], want[[10, 200]], rtol=0, atol=1e-4)


def load_gguf_without_tokenizer(path):
    """Config and weights of a GGUF file that holds tensors alone."""
    from longdraft.checkpoint.gguf import GGUFWeights, hf_config
    from longdraft.checkpoint.gguf_header import read_header
    from longdraft.models.config import parse_hf_config

    header = read_header(path)
    return parse_hf_config(hf_config(header)), GGUFWeights(header)


def test_rope_freqs_act_like_llama3_scaling(tmp_path):
    """The frequency tensor of a GGUF file against the config setting it stands for (cases O15 and O21)."""
    from longdraft.models.config import RopeConfig
    from longdraft.models.registry import tiny_config
    from longdraft.models.rope import inverse_frequencies

    rope = RopeConfig(kind="llama3", factor=8.0, original_max_len=64)
    config = tiny_config(rope=rope, max_position_embeddings=512)
    scaled, _ = inverse_frequencies(rope, config.head_dim, 512)
    plain, _ = inverse_frequencies(RopeConfig(), config.head_dim, 512)
    tensors = random_tensors(config)
    path = tmp_path / "model.gguf"
    plain_config = tiny_config(max_position_embeddings=512)
    write_llama_gguf(path, plain_config, tensors, rope_freqs=(plain / scaled))
    ids = [(3 * i) % 128 for i in range(301)]

    class Source:
        path = "memory"
        shapes = staticmethod(lambda: {name: tuple(t.shape) for name, t in tensors.items()})
        load = staticmethod(tensors.__getitem__)

    (want,) = chunked_logits(Transformer(config, Source), [ids], [64])
    (got,) = chunked_logits(Transformer(*load_gguf_without_tokenizer(path)), [ids], [64])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
