"""Tokens per round: counts, intervals, the modelled worth, and texts that a target writes itself."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from longdraft import LLM, DraftConfig, SamplingParams
from longdraft.bench.modelled import HONEST, PAPER, Drafting, multiplier
from longdraft.bench.tau import Counts, Method, TauPlan, against, measure, measure_engine, measure_forced, report, table
from longdraft.errors import InvalidValueError, ModelFileError
from longdraft.kv.select.streaming_llm import StreamingLLM
from longdraft.models.feedback import FeedbackConfig
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.train.onpolicy import Writing, write_texts
from longdraft.train.rounds import FeedbackDrafter, Filled, ModelDrafter
from longdraft.train.written import continuations
from tests.spire_drafts import for_training, tensors_of
from tests.unit.test_planner_papers import HONEST as BY_HAND
from tests.unit.test_planner_papers import SMALL, SPIRE, multipliers

CONFIG = FeedbackConfig((0, 1, 2), window=14, sinks=2)  # untrained it is much like the target
PLAN = TauPlan(contexts=(10, 21), temperatures=(0.0, 1.0), k=3, span=9, batch=2, seed=5)


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder, weights = tmp_path_factory.mktemp("target"), RandomWeights(tiny_config(), seed=6, std=0.2)
    save_file({name: weights.load(name) for name in weights.shapes()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(TINY))
    return LLM(folder, dtype="float64", kv_cache_memory_bytes=2**22)


@pytest.fixture(scope="module")
def draft(llm):
    source = llm.checkpoint.weights
    return for_training(llm.model, source, CONFIG, tensors_of(llm.model, source, CONFIG, trained=False))


@pytest.fixture(scope="module")
def methods(llm, draft):
    small, whole = replace(llm.model.config, num_layers=2), Drafting(llm.model.config)
    return [
        Method("spire", lambda filled: FeedbackDrafter(draft, filled), Drafting(small, 16, True), draft.taps, 100_000),
        Method("whole", lambda filled: ModelDrafter(Filled(llm.model, filled.texts, filled.places)), whole),
        Method("window", windowed, Drafting(llm.model.config, 16)),
    ]


def windowed(filled):
    return ModelDrafter(filled, StreamingLLM(budget=16, sinks=2).select)


def texts(rows=5, length=30):
    return torch.randint(128, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def found(llm, methods):
    return measure(llm.model, texts(), methods, PLAN)


def test_counts_are_sums_over_the_rounds_of_a_text_for_every_shorter_round_too():
    stood = torch.tensor([[[1.0, 0.5, 0.5], [1.0, 0.0, 0.0]], [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]])
    counts = Counts.of("rounds", 9, 0.0, stood)
    assert counts.tokens.tolist() == [[4.0, 4.5, 5.0], [3.0, 4.0, 5.0]]
    assert [counts.ratio(gamma).estimate().value for gamma in (1, 2, 3)] == [7 / 4, 8.5 / 4, 10 / 4]


def test_known_and_unknown_drafts_over_all_texts(found, methods, llm):
    """The target itself gives k + 1; texts in parts are as one; differences are paired; shorter contexts are others."""
    assert all(len(counts) == 4 and counts[0].tokens.shape == (5, 3) for counts in found.values())
    for counts in found["whole"]:
        assert counts.ratio(3).estimate().value == pytest.approx(4, abs=1e-9)
    for name in ("spire", "window"):
        values = [counts.ratio(3).estimate().value for counts in found[name]]
        assert min(values) >= 1 and max(values) <= 4 and 1.1 < values[1] < 3.9 and 1.1 < values[3] < 3.9
    at_once = measure(llm.model, texts(), methods[:1], replace(PLAN, batch=5))["spire"]
    for a, b in zip(found["spire"], at_once, strict=True):
        np.testing.assert_allclose(a.tokens, b.tokens, rtol=1e-9)
    differences = list(against(found, "whole", 2))
    assert [name for name, _, _ in differences] == ["spire"] * 4 + ["window"] * 4
    for name, counts, e in differences:
        mine = counts.ratio(2).estimate()
        assert e.value == pytest.approx(mine.value - 3) and e.low - 1e-9 <= e.value <= e.high + 1e-9, name
        assert e.high - e.low == pytest.approx(mine.high - mine.low)  # the baseline does not vary


def test_tables_say_what_it_is_worth(found, methods, llm):
    rows = [row for method in methods for row in table(llm.model.config, method, found[method.name])]
    assert len(rows) == 3 * 4 * 3 and len(report(rows)) == 36
    for cell in {(row.method, row.context, row.temperature) for row in rows}:
        own = [row for row in rows if (row.method, row.context, row.temperature) == cell]
        assert [row.gamma for row in own] == [1, 2, 3]
        assert [row.honest for row in own if row.best] == [max(row.honest for row in own)]
        assert own[0].tokens_per_round <= own[1].tokens_per_round <= own[2].tokens_per_round
        assert all(row.ci_low <= row.tokens_per_round + 1e-9 and row.how == "rounds" for row in own)
    assert rows[0].per_weight == pytest.approx(100_000 / (2 * (64 * 64 * 3 + 3 * 64 * 128 + 128)))


@pytest.mark.parametrize(("setting", "by_hand", "window"), [(PAPER, {}, 8), (HONEST, BY_HAND, 65)])
def test_modelled_speed_ups_are_the_papers_and_those_counted_by_hand(setting, by_hand, window):
    target, vanilla, spire = SMALL
    drafts = {
        "vanilla": Drafting(vanilla),
        "magicdec": Drafting(target, window),
        "spire": Drafting(spire, window, True),
    }
    for batch, context in ((64, 512), (16, 8192), (4096, 32)):  # the last one is bound by computing
        want = multipliers(SMALL, batch, context, **by_hand)
        for name, drafting in drafts.items():
            cell = {"batch": batch, "context": context, "gamma": 4, "tokens": SPIRE["tokens"][name]}
            assert multiplier(target, drafting, setting, **cell) == pytest.approx(want[name], rel=1e-9), (name, batch)


def test_the_forced_estimate_is_real_for_the_first_proposal(found, llm, draft):
    counts = measure_forced(llm.model, texts(), draft, draft.logits, PLAN)
    assert {c.how for c in counts} == {"forced"}
    for mine, real in zip(counts, found["spire"], strict=True):
        np.testing.assert_allclose(mine.tokens[:, 0], real.tokens[:, 0], rtol=1e-9)


def test_the_engines_own_rounds(llm):
    (full,) = measure_engine(
        llm, texts(3), DraftConfig(kv="full"), replace(PLAN, contexts=(10,), temperatures=(1.0,)), (3,)
    )
    assert full.how == "engine" and full.gammas == (3,)
    assert full.tokens.sum() == 4 * full.rounds.sum()
    assert llm.engine.num_unfinished == 0


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"contexts": (0,)}, "contexts"), ({"span": 2}, "span"), ({"rule": "both"}, "rule"), ({"k": 0}, "k")],
)
def test_senseless_plans_are_refused(settings, what):
    with pytest.raises(InvalidValueError) as caught:
        TauPlan(**settings)
    assert caught.value.what == what


def test_texts_that_are_too_short_are_refused(llm, methods):
    with pytest.raises(InvalidValueError, match="length of the texts is 29"):
        measure(llm.model, texts(length=29), methods, PLAN)


# --- texts that a target writes

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10], [11, 12]]


def test_texts_are_what_the_target_writes_and_writing_goes_on(llm, tmp_path):
    """The same whether it was killed or not, each by its own seed; what is there is not written again."""
    how = Writing("a model", temperature=1.0, length=12, seed=3, per_shard=2)
    write, asked = continuations(llm, 1.0, 12), []

    def mortal(prompts, seeds):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(seeds)
        return write(prompts, seeds)

    with pytest.raises(KeyboardInterrupt):
        write_texts(tmp_path, how, PROMPTS, mortal)
    asked.clear()
    got = write_texts(tmp_path, how, PROMPTS, mortal)
    assert asked == [[7]]
    for n, (row, prompt) in enumerate(zip(got.tolist(), PROMPTS, strict=True)):
        params = SamplingParams(temperature=1, seed=3 + n, max_tokens=12 - len(prompt), ignore_eos=True)
        assert row == prompt + list(llm.generate([prompt], params)[0].outputs[0].token_ids)
    with pytest.raises(ModelFileError, match="of other texts"):
        write_texts(tmp_path, replace(how, temperature=0.5), PROMPTS, write)
    with pytest.raises(ModelFileError, match="of other texts"):
        write_texts(tmp_path, how, PROMPTS[:4], write)
    with pytest.raises(InvalidValueError, match="tokens of a prompt is 12"):
        write_texts(tmp_path / "b", how, [[1] * 12], write)
