"""Folders of safetensors are whole or refused (O20), and pickles are never opened."""

import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longdraft.checkpoint.safetensors import INDEX, SINGLE, SafetensorsWeights
from longdraft.checkpoint.ties import EMBEDDING
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
    assert SafetensorsWeights(snapshot).shapes() == SafetensorsWeights(folder).shapes()


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
    shard, repeated = load_file(folder / SHARDS[0]), "model.norm.weight"
    save_file(shard | {repeated: weights[repeated]}, folder / SHARDS[0])


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
        (repeat_tensor, "norm.weight.*also in"),
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
