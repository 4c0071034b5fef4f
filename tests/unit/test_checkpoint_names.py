"""Which tensors a checkpoint may hold: no stray or missing ones (O16), tied heads as in transformers (O19)."""

import pytest
import torch
import transformers
from safetensors.torch import save_file

from longdraft.checkpoint.safetensors import SINGLE, SafetensorsWeights
from longdraft.checkpoint.ties import EMBEDDING, HEAD, resolve_tie
from longdraft.errors import ModelFileError
from tests.unit.test_safetensors_folder import T0, config, load, save, tensors

BIAS = "model.layers.1.self_attn.q_proj.bias"


def test_a_stray_bias_is_refused_by_name(tmp_path):
    save(tmp_path, tensors(config()) | {BIAS: torch.ones(64)})
    with pytest.raises(ModelFileError, match=BIAS):
        load(tmp_path, config())
    load(save(tmp_path, tensors(config("qwen2"))), config("qwen2"))


def test_a_missing_bias_is_refused_by_name(tmp_path):
    weights = tensors(config("qwen2"))
    del weights[BIAS]
    with pytest.raises(ModelFileError, match=BIAS):
        load(save(tmp_path, weights), config("qwen2"))


@pytest.mark.parametrize(
    ("tie", "head", "tied", "warned"),
    [
        (True, "absent", True, False),
        (True, "equal", True, False),
        (True, "different", False, True),
        (False, "different", False, False),
        (False, "equal", False, False),
    ],
)
def test_ties_follow_transformers(tmp_path, tie, head, tied, warned):
    weights = tensors(config(tie_word_embeddings=True))
    weights[HEAD] = weights[EMBEDDING].clone() if head == "equal" else torch.randn(128, 64)
    if head == "absent":
        del weights[HEAD]
    save_file(weights, tmp_path / SINGLE, metadata={"format": "pt"})
    model, warning = resolve_tie(config(tie_word_embeddings=tie), SafetensorsWeights(tmp_path))
    source = load(tmp_path, model)
    assert model.tie_embeddings == tied
    assert (warning is not None) == warned

    transformers.LlamaConfig(**T0, tie_word_embeddings=tie).save_pretrained(tmp_path)
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert (reference.lm_head.weight is reference.model.embed_tokens.weight) == tied
    assert torch.equal(source.load(EMBEDDING if tied else HEAD), reference.lm_head.weight)


def test_no_tie_and_no_head_is_an_error(tmp_path):
    weights = tensors(config(tie_word_embeddings=True))
    model, warning = resolve_tie(config(), SafetensorsWeights(save(tmp_path, weights)))
    assert warning is None
    with pytest.raises(ModelFileError, match="lm_head.weight"):
        load(tmp_path, model)


def test_a_tied_head_of_another_shape_is_an_error(tmp_path):
    weights = tensors(config(tie_word_embeddings=True)) | {HEAD: torch.ones(120, 64)}
    model, _ = resolve_tie(config(tie_word_embeddings=True), SafetensorsWeights(save(tmp_path, weights)))
    with pytest.raises(ModelFileError, match=r"lm_head\.weight.*120"):
        load(tmp_path, model)
