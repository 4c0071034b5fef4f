"""Arms of a recipe from end to end: trained on the same texts, gone on with, and measured together."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from longdraft.bench import trained
from longdraft.bench.modelled import Drafting
from longdraft.bench.tau import Method, TauPlan, measure, table
from longdraft.bench.tau import report as report_of
from longdraft.checkpoint.load import load_checkpoint
from longdraft.cli.app import app
from longdraft.cli.progress import Progress
from longdraft.cli.train import _on_said as show_said
from longdraft.cli.train import _on_written as show_written
from longdraft.kv.select.streaming_llm import StreamingLLM
from longdraft.models.registry import tiny_config
from longdraft.models.transformer import Transformer
from longdraft.train.data import held_out
from longdraft.train.recipe import DraftRecipe, read_recipe
from longdraft.train.rounds import ModelDrafter
from longdraft.train.stages import Workshop
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

[data.written]
prompt = 4
length = 8
texts = 5

[draft]
layers = "last:2"
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


def untrained_is_what_it_says(folder, tau):
    """Against the same measured by hand: layers, what they read, what they cost."""
    target, plan = load_checkpoint(folder / "out" / "target" / "model"), TauPlan((9, 20), k=3, span=9, batch=2)
    stream = Workshop(read_recipe(folder / "small.toml"), folder / "out").streams(target.tokenizer).held_out
    texts, model = next(held_out(stream, [29], 3 * 29)), Transformer(target.config, target.weights)
    read = StreamingLLM(budget=5, sinks=1).select
    by_hand = []
    for name, layers in ((trained.WINDOWED, None), (trained.SAME_LAYERS, (1, 2)), (trained.SPREAD_LAYERS, (0, 2))):
        costs = Drafting(replace(target.config, num_layers=len(layers or "all")), 5)
        by_hand.append(Method(name, lambda filled, layers=layers: ModelDrafter(filled, read, layers), costs))
    found = measure(model, texts, by_hand, plan)
    rows = [row for method in by_hand for row in table(target.config, method, found[method.name])]
    assert report_of(rows) == tau["rows"][-len(rows) :]


@pytest.mark.parametrize("layers", [(), (3,), (0, 3), (2, 3)])
def test_layers_that_are_skipped(layers):
    """As many from end to end as the draft has, unless these are the same; none beside a draft that has none."""
    target = SimpleNamespace(config=tiny_config(num_layers=4))
    found = {m.name: m.make.keywords["layers"] for m in trained._untrained(target, DraftRecipe(), layers)}
    own = {trained.SAME_LAYERS: layers} if layers else {}
    spread = {trained.SPREAD_LAYERS: (0, 3)} if layers == (2, 3) else {}
    assert found == {trained.WINDOWED: None} | own | spread


def test_arms_are_trained_on_the_same_texts_gone_on_with_and_measured_together(folder, monkeypatch):
    monkeypatch.setattr("longdraft.cli.train._draw", lambda out, done: {})  # pictures of stages take long
    said = []
    monkeypatch.setattr("longdraft.cli.train._on_said", lambda progress, stop, *at: said.append(at))
    wrote = []
    monkeypatch.setattr("longdraft.cli.train._on_written", lambda progress, stop, *at: wrote.append(at))
    report = run(folder, "--seeds", "2")
    assert wrote == [(done, 20) for done in (5, 10, 15, 20)], "once for all arms and seeds, and told of as it goes"
    with pytest.raises(KeyboardInterrupt):
        show_written(Progress(), [2], 5, 20)
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
    arms = ["no-activations", "spire", "vanilla"]
    methods = [*arms, trained.WINDOWED, trained.SAME_LAYERS, trained.SPREAD_LAYERS]
    assert len(tau["rows"]) == 6 * 2 * 2 * 3 and list(dict.fromkeys(row["method"] for row in tau["rows"])) == methods
    assert json.loads((folder / "out" / "tau.json").read_text()) == tau
    assert (folder / "out" / "tau.png").read_bytes().startswith(b"\x89PNG")
    full = {(r["method"], r["context"], r["temperature"]): r for r in tau["rows"] if r["gamma"] == 3}
    places = [(context, t) for context in (9, 20) for t in (0.0, 1.0)]
    for method in arms:  # of two seeds as many rounds each: the mean of both
        for n, place in enumerate(places):
            alone = [tau["alone"][f"{method}-{seed}"][n] for seed in (0, 1)]
            assert full[(method, *place)]["tokens_per_round"] == pytest.approx(sum(alone) / 2)
            assert full[(method, *place)]["trained"] == 128
    assert [x["method"] for x in tau["differences"][::4]] == [name for name in methods if name != "spire"]
    for x in tau["differences"]:
        place = (x["context"], x["temperature"])
        both = [full[(name, *place)]["tokens_per_round"] for name in (x["method"], "spire")]
        assert x["value"] == pytest.approx(both[0] - both[1]) and x["method"] != "spire"
    untrained_is_what_it_says(folder, tau)
    again = run(folder, "--seeds", "2", "--resume", "--no-evaluate", "--no-plot")
    assert "tau" not in again
    assert all(again["stages"][name]["held_out"] == report["stages"][name]["held_out"] for name in names)
