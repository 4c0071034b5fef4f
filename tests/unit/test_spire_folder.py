"""A SPIRe draft's folder: what is written is read again, for its own target alone, and damage is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from longdraft.checkpoint.base import Checkpoint
from longdraft.checkpoint.load import load_checkpoint
from longdraft.checkpoint.spire import is_spire, read_spire, save_spire
from longdraft.errors import InvalidValueError, ModelFileError, TargetMismatchError, UnsupportedModelError
from longdraft.models.feedback import MEMORY, FeedbackConfig
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.train.prune_init import initial_tensors

CONFIG = FeedbackConfig((0, 2), window=12, sinks=3, memory="shared", context="last")


def target_of(seed=6, **overrides):
    config = tiny_config(**overrides)
    return Checkpoint("the target", "nowhere", config, RandomWeights(config, seed=seed), None)


def saved(folder, config=CONFIG, dtype=torch.float32, **overrides):
    target = target_of(**overrides)
    tensors = initial_tensors(config, target.config, target.weights, dtype)
    return save_spire(folder / "draft", config, tensors, target), tensors, target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory", ["shared", "off"])
def test_what_is_written_is_read(tmp_path, dtype, memory):
    config = FeedbackConfig((0, 2), 12, 3, memory, "last")
    folder, tensors, target = saved(tmp_path, config, dtype, qkv_bias=True, qk_norm=True)
    draft = read_spire(folder, "mine")
    draft.check_target(target)
    assert is_spire(folder)
    assert (draft.config, draft.target, draft.path) == (config, "the target", str(folder))
    again = draft.tensors()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], x) and again[name].dtype == dtype for name, x in tensors.items())
    assert draft.tensors(torch.float64)["model.layers.1.mlp.up_proj.weight"].dtype == torch.float64


def test_nothing_of_the_target_is_stored_twice(tmp_path):
    folder, tensors, target = saved(tmp_path)
    assert not any(word in name for name in load_file(folder / "model.safetensors") for word in ("embed", "lm_head"))
    layer = sum(torch.tensor(shape).prod() for n, shape in target.weights.shapes().items() if ".layers.0." in n)
    assert sum(x.numel() for x in tensors.values()) == 2 * int(layer) + 3


@pytest.mark.parametrize("other", [{"seed": 7}, {"vocab_size": 120}, {"num_layers": 4}, {"num_kv_heads": 4}], ids=repr)
def test_another_target_is_refused(tmp_path, other):
    """The same sizes with other weights, another vocabulary, other shapes."""
    folder, _, _ = saved(tmp_path)
    with pytest.raises(TargetMismatchError, match="'mine' cannot propose tokens for 'the target'.*made for"):
        read_spire(folder, "mine").check_target(target_of(**other))


def test_a_draft_is_no_model(tmp_path):
    folder, _, _ = saved(tmp_path)
    with pytest.raises(UnsupportedModelError, match="spire"):
        load_checkpoint(folder)
    assert not is_spire(tmp_path)


DAMAGE = {
    "version": ({"version": 2}, "has version 2"),
    "no target": ({"target": "x"}, "does not say for which model"),
    "no digest": ({"target": {"name": "x"}}, "does not say for which model"),
    "layers": ({"layers": [2, 0]}, "layers is"),
    "window": ({"window": "wide"}, "window is 'wide'"),
    "memory": ({"memory": "all"}, "memory is 'all'"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_senseless_config_is_named(tmp_path, name):
    folder, _, _ = saved(tmp_path)
    change, words = DAMAGE[name]
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelFileError, match=words) as caught:
        read_spire(folder, "mine")
    assert str(path) in str(caught.value)


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    folder, tensors, target = saved(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    for damaged in (
        {n: x for n, x in tensors.items() if n != name},
        tensors | {name: torch.zeros(3, 4)},
        tensors | {"model.layers.2.mlp.down_proj.weight": torch.zeros(2)},
        {n: x for n, x in tensors.items() if n != MEMORY},
    ):
        save_file(damaged, folder / "model.safetensors")
        with pytest.raises(ModelFileError, match="has shape .*, expected"):
            read_spire(folder, "mine").check_target(target)
        with pytest.raises(InvalidValueError, match="tensors"):
            save_spire(tmp_path / "other", CONFIG, damaged, target)
