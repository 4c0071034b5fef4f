"""Calibration: curves and how they are fitted, timed and stored. Clocks are made up; nothing is said of speed."""

import json
import math
import os
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from longdraft.bench import calibrate
from longdraft.bench.calibrate import FIX, MOST_ROUNDS, measure, require_quiet
from longdraft.bench.calibrate_fit import fit_curves, fit_roofline, predict, spread
from longdraft.bench.calibrate_points import ROOM, Measured, Point, make_grid
from longdraft.bench.calibrate_rows import Timed
from longdraft.bench.machine import Load
from longdraft.config import DraftConfig
from longdraft.drafts.registry import NAMED, watches
from longdraft.errors import BusyMachineError, CalibrationError, ContextLengthError, InvalidValueError
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.planner.assumed import given
from longdraft.planner.calibration import (
    Calibration,
    Errors,
    Setting,
    calibrated,
    calibrated_here,
    fingerprint,
    load,
    setting,
    store,
)
from longdraft.planner.candidates import Target, candidate
from longdraft.planner.catalogue import known_models
from longdraft.planner.cost import pass_work, times
from longdraft.planner.curves import ChoiceCurve, Curves, DraftCurve, NotingCurve, PassCurve, kind, rounds_per_choice
from longdraft.planner.hardware import Hardware, processor
from longdraft.planner.plan import plain_round
from longdraft.planner.plan import predict as plan_rounds

STEP = PassCurve(6e-3, 4e-4, 1e-4, 6e-7, 0.0, knee=10)
TRUE = Curves(
    PassCurve(8e-3, 2e-4, 2e-4, 5e-7, 1.2e-7, knee=12, queries=3.0),
    {
        "target/all/streaming_llm": DraftCurve(STEP),
        "target/all/verified": DraftCurve(
            STEP, ChoiceCurve(5e-4, 8e-5, 1e-8, 1e-7), NotingCurve(1e-4, 2e-5, 5e-9), 1e-7
        ),
        "ngram": DraftCurve(None, ChoiceCurve(1e-6, 1e-6), wake_s=3e-6),
    },
)
STREAMING, VERIFIED, NGRAM = (NAMED[name] for name in ("streaming_llm", "verified", "ngram"))
GRID = make_grid((1, 4, 8, 16), (), (128, 512), 8192)


def extra(point):
    """The part of a point's time that is not its passes, by ``TRUE``."""
    if point.draft is None:
        return 0.0
    if point.noted:
        return TRUE.noting(point.draft, point.lengths, point.sizes)
    bare = Curves(TRUE.passes, {name: replace(d, choice=ChoiceCurve()) for name, d in TRUE.drafts.items()})
    return predict(TRUE, point) - predict(bare, point)


# --- curves


def test_a_pass_by_hand():
    curve = PassCurve(1.0, 0.1, 0.01, 0.001, 0.0001, knee=4, queries=2.0)
    # 2 + 4 = 6 tokens, 2 beyond the knee; 300 keys; the second row's 200 keys for 2 queries too many
    assert curve.seconds([100, 200], [2, 4]) == pytest.approx(1 + 0.6 + 0.02 + 0.3 + 0.04)
    # keys are counted with the pass's own tokens
    assert Curves(curve, {}).target([98, 196], [2, 4]) == curve.seconds([100, 200], [2, 4])


def test_proposing_is_the_sum_of_its_steps():
    lengths, gammas = [100, 3000, 700], [2, 0, 3]
    read = [
        [101, 512],
        [102, 512],
        [512],
    ]  # rows that still want a token: short ones grow, others are cut to the budget
    expected = sum(STEP.seconds(keys, [1] * len(keys)) for keys in read)
    assert TRUE.draft(STREAMING, lengths, gammas) == pytest.approx(expected)
    assert TRUE.draft(STREAMING, lengths, [0, 0, 0]) == 0
    choosing = TRUE.drafts["target/all/verified"].choice.seconds([100, 700], [100, 512])
    noting = TRUE.drafts["target/all/verified"].noting
    assert TRUE.propose(VERIFIED, lengths, gammas) == pytest.approx(expected + choosing)
    noted = noting.seconds(lengths, [3, 1, 4])
    assert TRUE.draft(VERIFIED, lengths, gammas) == pytest.approx(expected + choosing + noted)
    assert (
        TRUE.upkeep(VERIFIED, lengths)
        == noting.seconds(lengths, [1, 1, 1])
        == pytest.approx(3 * 1e-4 + 3 * 2e-5 + 3800 * 5e-9)
    )
    assert (TRUE.upkeep(STREAMING, lengths), TRUE.wake(NGRAM, 1000)) == (0, pytest.approx(3e-3))
    with pytest.raises(InvalidValueError, match="snapkv.*must have been calibrated.*ngram"):
        TRUE.draft(NAMED["snapkv"], lengths, gammas)


@pytest.mark.parametrize(
    ("config", "gamma", "rounds"),
    [
        (DraftConfig(kv="verified"), 3, 1),  # in every round
        (DraftConfig(kv="verified", refresh=4, budget=512), 3, 4),
        (DraftConfig(kv="verified", refresh=100, budget=64), 3, 4),  # its quarter is full after (16 - 3) // 4 rounds
        (DraftConfig(kv="snapkv", budget=512), 3, 32),  # (128 - 3) // 4, and the first
        (DraftConfig(kv="snapkv", budget=4), 3, 1),
        (DraftConfig(), 3, 1),
    ],
)
def test_how_long_a_choice_lasts(config, gamma, rounds):
    assert rounds_per_choice(config, gamma) == rounds


# --- points and fits


def test_points_held_out_lie_between_those_that_are_fitted():
    points = GRID.points([STREAMING, VERIFIED, NGRAM])
    assert points[0] == GRID.anchor == Point((4096,) * 4, (1,) * 4)
    assert len(set(points)) == len(points)
    fitted, held = ([p for p in points if p.held_out is held] for held in (False, True))
    assert {len(p.lengths) for p in fitted} == {1, 4, 8, 16} and {len(p.lengths) for p in held} == {2, 6, 11}
    assert {n for p in points for n in p.lengths} <= set(range(512, 8192 - ROOM + 1))
    assert any(len(set(p.lengths)) > 1 and len(set(p.sizes)) > 1 for p in held if p.draft is None)
    tokens = {p.sizes[0] for p in fitted if p.draft is None and p.lengths[0] == 8192 - ROOM}
    assert tokens == {1, 2, 3, 4, 5, 6, 9}  # every size at the longest context
    for draft in (STREAMING, VERIFIED):
        mine = [p for p in points if p.draft and kind(p.draft) == kind(draft) and not p.noted]
        assert {p.draft.budget for p in mine if not p.held_out} == {128, 512}
        assert {p.draft.budget for p in mine if p.held_out} == {256}
    assert {p.noted for p in held if p.draft and watches(p.draft)} == {True, False}
    assert not any(p.noted for p in points if p.draft and not watches(p.draft))
    assert all(p.draft.refresh == 1 for p in points if p.draft and watches(p.draft) and not p.noted)


def test_contexts_end_where_there_is_room():
    assert make_grid((2,), (), (16,), 256).contexts == (256 - ROOM,)
    assert make_grid((4, 1, 4), (128, 64), (16,), 256).contexts == (64, 128)
    with pytest.raises(ContextLengthError, match="--context is 200, but there is room for 192 tokens"):
        make_grid((2,), (64, 200), (16,), 256)
    with pytest.raises(ContextLengthError, match="room for 0 tokens"):
        make_grid((2,), (), (16,), 32)
    with pytest.raises(InvalidValueError, match="batch is 257"):
        make_grid((257,), (), (16,), 256)


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_fit_finds_the_constants_it_was_measured_with(noise):
    random = np.random.default_rng(0)
    measured = []
    for point in GRID.points([STREAMING, VERIFIED, NGRAM]):
        factor = math.exp(noise * random.standard_normal())
        measured.append(Measured(point, factor * predict(TRUE, point), factor * extra(point)))
    found = fit_curves(measured, {"ngram": 3e-6})
    held = [m.point for m in measured if m.point.held_out]
    errors = {p: predict(found, p) / predict(TRUE, p) - 1 for p in held}
    assert len(errors) > 20
    assert spread(list(errors.values()))[1] < 0.02 + noise  # a draft's knee may lie anywhere from 8 to 16 rows
    assert spread([e for p, e in errors.items() if p.draft is None])[1] < 1e-6 + 2 * noise
    assert found.passes.key_s == pytest.approx(5e-7, rel=1e-6 + 2 * noise)
    assert found.passes.step_s == pytest.approx(8e-3, rel=1e-6 + 2 * noise)
    assert found.wake(NGRAM, 1000) == pytest.approx(3e-3)
    if noise == 0:
        assert (found.passes.knee, found.passes.queries) == (12, 3.0)
        assert asdict(found.passes) == pytest.approx(asdict(TRUE.passes), rel=1e-6)
        for part in ("noting", "choice"):
            both = (asdict(getattr(c.drafts["target/all/verified"], part)) for c in (found, TRUE))
            assert next(both) == pytest.approx(next(both), rel=1e-5)


def test_held_out_points_are_not_fitted_to():
    points = GRID.points([STREAMING])
    honest = [Measured(p, predict(TRUE, p)) for p in points]
    spoiled = [Measured(p, predict(TRUE, p) * (9 if p.held_out else 1)) for p in points]
    assert fit_curves(honest, {}) == fit_curves(spoiled, {})


@pytest.mark.parametrize("overlap", ["kernel", "none"])
def test_the_roofline_model_is_fitted_by_its_own_formula(overlap):
    config = known_models()["Llama-3.1-8B"]
    true = Hardware("x", tflops=0.7, bandwidth_gb_s=40, layer_s=5e-3, row_s=5e-2, overlap=overlap)
    target = Target("x", config, Hardware("here", 1.0, 1.0, memory_gib=24.0, source="calibrated"))
    int8 = NAMED["int8"]
    draft = candidate(target, int8, given(1.0))
    measured = []
    for point in GRID.points([int8, VERIFIED]):
        rows, size = {point.lengths[0]: len(point.lengths)}, point.sizes[0]
        seconds = times(pass_work(target.network, rows, size), true).total
        if point.draft:
            seconds = size * times(pass_work(draft.network, rows, reads=draft.reads), true).total
        even = len(set(point.lengths)) == len(set(point.sizes)) == 1
        other = point.draft and point.draft.kv == "verified"  # what chooses is none of its business, nor are mixtures
        measured.append(Measured(point, 9.0 if other or not even else seconds, 1.0 if other else 0.0))
    found, errors = fit_roofline(target, measured)
    assert (found.overlap, found.name, found.memory_gib, found.source) == (overlap, "here", 24.0, "calibrated")
    for name in ("tflops", "bandwidth_gb_s", "layer_s", "row_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.05), name
    assert spread(errors)[1] < 0.01 and len(errors) > 10


# --- timing


class Clock:
    """Points that take what ``TRUE`` says, on a machine whose speed drifts; every seventh is an outlier if ``wild``."""

    def __init__(self, wild=False):
        self.calls, self.wild = [], wild

    def time(self, point):
        self.calls.append(point)
        factor = 1 + 0.5 * math.sin(len(self.calls) / 40)
        if self.wild and point != GRID.anchor and len(self.calls) % 7 == 0:
            factor *= 3
        return Timed(factor * predict(TRUE, point), factor * extra(point))


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(calibrate, "disturbed", lambda before, after: False)


@pytest.mark.parametrize("wild", [False, True])
def test_ratios_to_the_anchor_survive_drift_and_outliers(alone, wild):
    clock = Clock(wild)
    points, seen = GRID.points([VERIFIED]), []
    record = measure(clock, points, 1e6, lambda *args: seen.append(args))
    measured = record.measured()
    assert [m.point for m in measured] == points
    unit = record.anchor_s / predict(TRUE, points[0])
    errors = [m.seconds / (unit * predict(TRUE, m.point)) - 1 for m in measured]
    assert spread(errors)[1] < 0.1
    noted = max(measured, key=lambda m: m.extra_s)
    assert noted.extra_s == pytest.approx(unit * extra(noted.point), rel=0.1)
    assert {name for name, *_ in seen} == {"warm up", "measure"}
    assert seen[-1][1] == seen[-1][2]


def test_time_is_shared_and_some_rounds_are_always_measured(alone):
    points = GRID.points([STREAMING])
    for seconds, least, most in ((0.0, 2, 2), (1e6, MOST_ROUNDS, MOST_ROUNDS), (20.0, 3, 11)):
        clock = Clock()
        measure(clock, points, seconds, lambda *args: None)
        times_each = {p: clock.calls.count(p) - 1 for p in points[1:]}
        assert (min(times_each.values()), max(times_each.values())) == (least, most)
        spent = sum(predict(TRUE, p) for p in clock.calls)
        assert spent < max(1.3 * seconds, 5 * sum(predict(TRUE, p) for p in points))


def test_disturbed_blocks_are_timed_again_and_too_many_of_them_end_it(monkeypatch):
    points = GRID.points([])
    answers = iter([True, False] * 10_000)
    monkeypatch.setattr(calibrate, "disturbed", lambda before, after: next(answers))
    clock = Clock()
    record = measure(clock, points, 0.0, lambda *args: None)
    assert record.noisy == 0
    assert min(clock.calls.count(p) for p in points[1:]) == 5  # once to warm up, and two rounds twice
    monkeypatch.setattr(calibrate, "disturbed", lambda before, after: True)
    with pytest.raises(BusyMachineError, match="100%.*--force"):
        measure(Clock(), points, 0.0, lambda *args: None)
    record = measure(Clock(), points, 0.0, lambda *args: None, force=True)
    assert record.noisy == record.blocks > 0


def test_a_busy_machine_is_refused_before_anything_is_measured(monkeypatch):
    def loads(foreign):
        wall = iter((0.0, 2.0))
        monkeypatch.setattr(calibrate.psutil, "cpu_count", lambda: 4)
        monkeypatch.setattr(calibrate.time, "sleep", lambda seconds: None)

        def now():
            at = next(wall)
            return Load(at, busy=at * (4 * foreign + 1), own=at, steal=0.0)

        monkeypatch.setattr(calibrate, "Load", SimpleNamespace(now=now))

    loads(0.09)
    require_quiet()
    loads(0.5)
    with pytest.raises(BusyMachineError, match="Others use 50% .* allows 10%") as found:
        require_quiet()
    assert (found.value.share, found.value.fix) == (pytest.approx(0.5), FIX)


# --- the file

HERE = Setting("f" * 16, "bfloat16", "bfloat16", "native avx2", 2, processor())
HARDWARE = Hardware("cpu", 0.5, 40.0, 16.0, layer_s=3e-5, overlap="none", source="calibrated")


def calibration(where=HERE, made="2026-01-01T00:00:00+00:00", hardware=HARDWARE):
    return Calibration(where, "m", made, 0.02, 16, 8128, False, Errors(0.02, 0.1, 40, 0.03, 0.2), hardware, TRUE)


def test_what_is_stored_is_what_is_loaded(tmp_path):
    file = tmp_path / "deep" / "calibration.json"
    assert load(file) == []
    first, other = calibration(), calibration(replace(HERE, threads=1))
    store(file, first)
    store(file, other)
    assert load(file) == [first, other]
    again = replace(first, made="2026-02-01T00:00:00+00:00", noisy=True)
    store(file, again)
    assert load(file) == [other, again]  # one per setting
    assert [f.name for f in file.parent.iterdir()] == [file.name]
    assert load(file)[1].curves.draft(VERIFIED, [5000], [3]) == TRUE.draft(VERIFIED, [5000], [3])


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "calibration.json"
    store(file, calibration())

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CalibrationError, match="disk full.*--out"):
        store(file, calibration(replace(HERE, threads=7)))
    assert load(file) == [calibration()]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ((), [], "version None"),
        (("version",), 2, "version 2, not 1"),
        (("calibrations",), {}, "calibrations is {}"),
        (("calibrations", 0, "curves", "passes", "key_s"), "x", r"curves.passes.key_s is 'x', not float"),
        (("calibrations", 0, "curves", "passes", "key_s"), -1e-7, "key_s is -1e-07"),
        (("calibrations", 0, "curves", "passes", "key_s"), float("nan"), "key_s is nan"),
        (("calibrations", 0, "curves", "passes", "key_s"), float("inf"), "key_s is inf"),
        (("calibrations", 0, "curves", "passes", "key_s"), True, "key_s is True"),
        (("calibrations", 0, "curves", "passes", "more"), 1.0, "unknown or missing fields: more"),
        (("calibrations", 0, "setting"), {"model": "x"}, "unknown or missing fields: dtype, kernels"),
        (("calibrations", 0, "setting", "threads"), 2.5, "setting.threads is 2.5, not int"),
        (("calibrations", 0, "curves", "drafts", "ngram", "choice"), None, "choice is None"),
        (("calibrations", 0, "hardware", "tflops"), 0.0, "tflops is 0.0"),
        (("calibrations", 0, "hardware", "overlap"), "much", "overlap is 'much'"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, path, value, words):
    file = tmp_path / "calibration.json"
    store(file, calibration())
    raw = inner = json.loads(file.read_text())
    for name in path[:-1]:
        inner = inner[name]
    if path:
        inner[path[-1]] = value
    file.write_text(json.dumps(raw if path else value))
    with pytest.raises(CalibrationError, match=words) as found:
        load(file)
    assert str(file) in str(found.value) and "Remove it." in str(found.value)
    file.write_text("{")
    with pytest.raises(CalibrationError, match="cannot be read"):
        store(file, calibration())  # nothing is written over what may be of use


def test_a_loaded_model_finds_its_own_calibration_only(tmp_path):
    file = tmp_path / "calibration.json"
    model = Transformer(tiny_config(), RandomWeights(tiny_config()), dtype=torch.float32)
    mine = setting(model)
    assert (mine.dtype, mine.kv_dtype, mine.machine) == ("float32", "float32", processor())
    assert mine.threads >= 1 and mine.kernels.split()[0] in ("native", "torch")
    with pytest.raises(CalibrationError, match="no calibration in it. Run: longdraft calibrate"):
        calibrated(model, file)
    changes = {"dtype": "bfloat16", "threads": mine.threads + 1, "machine": "Z80", "kernels": "torch x", "model": "0"}
    for name, value in changes.items():
        store(file, calibration(replace(mine, **{name: value})))
    with pytest.raises(CalibrationError, match=r"none of its 5 .* nearest has dtype bfloat16, not float32"):
        calibrated(model, file)
    store(file, calibration(mine))
    assert calibrated(model, file).setting == mine
    assert fingerprint(tiny_config(norm_eps=1e-6)) != fingerprint(tiny_config()) == mine.model


def test_hardware_of_this_machine_by_model_types_and_date(tmp_path):
    file, config = tmp_path / "calibration.json", tiny_config()
    with pytest.raises(CalibrationError, match="no calibration in it"):
        calibrated_here(config, "bfloat16", "bfloat16", file)
    store(file, calibration(replace(HERE, machine="Z80")))
    with pytest.raises(CalibrationError, match="calibrations of Z80, none of this machine"):
        calibrated_here(config, "bfloat16", "bfloat16", file)
    old, new = (replace(HARDWARE, name=name) for name in ("old", "new"))
    store(file, calibration(HERE, "2026-03-01", new))
    store(file, calibration(replace(HERE, threads=1), "2026-02-01", old))
    assert calibrated_here(config, "bfloat16", "bfloat16", file).hardware == new
    store(file, calibration(replace(HERE, model=fingerprint(config)), "2026-01-01", replace(HARDWARE, name="mine")))
    assert calibrated_here(config, "bfloat16", "bfloat16", file).hardware.name == "mine"
    with pytest.raises(CalibrationError, match="--dtype bfloat16 --kv-dtype bfloat16 only, not with float32"):
        calibrated_here(config, "float32", "bfloat16", file)


def test_a_plan_uses_the_curves_of_its_own_model_and_the_roofline_model_for_what_they_do_not_know():
    config = known_models()["Llama-3.1-8B"]
    bare = Target("x", config, HARDWARE)
    known = replace(bare, curves=TRUE)
    streaming, snapkv = (candidate(bare, NAMED[name], given(0.8)) for name in ("streaming_llm", "snapkv"))
    rows = {5000: 3, 70: 1}
    lengths = [5000, 5000, 5000, 70]
    assert plain_round(known, rows).seconds == TRUE.target(lengths, [1] * 4) != plain_round(bare, rows).seconds
    (found,) = plan_rounds(known, streaming, rows, [3])
    assert found.verify_s == TRUE.target(lengths, [4] * 4)
    assert found.gamma * found.draft_s == pytest.approx(TRUE.draft(streaming.config, lengths, [3] * 4))
    (other,) = plan_rounds(known, snapkv, rows, [3])
    assert (other.verify_s, other.draft_s) == (found.verify_s, plan_rounds(bare, snapkv, rows, [3])[0].draft_s)
