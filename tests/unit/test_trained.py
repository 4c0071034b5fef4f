"""Arms of a recipe from end to end: trained on the same texts, gone on with, and measured together."""

import json

import pytest
from typer.testing import CliRunner

from longdraft.bench import trained
from longdraft.cli.app import app
from longdraft.cli.progress import Progress
from longdraft.cli.train import _on_said as show_said
from longdraft.train.state import read_log
from tests.recipes import TINY_TARGET, write_texts

RECIPE = (
    TINY_TARGET
    + """
[target.run]
steps = 2
lengths = { 16 = 1.0 }
batch_tokens = 64
eval_tokens = 32

[data]
corpora = []
paths = ["texts"]
held_out = 0.5
cache = true

[draft]
layers = "last:1"
window = 4

[arms]
names = ["no-activations", "spire", "vanilla"]

[loss]
k = 3

[optim]
lr = 1e-2

[run]
steps = 2
lengths = { 16 = 0.5, 32 = 0.5 }
batch_tokens = 64
eval_tokens = 32

[evaluate]
contexts = [9, 20]
texts = 3
span = 9
batch = 2
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    write_texts(folder)
    (folder / "small.toml").write_text(RECIPE)
    return folder


def run(folder, *args):
    done = CliRunner().invoke(app, ["train", "-c", str(folder / "small.toml"), "--out", str(folder / "out"), *args])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


def test_arms_are_trained_on_the_same_texts_gone_on_with_and_measured_together(folder, monkeypatch):
    monkeypatch.setattr("longdraft.cli.train._draw", lambda out, done: {})  # pictures of stages take long
    said = []
    monkeypatch.setattr("longdraft.cli.train._on_said", lambda progress, stop, *at: said.append(at))
    report = run(folder, "--seeds", "2")
    assert [at[0] for at in said] == sorted(at[0] for at in said)
    for length in (16, 32):  # a line now and then, up to all texts
        (total,), done = {total for n, _, total in said if n == length}, [at[1] for at in said if at[0] == length]
        with pytest.raises(KeyboardInterrupt):
            show_said(Progress(), [2], length, done[0], total)
        assert done == sorted(done) and 1 < len(set(done)) and done[0] == 8 < done[-1] == total
    names = [f"{arm}-{seed}" for seed in (0, 1) for arm in ("no-activations", "spire", "vanilla")]
    assert list(report["stages"]) == ["target", *names]
    lengths = {name: [x["length"] for x in read_log(folder / "out" / name) if "length" in x] for name in names}
    assert all(lengths[name] == lengths[f"spire-{name[-1]}"] for name in names)
    losses = [report["stages"][name]["held_out"]["loss"] for name in names]
    assert len(set(losses)) == 6 and "acceptance" not in report["stages"]["vanilla-0"]["held_out"]
    tau = report["tau"]
    methods = ["no-activations", "spire", "vanilla", trained.WINDOWED]
    assert len(tau["rows"]) == 4 * 2 * 2 * 3 and list(dict.fromkeys(row["method"] for row in tau["rows"])) == methods
    assert json.loads((folder / "out" / "tau.json").read_text()) == tau
    assert (folder / "out" / "tau.png").read_bytes().startswith(b"\x89PNG")
    full = {(r["method"], r["context"], r["temperature"]): r for r in tau["rows"] if r["gamma"] == 3}
    places = [(context, t) for context in (9, 20) for t in (0.0, 1.0)]
    for method in methods[:-1]:  # of two seeds as many rounds each: the mean of both
        for n, place in enumerate(places):
            alone = [tau["alone"][f"{method}-{seed}"][n] for seed in (0, 1)]
            assert full[(method, *place)]["tokens_per_round"] == pytest.approx(sum(alone) / 2)
            assert full[(method, *place)]["trained"] == 128
    for x in tau["differences"]:
        place = (x["context"], x["temperature"])
        both = [full[(name, *place)]["tokens_per_round"] for name in (x["method"], "spire")]
        assert x["value"] == pytest.approx(both[0] - both[1]) and x["method"] != "spire"
    again = run(folder, "--seeds", "2", "--resume", "--no-evaluate", "--no-plot")
    assert "tau" not in again
    assert all(again["stages"][name]["held_out"] == report["stages"][name]["held_out"] for name in names)
