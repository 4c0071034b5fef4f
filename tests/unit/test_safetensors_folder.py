"""Checkpoint folders: whole or refused (O20), tied or not (O19), no stray tensors (O16), JSON files within limits."""

import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from longdraft.checkpoint.folder import generation_defaults, read_json
from longdraft.checkpoint.safetensors import INDEX, SINGLE, SafetensorsWeights
from longdraft.checkpoint.ties import EMBEDDING, HEAD, resolve_tie
from longdraft.errors import ModelFileError, ModelNotFoundError
from longdraft.models.config import parse_hf_config
from longdraft.models.weights import check_names_and_shapes, expected_shapes

T0 = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
BIAS = "model.layers.1.self_attn.q_proj.bias"


def config(family="llama", **settings):
    return parse_hf_config({"model_type": family, **T0, **settings})


def tensors(model, seed=0):
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in expected_shapes(model).items()}


def save(folder, weights):
    save_file(weights, folder / SINGLE)
    return folder


def save_shards(folder, weights):
    """Three shards, tensors dealt in turn, and their index, which is returned."""
    names = list(weights)
    for i, shard in enumerate(SHARDS):
        save_file({name: weights[name] for name in names[i::3]}, folder / shard)
    weight_map = {name: SHARDS[i % 3] for i, name in enumerate(names)}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def load(folder, model):
    source = SafetensorsWeights(folder)
    check_names_and_shapes(model, source)
    return source


@pytest.fixture
def sharded(tmp_path):
    weights = tensors(config())
    return tmp_path, weights, save_shards(tmp_path, weights)


# --- whole checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_as", [save, save_shards])
def test_every_tensor_comes_back(tmp_path, save_as):
    weights = tensors(config("qwen3", attention_bias=True))
    save_as(tmp_path, weights)
    source = load(tmp_path, config("qwen3", attention_bias=True))
    assert source.shapes() == {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert all(torch.equal(source.load(name), tensor) for name, tensor in weights.items())
    assert source.path == str(tmp_path)
    assert source.warnings == ()
    with pytest.raises(ModelFileError, match="no_such"):
        source.load("no_such")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_float_types_are_kept(tmp_path, dtype):
    source = SafetensorsWeights(save(tmp_path, {"x": torch.ones(2, 3, dtype=dtype)}))
    assert source.load("x").dtype == dtype


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_other_types_are_refused_by_name(tmp_path, dtype):
    save(tmp_path, {"model.norm.weight": torch.ones(4).to(dtype)})
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight.*type"):
        SafetensorsWeights(tmp_path)


def test_links_into_a_cache_are_followed(sharded, tmp_path_factory):
    folder, _, _ = sharded
    snapshot = tmp_path_factory.mktemp("snapshot")
    for file in folder.iterdir():
        os.symlink(file, snapshot / file.name)
    load(snapshot, config())


# --- damaged and incomplete ones (O20) -----------------------------------------------------------------------------


def remove_shard(folder, weights, index):
    (folder / SHARDS[1]).unlink()


def cut_shard(folder, weights, index):
    file = folder / SHARDS[2]
    file.write_bytes(file.read_bytes()[:-1000])


def rename_shard(folder, weights, index):
    (folder / SHARDS[0]).rename(folder / "model-1.safetensors")


def point_elsewhere(folder, weights, index):
    write_index(folder, index | {EMBEDDING: SHARDS[1]})


def list_what_is_not_there(folder, weights, index):
    write_index(folder, index | {"model.extra": SHARDS[1]})


def break_index(folder, weights, index):
    (folder / INDEX).write_text('{"weight_map": {')


def reshape(folder, weights, index):
    save_shards(folder, weights | {"model.norm.weight": torch.ones(65)})


def drop_tensor(folder, weights, index):
    save_shards(folder, {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"})


def repeat_tensor(folder, weights, index):
    shard = load_file(folder / SHARDS[1])
    save_file(shard | {EMBEDDING: weights[EMBEDDING]}, folder / SHARDS[1])


def empty_shard(folder, weights, index):
    (folder / SHARDS[1]).write_bytes(b"")


def lengthen_shard(folder, weights, index):
    with open(folder / SHARDS[1], "ab") as file:
        file.write(b"more")


def pointer_instead(folder, weights, index):
    (folder / SHARDS[1]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")


def add_single_file(folder, weights, index):
    save_file({"other": torch.ones(1)}, folder / SINGLE)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (remove_shard, SHARDS[1]),
        (cut_shard, SHARDS[2]),
        (rename_shard, SHARDS[0]),
        (point_elsewhere, EMBEDDING),
        (list_what_is_not_there, "model.extra"),
        (break_index, INDEX),
        (reshape, "model.norm.weight"),
        (drop_tensor, "model.norm.weight"),
        (repeat_tensor, EMBEDDING),
        (empty_shard, SHARDS[1]),
        (lengthen_shard, SHARDS[1]),
        (pointer_instead, "git lfs pull"),
        (add_single_file, "both"),
    ],
)
def test_damage_is_found_before_anything_runs(sharded, damage, named):
    folder, weights, index = sharded
    load(folder, config())
    damage(folder, weights, index)
    with pytest.raises(ModelFileError, match=named):
        load(folder, config())


def test_a_surplus_file_is_left_aside_with_a_warning(sharded):
    folder, weights, _ = sharded
    save_file({EMBEDDING: torch.zeros(128, 64)}, folder / "extra.safetensors")
    source = load(folder, config())
    assert len(source.warnings) == 1
    assert "extra.safetensors" in source.warnings[0]
    assert torch.equal(source.load(EMBEDDING), weights[EMBEDDING])


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..\\x.safetensors", "C:x.safetensors"]
    + ["pytorch_model.bin", "..", "", "x\0.safetensors", "a\nb.bin", 7, None, ["x.safetensors"]],
)
def test_an_index_cannot_lead_out_of_the_folder(sharded, shard):
    folder, _, index = sharded
    write_index(folder, index | {EMBEDDING: shard})
    with pytest.raises(ModelFileError, match="not a safetensors file of this folder"):
        SafetensorsWeights(folder)


@pytest.mark.parametrize("text", ["[]", "7", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000, "\xff"])
def test_an_index_of_another_form_is_refused(sharded, text):
    folder, _, _ = sharded
    (folder / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFileError, match=INDEX):
        SafetensorsWeights(folder)


# --- folders without usable weights --------------------------------------------------------------------------------


class Poison:
    def __reduce__(self):
        return os.mkdir, ("poisoned",)


opened: list[str] | None = None


def record_opens(event, args):
    if event == "open" and opened is not None:
        opened.append(str(args[0]))


sys.addaudithook(record_opens)  # cannot be removed, so it records only while a test asks for it


@pytest.fixture
def recording():
    global opened
    opened = []
    yield opened
    opened = None


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "epoch.ckpt"])
@pytest.mark.parametrize("beside_safetensors", [False, True])
def test_pickles_are_never_opened(tmp_path, monkeypatch, recording, name, beside_safetensors):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(pickle.dumps(Poison()))
    if beside_safetensors:
        save(tmp_path, tensors(config()))
    recording.clear()
    if beside_safetensors:
        load(tmp_path, config())
    else:
        with pytest.raises(ModelFileError, match=rf"{name}.*run code.*save_pretrained"):
            SafetensorsWeights(tmp_path)
    assert not any(path.endswith(name) for path in recording)
    assert not Path("poisoned").exists()


def test_folders_without_weights(tmp_path):
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        SafetensorsWeights(tmp_path / "nowhere")
    with pytest.raises(ModelFileError, match=SINGLE):
        SafetensorsWeights(tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / SHARDS[0])
    with pytest.raises(ModelFileError, match=f"{INDEX} is missing"):
        SafetensorsWeights(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="adapter"):
        SafetensorsWeights(tmp_path)


# --- names (O16) and ties (O19) ------------------------------------------------------------------------------------


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


# --- JSON files ----------------------------------------------------------------------------------------------------


def test_read_json(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1, "a": 2}')
    assert read_json(file) == {"a": 2}
    with pytest.raises(ModelFileError, match="larger than 5 bytes"):
        read_json(file, 5)
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_json(tmp_path / "none.json")
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_json(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", '{"a": NaN}', '{"a": -Infinity}', "[1]", '"x"', "null", '{"a": ' * 99_999, "1" * 5000, "\xff"]
)
def test_read_json_refuses_what_is_no_object(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFileError, match="config.json"):
        read_json(file)


@pytest.mark.parametrize(
    ("generation", "model", "eos", "defaults"),
    [
        (None, None, (), {}),
        (None, {"eos_token_id": 2}, (2,), {}),
        ({"eos_token_id": [5, 6, 5]}, {"eos_token_id": 2}, (5, 6), {}),
        ({"eos_token_id": None, "temperature": 0.6}, {"eos_token_id": [2, 3]}, (2, 3), {"temperature": 0.6}),
        (
            {"eos_token_id": 0, "do_sample": False, "top_p": None, "_from_model_config": True, "use_cache": True},
            None,
            (0,),
            {"do_sample": False},
        ),
    ],
)
def test_generation_defaults(tmp_path, generation, model, eos, defaults):
    for name, content in (("generation_config.json", generation), ("config.json", model)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert generation_defaults(tmp_path) == (eos, defaults)


@pytest.mark.parametrize("eos", [-1, True, 1.0, "2", [1, None], {}, 2**31])
def test_ids_that_are_none_are_refused(tmp_path, eos):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelFileError, match="eos_token_id"):
        generation_defaults(tmp_path)
