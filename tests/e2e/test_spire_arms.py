"""A trained draft beside others: in the benches, in plans and calibrations, and where control chooses."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from longdraft import LLM, DraftConfig, SamplingParams, llm_control
from longdraft.bench import Arm, Plan, acceptance, decode
from longdraft.bench.calibrate_points import Point, make_grid
from longdraft.bench.calibrate_rows import SyntheticRows
from longdraft.bench.tasks import Prompt
from longdraft.checkpoint.load import load_checkpoint
from longdraft.checkpoint.spire import save_spire
from longdraft.cli.bench import make_arms, own_model
from longdraft.config import AutoDraft
from longdraft.errors import InvalidValueError, TargetMismatchError
from longdraft.kernels import native
from longdraft.models.feedback import MEMORY, FeedbackConfig
from longdraft.models.registry import tiny_config
from longdraft.models.weights import num_parameters
from longdraft.planner.assumed import assumed, given
from longdraft.planner.candidates import Target, candidate, candidates
from longdraft.planner.curves import Curves, DraftCurve, PassCurve, kind
from longdraft.planner.hardware import Hardware
from longdraft.planner.roofline import Roofline
from longdraft.train.prune_init import initial_memory, initial_tensors

F64 = {"dtype": "float64", "kv_cache_memory_bytes": 2**24}
needs_native = pytest.mark.skipif(native._native is None, reason=f"without the native extension: {native.WHY_NOT}")


def saved(folder, where, config):
    """A draft that knows all it needs: with every layer and a window over everything it is the target."""
    target = load_checkpoint(folder)
    tensors = initial_tensors(config, target.config, target.weights)
    tensors[MEMORY] = initial_memory(config, peak=60.0)
    return str(save_spire(where / "-".join(map(str, config.layers)), config, tensors, target))


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    return saved(folder, tmp_path_factory.mktemp("whole"), FeedbackConfig((0, 1, 2), window=200, sinks=3))


@pytest.fixture(scope="module")
def short(folder, tmp_path_factory):
    return saved(folder, tmp_path_factory.mktemp("short"), FeedbackConfig((1, 2), window=20, sinks=5))


def ids(n, length):
    return [(7 * i + 5 * n + i * i % 11 + 1) % 128 for i in range(length)]


def prompts(batch, context):
    return [ids(n, context) for n in range(batch)]


@pytest.fixture
def begun(monkeypatch):
    """What a draft holds of each row when it begins to propose: the first tokens, and the last ones."""
    from longdraft.drafts.spire import Spire

    held, begin = [], Spire.begin

    def watched(self, rows):
        feeds = begin(self, rows)
        for row, feed in zip(rows, feeds, strict=True):
            assert feed is not None, "nobody told it of this row"
            state = self._states[row.seq.id]
            assert state.stop == row.seq.num_committed
            held.append((state.first, min(self.needs.hidden, state.stop - state.start)))
        return feeds

    monkeypatch.setattr(Spire, "begin", watched)
    return held


@pytest.mark.parametrize("rate", [None, 0.5])
def test_an_arm_of_the_decoding_bench(folder, whole, begun, monkeypatch, rate):
    """It has heard of the prompts, whatever row they were filled as: the target itself is right every time."""
    monkeypatch.setattr(decode, "disturbed", lambda before, after: False)
    llm, cells = LLM(folder, draft=f"auto+{whole}", **F64), []
    arms = make_arms([whole, "auto"], [16, 64], [3], None)
    plan = Plan((2,), ((90, 40),), (*arms, Arm("full", DraftConfig(kv="full"))), rounds=2, round_tokens=8)
    decode.measure(llm, replace(plan, assume_acceptance=rate), prompts, cells.append)
    spire, auto, _ = cells
    assert len(arms) == 3  # one for each budget; it reads what it reads, so these are one and the same
    assert (spire.budget, spire.gamma, spire.identical, auto.identical) == (203, 3, True, True)
    assert begun and all(first == 3 and last >= 37 for first, last in begun)
    assert spire.t_draft_ms > 0 and spire.predicted > 0
    if rate is None:
        assert spire.acceptance_by_position == [1, 1, 1] and spire.tokens_per_verify == 4
    store = llm.engine.runner.draft(llm.engine.control.drafts[-1]).store
    assert store.num_free_pages == store.num_pages and "told" not in vars(llm.engine.control)


def test_an_arm_of_the_acceptance_bench(folder, whole, short, begun, monkeypatch):
    """Prompts are filled in pieces, all but the last of them for all drafts together."""
    make = lambda llm, task, count, context, seed=0: [Prompt(ids(n, context), []) for n in range(count)]  # noqa: E731
    monkeypatch.setattr(acceptance, "make_prompts", make)
    for path, first, last in ((whole, 3, 90), (short, 5, 20)):
        llm = LLM(folder, draft=path, max_num_batched_tokens=16, **F64)
        arm, found = Arm("spire", DraftConfig(path)), []
        sizes = {"prompts": 2, "positions": 5, "batch": 2, "mass_positions": 1}
        plan = acceptance.AcceptancePlan(("prose",), (100,), (arm,), (2,), (0.0, 1.0), **sizes)
        acceptance.measure(llm, plan, found.append)
        cells = [cell for result in found for cell in result.cells]
        assert all(cell.identical and cell.captured_mass is None for cell in cells)
        assert path == short or all(cell.acceptance_by_position == [1, 1] for cell in cells)
        assert path == short or cells[1].overlap == pytest.approx(1, abs=1e-5)
        assert begun and all(f == first and n >= last for f, n in begun)
        begun.clear()


@needs_native
def test_one_load_serves_both_widths(folder, short):
    """Arms with and without 8-bit copies; two models are one too many."""
    arms = make_arms([short, f"{short}@int8", f"auto+{short}@int8"], [16], [2], None)
    assert [arm.name for arm in arms] == ["1-2", "1-2@int8", "auto"]
    assert own_model(arms) == AutoDraft(weights=f"{short}@int8")
    llm = LLM(folder, draft=own_model(arms), dtype="float32", kv_cache_memory_bytes=2**24)
    one, other = (llm.engine.runner.draft(llm.resolve(arm.draft)) for arm in arms[:2])
    assert one.spire is other.spire and one.runs is not other.runs
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = [llm.generate(prompts(2, 60), params, draft=arm.draft, use_tqdm=False) for arm in arms]
    assert len({str([r.outputs[0].token_ids for r in text]) for text in texts}) == 1
    with pytest.raises(InvalidValueError, match="one model at most"):
        own_model((*arms, Arm("x", DraftConfig("other"))))
    with pytest.raises(InvalidValueError, match="draft model that was loaded"):
        llm.generate([1, 2], params, draft=AutoDraft(weights="other"))


def test_control_may_choose_it(folder, short):
    """It is one of its drafts, and hears of every prompt; memory is counted with that of the others."""
    llm = LLM(folder, draft=f"auto+{short}", **F64)
    (own,) = (draft for draft in llm.engine.control.drafts if draft.own_model)
    assert (own.budget, own.sinks) == (25, 5) and llm.engine.control.prices.knows(own)
    engine, spire = llm.engine, llm.engine.runner.draft(own)
    seq = engine.sequence(engine.add(ids(0, 70), SamplingParams(temperature=0, max_tokens=30), llm.draft))
    while not seq.decoding:
        engine.step()
    assert (spire._states[seq.id].first, spire._states[seq.id].stop) == (5, 70)
    for _ in range(6):
        engine.step()
        assert spire._states[seq.id].stop + len(spire._states[seq.id].news) >= seq.num_committed - 20
    child = engine.sequence(engine.fork(seq.id, draft=llm.draft))
    assert own in engine.control.told(child) and child.id in spire._states
    plain, auto = (LLM(folder, draft=draft, **F64).engine.config.num_pages for draft in ("auto", f"auto+{short}"))
    assert auto < plain


def test_it_has_a_price_where_others_were_calibrated(folder, short, monkeypatch):
    """Curves of what was measured; of a draft that was not, a guess for that very machine."""
    window, machine = DraftConfig(budget=256), Hardware("this", tflops=1, bandwidth_gb_s=7)
    curves = Curves(PassCurve(1, 0, 0, 0, 0), {kind(window): DraftCurve(PassCurve(2, 0, 0, 0, 0))})
    monkeypatch.setattr(llm_control, "_calibration", lambda model: SimpleNamespace(curves=curves, hardware=machine))
    control = LLM(folder, draft=f"auto+{short}", **F64).engine.control
    (own,) = (draft for draft in control.drafts if draft.own_model)
    target = Target("model0", tiny_config(), machine, 8, 8)
    guess = Roofline(target, [own]).draft(own, [50, 9], [2, 1])
    assert control.prices.draft(own, [50, 9], [2, 1]) == guess != 0 == control.prices.upkeep(own, [50])
    assert (control.prices.target([5], [1]), control.prices.draft(window, [50], [3])) == (1, 6)
    assert set(control.drafts) == {replace(window, gamma=1), own}
    assert LLM(folder, draft="auto", **F64).engine.control.prices is curves


# --- costs


def test_what_it_costs_by_hand(folder, short):
    config = tiny_config()
    machine = Hardware("plain", tflops=1, bandwidth_gb_s=1)
    target = Target("tiny", config, machine, 4.0, 4.0)
    layer, kv = num_parameters(config, "model.layers.0."), config.kv_elements_per_layer
    head = config.vocab_size * config.hidden_size + config.hidden_size
    (made,) = candidates(target, [short], [16, 64])
    assert made.network.weights == 2 * layer + head + 2 * 2 * kv * config.hidden_size  # projected twice more
    assert (made.reads(9), made.reads(10**6), made.budget) == (9, 25, 25)
    assert (made.weight_bytes, made.kv_bytes_per_token) == (2 * layer * 4.0, 0)
    assert made.kv_bytes_per_row == (25 + made.config.gamma) * 2 * kv * 4.0
    assert "2504.06419" in made.acceptance.source and made.acceptance.rate(512) == 0.806
    (int8,) = candidates(target, [f"{short}@int8"], acceptance=given(0.5))
    assert int8.network.weight_bytes == 1 and int8.weight_bytes == 2 * layer * 4.0 + 2 * layer + head
    assert assumed(int8.config, "tiny").rate(512) < 0.806
    other = Target("wide", tiny_config(hidden_size=96), machine)
    with pytest.raises(TargetMismatchError, match=r"made for 'model\d+', whose sizes"):
        candidate(other, DraftConfig(short), given(0.5))


def test_a_calibration_of_it(folder, short):
    """Proposals over rows that it was told of, and passes that tell it: again and again of the same tokens."""
    llm = LLM(folder, draft=short, dtype="float32", kv_cache_memory_bytes=2**24, max_num_seqs=16)
    draft = llm.resolve()
    points = [p for p in make_grid((1, 2), (64, 150), (16, 32), 256).points([draft]) if p.draft]
    assert {p.draft for p in points} == {draft} and {p.noted for p in points} == {False, True}
    rows = SyntheticRows(llm, [Point((150, 64), (1, 1)), *points], lambda *args: None)
    made = llm.engine.runner.draft(draft)
    try:
        for point in points:
            for _ in range(2):
                assert rows.time(point).seconds > 0
        for (key, copied), seq in rows._rows.items():
            state = made._states[seq.id]
            assert state.first == 5 and (copied or state.stop == key[1]) and not state.news
    finally:
        rows.close()
    assert not made._states and made.store.num_free_pages == made.store.num_pages
