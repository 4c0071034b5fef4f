"""The acceptance bench on tiny models: what it asks, counts and reports, against drafts whose answers are known."""

import json
from dataclasses import fields, replace

import pytest
import torch
from typer.testing import CliRunner

from longdraft import LLM, DraftConfig, SamplingParams
from longdraft.bench import Arm
from longdraft.bench import acceptance as bench
from longdraft.bench.acceptance import AcceptancePlan
from longdraft.bench.acceptance_cells import AcceptanceCell, Difference, Result
from longdraft.bench.acceptance_files import read_reports
from longdraft.bench.acceptance_plot import largest_gammas, plot, views_of
from longdraft.bench.asked import overlaps
from longdraft.bench.examine import Examination, Setting
from longdraft.bench.tasks import Prompt
from longdraft.cli.app import app
from longdraft.core import Proposal
from longdraft.drafts.base import Draft, DraftRow
from longdraft.errors import ContextLengthError, InvalidValueError, KVCapacityError
from tests.e2e.command import longdraft_process
from tests.exact.fake_drafts import Noisy, install, place, slot

FULL = Arm("full", DraftConfig(kv="full"))
SELF = Arm("streaming_llm", DraftConfig(budget=32))
LOOKUP = Arm("ngram", DraftConfig(weights="ngram"))
CELL = {field.name for field in fields(AcceptanceCell)}
SMALL = {"prompts": 4, "positions": 6, "batch": 2, "mass_positions": 2}


@pytest.fixture
def llm(folder):
    """Prompts of more than 32 tokens are filled in several steps."""
    return LLM(folder, dtype="float64", kv_cache_memory_bytes=2**23, max_num_batched_tokens=16)


@pytest.fixture(autouse=True)
def texts(monkeypatch):
    """Without a tokenizer: ids of a formula. The task "second" has tokens that come as output."""

    def make(llm, task, count, context, seed=0):
        then = [5, 6, 7] if task == "second" else []
        rows = [[(7 * i + 5 * n + i * i % 11 + 1) % 128 for i in range(context)] for n in range(count)]
        return [Prompt(ids, then[: 3 - n % 2]) for n, ids in enumerate(rows)]

    monkeypatch.setattr(bench, "make_prompts", make)


def measure(llm, plan, **more):
    found = []
    bench.measure(llm, plan, found.append, **more)
    assert_clean(llm)
    return found


def assert_clean(llm):
    assert llm.engine.num_unfinished == 0
    llm.engine.store.check_integrity()
    assert llm.engine.store.num_free_pages == llm.engine.store.num_pages
    assert "forward" not in vars(llm.model)
    assert not any("propose" in vars(draft) for draft in llm.engine.runner._drafts.values())


def plan_of(*arms, gammas=(1, 3), tasks=("prose",), contexts=(40,), **more):
    return AcceptancePlan(tasks, contexts, arms, gammas, **(SMALL | more))


@pytest.mark.parametrize("task", ["prose", "second"])
def test_one_that_is_always_right_and_one_that_never_is(llm, task):
    install(llm.engine)
    results = measure(llm, plan_of(FULL, Arm("wrong", slot("wrong")), tasks=(task,), baseline="full"))
    assert [r.cells[0].temperature for r in results] == [0, 1]
    for result in results:
        both = ("overlap", "coupled_overlap") if result.cells[0].temperature else ()
        assert [(c.draft, c.gamma) for c in result.cells] == [(d, g) for d in ("full", "wrong") for g in (1, 3)]
        for cell in result.cells:
            right = cell.draft == "full"
            assert cell.acceptance_by_position == ([1.0] * cell.gamma if right else [0.0, None, None][: cell.gamma])
            assert (cell.acceptance, cell.ci_low, cell.ci_high) == ((1, 1, 1) if right else (0, 0, 0))
            assert cell.expected_tokens == cell.tokens_per_verify == (1 + cell.gamma if right else 1)
            assert (cell.identical, cell.prompts, cell.positions, cell.proposed) == (True, 4, 6, 3)
            assert cell.captured_mass == pytest.approx(1)  # both read everything
            if right:
                wanted = pytest.approx(1, abs=1e-6) if cell.temperature else None
                assert [cell.overlap, cell.coupled_overlap] == [wanted, wanted]
        assert {(d.measure, d.gamma): d.difference for d in result.differences} == {
            ("acceptance", None): -1,
            ("captured_mass", None): pytest.approx(0),
            ("tokens_per_verify", 1): -1,
            ("tokens_per_verify", 3): -3,
            **{(name, None): pytest.approx(-1, abs=0.5) for name in both},
        }


def test_an_encoded_copy_of_everything_is_nearly_the_target(llm):
    """What it reads is decoded when the bench looks at it: almost all of the attention, and most proposals stand."""
    arms = (Arm("full+quant8", DraftConfig(kv="full+quant8")), FULL)
    (result,) = measure(llm, plan_of(*arms, gammas=(2,), contexts=(130,), temperatures=(1.0,), prompts=2))
    coded, whole = result.cells
    assert coded.identical
    assert coded.budget is None
    assert coded.acceptance > 0.9
    assert 1e-9 < abs(coded.captured_mass - 1) < 1e-2
    assert coded.extra_bytes < 0.25 * whole.bytes_per_token
    assert coded.bytes_per_token < whole.bytes_per_token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_proposals_are_those_of_a_request_with_that_history(llm, folder, temperature):
    """Every position asked about, once more as the first one of a request of its own."""
    plan = plan_of(SELF, gammas=(3,), temperatures=(temperature,), prompts=2)
    (result,) = measure(llm, plan)
    stood, reached, places = [0, 0, 0], [0, 0, 0], 0
    other = LLM(folder, dtype="float64", kv_cache_memory_bytes=2**23)
    for n, prompt in enumerate(bench.make_prompts(None, "prose", 2, 40)):
        params = SamplingParams(temperature=temperature, seed=n, max_tokens=12, ignore_eos=True)
        (text,) = other.generate([prompt.ids], params)
        truth = prompt.ids + text.outputs[0].token_ids
        for j in range(41, 47):
            engine = other.engine
            seq = engine.sequence(engine.add(truth[: j - 1], params, replace(SELF.draft, gamma=3)))
            while not seq.decoding:
                engine.step()
            assert seq.ids == truth[:j]
            engine.store.reserve(seq.id, seq.num_committed, 4)
            (tokens,) = engine.runner.draft(SELF.draft).propose([DraftRow(seq, 3)], sampled=False).tokens
            engine.abort(seq.id)
            places += 1
            for i in range(3):
                if tokens[:i] == truth[j : j + i]:
                    reached[i] += 1
                    stood[i] += tokens[i] == truth[j + i]
    cell = result.cells[0]
    assert places == cell.prompts * cell.positions == reached[0]
    assert 0 < stood[0] < places
    assert cell.acceptance_by_position == [s / r if r else None for s, r in zip(stood, reached, strict=True)]


def test_overlaps_are_those_of_the_distributions(llm, folder):
    """At T = 1, from the logits of two passes of another engine."""
    (result,) = measure(llm, plan_of(SELF, gammas=(1,), temperatures=(1.0,), prompts=2, positions=4))
    other, sums = LLM(folder, dtype="float64", kv_cache_memory_bytes=2**23), [0.0, 0.0]
    for n, prompt in enumerate(bench.make_prompts(None, "prose", 2, 40)):
        params = SamplingParams(temperature=1, seed=n, max_tokens=9, ignore_eos=True)
        truth = prompt.ids + other.generate([prompt.ids], params)[0].outputs[0].token_ids
        for j in range(41, 45):
            engine = other.engine
            seq = engine.sequence(engine.add(truth[: j - 1], params, SELF.draft))
            while not seq.decoding:
                engine.step()
            engine.store.reserve(seq.id, seq.num_committed, 2)
            q, p = (
                engine.runner.draft(config).propose([DraftRow(seq, 1)], sampled=True).log_q[0]
                for config in (SELF.draft, FULL.draft)
            )
            engine.abort(seq.id)
            sums = [a + b for a, b in zip(sums, overlaps(p, [0], q), strict=True)]
    cell = result.cells[0]
    assert [cell.overlap, cell.coupled_overlap] == pytest.approx([x / 8 for x in sums], abs=1e-6)
    assert cell.coupled_overlap < cell.overlap < 1


def test_overlap_of_certain_and_of_missing_tokens():
    log_p = torch.tensor([0.5, 0.3, 0.2]).log()
    assert overlaps(log_p, [1], None) == pytest.approx((0.3, 0.3))
    assert overlaps(log_p, [], None) == (0, 0)
    both = overlaps(log_p, [0], torch.tensor([0.2, 0.3, 0.5]).log())
    assert both[0] == pytest.approx(0.7)
    assert both[1] == pytest.approx(1 / (0.5 / 0.5 + 1.5 + 2.5) + 1 / (2.5 + 1 + 5 / 3) + 1 / (2.5 + 1 + 1), abs=0.2)


class Watching(Draft):
    """Notes every call: what, and per sequence how long it and its cache are."""

    def __init__(self):
        self.calls = []

    def note(self, what, seqs):
        self.calls.append((what, [(seq.id, len(seq.ids), seq.num_committed) for seq in seqs]))

    def propose(self, rows, *, sampled):
        self.note("propose", [row.seq for row in rows])
        return Proposal([[1] * row.gamma for row in rows])

    def follow(self, seqs):
        self.note("follow", seqs)

    def settle(self, seqs):
        self.note("settle", seqs)

    def fork(self, source, child):
        self.note("fork", [child])


def test_a_draft_sees_the_calls_of_the_engine(llm):
    """It takes in the prompt's last chunks itself; then it is asked before each token, and settles after each."""
    draft, config, prompts = Watching(), slot("constant"), bench.make_prompts(None, "second", 2, 70)
    place(llm.engine, config, draft)
    examined = Examination(llm, prompts, Setting(0.0, 5, (2,)))
    try:
        examined.prepare("fill", lambda *_: None)
        assert not draft.calls
        examined.sample(Arm("watching", replace(config, gamma=2)))
    finally:
        examined.close()
    assert_clean(llm)
    follows = [call for call in draft.calls if call[0] == "follow" and call[1][0][2] <= 70]
    taken = [done for _, rows in follows for _, _, done in rows if done < 70]
    assert min(taken) > 30  # what all drafts share was filled before
    assert len(set(taken)) > 1
    for start, seqs in ((0, "asked"), (1, "loop")):
        first = [i for i, call in enumerate(draft.calls) if call[0] == "fork"][2 * start]
        ids = [draft.calls[first][1][0][0], draft.calls[first + 1][1][0][0]]
        for n, seq_id in enumerate(ids):
            own = [(what, size) for what, rows in draft.calls[first:] for i, *size in rows if i == seq_id]
            asked = [length for what, (length, _) in own if what == "propose"]
            then = len(prompts[n].then)
            assert asked[: then - 1] == list(range(71, 70 + then)), seqs  # its state goes along the forced tokens
            if seqs == "asked":
                assert asked == list(range(71, 70 + then + 5))
            order = [what for what, _ in own if what in ("propose", "settle")]
            assert order == ["propose", "settle"] * len(asked)
    assert [ids[70 : 70 + len(p.then)] for ids, p in zip(examined.truth, prompts, strict=True)] == [
        p.then for p in prompts
    ]


@pytest.mark.parametrize("task", ["prose", "second"])
def test_later_text_is_asked_about_at_the_same_places(llm, task):
    """Six positions behind five tokens are the last six of eleven."""

    def stood(**places):
        cell = measure(llm, plan_of(SELF, tasks=(task,), temperatures=(0.0,), gammas=(1,), **places))[0].cells[0]
        assert (cell.identical, cell.after) == (True, places.get("after", 0))
        return round(cell.acceptance * cell.prompts * cell.positions)

    early, late = stood(positions=5), stood(positions=6, after=5)
    assert 0 < late < 24
    assert early + late == stood(positions=11)


def test_ragged_proposals_count_as_not_standing(llm):
    config = slot("noisy")
    place(llm.engine, config, Noisy(llm.engine, seed=1, rate=0.2))
    cell = measure(llm, plan_of(Arm("noisy", config), gammas=(3,), temperatures=(0.0,), positions=20))[0].cells[0]
    chances = cell.acceptance_by_position
    assert cell.expected_tokens == pytest.approx(1 + chances[0] * (1 + chances[1] * (1 + chances[2])))
    assert 0.9 < cell.proposed < 2.1  # of 3, any number from none on
    assert chances[0] < 0.8
    assert all(low <= c <= high for c, (low, high) in zip(chances, cell.ci_by_position, strict=True))


def test_cells_name_everything_and_can_be_written(llm, tmp_path):
    arms = (Arm("streaming_llm", DraftConfig(budget=16)), SELF, FULL, LOOKUP)
    results = measure(llm, plan_of(*arms, contexts=(44, 60), temperatures=(0.0,), baseline="streaming_llm"))
    cells = [cell for result in results for cell in result.cells]
    differences = [row for result in results for row in result.differences]
    report = Result(cells, differences).report()
    assert json.loads(json.dumps(report)) == report
    assert all(cell.keys() == CELL for cell in report["cells"])
    assert len(cells) == 2 * 4 * 2
    assert {(d.draft, d.budget, d.baseline_budget) for d in differences} == {
        (name, None, budget) for name in ("full", "ngram") for budget in (16, 32)
    }
    token = llm.engine.store.bytes_per_token
    assert {(c.draft, c.budget, c.bytes_per_token // token) for c in cells if c.context == 60} == {
        ("streaming_llm", 16, 16),
        ("streaming_llm", 32, 32),
        ("full", None, 60),
        ("ngram", None, 0),
    }
    assert [c.extra_bytes > 0 for c in cells] == [c.draft == "ngram" for c in cells]
    masses = [[c.captured_mass for c in r.cells if c.gamma == 1] for r in results]
    assert all(m[0] < m[1] < m[2] == pytest.approx(1) and m[3] is None for m in masses)
    lookups = [c for c in cells if c.draft == "ngram"]
    for name, some, views in (
        ("all", cells, ["budget", "context", "position"]),
        ("one", cells[:1], ["position"]),
        ("none", lookups, ["context", "position"]),
    ):
        files = plot(some, tmp_path / f"{name}.png", "tiny")
        assert files == [tmp_path / f"{name}-{view}.png" for view in views]
        assert all(file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for file in files)


def test_pictures_hold_fixed_what_most_cells_share(llm, monkeypatch):
    """Of each draft the largest γ; a draft without a budget is drawn at all of them."""
    (result,) = measure(llm, plan_of(SELF, LOOKUP, temperatures=(0.0,)))
    drafted, looked_up = (
        next(c for c in result.cells if (c.draft, c.gamma) == (n, 3)) for n in ("streaming_llm", "ngram")
    )
    places = [(40, 16), (40, 32), (40, 64), (80, 32), (80, 8)]
    cells = [replace(drafted, context=n, budget=b) for n, b in places] + [
        replace(looked_up, context=n) for n in (40, 90)
    ]
    cells += [replace(drafted, gamma=1, acceptance=9.0)]
    views = {view.name: view for view in views_of(largest_gammas(cells))}
    drawn = {name: [(c.draft, p.x, p.y) for c in view.cells for p in view.points(c)] for name, view in views.items()}
    a, b = drafted.acceptance, looked_up.acceptance
    assert drawn["budget"] == [
        *(("streaming_llm", n, a) for n in (16, 32, 64)),
        *(("ngram", n, b) for n in (8, 16, 32, 64)),
    ]
    assert drawn["context"] == [("streaming_llm", n, a) for n in (40, 80)] + [("ngram", n, b) for n in (40, 90)]
    assert {(name, x) for name, x, _ in drawn["position"]} <= {
        (n, x) for n in ("streaming_llm", "ngram") for x in (1, 2, 3)
    }
    assert [view.fixed for view in views.values()] == ["context 40", "budget 32", "context 40, budget 32"]


def test_the_same_again_is_the_same(llm):
    """Also in groups of another size, up to rounding: each prompt has a seed of its own."""
    plan = plan_of(SELF, LOOKUP, gammas=(2,), batch=2)
    first, second, whole = (
        [cell for result in measure(llm, p) for cell in result.cells] for p in (plan, plan, replace(plan, batch=4))
    )
    assert first == second
    for a, b in zip(first, whole, strict=True):
        for field in fields(AcceptanceCell):
            mine, other = getattr(a, field.name), getattr(b, field.name)
            assert mine == (pytest.approx(other, abs=1e-9) if isinstance(other, float) else other) or "ci" in field.name


def test_an_interruption_keeps_complete_groups(llm):
    def interrupt(name, done, total, unit):
        if unit != "tokens" and done == 6:  # the first draft is done with the second group
            raise KeyboardInterrupt

    found = []
    with pytest.raises(KeyboardInterrupt):
        bench.measure(llm, plan_of(SELF, LOOKUP, prompts=6), found.append, interrupt)
    assert_clean(llm)
    assert [(c.draft, c.gamma, c.prompts, c.temperature) for c in found[0].cells] == [
        (draft, gamma, 2, 0) for draft in ("streaming_llm", "ngram") for gamma in (1, 3)
    ]
    assert len(found) == 1


def test_what_cannot_be_done_is_refused_at_once(folder, llm):
    for more, error, word in (
        ({"contexts": (250,)}, ContextLengthError, "context"),
        ({"prompts": 99, "batch": 99}, KVCapacityError, "99 prompts"),
        ({"arms": (Arm("int8", DraftConfig(weights="target@int8")),)}, InvalidValueError, "int8"),
    ):
        arms = more.pop("arms", (SELF,))
        with pytest.raises(error, match=word):
            measure(llm, plan_of(*arms, **more))
    few = LLM(folder, dtype="float64", kv_cache_memory_bytes=2**23, max_num_seqs=5)
    with pytest.raises(InvalidValueError, match="max_num_seqs"):
        measure(few, plan_of(SELF))
    for wrong in (
        {"prompts": 1},
        {"positions": 0},
        {"after": -1},
        {"batch": 0},
        {"baseline": "full"},
        {"contexts": (0,)},
        {"temperatures": (-1.0,)},
    ):
        with pytest.raises(InvalidValueError):
            plan_of(SELF, **wrong)
    with pytest.raises(InvalidValueError, match="--draft"):
        plan_of()


def test_a_difference_from_plain_decoding_is_exit_status_1(folder, wrong_verify):
    done = run_verb(folder, "--draft", "full")
    assert done.exit_code == 1, done.output
    assert [c["identical"] for c in json.loads(done.stdout.splitlines()[-1])["cells"]] == [False]
    assert "DIFFERS" in done.stdout


def run_verb(folder, *args):
    sizes = ("--context", "40", "--prompts", "2", "--positions", "4", "--temperature", "0", "--task", "prose")
    command = ["bench", "acceptance", "--model", str(folder), "--dtype", "float64", *sizes, *args]
    return CliRunner().invoke(app, command)


def test_ctrl_c_prints_what_is_known(folder, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("longdraft.bench.acceptance.Examination.sample", interrupted)
    done = run_verb(folder)
    assert done.exit_code == 130, done.output
    assert json.loads(done.stdout.splitlines()[-1])["cells"] == []


def test_the_verb(tmp_path):
    """On the embedded model, with its tokenizer: a task with an answer."""
    file, picture = tmp_path / "out.json", tmp_path / "out.png"
    sizes = ("--context", "150", "--prompts", "2", "--positions", "4", "--budget", "16", "--gamma", "1", "--gamma", "2")
    names = ("--task", "needle", "--draft", "streaming_llm", "--draft", "ngram", "--temperature", "1")
    done = longdraft_process("bench", "acceptance", *sizes, *names, "--json", str(file), "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads(file.read_text())
    assert report.keys() == {"machine", "model", "cells", "differences"}
    assert [(c["draft"], c["budget"], c["gamma"]) for c in report["cells"]] == [
        (*draft, gamma) for draft in (("streaming_llm", 16), ("ngram", None)) for gamma in (1, 2)
    ]
    for cell in report["cells"]:
        assert cell.keys() == CELL
        assert (cell["identical"], cell["answered"] in (0, 0.5, 1)) == (True, True)
    assert {d["draft"] for d in report["differences"]} == {"ngram"}
    assert all(d.keys() == {field.name for field in fields(Difference)} for d in report["differences"])
    assert "answered by plain decoding" in done.stdout
    assert "out-position.png" in done.stderr
    drawn = tmp_path / "out-position.png"
    size = drawn.stat().st_size
    drawn.unlink()
    again = CliRunner().invoke(app, ["bench", "acceptance", "--from", str(file), "--plot", str(picture)])
    assert json.loads(again.stdout.splitlines()[-1]) == report
    assert drawn.stat().st_size == size


def test_reports_are_read_back(tmp_path, llm):
    """Several as one; what is no report, and one of another model, are refused."""
    (result,) = measure(llm, plan_of(SELF, temperatures=(0.0,)))
    whole = {"machine": {}, "model": {"name": "a", "dtype": "float64"}, **result.report()}
    texts = {
        "one": json.dumps(whole),
        "two": json.dumps(whole | {"machine": {"cores": 2}}),
        "other": json.dumps(whole | {"model": {"name": "b", "dtype": "float64"}}),
        "old": json.dumps(whole | {"cells": [{**whole["cells"][0], "new": 1}]}),
        "bench": json.dumps({"machine": {}, "model": whole["model"], "cells": [{"batch": 1}]}),
        "torn": json.dumps(whole)[:-1],
        "list": "[]",
    }
    files = {name: tmp_path / name for name in texts}
    for name, text in texts.items():
        files[name].write_text(text)
    assert [r.result for r in read_reports([files["one"], files["two"]])] == [result, result]
    for name, words in (("old", "this version's"), ("bench", "this version's"), ("torn", "JSON"), ("list", "JSON")):
        with pytest.raises(InvalidValueError, match=f"{name}'.*{words}"):
            read_reports([files[name]])
    with pytest.raises(InvalidValueError, match="must be of a in float64, not of b in float64"):
        read_reports([files["one"], files["other"]])
    with pytest.raises(InvalidValueError, match="readable file"):
        read_reports([tmp_path / "none"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--draft", "nonsense"), "nonsense"),
        (("--task", "nonsense"), "--task"),
        (("--baseline", "full"), "--baseline"),
        (("--prompts", "1"), "prompts"),
        (("--draft", "auto"), "--draft"),
        (("--from", "README.md"), "--from"),
        (("--plot", "x.pdf"), ".png"),
    ],
)
def test_wrong_options_are_refused(folder, args, words, monkeypatch):
    monkeypatch.undo()  # the real tasks
    done = CliRunner().invoke(app, ["bench", "acceptance", "--model", str(folder), *args])
    assert done.exit_code == 1
    assert words in str(done.exception) or "tokenizer" in str(done.exception)
