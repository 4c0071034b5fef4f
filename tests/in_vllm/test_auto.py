"""With γ chosen at every step, by the planner or at random, stock vLLM's text stays what it is."""

from __future__ import annotations

import json

import pytest

from longdraft.integrations.vllm.args import engine_args
from longdraft.integrations.vllm.settings import Settings
from tests.in_vllm.engines import GAMMA, KINDS, LENGTH, engine
from tests.in_vllm.test_engine import greedy, prompts, run


@pytest.fixture(scope="module")
def chosen(folder, kind, tmp_path_factory):
    """An engine that chooses, and the file with what it measured."""
    return choosing(folder, kind, tmp_path_factory.mktemp("curves"))


def choosing(folder, kind, home, **more):
    settings = Settings(draft="auto", budget=64, **KINDS[kind])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGDRAFT_CALIBRATION", str(home / "own.json"))
        llm = engine(folder, **{**engine_args(settings, None, "cpu"), **more})
    return llm, home / "own.vllm.json"


def test_greedy_text_is_plains_and_what_was_measured_is_kept(plain, chosen):
    llm, file = chosen
    texts = prompts(21, 32)
    assert run(llm, texts, greedy()) == run(plain, texts, greedy())
    (counts,) = llm.collective_rpc("longdraft_set")
    assert counts["rounds"] > 30 and counts["predicted"] > 0 and counts["realised"] > 0
    (stored,) = json.loads(file.read_text())["calibrations"]
    assert stored["curves"]["passes"]["step_s"] > 0


def test_what_is_stored_is_read_at_the_next_start(folder, chosen, kind, capfd):
    before = chosen[1].read_text()
    choosing(folder, kind, chosen[1].parent)
    assert chosen[1].read_text() == before
    said = "".join(capfd.readouterr())
    assert "is chosen by passes timed" in said and "are timed" not in said


def test_requests_may_still_say_how_much(plain, chosen):
    llm, _ = chosen
    wishes = [{}, {"longdraft_gamma": 2}, {"longdraft_off": 1}, {"longdraft_budget": 200}] * 4
    texts = prompts(22, len(wishes), 100)
    assert run(llm, texts, [greedy(extra_args=w) for w in wishes]) == run(plain, texts, greedy())
    llm.collective_rpc("longdraft_set")
    run(llm, texts, greedy(extra_args={"longdraft_off": 1}))
    (counts,) = llm.collective_rpc("longdraft_set")
    assert not counts["verified"]


def test_whoever_chooses_at_random_changes_no_text(folder, plain, kind):
    """Ragged and empty lists at every step, rows thrown out and come back, prompts in chunks beside them."""
    ours = engine_args(Settings(draft="auto", budget=64, **KINDS[kind]), GAMMA, "cpu")
    ours["speculative_config"] |= {"model": "tests.in_vllm.dice.DiceProposer"}
    llm = engine(folder, **ours, num_gpu_blocks_override=72)
    texts = prompts(23, 24, 1, 260) + prompts(24, 2, LENGTH - 40, LENGTH - 30)
    assert run(llm, texts, greedy(60)) == run(plain, texts, greedy(60))
    (counts,) = llm.collective_rpc("longdraft_set")
    assert 0 < counts["accepted"] < counts["verified"]
