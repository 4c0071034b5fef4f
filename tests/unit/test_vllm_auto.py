"""``auto`` inside vLLM, over the runner of ``test_vllm_glue.py``: who drafts how much, and by which curves."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from longdraft.config import DraftConfig
from longdraft.core import Status
from longdraft.errors import KVCapacityError
from longdraft.integrations.vllm import measure as measuring
from longdraft.integrations.vllm.args import engine_args
from longdraft.integrations.vllm.auto import prepare
from longdraft.integrations.vllm.control import Control, sentence
from longdraft.integrations.vllm.drafter import UNCHOSEN
from longdraft.integrations.vllm.guard import auto_refusals
from longdraft.integrations.vllm.measure import Bench, measure, points_of
from longdraft.integrations.vllm.rows import Row
from longdraft.integrations.vllm.settings import Settings
from longdraft.integrations.vllm.stored import curves_for, file
from longdraft.integrations.vllm.tables import PAD_SLOT, fed
from longdraft.outputs import ControlStats
from longdraft.planner import calibration
from longdraft.planner.calibration import Setting
from longdraft.planner.curves import Curves, DraftCurve, PassCurve
from longdraft.sampling_params import SamplingParams
from tests.unit.test_vllm_glue import VOCAB, Runner, decode, params, texts

DRAFT = DraftConfig(budget=100, sinks=4)
TARGET = PassCurve(8e-3, 1e-5, 3e-4, 3e-7, 2e-8, 4, 2.0)
STEP = PassCurve(1e-3, 2e-5, 0.0, 3e-7, 0.0)
CURVES = Curves(TARGET, {"target/all/streaming_llm": DraftCurve(STEP)})
MOST = 6


def control(**changes):
    return Control(**{**dict(prices=CURVES, draft=DRAFT, prior=0.7, most=MOST), **changes})


def row(index, known, wanted=MOST, free=True, end=10_000):
    return Row(index, f"r{index}", known, 1, wanted, 100, free, end, SamplingParams(temperature=0.0), None)


def decoded(chooser, chances, steps, fixed=(), seed=0):
    """γ of every row at every step, where a drafted token of row ``i`` stands with ``chances[i]``; ``fixed``: own γ."""
    rng, now, chosen = random.Random(seed), 0.0, []
    lengths, sampled = [2000] * len(chances), {f"r{i}": [1] for i in range(len(chances))}
    for _ in range(steps):
        chooser.observe(sampled, sampled, now)
        own = dict(fixed)
        gammas = chooser.choose([row(i, n, own.get(i, MOST), i not in own) for i, n in enumerate(lengths)])
        drafting = [n for n, gamma in zip(lengths, gammas, strict=True) if gamma]
        draft_s = max(gammas) * STEP.seconds([100] * len(drafting), [1] * len(drafting)) if drafting else 0.0
        chooser.took(draft_s)
        now += draft_s + CURVES.target(lengths, [1 + gamma for gamma in gammas])
        chosen.append(gammas)
        stood = [next((k for k in range(g) if rng.random() >= p), g) for g, p in zip(gammas, chances, strict=True)]
        sampled = {f"r{i}": [1] * (1 + k) for i, k in enumerate(stood)}
        lengths = [n + 1 + k for n, k in zip(lengths, stood, strict=True)]
    return chosen


def test_each_row_drafts_as_much_as_its_own_tokens_stand():
    chosen = decoded(control(), (0.95, 0.02, 0.95), 150)[60:]
    often = [sum(gammas[i] for gammas in chosen) / len(chosen) for i in range(3)]
    assert often[0] > 2 and often[2] > 2 and often[1] < 0.5, often
    assert any(0 in gammas and max(gammas) > 1 for gammas in chosen)  # ragged, with empty lists among them


def test_where_nothing_stands_steps_are_plain_and_a_row_with_its_own_gamma_keeps_it():
    chosen = decoded(control(), (0.0, 0.0), 200)[50:]
    assert sum(map(any, chosen)) < 0.1 * len(chosen)
    chosen = decoded(control(), (0.0, 0.0, 0.0), 120, fixed={1: 2, 2: 0}.items())[50:]
    assert all(gammas[1:] == [2, 0] for gammas in chosen)
    assert sum(gammas[0] > 0 for gammas in chosen) < 0.1 * len(chosen)


def test_no_row_drafts_more_than_it_has_slots_for():
    (gamma,) = control().choose([row(0, 100)])
    assert gamma > 1 and control().choose([row(0, 100, wanted=1), row(1, 100, wanted=0)]) == [1, 0]


def test_what_it_predicts_is_what_comes_at_any_speed_of_the_machine():
    chooser = control()
    decoded(chooser, (0.9,) * 4, 300)
    stats = chooser.news("test")
    assert stats.predicted_speedup > 1.3
    assert stats.realised_speedup == pytest.approx(stats.predicted_speedup, rel=0.05)
    assert chooser.news("test").seconds == 0 and chooser.news("another").seconds > 0
    assert f"realised {stats.realised_speedup:.2f} x" in sentence(stats) and "γ " in sentence(stats)
    assert "0 rounds" in sentence(ControlStats())


def told(chooser, monkeypatch):
    """What the controller is told of each step: lengths, tokens, seconds; and which sequences end."""
    seen, ended, controller = [], [], chooser._controller
    observe, release = controller.observe, controller.release

    def observing(rounds, seconds, draft_s):
        seen.append(([r.row.seq.num_committed for r in rounds], [r.tokens for r in rounds], seconds, draft_s))
        observe(rounds, seconds, draft_s)

    monkeypatch.setattr(controller, "observe", observing)
    monkeypatch.setattr(controller, "release", lambda seq: (ended.append(seq), release(seq)))
    return seen, ended


def test_steps_with_prompts_or_returning_rows_say_nothing_of_time(monkeypatch):
    chooser = control()
    seen, ended = told(chooser, monkeypatch)
    chooser.observe({"r0": [1], "r1": []}, ("r0", "r1"), 0.0)
    (gamma,) = chooser.choose([row(0, 100)])
    assert not seen and gamma
    chooser.took(0.5)
    chooser.observe({"r0": [1, 1], "r1": []}, ("r0", "r1"), 2.0)  # r1 still in its prompt
    chooser.choose([row(0, 102)])
    chooser.observe({"r0": [1], "r1": [1]}, ("r0", "r1"), 3.0)  # and at its end
    chooser.choose([row(0, 103), row(1, 50)])
    chooser.took(0.25)
    chooser.observe({"r0": [1, 1], "r1": [1]}, ("r0", "r1"), 5.0)
    assert [(lengths, tokens, seconds) for lengths, tokens, seconds, _ in seen] == [
        ([101], [2], None),
        ([102], [1], None),
        ([104, 50], [2, 1], 2.0),
    ]
    assert list(seen[0][3].values()) == [0.5] and list(seen[2][3].values()) == [0.25]
    chooser.choose([row(0, 105), row(1, 51)])
    chooser.forget()
    chooser.observe({"r0": [1]}, ("r0",), 6.0)
    assert len(seen) == 3 and ended == [1]
    chooser.choose([row(0, 30)])  # preempted, it begins anew with another length
    assert ended == [1, 0] and [seq.status for seq in chooser._seqs.values()] == [Status.RUNNING]


class Dice:
    """A control that chooses at random."""

    def __init__(self, seed):
        self.rng, self.steps = random.Random(seed), []

    def observe(self, step, alive, now):
        self.steps.append({name: len(tokens) for name, tokens in step.items()})

    def choose(self, rows):
        self.last = [self.rng.randint(0, r.wanted) if r.free else r.wanted for r in rows]
        return self.last

    def took(self, draft_s):
        pass

    def forget(self):
        pass

    def news(self, reader):
        return ControlStats()


def test_lists_are_as_long_as_was_chosen_whoever_chooses():
    for seed in range(12):
        wishes = [{}, {"longdraft_gamma": 2}, {"longdraft_off": 1}, {"longdraft_budget": 500}, {}]
        runner = Runner(texts(random.Random(seed), 5), [params(extra_args=w) for w in wishes], seed=seed)
        drafter = runner.drafter(Settings(draft="auto", budget=500), most=4)  # over all there is
        drafter.control = Dice(seed)
        drafts = drafter.propose(*runner.arguments())
        assert [len(d) for d in drafts] == drafter.control.last
        assert [len(d) for d in drafts[1:3]] == [2, 0]
        assert drafts == [decode(t, 4)[: len(d)] for t, d in zip(runner.texts, drafts, strict=True)]
        assert drafter.control.steps == [dict.fromkeys(runner.input_batch.req_ids, 1)] and not runner.said


def test_nothing_chosen_is_nothing_run():
    runner = Runner(texts(random.Random(1), 3), [params(1.0)] * 3)
    drafter = runner.drafter(Settings(draft="auto"))
    drafter.control = SimpleNamespace(
        **{n: lambda *_: None for n in ("observe", "took")}, news=lambda _: ControlStats()
    )
    drafter.control.choose = lambda rows: [0] * len(rows)
    drafter._forward = lambda *_: 1 / 0
    assert drafter.propose(*runner.arguments()) == [[]] * 3 and not runner.said
    assert runner._draft_probs is None


def test_without_a_control_a_fixed_number_is_drafted_and_a_setting_overrules_one():
    runner = Runner(texts(random.Random(2), 2))
    drafter = runner.drafter(Settings(draft="auto"), most=8)
    assert [len(d) for d in drafter.propose(*runner.arguments())] == [UNCHOSEN] * 2
    drafter.control = Dice(0)
    drafter.change(gamma=1)
    assert [len(d) for d in drafter.propose(*runner.arguments())] == [1, 1]
    drafter.change(gamma=None, draft="streaming_llm")
    drafter.control = SimpleNamespace(news=lambda _: ControlStats(), took=lambda _: None)
    assert [len(d) for d in drafter.propose(*runner.arguments())] == [8, 8]


def test_no_row_drafts_beyond_what_its_request_may_still_say():
    runner = Runner(texts(random.Random(3), 3), [params(max_tokens=n) for n in (1, 3, 50)])
    for request in runner.requests.values():
        request.num_prompt_tokens -= 1  # the newest token is the request's first
    runner.requests["r0"].num_prompt_tokens += 1
    assert [len(d) for d in runner.drafter(most=4).propose(*runner.arguments())] == [0, 1, 4]


# --- curves


class Clock:
    """Time that passes only while passes run, as curves say."""

    def __init__(self):
        self.now, self.rows = 0.0, []

    def perf_counter(self):
        return self.now

    def verify(self, ids, step, table, sizes):
        assert len(ids) == len(step.positions) == len(step.slots) == sum(sizes)
        self.rows.append((table, step, list(sizes)))
        self.now += TARGET.seconds(step.lengths.tolist(), sizes)
        return torch.zeros(len(ids), VOCAB)

    def forward(self, ids, step, tables, index):
        self.now += STEP.seconds(step.lengths.tolist(), [1] * len(ids))
        assert (step.slots != PAD_SLOT).any()
        return torch.zeros(len(ids), VOCAB)


def bench(clock, blocks=1600):
    return Bench(clock.verify, clock.forward, blocks, 16, 4, 96, torch.device("cpu"))


def test_curves_are_those_by_which_time_passed(monkeypatch):
    clock, said = Clock(), []
    monkeypatch.setattr(measuring, "time", clock)
    monkeypatch.setattr(measuring, "REPORT_S", 0.5)
    points = points_of(bench(clock), DRAFT, rows=16, length=3000, tokens=512)
    assert {len(p.lengths) for p in points} >= {1, 4, 16} and max(max(p.lengths) for p in points) == 3000 - 64
    curves, error = measure(bench(clock), points, said.append)
    assert error < 0.02 and said
    for lengths, tokens in (([700] * 8, [1] * 8), ([100, 2500], [4, 1]), ([1500] * 4, [5] * 4)):
        assert curves.target(lengths, tokens) == pytest.approx(CURVES.target(lengths, tokens), rel=0.05)
    assert curves.propose(DRAFT, [2000] * 6, [3] * 6) == pytest.approx(3 * STEP.seconds([104] * 6, [1] * 6), rel=0.05)
    assert clock.now < 2 * measuring.SECONDS


def test_rows_of_a_point_lie_in_blocks_of_their_own():
    clock = Clock()
    for point in points_of(bench(clock), DRAFT, 16, 2000, 512):
        bench(clock).run(point)
    for table, step, sizes in clock.rows:
        own = [set(table[i, : -(-int(n) // 16)].tolist()) for i, n in enumerate(step.lengths)]
        assert all(len(blocks) == -(-int(n) // 16) for blocks, n in zip(own, step.lengths, strict=True))
        assert len(set().union(*own)) == sum(map(len, own)) < 1600 and 0 not in set().union(*own)
        rows = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).tolist()
        for i, slot, position in zip(rows, step.slots.tolist(), step.positions.tolist(), strict=True):
            assert slot == int(table[i, position // 16]) * 16 + position % 16
            assert int(step.lengths[i]) - sizes[i] <= position < int(step.lengths[i])


def test_what_has_no_room_is_not_timed():
    clock = Clock()
    small = bench(clock, blocks=100)
    assert max(sum(p.lengths) for p in points_of(small, DRAFT, 16, 3000, 512)) < 1600
    with pytest.raises(KVCapacityError, match="1 blocks"):
        points_of(bench(clock, blocks=1), DRAFT, 16, 3000, 512)
    assert fed(torch.tensor([[3, 9]]), [15], [2], 16).slots.tolist() == [3 * 16 + 15, 9 * 16]


SETTING = Setting("m", "bfloat16", "bfloat16", "native", 2, "here")


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_CALIBRATION", str(tmp_path / "own.json"))
    said, measured = [], []

    def ask(setting=SETTING):
        def now():
            measured.append(setting)
            return CURVES, 0.05

        return curves_for(setting, "a model", now, said.append)

    ask.said, ask.measured, ask.folder = said, measured, tmp_path
    return ask


def test_curves_are_measured_once_for_each_setting(stored):
    first = stored()
    assert stored() == first and first.curves == CURVES and len(stored.measured) == 1
    other = Setting("m", "bfloat16", "bfloat16", "native", 4, "here")
    assert stored(other).setting == other and stored(other).setting == other and stored() == first
    assert stored.measured == [SETTING, other] and not stored.said
    assert [path.name for path in stored.folder.iterdir()] == ["own.vllm.json"]


@pytest.mark.parametrize("damage", ["{", '{"version": 1, "calibrations": [{}]}', '{"version": 9}'])
def test_a_damaged_file_is_named_once_and_left_alone(stored, damage):
    file().write_text(damage)
    assert stored().curves == CURVES and len(stored.said) == 1 and "own.vllm.json" in stored.said[0]
    assert file().read_text() == damage


def test_a_folder_that_takes_no_file_is_named(stored, monkeypatch):
    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(calibration.os, "replace", refuse)
    assert stored().curves == CURVES and len(stored.said) == 1 and "not kept" in stored.said[0]


def test_measuring_that_fails_costs_the_choice_and_nothing_else():
    runner = Runner(texts(random.Random(4), 1))
    drafter = runner.drafter(Settings(draft="auto"), most=8)
    parallel = SimpleNamespace(tensor_parallel_size=1)
    proposer = SimpleNamespace(drafter=drafter, config=SimpleNamespace(parallel_config=parallel))
    prepare(proposer)
    assert drafter.control is None and len(runner.said) == 1 and "γ is not chosen" in runner.said[0]
    assert [len(d) for d in drafter.propose(*runner.arguments())] == [UNCHOSEN]
    parallel.tensor_parallel_size = 2
    assert "clock" in next(auto_refusals(proposer.config))


def test_more_may_be_chosen_than_is_drafted_where_nobody_says():
    def most(settings, gamma):
        return engine_args(settings, gamma, "cpu")["speculative_config"]["num_speculative_tokens"]

    assert (most(Settings(), None), most(Settings(draft="auto"), None), most(Settings(draft="auto"), 4)) == (3, 8, 4)
    assert engine_args(Settings(draft="auto"), None, "gpu")["additional_config"]["longdraft"]["draft"] == "auto"
