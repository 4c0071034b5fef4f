"""The decoding benchmark at tiny sizes: what it counts, compares, repeats and writes. Nothing is said of speed."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from longdraft import LLM, DraftConfig
from longdraft.bench import PLAIN, Arm, Plan, Turn, interval, repeated_share
from longdraft.bench import decode as bench
from longdraft.bench.machine import Load, MemoryRoof, describe_machine, disturbed
from longdraft.bench.plot import check_plot, plot
from longdraft.bench.predict import predicted_speedup
from longdraft.bench.turns import touch
from longdraft.cli.app import app
from longdraft.cli.bench import _lines, make_arms, tables
from longdraft.config import AutoDraft
from longdraft.errors import ContextLengthError, InvalidValueError, KVCapacityError, MissingDependencyError
from longdraft.outputs import ControlStats
from longdraft.planner.batch import draft_kind, target_kind
from longdraft.planner.control import Controller
from longdraft.sampling_params import SamplingParams
from tests.e2e.command import longdraft
from tests.unit.recorded import INT8, Flat

CELL = {
    *("batch", "context", "dtype", "draft", "weights", "budget", "gamma", "temperature", "plain_tok_s", "spec_tok_s"),
    *("speedup", "ci_low", "ci_high", "identical", "tokens_per_verify", "acceptance_by_position", "t_plain_ms"),
    *("t_draft_ms", "t_verify_ms", "roof_share", "repeated_8gram", "simulated", "noisy", "predicted"),
}
SELF = Arm("streaming_llm", DraftConfig(budget=16, gamma=2))
FULL = Arm("full", DraftConfig(kv="full", gamma=3))
AUTO = Arm("auto", AutoDraft())
LOOKUP = Arm("ngram", DraftConfig(weights="ngram", gamma=2))
SMALL = {"rounds": 2, "round_tokens": 8}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, dtype="float64", kv_cache_memory_bytes=2**24)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Whoever else uses this machine shall not make the tests repeat rounds."""
    monkeypatch.setattr(bench, "disturbed", lambda before, after: False)


def prompts(batch, context):
    return [[(7 * i + 5 * n + 1) % 128 for i in range(context)] for n in range(batch)]


def measure(llm, plan, **more):
    cells = []
    bench.measure(llm, plan, prompts, cells.append, **more)
    assert llm.engine.num_unfinished == 0
    llm.engine.store.check_integrity()
    assert llm.engine.store.num_free_pages == llm.engine.store.num_pages
    return cells


def test_cells_are_complete_and_identical(llm):
    plan = Plan((1, 3), (64,), (SELF, FULL, LOOKUP), (0.0, 1.0), **SMALL)
    seen = []
    roof = MemoryRoof(2**20) if MemoryRoof.available(llm.model.device) else None
    cells = measure(llm, plan, roof=roof, on_progress=lambda *args: seen.append(args))
    assert [(c.temperature, c.batch, c.draft) for c in cells] == [
        (t, b, arm.name) for t in (0, 1) for b in (1, 3) for arm in plan.arms
    ]
    for cell in cells:
        report = cell.report()
        assert report.keys() == CELL
        assert (cell.identical, cell.simulated, cell.noisy, cell.context) == (True, False, False, 64)
        assert cell.ci_low <= cell.speedup <= cell.ci_high
        assert 1 <= cell.tokens_per_verify <= 1 + cell.gamma
        assert min(cell.plain_tok_s, cell.spec_tok_s, cell.t_plain_ms, cell.t_verify_ms) > 0
        assert (cell.roof_share or 0) > 0 if roof else cell.roof_share is None
        assert json.dumps(report)
    assert [c.acceptance_by_position for c in cells if c.draft == "full"] == 4 * [[1, 1, 1]]
    assert {c.draft: c.budget for c in cells} == {"streaming_llm": 16, "full": None, "ngram": None}
    # In float64, without the embedding; K and V of 3 layers with 2 heads of 16, and 4 query heads.
    weights, length, shown = llm.model.weight_bytes - 8 * 128 * 64, 64 + 1 + 1 + 8, cells[-1].shown
    assert shown.read_bytes == pytest.approx(weights + 3 * length * 2 * 3 * 2 * 16 * 8, rel=0.01)
    assert shown.flops == pytest.approx(3 * (2 * weights / 8 + 4 * length * 3 * 4 * 16), rel=0.01)
    assert {name for name, *_ in seen} == {f"{x}{t}" for x in ("fill 64", "1 x 64", "3 x 64") for t in ("", " T1")}


@pytest.mark.parametrize("rate", [None, 0.8])
def test_an_arm_whose_drafts_are_chosen(llm, rate):
    """What was chosen in its turns alone, whatever else ran; also with imposed acceptance."""
    auto, fixed = measure(llm, Plan((2,), (64,), (AUTO, SELF), **SMALL, assume_acceptance=rate))
    report = auto.report()
    assert report.keys() == CELL | {"control", "over_fixed"}
    assert (auto.identical, auto.budget, auto.weights, fixed.control) == (True, None, "auto", None)
    chosen = auto.control["chosen"]
    assert sum(one["share"] for one in chosen) == pytest.approx(1)
    assert {one["draft"] for one in chosen} <= {"off", "streaming_llm, budget 256", "ngram"}
    assert min(auto.control["predicted_speedup"], auto.control["realised_speedup"]) > 0
    assert json.dumps(report)
    lines = {name: values for name, _, values in _lines([auto, fixed])}
    assert lines["Eq. 2 residual"][0].endswith("%")
    assert lines["Eq. 2 residual"][1] == ""


def test_control_learns_from_its_own_turns_alone(folder):
    own = LLM(folder, dtype="float64", kv_cache_memory_bytes=2**24)
    measure(own, Plan((1,), (64,), (Arm("window", DraftConfig(budget=256, gamma=2)),), **SMALL))
    control = own.engine.control
    assert (len(control.pace._seen), control.evidence.pools[0].evidence(0)) == (0, 0)
    measure(own, Plan((1,), (64,), (AUTO,), **SMALL))
    assert control.pace._seen


def test_rows_of_several_lengths_in_one_batch(llm):
    auto, fixed = measure(llm, Plan((3,), ((32, 64),), (AUTO, LOOKUP), **SMALL))
    assert (auto.context, auto.row_contexts, auto.identical) == (43, [32, 64, 32], True)
    assert "row_contexts" in fixed.report()
    alike = [replace(cell, row_contexts=None) for cell in (auto, fixed)]  # of the same mean
    titles = [table.title for table in tables([auto, fixed, *alike], [], {"name": "x", "dtype": "y"})]
    assert titles == ["x, y: 3 x 43 tokens on average, 32 to 64, T 0", "x, y: 3 x 43 tokens, T 0"]
    assert auto.over_fixed.arm in ("plain", "ngram γ2")
    slower = fixed if fixed.spec_tok_s > fixed.plain_tok_s else replace(fixed, spec_tok_s=fixed.plain_tok_s)
    assert auto.over_fixed.arm == ("ngram γ2" if slower is fixed else "plain")


def test_pages_are_touched_before_they_are_needed(llm):
    """Those that a row grows into are handed out once, which empties them, and are free again."""
    engine, store = llm.engine, llm.engine.store
    seq = engine.sequence(engine.add(list(range(40)), SamplingParams(max_tokens=50, ignore_eos=True)))
    while not seq.decoding:
        engine.step()
    (held,), free = store.tables([seq.id], [40]), store.num_free_pages
    others = [page for page in range(store.num_pages) if page not in held]
    store.k[:, others] = 1
    touch(llm, [seq])
    assert store.num_free_pages == free
    assert sum(not store.k[:, page].any() for page in others) == store.pages_for(90) - len(held)
    engine.abort(seq.id)


def test_what_prices_say_of_a_measured_speedup():
    """A pass takes a second, a drafted token half of one: 2.5 tokens per pass in two seconds."""
    turns = Turn(50, 1.0, 0.0, 10, 20, drafted=[20, 20], accepted=[15, 15], context=101.0)
    arm, prices = Arm("int8", replace(INT8, gamma=2)), Flat(0.5)
    control = Controller(prices, {INT8: 0.9})
    llm, rows = SimpleNamespace(engine=SimpleNamespace(control=control)), [90, 110]
    assert predicted_speedup(llm, arm, rows, turns, turns) == pytest.approx(1.25)
    prices.target = lambda lengths, fed: 1.0 + 0.1 * sum(n > 2 for n in fed)  # a row's third token costs more
    assert predicted_speedup(llm, arm, rows, turns, turns) == pytest.approx(2.5 / 2.2)
    fewer = replace(turns, drafted=[20, 4])  # in a fifth of the rounds, so in neither of two rows
    assert predicted_speedup(llm, arm, rows, turns, fewer) == pytest.approx(1.25)
    for fed, seconds in [([1, 1], 1.0), ([3, 3], 1.4)] * 30:  # and twice as much as that today
        control.pace.observe(target_kind(rows), seconds, 1.0, prices.target(rows, fed) - 1)
        control.pace.observe(draft_kind(0, rows), 1.0, 1.0)
    assert predicted_speedup(llm, arm, rows, turns, turns) == pytest.approx(2.5 / 2.4, rel=0.02)
    prices.knows = lambda draft: False
    assert predicted_speedup(llm, arm, rows, turns, turns) is None
    stats = ControlStats(seconds=9.0, plain_s=6.0, expected_s=4.0)
    assert predicted_speedup(llm, AUTO, rows, turns, replace(turns, control=stats)) == pytest.approx(1.5)


def test_auto_is_one_arm_whatever_budgets_and_gammas_are_asked_for():
    arms = make_arms(["auto", "streaming_llm"], [16, 32], [1, 2], None)
    assert [arm.label for arm in arms] == ["auto", *(f"streaming_llm {b} γ{g}" for b in (16, 32) for g in (1, 2))]


def test_tokens_and_order_of_turns(llm, monkeypatch):
    """A turn ends when every row has its tokens; rounds run forwards and backwards."""
    turns, right = [], bench.turn

    def watched(engine, rows, tokens):
        before = [len(seq.ids) for seq in rows]
        done = right(engine, rows, tokens)
        got = [len(seq.ids) - n for seq, n in zip(rows, before, strict=True)]
        assert done.tokens == sum(got)
        assert min(got) >= tokens
        assert done.passes == done.steps * len(rows)
        gamma = rows[0].draft.gamma if rows[0].draft else 0
        assert min(got) <= tokens + gamma
        assert done.drafted == [done.passes] * gamma
        assert sum(done.accepted) == done.tokens - done.passes
        turns.append((rows[0].draft, tokens))
        return done

    monkeypatch.setattr(bench, "turn", watched)
    measure(llm, Plan((3,), (64,), (SELF, FULL), rounds=3, round_tokens=8))
    arms = [PLAIN.draft, SELF.draft, FULL.draft]
    assert [draft for draft, tokens in turns if tokens == 1] == arms  # steps that are not timed
    assert [draft for draft, tokens in turns if tokens == 8] == arms + arms[::-1] + arms


def test_forks_are_made_anew_where_their_room_ends(llm):
    """256 tokens of context: 12 rounds of 16 tokens or more do not fit behind 100."""
    cells = measure(llm, Plan((2,), (100,), (FULL,), rounds=12, round_tokens=16))
    assert (cells[0].identical, cells[0].acceptance_by_position, cells[0].shown.rounds) == (True, [1, 1, 1], 12)


def test_a_difference_is_seen(llm, wrong_verify):
    assert [c.identical for c in measure(llm, Plan((2,), (64,), (FULL,), **SMALL))] == [False]


@pytest.mark.parametrize("rate", [0.0, 0.7])
def test_assumed_acceptance(llm, rate):
    """Acceptance is what was assumed, whatever the draft would have said, and the output is still compared."""
    plan = Plan((8,), (64,), (LOOKUP, SELF)[: 1 + (rate > 0)], rounds=8, round_tokens=8, assume_acceptance=rate)
    for cell in measure(llm, plan):
        assert (cell.identical, cell.simulated) == (True, True)
        first, second = cell.acceptance_by_position
        assert first == pytest.approx(rate, abs=0.08)  # more than 250 trials
        assert second == pytest.approx(rate**2, abs=0.09)
    assert type(llm.engine.runner.draft(SELF.draft)).__name__ == "SelfSpec"  # nothing of it stays


@pytest.mark.parametrize(("disturbed_rounds", "rounds", "noisy"), [({1, 2}, 5, False), (set(range(99)), 6, True)])
def test_disturbed_rounds_are_repeated_to_an_end(llm, monkeypatch, disturbed_rounds, rounds, noisy):
    """Each round has two turns; the first of a disturbed round is."""
    asked = []

    def foreign(before, after):
        asked.append(None)
        return len(asked) % 2 == 1 and len(asked) // 2 in disturbed_rounds

    monkeypatch.setattr(bench, "disturbed", foreign)
    (cell,) = measure(llm, Plan((1,), (64,), (SELF,), rounds=3, round_tokens=4))
    assert (len(asked), cell.noisy, cell.shown.rounds) == (2 * rounds, noisy, 3)


def test_an_interruption_keeps_what_is_known(llm, monkeypatch):
    cells, rounds = [], []

    def interrupted(before, after):
        rounds.append(None)
        if len(rounds) == 7:  # in the fourth round of four
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(bench, "disturbed", interrupted)
    plan = Plan((1,), (64,), (SELF,), rounds=4, round_tokens=4)
    with pytest.raises(KeyboardInterrupt):
        bench.measure(llm, plan, prompts, cells.append)
    assert [(c.noisy, c.shown.rounds) for c in cells] == [(True, 3)]
    assert llm.engine.num_unfinished == 0


def test_what_disturbs():
    start = Load(0.0, 100.0, 50.0, 0.0)
    cores = disturbed.__globals__["psutil"].cpu_count()
    own = Load(10.0, 100.0 + 9 * cores, 50.0 + 9 * cores, 0.0)
    assert not disturbed(start, own)
    assert disturbed(start, Load(10.0, own.busy + 0.3 * cores, own.own, 0.0))
    assert disturbed(start, Load(10.0, own.busy, own.own, 0.2 * cores))
    now = Load.now()
    assert 0 < now.own <= now.busy


def test_intervals_and_repeats():
    random = np.random.default_rng(0)
    for n in (2, 3, 8, 20):
        ratios = list(random.lognormal(0.1, 0.2, n))
        middle, low, high = interval(ratios)
        assert low <= middle == np.median(ratios) <= high
        assert interval(ratios) == (middle, low, high)
    assert interval([1.5, 1.5]) == (1.5, 1.5, 1.5)
    assert repeated_share([list(range(20)), [1]]) == 0
    assert repeated_share([[1, 2] * 10]) == 11 / 13


def test_what_does_not_fit_is_refused_at_once(folder, llm):
    for plan, error in (
        (Plan((1,), (240,), (SELF,)), ContextLengthError),
        (Plan((500,), (64,), (SELF,), **SMALL), KVCapacityError),
    ):
        with pytest.raises(error):
            measure(llm, plan)
    with pytest.raises(InvalidValueError, match="max_num_seqs"):
        measure(LLM(folder, kv_cache_memory_bytes=2**24, max_num_seqs=4), Plan((2,), (64,), (SELF,), **SMALL))
    for wrong in ({"rounds": 1}, {"round_tokens": 0}, {"assume_acceptance": 1.5}, {"batches": (0,)}, {"arms": ()}):
        with pytest.raises(InvalidValueError):
            Plan(**{"batches": (1,), "contexts": (64,), "arms": (SELF,)} | wrong)


def test_plots(llm, tmp_path):
    cells = measure(llm, Plan((1, 2), (32, 64), (SELF, FULL), **SMALL))
    for name, some in (("grid", cells), ("bars", cells[:2]), ("hole", cells[:-2])):
        file = tmp_path / f"{name}.png"
        plot(some, file, "tiny")
        assert file.read_bytes().startswith(PNG)


def test_the_machine():
    machine = describe_machine(None)
    assert machine.keys() == {"cpu", "cores", "isa", "threads", "memory_gib", "read_gb_s", "versions"}
    assert machine["cores"] >= 1
    assert json.dumps(machine)


def test_a_difference_is_exit_status_1(folder, monkeypatch, wrong_verify):
    monkeypatch.setattr("longdraft.bench.machine.ROOF_BYTES", 2**20)
    args = [
        "--draft",
        "full",
        "--text",
        "random",
        "--batch",
        "2",
        "--context",
        "64",
        "--rounds",
        "2",
        "--round-tokens",
        "4",
    ]
    done = CliRunner().invoke(app, ["bench", "decode", "--model", str(folder), "--dtype", "float64", *args])
    assert done.exit_code == 1, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert [cell["identical"] for cell in report["cells"]] == [False]
    assert "DIFFERS" in done.stdout


def test_the_verb(tmp_path):
    file, picture = tmp_path / "out.json", tmp_path / "out.png"
    sizes = ("--batch", "2", "--batch", "9", "--context", "40", "--budget", "16", "--gamma", "1", "--gamma", "2")
    short = ("--rounds", "2", "--round-tokens", "2", "--draft", "streaming_llm", "--draft", "ngram")
    done = longdraft("bench", "decode", *sizes, *short, "--json", str(file), "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads(file.read_text())
    assert report.keys() == {"machine", "model", "text", "cells", "peers"}
    assert {"name", "dtype", "kv_dtype", "weight_bytes", "kv_bytes_per_token"} <= report["model"].keys()
    assert len(report["cells"]) == 8
    assert all(cell.keys() == CELL and cell["identical"] for cell in report["cells"])
    assert picture.read_bytes().startswith(PNG)
    assert "repeated 8-grams" in done.stdout


def test_ctrl_c_prints_what_is_known(folder, monkeypatch):
    def interrupted(before, after):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "disturbed", interrupted)
    args = ["--text", "random", "--batch", "1", "--context", "32", "--rounds", "2", "--round-tokens", "4"]
    done = CliRunner().invoke(app, ["bench", "decode", "--model", str(folder), "--dtype", "float64", *args])
    assert done.exit_code == 130, done.output
    assert json.loads(done.stdout.splitlines()[-1])["cells"] == []


def test_missing_packages_are_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(MissingDependencyError, match="matplotlib.*bench"):
        check_plot(tmp_path / "x.png")
    with pytest.raises(MissingDependencyError, match="scipy.*bench"):
        interval([1.0, 2.0])


def test_prompts_differ(embedded_path):
    from longdraft.bench.prompts import windows

    llm = LLM(embedded_path, max_model_len=64)
    rows = windows(llm, 17, 30)
    assert len({tuple(row) for row in rows}) == 17
    assert {len(row) for row in rows} == {30}
    assert windows(llm, 8, 20) == [row[:20] for row in rows[:8]]
    with pytest.raises(InvalidValueError, match="--context"):
        windows(llm, 1, 150_000)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--draft", "nonsense"), "nonsense"),
        (("--draft", "off"), "--draft"),
        (("--rounds", "1"), "rounds"),
        (("--plot", "x.pdf"), ".png"),
        (("--json", "/no/such/folder/x.json"), "folder"),
        (("--peer", "vllm"), "--peer"),
        (("--text", "verse"), "--text"),
        (("--context", "500,700"), "--context"),
    ],
)
def test_wrong_options_are_refused(args, words):
    done = CliRunner().invoke(app, ["bench", "decode", *args])
    assert done.exit_code == 1
    assert words in str(done.exception)
