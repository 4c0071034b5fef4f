"""The training loop: steps, guards, and runs that are killed and go on bit by bit."""

import math
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from longdraft import LLM, SamplingParams
from longdraft.checkpoint.load import load_checkpoint
from longdraft.errors import InvalidValueError, TrainingError
from longdraft.models.config import parse_hf_config
from longdraft.models.feedback import MEMORY
from longdraft.models.transformer import Transformer
from longdraft.train import files
from longdraft.train.lm import LanguageModel, random_tensors
from longdraft.train.loop import MODEL, Hooks, Job, RunConfig, Trainer
from longdraft.train.optim import OptimConfig, Optimizer
from longdraft.train.state import LOG, STATE, read_log
from longdraft.train.teacher import Teacher

F64 = torch.float64
RAW = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
UNTIMED = ("step", "tokens", "skipped", "loss", "accuracy", "grad_norm", "lr", "held_out")


class Counting:
    """Texts in which each id is the last one plus one, modulo 7."""

    def step(self, step):
        return (torch.arange(12) + torch.tensor([[step], [step + 2], [3]])) % 7


def language_model(dtype=torch.float32, **changes):
    raw = RAW | changes
    return LanguageModel(raw, random_tensors(parse_hf_config(raw), 0, dtype))


def job(objective=None, optim=None, identity="it", **run):
    run = RunConfig(**{"steps": 6, "save_every": 2, "eval_every": 3, "lengths": {12: 1.0}, **run})
    tested = [torch.arange(9)[None] % 7, torch.arange(5)[None] % 7]
    return Job(objective or language_model(), Counting(), tested, optim or OptimConfig(lr=0.01), run, identity)


def result(folder):
    """Everything that a run leaves behind, but times."""
    log = [{name: record.get(name) for name in UNTIMED} for record in read_log(folder)]
    return (folder / STATE).read_bytes(), (folder / MODEL / "model.safetensors").read_bytes(), log


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    Trainer(job(), folder).train()
    return result(folder)


# --- killed and resumed


@pytest.mark.parametrize("at", range(7))
def test_a_run_that_failed_after_any_step_goes_on_bit_by_bit(at, whole, tmp_path):
    class Failure(Exception):
        pass

    def fail(record):
        if record["step"] == at:
            raise Failure

    with pytest.raises(Failure):
        Trainer(job(), tmp_path, Hooks(fail)).train()
    Trainer(job(), tmp_path).train(resume=True)
    assert result(tmp_path) == whole


def test_a_run_that_was_stopped_goes_on_bit_by_bit(whole, tmp_path):
    stopped = Trainer(job(), tmp_path, Hooks(stop=lambda: True))
    assert stopped.train().step == 1
    assert (tmp_path / MODEL).is_dir()
    log = (tmp_path / LOG).read_text()
    (tmp_path / LOG).write_text(log[: log.index('"step": 1, "held_out"')])  # cut within a line
    for step in range(2, 6):
        assert stopped.train(resume=True).step == step
    Trainer(job(micro_tokens=24), tmp_path).train(resume=True)
    state, weights, log = result(tmp_path)
    assert (state, weights) != whole[:2]  # parts of another size round otherwise in float32
    assert [x["loss"] for x in log if x["loss"]] == pytest.approx([x["loss"] for x in whole[2] if x["loss"]], rel=1e-5)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.test_training import Trainer, job
replace, saved = os.replace, []
def killed(*names):
    saved.append(names)
    if len(saved) == 3:  # the log's beginning, step 2; step 4 is written, and not yet in its place
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*names)
os.replace = killed
Trainer(job(), Path(sys.argv[1])).train()
"""


def test_a_process_that_was_killed_while_it_saved_goes_on_bit_by_bit(whole, tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {STATE, f"{STATE}.part", LOG}
    assert list(read_log(tmp_path))[-1]["step"] == 4
    Trainer(job(), tmp_path).train(resume=True)
    assert result(tmp_path) == whole


def test_a_run_is_not_mixed_with_another(tmp_path):
    Trainer(job(steps=2), tmp_path).train()
    with pytest.raises(TrainingError, match="--resume"):
        Trainer(job(steps=2), tmp_path).train()
    with pytest.raises(TrainingError, match="another recipe"):
        Trainer(job(identity="else"), tmp_path).train(resume=True)
    (tmp_path / STATE).write_bytes((tmp_path / STATE).read_bytes()[:-100])
    with pytest.raises(TrainingError, match="damaged"):
        Trainer(job(), tmp_path).train(resume=True)
    run = RunConfig()
    assert run.decisive == replace(run, save_every=7, eval_every=3, micro_tokens=64, patience=2).decisive
    assert run.decisive != replace(run, lengths={64: 1.0}).decisive != replace(run, autocast="bfloat16").decisive


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    def killed(part, file):
        raise KeyboardInterrupt

    files.save_text(tmp_path / "x", "old")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files.os, "replace", killed)
        files.save_text(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "old"
    files.save_text(tmp_path / "x", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "new")]


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    def fail(folder):
        (folder / "b").write_text("half")
        raise OSError

    files.save_folder(tmp_path / "x", lambda folder: (folder / "a").write_text("1"))
    with pytest.raises(OSError):
        files.save_folder(tmp_path / "x", fail)
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["a"]
    files.save_folder(tmp_path / "x", lambda folder: (folder / "c").write_text("2"))
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["x", "x/c"]


# --- steps


def test_the_learning_rate_rises_and_falls_along_a_cosine():
    config = OptimConfig(lr=2.0, warmup=0.4, floor=0.1)
    rates = [config.rate(step, 10) for step in range(10)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4:] == pytest.approx([2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * i / 5)) / 2) for i in range(6)])
    assert rates[-1] == pytest.approx(0.2)
    assert [OptimConfig(lr=1.0, warmup=0).rate(0, n) for n in (1, 5)] == [1.0, 1.0]
    assert OptimConfig(lr=1.0, warmup=1).rate(3, 4) == 1.0


def test_matrices_alone_decay():
    names = {"model.norm.weight": (3,), "w": (2, 3), MEMORY: (2, 3)}
    parameters = {name: torch.ones(shape, dtype=F64, requires_grad=True) for name, shape in names.items()}
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
    Optimizer(OptimConfig(weight_decay=0.5), parameters).step(0.1)
    assert {name: p.flatten()[0].item() for name, p in parameters.items()} == {
        "model.norm.weight": 1.0,
        "w": 0.95,
        MEMORY: 1.0,
    }


@pytest.mark.parametrize(("clip", "kept"), [(1.0, 0.2), (0.0, 1.0), (50.0, 1.0)])
def test_gradients_are_clipped_to_their_common_norm(clip, kept):
    parameters = {name: torch.zeros(1, dtype=F64, requires_grad=True) for name in "ab"}
    for p, grad in zip(parameters.values(), (3.0, 4.0), strict=True):
        p.grad = torch.tensor([grad], dtype=F64)
    optimizer = Optimizer(OptimConfig(clip=clip, beta1=0.5), parameters)
    assert optimizer.step(0.1) == 5.0
    first = [float(optimizer.tensors()[f"exp_avg.{name}"]) for name in "ab"]
    assert first == pytest.approx([0.5 * kept * 3, 0.5 * kept * 4], rel=1e-5)
    assert all(p.grad is None for p in parameters.values())


def test_parts_of_a_batch_add_up_to_it():
    """Parts of two rows and one: the mean of means would weigh the last row twice."""
    found = []
    for micro_tokens in (36, 24, 1):
        objective = language_model(F64)
        trainer = Trainer(job(objective, micro_tokens=max(2, micro_tokens)), None)
        loss, figures = trainer._gradients(Counting().step(1))
        found.append([torch.tensor([loss, figures["accuracy"]]), *(p.grad for p in objective.parameters.values())])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-11, atol=1e-13)


def test_half_precision_is_near_and_keeps_weights_whole(tmp_path):
    found = []
    for autocast in ("off", "bfloat16"):
        objective = language_model()
        found.append(Trainer(job(objective, autocast=autocast), tmp_path)._gradients(Counting().step(0))[0])
        assert all(p.grad.dtype == p.dtype == torch.float32 for p in objective.parameters.values())
    assert found[0] != found[1] == pytest.approx(found[0], rel=0.01)


class Poisoned(LanguageModel):
    """Some losses are infinite, with gradients that are not; or the other way round."""

    bad: tuple = ()
    calls = 0

    def loss(self, ids):
        loss, figures = super().loss(ids)
        if torch.is_grad_enabled():
            self.calls += 1
            if self.calls in self.bad:
                x = next(iter(self.parameters.values()))
                loss = loss + math.inf if self.calls % 2 else loss + (x[0, 0] - x[0, 0].detach()).abs().sqrt()
        return loss, figures


def poisoned(bad):
    objective = Poisoned(RAW, random_tensors(parse_hf_config(RAW), 0))
    objective.bad = bad
    return objective


def test_a_step_that_is_no_number_changes_nothing(tmp_path):
    objective, seen = poisoned((2, 3)), []

    def look(record):
        if "loss" in record:
            seen.append({name: p.detach().clone() for name, p in objective.parameters.items()})

    done = Trainer(job(objective, patience=3), tmp_path, Hooks(look)).train()
    assert (done.step, done.skipped, done.in_a_row) == (6, 2, 0)
    moved = [any(not torch.equal(a[name], b[name]) for name in a) for a, b in zip(seen, seen[1:], strict=False)]
    assert moved == [False, False, True, True, True]
    log = [record for record in read_log(tmp_path) if "skipped" in record]
    assert [record["skipped"] for record in log] == [0, 1, 2, 2, 2, 2]
    assert log[2]["loss"] is None and log[1]["grad_norm"] is None and log[3]["grad_norm"] > 0
    assert all(bool(x.isfinite().all()) for x in load_file(tmp_path / STATE).values())


def test_a_run_that_comes_to_nothing_ends_and_keeps_what_was_good(tmp_path):
    with pytest.raises(TrainingError, match="last 2 steps, up to step 5") as caught:
        Trainer(job(poisoned((2, 4, 5)), patience=2), tmp_path).train()
    assert "optim.lr" in str(caught.value)
    saved = load_file(tmp_path / STATE)
    assert saved["moments.step.model.norm.weight"] == 2.0 and not (tmp_path / MODEL).exists()
    assert all(bool(x.isfinite().all()) for x in saved.values())


def test_weights_that_are_no_numbers_are_not_saved(tmp_path):
    objective = language_model()

    def spoil(record):
        if record["step"] == 3:
            next(iter(objective.parameters.values())).data[0, 0] = math.inf

    with pytest.raises(TrainingError, match=r"model.embed_tokens.weight .* step 4"):
        Trainer(job(objective), tmp_path, Hooks(spoil)).train()
    assert list(read_log(tmp_path))[-1]["step"] == 4
    assert all(bool(x.isfinite().all()) for x in load_file(tmp_path / STATE).values())


# --- plain models


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"model_type": "qwen3", "head_dim": 8, "num_key_value_heads": 1}],
)
def test_a_model_learns_and_is_opened_as_any_other(changes, tmp_path):
    """It counts modulo 7, and the package's own forward gives its logits."""
    objective = language_model(**changes)
    run = job(objective, OptimConfig(lr=0.03, weight_decay=0), steps=40, save_every=40, eval_every=40)
    Trainer(run, tmp_path).train()
    before, after = (record["held_out"] for record in read_log(tmp_path) if "held_out" in record)
    assert before["loss"] == pytest.approx(math.log(16), abs=0.1) and after["loss"] < 0.2 and after["accuracy"] == 1
    checkpoint = load_checkpoint(tmp_path / MODEL)
    target = Transformer(checkpoint.config, checkpoint.weights, dtype=torch.float32)
    ids = Counting().step(5)
    logits = torch.cat([x for _, x in Teacher(target, chunk=5).chunks(ids.tolist(), (0,))], dim=1)
    torch.testing.assert_close(logits, objective.logits(ids).detach(), rtol=1e-4, atol=1e-4)
    if not changes:
        out = LLM(tmp_path / MODEL, max_model_len=64).generate(
            {"prompt_token_ids": [4, 5, 6]}, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
        )
        assert list(out[0].outputs[0].token_ids) == [0, 1, 2, 3]


def test_a_model_is_made_of_its_own_tensors():
    config = parse_hf_config(RAW)
    with pytest.raises(InvalidValueError, match="tensors"):
        LanguageModel(RAW | {"hidden_size": 32}, random_tensors(config, 0))
    one, other = random_tensors(config, 0), random_tensors(config, 1)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    assert one["model.layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(0.01, rel=0.2)
