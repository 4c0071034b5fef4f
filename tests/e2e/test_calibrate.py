"""``longdraft calibrate`` as a user meets it, on a tiny model: what is timed, stored, shown and refused."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from longdraft import LLM
from longdraft.bench import calibrate as bench
from longdraft.bench.calibrate_points import ROOM, Point, make_grid
from longdraft.bench.calibrate_rows import SyntheticRows, fitting
from longdraft.cli.app import app
from longdraft.drafts.registry import NAMED
from longdraft.engine.runner import Runner
from longdraft.errors import BusyMachineError, CalibrationError, InvalidValueError, KVCapacityError
from longdraft.planner.calibration import load
from longdraft.planner.curves import kind

CHOOSING = ["verified", "pages", "snapkv", "topk"]
PNG = b"\x89PNG\r\n\x1a\n"


def run(*args):
    done = CliRunner().invoke(app, [str(a) for a in args])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, dtype="float32", kv_cache_memory_bytes=2**24, max_num_seqs=64)


@pytest.fixture
def synthetic(llm):
    """Makes rows, and checks that all is given back."""
    made = []

    def make(points):
        made.append(SyntheticRows(llm, points, lambda *args: None))
        return made[-1]

    yield make
    for rows in made:
        rows.close()
    store = llm.engine.store
    store.check_integrity()
    assert store.num_free_pages == store.num_pages
    for draft in llm.engine.runner._drafts.values():
        assert not getattr(draft, "_states", None), draft  # nothing is known of anybody


def test_what_is_timed_is_what_the_point_says(synthetic, monkeypatch):
    fed = []
    forward = Runner.forward

    def watch(self, batch):
        fed.append([(row.seq.num_committed, len(row.tokens), row.num_logits) for row in batch.rows])
        return forward(self, batch)

    monkeypatch.setattr(Runner, "forward", watch)
    plain, verify = Point((100, 37), (1, 1)), Point((100, 37), (3, 1))
    rows = synthetic([plain, verify])
    rows.time(plain)
    assert set(map(tuple, fed)) == {((100, 1, 1), (37, 1, 1))}
    fed.clear()
    rows.time(verify)
    assert set(map(tuple, fed)) == {((100, 3, 3), (37, 1, 1))}


@pytest.mark.parametrize(
    "name", ["streaming_llm", "layer_skip", "verified", "pages", "snapkv", "topk", "ngram", "full"]
)
def test_drafts_propose_what_was_asked_and_choose_in_every_round(llm, synthetic, name):
    draft = replace(NAMED[name], budget=32)
    chooses = name in CHOOSING
    draft = replace(draft, refresh=1) if chooses else draft
    point = Point((160, 90), (3, 1), draft)
    rows, asked, told = synthetic([point]), [], []
    made = llm.engine.runner.draft(draft)
    propose, observe = made.propose, made.observe

    def watch(drafted, *, sampled):
        proposal = propose(drafted, sampled=sampled)
        asked.append([(row.gamma, len(tokens)) for row, tokens in zip(drafted, proposal.tokens, strict=True)])
        return proposal

    made.propose, made.observe = watch, lambda seq, seen: told.append(seen.stop) or observe(seq, seen)
    try:
        for _ in range(3):
            timed = rows.time(point)
            assert timed.seconds > 0
            assert (timed.extra_s > 0) == (chooses or name == "ngram")
            assert timed.extra_s <= timed.seconds
    finally:
        del made.propose, made.observe
    assert told == ([160, 90] if chooses else [])  # once, of the ends of the texts
    assert asked and all(round == [(3, 3), (1, 1)] for round in asked)
    if name == "ngram":
        state = made._states[rows._row((0, 160)).id]
        rows.wake(draft, 160)
        assert made._states[rows._row((0, 160)).id] is not state  # all tokens were looked at again


def test_drafts_keep_what_they_know_however_many_are_measured(llm, synthetic, monkeypatch):
    monkeypatch.setattr("longdraft.engine.runner.MOST_IDLE", 1)
    ngram, *others = (NAMED["ngram"], *(replace(NAMED["verified"], budget=32 + n) for n in range(3)))
    points = [Point((160, 90), (3, 1), draft) for draft in (ngram, *others)]
    rows = synthetic(points)
    made = [rows.time(point) and llm.engine.runner.draft(point.draft) for point in points]
    states = dict(made[0]._states)
    assert len(states) == 2
    for point in points:
        rows.time(point)
    assert [llm.engine.runner.draft(point.draft) for point in points] == made
    assert made[0]._states == states


@pytest.mark.parametrize("name", ["verified", "snapkv", "pages"])
def test_noted_passes_tell_the_draft_of_each_token_each_time(llm, synthetic, name):
    draft = replace(NAMED[name], budget=32)
    point = Point((160, 90), (4, 2), draft, noted=True)
    rows, told = synthetic([point]), []
    made = llm.engine.runner.draft(draft)
    observe = made.observe
    known = {
        "verified": lambda seq: made.memory._rows[seq.id].stop,
        "pages": lambda seq: made.memory._seen[seq.id].stop,
        "snapkv": lambda seq: made._states[seq.id].seen.stop,
    }[name]

    def watch(seq, seen):
        if seen.stop > 160 or 90 < seen.stop < 160:
            assert known(seq) == seq.num_prompt  # what the row knew before it, and no more
        told.append((seen.start, seen.stop))
        observe(seq, seen)

    made.observe = watch
    try:
        rows.time(point)
        told.clear()  # the ends of the texts came first
        for _ in range(2):
            rows.time(point)
    finally:
        del made.observe
    last = (lambda length, size: (length + size - made.needs.tokens, length + size)) if name == "pages" else None
    expected = [(160, 164), (90, 92)] if last is None else [last(160, 4), last(90, 2)]
    assert [stop for _, stop in told] == 2 * [stop for _, stop in expected]
    assert name == "pages" or told == 2 * expected


def test_points_for_which_there_is_no_room_are_left_out(llm, synthetic):
    grid = make_grid((1, 2, 80), (), (16,), 256)
    points = grid.points([])
    kept = fitting(llm, points)
    assert 0 < len(kept) < len(points) and kept[0] == points[0]
    rows = synthetic(kept)
    for point in kept:
        rows.time(point)
    with pytest.raises(KVCapacityError, match="too few for 200 rows of 192.*--batch"):
        fitting(llm, [Point((192,) * 200, (1,) * 200)])


def test_a_whole_calibration_and_a_plan_by_it(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_CALIBRATION", str(tmp_path / "new" / "calibration.json"))
    plot = tmp_path / "x.png"
    args = ("calibrate", "--model", folder, "--batch", "1,2", "--budget", 32, "--minutes", 0, "--force")
    done = run(*args, "--draft", "streaming_llm", "--draft", "verified", "--draft", "ngram", "--plot", plot)
    report = json.loads(done.stdout.splitlines()[-1])
    (stored,) = load(tmp_path / "new" / "calibration.json")
    assert report["setting"] == vars(stored.setting) and report["file"].endswith("calibration.json")
    assert set(stored.curves.drafts) == {"target/all/streaming_llm", "target/all/verified", "ngram"}
    assert stored.errors.points == sum(p["held_out"] for p in report["points"]) > 0
    assert {p["kind"] for p in report["points"]} == {"target", *stored.curves.drafts}
    assert all(p["measured_ms"] > 0 and p["predicted_ms"] >= 0 for p in report["points"])
    assert (stored.batch, stored.context) == (2, 256 - ROOM)
    assert plot.read_bytes().startswith(PNG)
    for word in ("GB/s", "GFLOP/s", "held out", "target/all/verified"):
        assert word in done.stdout
    shown = json.loads(run("calibrate", "--show").stdout.splitlines()[-1])
    assert [c["setting"] for c in shown["calibrations"]] == [report["setting"]]
    types = ("--dtype", stored.setting.dtype, "--kv-dtype", stored.setting.kv_dtype)
    planned = json.loads(run("plan", folder, "--hardware", "calibrated", *types).stdout.splitlines()[-1])
    assert planned["hardware"]["bandwidth_gb_s"] == stored.hardware.bandwidth_gb_s
    assert "calibrated with" in planned["hardware"]["source"] and planned["model"]["calibrated"] is True
    plain = 1e3 * stored.curves.target([256] * 32, [1] * 32)
    assert planned["ranking"][0]["plain_ms"] == pytest.approx(plain, abs=1e-4)
    chosen = LLM(folder, dtype="auto", draft="auto", kv_cache_memory_bytes=2**22).engine.control
    assert chosen.prices == stored.curves  # online control goes by it, with the drafts that were measured
    assert {kind(draft) for draft in chosen.drafts} == {"target/all/streaming_llm", "ngram"}
    other = run("plan", "Qwen3-0.6B", "--hardware", "calibrated", "--batch", 2, *types)
    assert json.loads(other.stdout.splitlines()[-1])["model"]["calibrated"] is False
    with pytest.raises(CalibrationError, match="float16"):
        run("plan", folder, "--hardware", "calibrated", "--dtype", "float16")


def test_refusals_come_before_the_work(folder, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise BusyMachineError(0.5, 0.1, bench.FIX)

    monkeypatch.setattr(bench, "require_quiet", refuse)
    file = tmp_path / "c.json"
    tiny = ("calibrate", "--model", folder, "--minutes", 0, "--out", file)
    with pytest.raises(BusyMachineError, match="50%.*--force"):
        run(*tiny)
    assert not file.exists()
    for more, words in (
        (("--draft", "gpt"), "--draft is 'gpt'.*streaming_llm"),
        (("--minutes", -1), "--minutes is -1"),
        (("--batch", "many"), "--batch is 'many'"),
        (("--context", "1k"), "--context is 1024.*192"),
        (("--plot", "x.svg"), "--plot"),
    ):
        with pytest.raises(InvalidValueError, match=words):
            run(*tiny, *more)
    with pytest.raises(InvalidValueError, match="--tflops"):
        run("plan", "--hardware", "calibrated", "--tflops", 3)
    file.write_text("{}")
    with pytest.raises(CalibrationError, match="Remove it"):
        run(*tiny)
