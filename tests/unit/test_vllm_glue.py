"""The plug-in for vLLM over a runner of our own: which blocks, slots, rows, distributions, and when it stays away.

The runner here keeps token ids in its pages instead of keys and values, and its model's next token is a function of all
tokens a row can see: whoever reads a wrong block, position or slot drafts something else. ``tests/in_vllm`` runs vLLM.
"""

from __future__ import annotations

import random
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from longdraft.errors import InvalidValueError
from longdraft.integrations.vllm.args import engine_args, serve_line
from longdraft.integrations.vllm.drafter import Drafter
from longdraft.integrations.vllm.guard import config_refusals, runner_refusals, twin_refusals, version_refusal
from longdraft.integrations.vllm.repair import expand_batch_to_tokens, repair
from longdraft.integrations.vllm.sampling import Draw, Filters, Seeds
from longdraft.integrations.vllm.settings import Settings
from longdraft.integrations.vllm.tables import PAD_SLOT, DraftTables
from longdraft.sampling_params import SamplingParams
from longdraft.spec.probs import to_log_probs

VOCAB, BLOCK = 13, 4


def next_token(seen):
    """Of ``(position, token)`` pairs, in any order."""
    return sum((position + 1) * (token + 3) for position, token in seen) % VOCAB


def params(temperature=0.0, **more):
    given = dict(temperature=temperature, top_k=-1, top_p=1.0, seed=None, max_tokens=None, extra_args=None)
    return SimpleNamespace(**{**given, **more})


class Table:
    """Of vLLM's block table, what is used."""

    def __init__(self, rows, block_size=BLOCK):
        self.block_size = block_size
        self.num_blocks_per_row = np.array([len(row) for row in rows], dtype=np.int32)
        self.table = torch.zeros(len(rows), 64, dtype=torch.int32)
        for i, row in enumerate(rows):
            self.table[i, : len(row)] = torch.tensor(row)

    def get_device_tensor(self, num_reqs):
        return self.table[:num_reqs]


class Runner:
    """Sequences in pages, at random blocks; ``spare``: slots beyond the known tokens' of each row."""

    def __init__(self, texts, all_params=None, spare=20, max_model_len=200, seed=0):
        rng = random.Random(seed)
        blocks = list(range(400))
        rng.shuffle(blocks)
        counts = [-(-(len(text) + spare) // BLOCK) for text in texts]
        rows = [[blocks.pop() for _ in range(count)] for count in counts]
        names = [f"r{i}" for i in range(len(texts))]
        requests = all_params or [params() for _ in texts]
        self.texts, self.max_model_len, self.device = texts, max_model_len, torch.device("cpu")
        self.requests = {
            name: SimpleNamespace(sampling_params=p, num_prompt_tokens=len(text))
            for name, p, text in zip(names, requests, texts, strict=True)
        }
        self.input_batch = SimpleNamespace(block_table=[Table(rows)], req_ids=names, sampling_metadata=None)
        group = SimpleNamespace(layer_names=["layer"], get_metadata_builder=lambda _: None)
        self.attn_groups, self.effective_drafter_max_model_len = [[group]], 0
        self._draft_probs = self._draft_prob_req_ids = None
        self.model = self.forward
        self.pages = torch.full((400 * BLOCK,), -1)
        self.written, self.seen = [], []
        for text, row in zip(texts, rows, strict=True):
            for position, token in enumerate(text[:-1]):  # the newest has no keys and values yet
                self.pages[row[position // BLOCK] * BLOCK + position % BLOCK] = token

    def arguments(self, rows=None):
        """Of ``propose``: ``rows`` got a token, the others sit in their prompts."""
        longest = max(map(len, self.texts))
        ids = np.zeros((len(self.texts), longest), dtype=np.int32)
        for i, text in enumerate(self.texts):
            ids[i, : len(text)] = text
        got = range(len(self.texts)) if rows is None else rows
        return (
            [[text[-1]] if i in got else [] for i, text in enumerate(self.texts)],
            np.array([*map(len, self.texts)]),
            ids,
        )

    def forward(self, ids, step, tables, index):
        """The pass over the pages: writes the fed tokens, and reads what the tables show."""
        for slot, token in zip(step.slots.tolist(), ids.tolist(), strict=True):
            if slot != PAD_SLOT:
                self.pages[slot] = token
                self.written.append(slot)
        logits = torch.zeros(len(ids), VOCAB)
        for row, length in enumerate(step.lengths.tolist()):
            assert length <= tables.longest
            at = range(length)
            tokens = [int(self.pages[tables.table[row, i // BLOCK] * BLOCK + i % BLOCK]) for i in at]
            gap = int(step.positions[row]) + 1 - length  # of the positions behind the sinks
            first = -(-self.sinks // BLOCK) * BLOCK
            positions = [i if i < first else i + gap for i in at]
            self.seen.append((row, index, positions))
            logits[row, next_token(zip(positions, tokens, strict=True))] = 5.0
        return logits

    def drafter(self, settings=None, most=3, off=None):
        self.said = []
        settings = settings or Settings(draft="full")
        self.sinks = settings.sinks
        drafter = Drafter(settings, most, 0, self.forward, self.said.append, off)
        drafter.runner = self
        return drafter


def texts(rng, count, shortest=1, longest=90):
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def decode(text, count):
    """What the model says next, ``count`` times."""
    text = list(text)
    for _ in range(count):
        text.append(next_token(enumerate(text)))
    return text[-count:]


@pytest.mark.parametrize("seed", range(5))
def test_over_all_blocks_drafts_are_the_models_own_words(seed):
    runner = Runner(texts(random.Random(seed), 5), seed=seed)
    assert runner.drafter(most=6).propose(*runner.arguments()) == [decode(text, 6) for text in runner.texts]
    assert not runner.said


def kept(known, step, budget, sinks):
    """Positions a draft step may read, from the definition: whole blocks of the sinks and of the last tokens."""
    first = -(-sinks // BLOCK)
    recent = max(0, known - budget) // BLOCK
    return [p for p in range(known + step) if p // BLOCK < first or p // BLOCK >= recent]


def test_a_budget_shows_sinks_and_the_last_tokens_and_writes_the_rows_own_slots_alone():
    rng = random.Random(1)
    for trial in range(60):
        budget, sinks, most = rng.randint(1, 40), rng.choice((0, 1, 4, 9)), rng.randint(1, 6)
        runner = Runner(texts(rng, rng.randint(1, 5)), seed=trial)
        drafts = runner.drafter(Settings(budget=budget, sinks=sinks), most).propose(*runner.arguments())
        assert not runner.said
        assert [len(draft) for draft in drafts] == [most] * len(drafts)
        for row, step, positions in runner.seen:
            assert positions == kept(len(runner.texts[row]), step, budget, sinks)
        table = runner.input_batch.block_table[0].table
        own = {
            int(table[i, p // BLOCK]) * BLOCK + p % BLOCK
            for i, text in enumerate(runner.texts)
            for p in range(len(text) - 1, len(text) - 1 + most)
        }
        assert set(runner.written) == own and len(runner.written) == len(own)


def test_rows_are_cut_singly_by_their_slots_the_models_length_and_their_own_wish():
    length = 60
    wishes = [None, {"longdraft_gamma": 1}, {"longdraft_off": 1}, {"longdraft_gamma": 9}, None]
    rows = texts(random.Random(2), 4, 20, 40) + [[1] * (length - 3)]
    runner = Runner(rows, [params(extra_args=wish) for wish in wishes], max_model_len=length)
    table = runner.input_batch.block_table[0]
    # The first row's own tokens fill its last block but for the newest's slot and one more.
    runner.texts[0] = runner.texts[0][: 4 * BLOCK + 3]
    table.num_blocks_per_row[0] = 5
    drafts = runner.drafter(most=5).propose(*runner.arguments())
    assert [len(draft) for draft in drafts] == [2, 1, 0, 5, 2]
    for text, draft in zip(runner.texts, drafts, strict=True):
        assert draft == decode(text, 5)[: len(draft)]
    assert not runner.said


def test_counts_are_of_verified_tokens_alone():
    """Three rows: one keeps 2 of 3, one is in its prompt, one had ended before anything was verified."""
    runner = Runner(texts(random.Random(11), 3, 20))
    drafter = runner.drafter(most=3)
    drafter.propose(*runner.arguments(rows=(0, 2)))
    sampled, lengths, ids = runner.arguments(rows=(0,))
    sampled[0] = [1, 2, int(ids[0, lengths[0] - 1])]
    runner.input_batch.req_ids[2] = "another"
    runner.requests["another"] = runner.requests["r2"]
    drafter.propose(sampled, lengths, ids)
    counts = drafter.change()
    assert (counts["rounds"], counts["verified"], counts["accepted"]) == (2, 3, 2)
    assert drafter.counts == {}


def test_settings_change_while_it_runs_but_for_the_attention():
    drafter = Runner(texts(random.Random(12), 1)).drafter()
    drafter.change(gamma=1, attention="vllm")
    assert drafter.settings.gamma == 1
    with pytest.raises(InvalidValueError, match="attention"):
        drafter.change(attention="native")


def test_rows_in_their_prompts_draft_nothing_and_disturb_nobody():
    runner = Runner(texts(random.Random(3), 4))
    drafts = runner.drafter(most=2).propose(*runner.arguments(rows=(1, 3)))
    assert drafts == [[], decode(runner.texts[1], 2), [], decode(runner.texts[3], 2)]
    assert runner.drafter().propose(*runner.arguments(rows=())) == [[]] * 4


def test_a_bad_wish_of_one_request_is_named_once_and_passed_over():
    runner = Runner(texts(random.Random(4), 2), [params(extra_args={"longdraft_gamma": "lots"}), params()])
    drafter = runner.drafter(most=2)
    for _ in range(2):
        assert [len(draft) for draft in drafter.propose(*runner.arguments())] == [2, 2]
    assert len(runner.said) == 1 and "gamma" in runner.said[0] and "lots" in runner.said[0]


def test_sampled_drafts_hand_their_distributions_over_and_greedy_rows_are_one_hot():
    rows = [params(), params(1.0, seed=7), params(0.5, top_k=2, seed=8)]
    runner = Runner(texts(random.Random(5), 3), rows)
    drafts = runner.drafter(most=3).propose(*runner.arguments())
    probs, names = runner._draft_probs, runner._draft_prob_req_ids
    assert names == runner.input_batch.req_ids and probs.shape == (3, 3, VOCAB) and probs.dtype == torch.float32
    assert drafts[0] == decode(runner.texts[0], 3)
    assert [int(p.argmax()) for p in probs[0]] == drafts[0] and torch.equal(probs[0].amax(-1), torch.ones(3))
    assert ((probs[2] > 0).sum(-1) == 2).all() and all(probs[2, j, drafts[2][j]] > 0 for j in range(3))
    first = torch.softmax(torch.nn.functional.one_hot(torch.tensor(decode(runner.texts[1], 1)[0]), VOCAB) * 5.0, 0)
    torch.testing.assert_close(probs[1, 0], first.float())
    # A seed drafts the same again, alone or in company; another one something else at some place.
    alone = Runner([runner.texts[1]], [params(1.0, seed=7)])
    assert alone.drafter(most=3).propose(*alone.arguments())[0] == drafts[1]


def test_all_greedy_rows_hand_over_no_distributions():
    runner = Runner(texts(random.Random(6), 2))
    runner.drafter().propose(*runner.arguments())
    assert runner._draft_probs is None and runner._draft_prob_req_ids is None


def test_tokens_are_drawn_from_the_distribution_that_is_handed_over():
    logits = torch.randn(1, 5, generator=torch.Generator().manual_seed(0)).expand(4000, 5)
    draw = Draw([SamplingParams(temperature=0.7)] * 4000, list(range(4000)), logits.device)
    tokens, q = draw(logits, torch.arange(4000))
    torch.testing.assert_close(q[0], torch.softmax(logits[0] / 0.7, -1))
    counts = torch.bincount(tokens, minlength=5)
    assert float(((counts - 4000 * q[0]) ** 2 / (4000 * q[0])).sum()) < 18.5  # chi-square, 4 degrees, p = .001


def test_all_rows_at_once_are_filtered_as_each_alone():
    """What devices filter by is what processors do: ties at borders, rows of one token, rows of all."""
    rng = random.Random(0)
    rows = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), SamplingParams(temperature=0.3)]
    rows += [SamplingParams(temperature=0.8, top_k=k) for k in (1, 3, 40, 500)]
    rows += [SamplingParams(temperature=1.5, top_p=p) for p in (1e-9, 0.3, 0.9, 1 - 1e-9)]
    rows += [SamplingParams(temperature=rng.uniform(0.2, 2), top_k=rng.randint(1, 60), top_p=0.7) for _ in range(4)]
    logits = (torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(1)) * 2).round(decimals=1)
    for chosen in (slice(None), slice(1, 3)):
        expected, mine = (
            to_log_probs(logits[chosen], rows[chosen]),
            Filters(rows[chosen], logits.device)(logits[chosen]),
        )
        assert torch.equal(expected > -torch.inf, mine > -torch.inf)
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_requests_without_a_seed_differ_and_ranks_agree():
    one, two = Seeds(3), Seeds(3)
    names = ["a", "b", "a", "c"]
    assert [one.of(name, None) for name in names] == [two.of(name, None) for name in names]
    assert len({one.of(name, None) for name in names}) == 3
    assert Seeds(4).of("a", None) != one.of("a", None)  # vLLM's own seed counts
    assert one.of("d", 5) == two.of("e", 5)
    before = one.of("a", None)
    one.keep(["b"])
    assert one.of("a", None) != before


def test_whatever_goes_wrong_means_plain_decoding_and_one_sentence():
    runner = Runner(texts(random.Random(7), 2), [params(1.0), params(1.0)])
    drafter = runner.drafter()
    runner._draft_probs = runner._draft_prob_req_ids = "stale"
    drafter._forward = lambda *_: 1 / 0
    for _ in range(3):
        assert drafter.propose(*runner.arguments()) == [[], []]
    assert len(runner.said) == 1 and "ZeroDivisionError" in runner.said[0]
    assert runner._draft_probs is None and runner._draft_prob_req_ids is None


def test_an_unbound_drafter_says_how_to_bind_it():
    runner = Runner(texts(random.Random(8), 1))
    drafter = runner.drafter()
    drafter.runner = None
    assert drafter.propose(*runner.arguments()) == [[]] and "vllm-args" in runner.said[0]


def test_runners_of_another_make_are_refused_by_name():
    runner = Runner(texts(random.Random(9), 1))
    assert not list(runner_refusals(runner))
    del runner.effective_drafter_max_model_len
    assert "effective_drafter_max_model_len" in next(runner_refusals(runner))
    runner = Runner(texts(random.Random(9), 1))
    runner.attn_groups = [runner.attn_groups[0], runner.attn_groups[0]]
    assert "2 kinds" in next(runner_refusals(runner))
    runner = Runner(texts(random.Random(9), 1))
    del runner.input_batch.block_table[0].num_blocks_per_row
    assert "num_blocks_per_row" in next(runner_refusals(runner))


@pytest.mark.parametrize(
    ("version", "fine"), [("0.31.2", False), ("0.32.0", True), ("0.33.1rc2", True), ("0.34", False), ("1.0", False)]
)
def test_versions(version, fine):
    assert (version_refusal(version) is None) == fine


def config(**changes):
    model = dict(
        is_encoder_decoder=False, uses_mrope=False, is_hybrid=False, is_attention_free=False, enable_prompt_embeds=False
    )
    parallel = dict(
        pipeline_parallel_size=1,
        data_parallel_size=1,
        enable_expert_parallel=False,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        is_moe_model=False,
    )
    whole = dict(kv_transfer_config=None, lora_config=None)
    for name, value in changes.items():
        next(part for part in (model, parallel, whole) if name in part)[name] = value
    return SimpleNamespace(model_config=SimpleNamespace(**model), parallel_config=SimpleNamespace(**parallel), **whole)


def test_what_cannot_be_drafted_for_is_refused_in_a_sentence():
    assert not list(config_refusals(config()))
    assert not list(config_refusals(config(data_parallel_size=2)))
    refused = dict(
        pipeline_parallel_size=2,
        decode_context_parallel_size=2,
        prefill_context_parallel_size=2,
        kv_transfer_config="x",
        lora_config="x",
        is_encoder_decoder=True,
        uses_mrope=True,
        is_hybrid=True,
        is_attention_free=True,
        enable_prompt_embeds=True,
    )
    for name, value in refused.items():
        assert len(list(config_refusals(config(**{name: value})))) == 1, name
    for experts in ("enable_expert_parallel", "is_moe_model"):
        assert len(list(config_refusals(config(data_parallel_size=2, **{experts: True})))) == 1


def test_settings_of_a_server_and_of_a_request():
    server = Settings.of_server({"longdraft": {"budget": 100}})
    assert (server.draft, server.budget, server.sinks, server.gamma) == ("streaming_llm", 100, 16, None)
    assert Settings.of_server({}) == Settings.of_server(None) == Settings()
    assert server.of_request({"other": 1}) is server
    assert server.of_request({"longdraft_gamma": 2, "longdraft_budget": 7}) == Settings(budget=7, gamma=2)
    assert server.of_request({"longdraft_off": 1, "longdraft_gamma": 2}).gamma == 0
    for bad in (
        {"longdraft": {"window": 1}},
        {"longdraft": 5},
        {"longdraft": {"draft": "snap"}},
        {"longdraft": {"budget": 0}},
    ):
        with pytest.raises(InvalidValueError):
            Settings.of_server(bad)
    for bad in ({"longdraft_budget": 0}, {"longdraft_window": 3}, {"longdraft_off": 2}):
        with pytest.raises(InvalidValueError):
            server.of_request(bad)


def test_the_line_for_vllm_says_what_the_keywords_say():
    words = shlex.split(serve_line("a model", Settings(budget=64), 4, "cpu"))
    arguments = engine_args(Settings(budget=64), 4, "cpu")
    assert words[:3] == ["vllm", "serve", "a model"] and len(words) == 3 + 2 * len(arguments)
    assert words[words.index("--worker-cls") + 1] == arguments["worker_cls"]
    assert '"budget": 64' in words[words.index("--additional-config") + 1]
    assert '"num_speculative_tokens": 4' in words[words.index("--speculative-config") + 1]
    with pytest.raises(InvalidValueError, match="device"):
        engine_args(Settings(), 4, "tpu")


def test_an_attention_of_ours_goes_with_and_without_a_draft_on_cpus_alone():
    ours = Settings(attention="native")
    assert "speculative_config" not in engine_args(ours, 0, "cpu")
    assert engine_args(ours, 3, "cpu")["additional_config"]["longdraft"]["attention"] == "native"
    with pytest.raises(InvalidValueError, match="attention"):
        engine_args(ours, 3, "gpu")
    with pytest.raises(InvalidValueError, match="attention"):
        Settings.of_server({"longdraft": {"attention": "flash"}})
    with pytest.raises(InvalidValueError, match="attention native"):
        Settings(weights="int8")
    assert Settings(weights="int8", attention="native").weights == "int8"


def test_no_weights_of_its_own_beside_a_target_in_parts_or_quantised():
    def config(ranks=1, quantization=None):
        model, parallel = SimpleNamespace(quantization=quantization), SimpleNamespace(tensor_parallel_size=ranks)
        return SimpleNamespace(model_config=model, parallel_config=parallel)

    assert not list(twin_refusals(config()))
    assert len(list(twin_refusals(config(2)))) == len(list(twin_refusals(config(quantization="gptq")))) == 1


def test_vllms_defects_are_found_and_repaired():
    x, ends = torch.tensor([1.0, 0.5, 0.0]), torch.tensor([1, 1, 4], dtype=torch.int32)
    assert expand_batch_to_tokens(x, ends, 4, 0, 9).tolist() == [1.0, 9.0, 9.0, 9.0]
    fine = SimpleNamespace(
        expand_batch_to_tokens=expand_batch_to_tokens, apply_sampling_constraints=lambda x, *_: x + 1
    )
    assert not list(repair(fine, torch.device("cpu")))

    def constraints(logits, ends, metadata):
        return logits + metadata.top_k.expand(len(logits)).max()

    wrong = SimpleNamespace(
        expand_batch_to_tokens=lambda x, ends, n, *a: torch.zeros(n, dtype=x.dtype),
        apply_sampling_constraints=constraints,
    )
    assert len(list(repair(wrong, torch.device("cpu")))) == 2
    assert wrong.expand_batch_to_tokens is expand_batch_to_tokens
    params = SimpleNamespace(top_k=torch.tensor([2]))
    assert wrong.apply_sampling_constraints(torch.empty(0, 3), ends, params).shape == (0, 3)
    assert wrong.apply_sampling_constraints(torch.zeros(1, 3), ends, params).tolist() == [[2.0] * 3]
    assert not list(repair(wrong, torch.device("cpu")))


def test_tables_are_vllms_own_where_nothing_is_left_out():
    table = torch.arange(12, dtype=torch.int32).view(2, 6)
    tables = DraftTables.build(table, [9, 20], [2, 3], [100, 100], 0, BLOCK)
    assert torch.equal(tables.table[1], table[1]) and torch.equal(tables.table[0, :3], table[0, :3])
    assert tables.longest == 22
