"""``longdraft train`` as a user meets it: a target and its draft from a recipe, resumed, used, and refused."""

import json

import pytest
import torch

from longdraft import LLM, SamplingParams
from tests.e2e.command import longdraft
from tests.recipes import TINY_TARGET, write_texts

RECIPE = (
    TINY_TARGET
    + """
[target.run]
steps = 3
lengths = { 16 = 1.0 }
batch_tokens = 64
eval_tokens = 32

[data]
corpora = []
paths = ["texts"]
held_out = 0.5

[draft]
layers = "influential:2"
window = 8

[run]
steps = 3
lengths = { 16 = 0.5, 32 = 0.5 }
batch_tokens = 64
eval_tokens = 32
"""
)
PLAIN = """
[draft.model]
model_type = "llama"
hidden_size = 8
intermediate_size = 8
num_hidden_layers = 1
num_attention_heads = 1
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    write_texts(folder)
    (folder / "small.toml").write_text(RECIPE)
    return folder / "small.toml"


def test_a_target_and_its_draft_are_trained_resumed_and_used(recipe, tmp_path):
    done = longdraft("train", "--config", str(recipe), "--out", str(tmp_path), "--no-plot")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    target, draft = report["stages"]["target"], report["stages"]["draft"]
    assert (target["step"], draft["tokens"], draft["finished"]) == (3, 192, True)
    assert 0 < draft["held_out"]["acceptance"] <= 1 and target["held_out"]["loss"] < 6
    config = json.loads((tmp_path / "draft" / "model" / "config.json").read_text())
    assert config["model_type"] == "spire" and config["window"] == 8 and len(config["layers"]) == 2
    params = SamplingParams(temperature=0, max_tokens=12)
    texts = []
    for name in (None, draft["model"]):
        llm = LLM(target["model"], draft=name, dtype="float32", kv_cache_memory_bytes=2**20)
        texts.append(llm.generate("2 bottles", params, use_tqdm=False)[0])
    assert texts[0].outputs[0].token_ids == texts[1].outputs[0].token_ids and texts[1].stats.verify_passes > 0
    kept = (tmp_path / "draft" / "state.safetensors").read_bytes()
    again = longdraft("train", "-c", str(recipe), "--out", str(tmp_path), "--no-plot", "--resume")
    assert json.loads(again.stdout.splitlines()[-1])["stages"]["draft"]["held_out"] == draft["held_out"]
    assert (tmp_path / "draft" / "state.safetensors").read_bytes() == kept
    for args, words in ((["--resume", "--steps", "2"], "another recipe"), ([], "--resume")):
        refused = longdraft("train", "-c", str(recipe), "--out", str(tmp_path), *args)
        assert refused.returncode == 1 and words in refused.stderr


@pytest.mark.parametrize("learns", ["text", "target"])
def test_a_plain_small_model_is_trained_with_the_targets_vocabulary(recipe, tmp_path, learns):
    draft = f'[draft]\nkind = "model"\nlearns = "{learns}"\nwindow = 4\n{PLAIN}'
    start = RECIPE[: RECIPE.index("[draft]")] + draft + RECIPE[RECIPE.index("[run]") :]
    recipe.with_name("plain.toml").write_text(start)
    args = ("--steps", "1", "--seed", "4", "--json", str(tmp_path / "x.json"))
    done = longdraft("train", "-c", str(recipe.with_name("plain.toml")), "--out", str(tmp_path / "out"), *args)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "x.json").read_text())["stages"]
    assert ("acceptance" in report["draft"]["held_out"]) == (learns == "target")
    assert report["draft"]["plot"].endswith("training.png")
    assert (tmp_path / "out" / "draft" / "training.png").read_bytes().startswith(b"\x89PNG")
    llm = LLM(report["target"]["model"], draft=report["draft"]["model"], kv_cache_memory_bytes=2**20)
    assert len(llm.generate("2", SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids) > 0
    assert not torch.are_deterministic_algorithms_enabled()


def test_errors_are_a_line(tmp_path):
    (tmp_path / "x.toml").write_text("[target]\npath = 'x'\n[draft]\n[optm]")
    done = longdraft("train", "-c", str(tmp_path / "x.toml"))
    assert done.returncode == 1 and done.stderr.startswith("error: optm is {}") and "'optim'" in done.stderr
