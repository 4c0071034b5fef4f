"""The planner's counting against a count by hand, its laws, its tables and its limits."""

import json
import math
from collections import Counter
from dataclasses import replace
from importlib.resources import files

import pytest

from longdraft.config import DraftConfig
from longdraft.errors import (
    InvalidValueError,
    KVCapacityError,
    ModelFileError,
    ModelNotFoundError,
    VocabularyMismatchError,
)
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.weights import num_parameters
from longdraft.planner.assumed import assumed, given
from longdraft.planner.candidates import Target, candidate, candidates
from longdraft.planner.catalogue import find_model, known_models, known_name
from longdraft.planner.cost import min_acceptance, network, pass_work, times
from longdraft.planner.hardware import GIB, Hardware, known_hardware, named_hardware
from longdraft.planner.memory import memory, require_one_row, rows_that_fit
from longdraft.planner.plan import Planner, Round, fastest, lengths, mean_tokens, plain_round, predict
from longdraft.spec.acceptance import expected_tokens

H200 = named_hardware("H200")
PLAIN = Hardware("plain", tflops=100, bandwidth_gb_s=1000)


def target(name="Llama-3.1-8B", hardware=H200, **more):
    return Target(name, known_models()[name], hardware, **more)


def self_draft(on, rate=0.8, **config):
    return candidate(on, DraftConfig(**config), given(rate))


# --- counting


def multiply_adds(config, queries, keys):
    """Of one row, product by product: every weight matrix, then scores and sums over the keys."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    linear = attention = 0
    for _ in range(config.num_layers):
        linear += queries * hidden * (heads + 2 * kv_heads) * dim  # q, k, v
        linear += queries * heads * dim * hidden  # o
        linear += 3 * queries * hidden * inner  # gate, up, down
        attention += 2 * queries * keys * heads * dim
    return linear + queries * hidden * config.vocab_size, attention


@pytest.mark.parametrize("shape", [{}, {"num_kv_heads": 4}, {"num_kv_heads": 1}, {"tie_embeddings": True}])
def test_work_of_a_small_model_by_hand(shape):
    config, rows, queries = tiny_config(**shape), [5, 40, 40, 100], 3
    work = pass_work(network(config, kv_bytes=4), Counter(rows), queries)
    counted = [multiply_adds(config, queries, n) for n in rows]
    norms = 2 * config.num_layers * config.hidden_size + config.hidden_size  # counted like other weights
    assert work.linear_flops == 2 * sum(linear for linear, _ in counted) + 2 * norms * queries * len(rows)
    assert work.attention_flops == 2 * sum(attention for _, attention in counted)
    assert work.kv_bytes == sum(rows) * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert work.rows == len(rows)
    source = RandomWeights(config)
    read = [n for n in source.shapes() if config.tie_embeddings or n != "model.embed_tokens.weight"]
    assert work.weight_bytes == 2 * sum(source.load(name).numel() for name in read)


def test_what_is_left_out_costs_nothing():
    config = tiny_config()
    whole, kept = network(config), network(config, layers=1)
    layer = num_parameters(config, "model.layers.0.")
    assert whole.weights - kept.weights == 2 * layer
    assert (kept.kv_elements, kept.attention_flops) == (whole.kv_elements // 3, whole.attention_flops // 3)
    bare = network(config, head=False, attention=False)
    assert (bare.weights, bare.attention_flops) == (3 * layer, 0)


def test_a_draft_step_reads_its_budget_of_each_row():
    on = target("SmolLM2-135M")
    rows = Counter([100, 300, 8000, 8000])
    for kv, read in (("streaming_llm", 100 + 256 + 256 + 256), ("full", 100 + 300 + 16000)):
        draft = self_draft(on, kv=kv, budget=256)
        work = pass_work(draft.network, rows, reads=draft.reads)
        assert work.kv_bytes == read * 2 * 30 * 3 * 64 * 2


def test_time_is_the_roof_of_each_kernel_of_the_pass_or_the_sum():
    config = known_models()["Llama-3.1-8B"]
    rows = {4000: 64}
    for queries in (1, 9):
        work = pass_work(network(config), rows, queries)
        linear = work.linear_flops / 100e12, work.weight_bytes / 1e12
        attention = work.attention_flops / 100e12, work.kv_bytes / 1e12
        expected = {
            "kernel": max(linear) + max(attention),
            "pass": max(linear[0] + attention[0], linear[1] + attention[1]),
            "none": sum(linear) + sum(attention),
        }
        for overlap, seconds in expected.items():
            hardware = replace(PLAIN, overlap=overlap, layer_s=1e-5, row_s=1e-6)
            assert times(work, hardware).total == pytest.approx(seconds + 32e-5 + 64e-6)
    assert times(work, PLAIN).bound == "compute"
    assert times(pass_work(network(config), {40_000: 64}), PLAIN).bound == "cache"
    assert times(pass_work(network(config), {100: 1}), PLAIN).bound == "weights"
    assert times(pass_work(network(config), {100: 1}), replace(PLAIN, layer_s=1.0)).bound == "overhead"


def test_efficiencies_and_devices_divide():
    work = pass_work(network(known_models()["Qwen2.5-7B"]), {4000: 64})  # 4 KV heads
    one, half = times(work, PLAIN), times(work, replace(PLAIN, compute_efficiency=0.5, bandwidth_efficiency=0.25))
    assert half.linear_compute == pytest.approx(2 * one.linear_compute)
    assert half.cache_read == pytest.approx(4 * one.cache_read)
    eight = times(work, replace(PLAIN, devices=8))
    assert eight.weight_read == pytest.approx(one.weight_read / 8)
    assert eight.cache_read == pytest.approx(one.cache_read / 4)  # no more devices than KV heads can share it


# --- laws


CONTEXTS = [2**i for i in range(9, 18)]


def verify_ratio(on, batch, context, gamma=4):
    one, many = (times(pass_work(on.network, {context: batch}, n), on.hardware).total for n in (1, gamma + 1))
    return many / one


@pytest.mark.parametrize("name", ["Llama-2-7B", "Llama-3.1-8B", "Qwen2.5-32B"])
def test_verification_costs_more_with_batch_and_less_with_context(name):
    on = target(name)
    for context in CONTEXTS:
        ratios = [verify_ratio(on, b, context) for b in (1, 4, 16, 64, 256)]
        assert ratios == sorted(ratios) and ratios[0] < ratios[-1]
    for batch in (16, 64, 256):
        ratios = [verify_ratio(on, batch, n) for n in CONTEXTS]
        assert ratios == sorted(ratios, reverse=True)
        assert 1 <= verify_ratio(on, batch, 2**24) < 1.01


def test_a_bounded_draft_step_is_ever_cheaper_beside_a_plain_step_and_a_full_small_one_is_not():
    on = target()
    small = {c.config.kv: c for c in candidates(on, ["Llama-3.2-1B"], [512], given(0.7))}
    ratios = {"self": [], "streaming_llm": [], "full": []}
    for batch in (8, 32, 128, 512):
        rows = {32000: batch}
        plain = plain_round(on, rows).seconds
        for name, draft in {"self": self_draft(on), **small}.items():
            ratios[name].append(predict(on, draft, rows, [1])[0].draft_s / plain)
    assert ratios["self"] == sorted(ratios["self"], reverse=True)
    assert ratios["streaming_llm"] == sorted(ratios["streaming_llm"], reverse=True)
    assert ratios["full"][-1] > 0.2 > 5 * ratios["streaming_llm"][-1]


@pytest.mark.parametrize("draft", [{}, {"layers": "every:2"}, {"weights": "target@int8"}])
def test_the_speedup_rises_with_the_context(draft):
    on = target(hardware=replace(H200, memory_gib=None))
    planner = Planner(on, (self_draft(on, **draft),))
    for batch in (8, 64, 256):
        gains = [planner.best_speedup(batch, n) for n in CONTEXTS]
        assert gains == sorted(gains)


def test_the_critical_context_is_longer_with_fewer_kv_heads_and_on_hardware_with_less_arithmetic():
    """MagicDec's S_inflection: MHA < GQA, and H100 < A100, per byte of bandwidth the weaker in arithmetic."""

    def critical(name, hardware, batch=256):
        on = target(name, named_hardware(hardware))
        return Planner(on, (self_draft(on, 0.8),)).break_even_context(batch)

    assert critical("Llama-2-7B-32K", "H100-SXM") < critical("Llama-3.1-8B", "H100-SXM")
    assert critical("Llama-3.1-8B", "H100-SXM") < critical("Llama-3.1-8B", "A100-80GB")


def test_break_even_is_where_the_speedup_crosses_one():
    on = target()
    planner = Planner(on, (self_draft(on, 0.7),))
    free = replace(planner, target=replace(on, hardware=replace(H200, memory_gib=None)))
    for batch in (32, 256):
        for goal in (1.0, 1.3):
            found = planner.break_even_context(batch, goal)
            assert free.best_speedup(batch, found) > goal >= free.best_speedup(batch, found - 1)
    assert Planner(on, (self_draft(on, 0.0),)).break_even_context(64) is None
    assert Planner(on, ()).break_even_context(64) is None
    assert list(lengths(100))[:3] == [16, 19, 23] and list(lengths(100))[-1] == 100


# --- choices


def test_a_round_is_made_of_passes_over_what_each_of_them_reads():
    on, rows = target(), {6000: 5, 30_000: 2}
    draft = self_draft(on, 0.7, budget=384)
    for found in predict(on, draft, rows, (1, 4)):
        step = times(pass_work(draft.network, rows, 1, lambda n: min(n, 384)), H200).total
        check = times(pass_work(on.network, rows, found.gamma + 1), H200).total
        assert (found.draft_s, found.verify_s, found.rows) == (step, check, 7)
        assert found.seconds == pytest.approx(found.gamma * step + check + H200.round_s)
        assert found.tokens_per_s == pytest.approx(7 * expected_tokens(0.7, found.gamma) / found.seconds)


def test_the_best_gamma_is_that_of_brute_force_and_plain_is_always_offered():
    on = target()
    draft = self_draft(on, 0.85)
    for batch, context in ((1, 1000), (64, 1000), (64, 16000), (8, 100_000)):
        ranking = Planner(on, (draft,), max_gamma=12).ranking(batch, context)
        rows = {context: rows_that_fit(on, draft, batch, context)}
        rounds = {r.gamma: r.tokens_per_s for r in predict(on, draft, rows, range(1, 13))}
        chosen = next(choice for choice in ranking if choice.draft)
        assert chosen.round.gamma == max(rounds, key=rounds.get)
        assert [c.speedup for c in ranking] == sorted((c.speedup for c in ranking), reverse=True)
        assert [c.round.gamma for c in ranking if c.draft is None] == [0]


def test_plain_decoding_wins_ties():
    plain = Round(0, 0.0, 1.0, 1.0)
    assert fastest([Round(1, 0.0, 2.0, 2.0)], plain) is plain
    assert fastest([], plain) is plain


def test_the_acceptance_that_is_needed():
    on = target()
    for rate in (0.0, 0.5, 0.9):
        rounds = predict(on, self_draft(on, rate), {16000: 32}, range(1, 9))
        plain = plain_round(on, {16000: 32})
        for found in rounds:
            needed = found.min_acceptance(plain, 1.5)
            at = replace(found, tokens=expected_tokens(needed, found.gamma))
            assert at.speedup(plain) == pytest.approx(1.5)
            assert (found.speedup(plain) >= 1.5) == (rate >= needed)
    choice = Planner(on, (self_draft(on),)).ranking(32, 16000)[0]
    assert choice.min_acceptance(1.5) == min(r.min_acceptance(choice.plain, 1.5) for r in choice.rounds)
    assert choice.min_acceptance() < choice.min_acceptance(1.5) < choice.min_acceptance(2.0)
    assert choice.min_acceptance(9.1) is None
    assert min_acceptance(2, plain=1.0, round_s=3.1) is None
    assert min_acceptance(2, plain=1.0, round_s=0.9) == 0.0
    assert min_acceptance(2, plain=1.0, round_s=3.0) == pytest.approx(1.0)


def test_acceptance_by_position_and_by_length_of_the_row():
    on = target()
    by_position = self_draft(on, (0.9, 0.5))
    assert predict(on, by_position, {1000: 4}, [2])[0].tokens == pytest.approx(1 + 0.9 + 0.45)
    mixed = candidate(on, DraftConfig(), assumed(DraftConfig(), on.name))
    rows = {4000: 1, 64000: 3}
    alone = [mean_tokens(mixed, {n: 1}, 4) for n in rows]
    assert mean_tokens(mixed, rows, 4) == pytest.approx((alone[0] + 3 * alone[1]) / 4)
    assert alone[0] > alone[1]


def test_rows_of_different_lengths_cost_what_their_sum_costs():
    on = target()
    mixed, even = plain_round(on, {8000: 8, 24000: 8}), plain_round(on, {16000: 16})
    assert mixed.seconds == pytest.approx(even.seconds)
    draft = self_draft(on, budget=10_000)
    step = [predict(on, draft, rows, [1])[0].draft_s for rows in ({8000: 8, 24000: 8}, {16000: 16})]
    assert step[0] < step[1]  # 8,000 and 10,000 of a row against 10,000 of every one


# --- memory


def test_memory_by_hand_and_the_largest_batch():
    on = target()
    held = memory(on, None, 64, 16384)
    assert held.weights == 2 * 8_030_261_248
    assert held.cache == 64 * 16384 * 2 * 32 * 8 * 128 * 2
    left = 141 * GIB * 0.9 - held.weights
    assert held.largest_batch == math.floor(left / (16384 * 131072)) == 55
    assert not held.fits and memory(on, None, 55, 16384).fits and not memory(on, None, 56, 16384).fits
    assert memory(target(kv_bytes=1.0), None, 64, 16384).cache == held.cache / 2
    unknown = memory(target(hardware=PLAIN), None, 64, 16384)
    assert (unknown.fits, unknown.largest_batch, unknown.usable) == (True, None, None)


def test_drafts_hold_their_share():
    on = target()
    small = candidates(on, ["Llama-3.2-1B"], [512], given(0.7))[1]
    held = memory(on, small, 10, 1000)
    assert held.draft_weights == 2 * 1_235_814_400
    assert held.draft_cache == 10 * 1000 * 2 * 16 * 8 * 64 * 2  # its own cache holds all, whatever it reads
    copying = replace(small.config, kv="snapkv")
    assert memory(on, candidate(on, copying, given(0.7)), 10, 1000).draft_cache == 10 * 1512 * 2 * 16 * 8 * 64 * 2
    assert memory(on, self_draft(on, kv="snapkv", budget=256), 10, 1000).draft_cache == 10 * 256 * 2 * 32 * 8 * 128 * 2
    assert memory(on, self_draft(on, weights="target@int8"), 10, 1000).draft_weights == 8_030_261_248
    assert memory(on, self_draft(on), 10, 1000).total == memory(on, None, 10, 1000).total


def test_a_draft_that_takes_room_is_compared_with_more_plain_rows():
    on = target()
    ranking = Planner(on, tuple(candidates(on, ["Llama-3.2-1B"], [512]))).ranking(64, 16384)
    small = next(c for c in ranking if c.draft)
    assert (small.round.rows, small.plain.rows) == (43, 55)
    assert small.speedup == pytest.approx(small.round.tokens_per_s / small.plain.tokens_per_s)
    needed = small.round.min_acceptance(small.plain)
    assert replace(small.round, tokens=expected_tokens(needed, small.round.gamma)).speedup(
        small.plain
    ) == pytest.approx(1)


def test_nothing_fits():
    on = target("Llama-3.1-70B")
    with pytest.raises(
        KVCapacityError, match=r"Llama-3.1-70B takes 131.4 GiB.*one row of 1,000.*126.9 GiB.*smaller model"
    ):
        require_one_row(on, 1000)
    assert Planner(on, ()).ranking(1, 1000) == []
    assert Planner(on, ()).best_speedup(1, 1000) is None
    short = target("Llama-3.1-70B", weight_bytes=1.0)
    with pytest.raises(KVCapacityError, match=r"at most 200,5\d\d tokens"):
        require_one_row(short, 10**6)
    require_one_row(short, 131_072)


# --- tables and names

# Sizes that the published checkpoints' indexes give.
PUBLISHED = {
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-13B": 13_015_864_320,
    "Llama-2-70B": 68_976_648_192,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "TinyLlama-1.1B": 1_100_048_384,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mistral-Nemo-12B": 12_247_782_400,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
}
SAME = {"Llama-2-7B-32K": "Llama-2-7B", "Llama-3-8B": "Llama-3.1-8B", "Llama-3-70B": "Llama-3.1-70B"}
SAME |= {"Llama-3.3-70B": "Llama-3.1-70B"}


def test_known_models_have_the_published_number_of_weights():
    found = {name: num_parameters(config) for name, config in known_models().items()}
    assert found == PUBLISHED | {name: PUBLISHED[other] for name, other in SAME.items()}


def test_names_are_found_however_they_are_written(tmp_path):
    assert known_name("meta-llama/Llama-3.1-8B-Instruct") == known_name("llama-3.1-8b") == "Llama-3.1-8B"
    assert find_model("Qwen/Qwen3-8B")[0] == "Qwen3-8B"
    with pytest.raises(ModelNotFoundError, match=r"GPT-5.*config\.json.*Llama-3\.1-8B.*Qwen3-32B"):
        find_model("GPT-5")


def test_a_config_is_enough(tmp_path, embedded_path):
    raw = json.loads((files("longdraft.planner") / "models.json").read_text())["models"]["Qwen3-8B"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(raw))
    assert find_model(str(file)) == find_model(str(tmp_path)) == (tmp_path.name, known_models()["Qwen3-8B"])
    assert find_model(None)[1] == find_model(str(embedded_path))[1]
    assert num_parameters(find_model(None)[1]) == PUBLISHED["SmolLM2-135M"]
    file.write_text("{")
    with pytest.raises(ModelFileError, match="valid JSON"):
        find_model(str(file))
    file.rename(tmp_path / "model.bin")
    for path in (tmp_path, tmp_path / "model.bin"):
        with pytest.raises(ModelFileError):
            find_model(str(path))


def test_hardware_has_sources_and_names():
    for name, hardware in known_hardware().items():
        assert hardware.source and hardware.kind == "gpu", name
        assert named_hardware(name.lower()) is hardware
        assert hardware.flops_per_s / hardware.bytes_per_s > 20
    eight, one = named_hardware("8xH100-SXM"), named_hardware("H100-SXM")
    assert (eight.devices, eight.tflops, eight.bandwidth_gb_s) == (8, one.tflops, one.bandwidth_gb_s)
    assert eight.usable_bytes == pytest.approx(8 * one.usable_bytes)
    with pytest.raises(InvalidValueError, match="H300.*H200.*MI300X.*--tflops"):
        named_hardware("H300")


@pytest.mark.parametrize(
    "bad",
    [{"tflops": 0}, {"bandwidth_gb_s": -1}, {"memory_gib": 0}, {"devices": 0}, {"compute_efficiency": 1.5}]
    + [{"layer_s": -1}, {"overlap": "some"}, {"kind": "tpu"}],
)
def test_bad_hardware(bad):
    (name,) = bad
    with pytest.raises(InvalidValueError, match=name):
        Hardware(**{"name": "x", "tflops": 1, "bandwidth_gb_s": 1, **bad})


def test_candidates_without_names_are_those_with_figures():
    assert [(c.key, c.config.kv, c.budget) for c in candidates(target())] == [
        ("streaming_llm", "streaming_llm", 256),
        ("streaming_llm", "streaming_llm", 512),
        ("Llama-3.2-1B", "full", None),
        ("Llama-3.2-1B", "streaming_llm", 512),  # none is published for smaller budgets
    ]
    cpu = [c.key for c in candidates(target("Qwen3-8B", PLAIN), budgets=[512])]
    assert cpu == ["streaming_llm", "int8"]


def test_named_candidates():
    on = target()
    names = ["ngram", "layer_skip", "int8", "full"]
    found = {c.key: c for c in candidates(on, names, [512, 1024], given(0.5))}
    assert found.keys() == set(names)
    assert found["ngram"].network is None and predict(on, found["ngram"], {1000: 4}, [3])[0].draft_s == 0
    assert found["layer_skip"].network.layers == 17  # every second, and the last
    assert found["int8"].network.weight_bytes == 1 and "CPU" in found["int8"].note
    assert (found["full"].budget, found["full"].reads(10**6)) == (None, 10**6)
    with pytest.raises(InvalidValueError, match=r"layer_skip.*--acceptance"):
        candidates(on, ["layer_skip"])
    with pytest.raises(VocabularyMismatchError, match="32000 tokens.*128256"):
        candidates(on, ["TinyLlama-1.1B"], [512])
    with pytest.raises(ModelNotFoundError):
        candidates(on, ["no-such-draft"])


def test_a_small_model_reads_no_more_than_it_was_made_for():
    on = target("Llama-2-7B-32K")
    full = next(c for c in candidates(on, ["TinyLlama-1.1B"], [512]) if c.config.kv == "full")
    assert (full.reads(1000), full.reads(30_000)) == (1000, 2048)


def test_assumed_acceptance_grows_with_the_budget_and_names_its_source():
    rates = [assumed(DraftConfig(budget=b), "Llama-3.1-8B").rate(16000) for b in (64, 100, 256, 512, 4096)]
    assert rates == sorted(rates) and rates[-1] == rates[-2] == pytest.approx(0.82)
    # Half-way between two published lengths is so by their ratio; beyond them it is level.
    by_length = [assumed(DraftConfig(), "Llama-3.1-8B").rate(n) for n in (1000, 4000, 64_000, 80_000, 100_000, 2**20)]
    assert by_length == pytest.approx([0.84, 0.84, 0.79, 0.79, 0.79, 0.79])
    assert assumed(DraftConfig(), "any").rate(45_255) == pytest.approx(0.80, abs=1e-6)
    assert assumed(DraftConfig(budget=32), "Llama-3.1-8B") is None
    int8 = assumed(DraftConfig(weights="target@int8"), "Llama-3.1-8B")
    assert int8.rate(16000) < rates[-1] and "8-bit" in int8.source
    assert "2408.11049" in assumed(DraftConfig(), "any").source
    other = assumed(DraftConfig(weights="Qwen3-0.6B"), "Qwen3-32B")
    assert "no figure for this pair" in other.source
    for text in (1.5, -0.1, float("nan"), (0.5, 2.0)):
        with pytest.raises(InvalidValueError, match="acceptance"):
            given(text)
