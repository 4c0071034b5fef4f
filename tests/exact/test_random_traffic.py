"""Random requests with random parameters and drafts in a crowded engine return what each returns alone and plainly."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from longdraft.engine.admission import derived_seed
from longdraft.sampling_params import SamplingParams
from tests.exact.test_contract import (
    DRAFTS,
    Kit,
    by_prompt,
    check_nothing_left,
    check_same,
    check_same_logprobs,
    push_away,
    random_ids,
    stores,
)

REQUESTS = 200
SIZES = {"num_pages": 9, "max_num_seqs": 12, "max_num_batched_tokens": 24, "max_model_len": 96}
LENGTHS = (1, 2, 3, 5, 9, 15, 16, 17, 24, 31, 33, 48, 60)


@pytest.fixture(scope="module")
def kit(tiny):
    return Kit(tiny)


def unlucky(ids, logits):
    """Fails behind an odd token."""
    if ids and ids[-1] % 2:
        raise ValueError("unlucky")
    return logits


CHOICES = {
    "top_k": lambda rng: rng.choice([-1, 1, 2, 5, 30]),
    "top_p": lambda rng: rng.choice([0.3, 0.8, 0.99]),
    "min_p": lambda rng: rng.choice([0.02, 0.1, 0.5]),
    "repetition_penalty": lambda rng: rng.choice([0.7, 1.1, 1.6]),
    "presence_penalty": lambda rng: rng.choice([-2.0, 0.6, 2.0]),
    "frequency_penalty": lambda rng: rng.choice([-0.6, 0.6, 2.0]),
    "logit_bias": lambda rng: {t: rng.choice([-100, -4, 3, 5]) for t in random_ids(rng, 6)},
    "bad_words": lambda rng: [random_ids(rng, rng.choice([1, 1, 1, 2])) for _ in range(20)],
    "allowed_token_ids": lambda rng: random_ids(rng, rng.choice([2, 5, 60])),
    "logits_processors": lambda rng: rng.choice([push_away, [by_prompt, push_away], unlucky]),
    "min_tokens": lambda rng: rng.randint(1, 8),
    "stop_token_ids": lambda rng: random_ids(rng, 12),
    "stop": lambda rng: rng.choice([["A", "#"], ["B"], ["bC", "cDd", "zz"], ["D"]]),
    "include_stop_str_in_output": lambda rng: True,
    "skip_special_tokens": lambda rng: False,
    "ignore_eos": lambda rng: True,
    "logprobs": lambda rng: rng.randint(0, 3),
    "prompt_logprobs": lambda rng: rng.randint(0, 3),
    "truncate_prompt_tokens": lambda rng: rng.choice([-1, 1, 8, 20]),
    "n": lambda rng: rng.choice([2, 3]),
}


def random_request(rng):
    chosen = rng.sample(list(CHOICES), rng.choice([0, 1, 2, 3, 3, 4, 5, 7]))
    params = {name: CHOICES[name](rng) for name in chosen}
    params |= {"temperature": rng.choice([0, 0, 0.7, 1.0, 1.3]), "seed": rng.randrange(2**63)}
    params["max_tokens"] = rng.randint(max(1, params.get("min_tokens", 0)), 36)
    return random_ids(rng, rng.choice(LENGTHS)), SamplingParams(**params)


def random_draft(rng):
    if rng.random() < 0.1:
        return None
    return replace(DRAFTS[rng.choice(list(DRAFTS))], gamma=rng.choice((1, 2, 2, 3, 4, 8)))


class Traffic:
    """Everything that may happen to requests, with a note of what each sequence should return."""

    def __init__(self, kit, seed):
        self.rng, self.engine = random.Random(seed), kit.engine(**SIZES)
        self.wanted = {}  # sequence id → (sequence, prompt, params of one plain request alone)
        self.joined, self.did = 0, Counter()

    def join(self):
        prompt, params = random_request(self.rng)
        ids = self.engine.add_all(prompt, params, random_draft(self.rng))
        for i, request_id in enumerate(ids):
            own = replace(params, n=1, seed=derived_seed(params.seed, i) if i else params.seed)
            own = replace(own, prompt_logprobs=None) if i else own
            self.wanted[request_id] = (self.engine.sequence(request_id), prompt, own)
        self.joined += 1

    def fork(self, source):
        child = self.engine.fork(source, draft=random_draft(self.rng))
        self.wanted[child] = (self.engine.sequence(child), *self.wanted[source][1:])

    def abort(self, request_id):
        self.engine.abort(request_id)

    def preempt(self, request_id):
        del request_id  # only one that runs can be thrown out
        if running := self.engine.scheduler.running:
            self.engine.scheduler.preempt(self.rng.choice(running))

    def hold(self, request_id):
        self.engine.hold(request_id, not self.engine.sequence(request_id).held)

    def act(self):
        """A new request, or something that happens to an old one; where all that is left is held, it may go on."""
        live = list(self.engine._sequences)
        if self.joined < REQUESTS and (len(live) < 10 or self.rng.random() < 0.1):
            return self.join()
        what = self.rng.choices(["fork", "abort", "preempt", "hold", "nothing"], [3, 2, 3, 3, 80])[0]
        if what != "nothing" and live:
            self.did[what] += 1
            return getattr(self, what)(self.rng.choice(live))
        if not self.engine.has_work:
            for request_id in live:
                self.engine.hold(request_id, False)
        return None

    def run(self):
        while self.joined < REQUESTS or self.engine.num_unfinished:
            self.act()
            self.engine.step()
            for store in stores(self.engine):
                store.check_integrity()
            running = {seq.id for seq in self.engine.scheduler.running}
            for draft in self.engine.runner._drafts.values():
                assert running.issuperset(getattr(draft, "_states", ()))


def plain_outputs(kit, requests):
    """What each (prompt, params) gives without drafts, all in one roomy engine, and some of them compared alone."""
    limit = SIZES["max_model_len"]
    roomy = {"num_pages": 8 * len(requests), "max_num_seqs": len(requests), "max_num_batched_tokens": 2048}
    outputs = [own[0] for own in kit.batch(requests, **roomy, max_model_len=limit)]
    for request, want in list(zip(requests, outputs, strict=True))[::10]:
        check_same(kit.alone(*request, max_model_len=limit)[0], want)
    return outputs


def check(seq, want):
    """What came is what a plain request gives, or its beginning if it was aborted."""
    if seq.finish_reason != "abort":
        check_same(seq, want)
        return
    n = len(seq.output_ids)
    assert seq.output_ids == want.output_ids[:n]
    assert n < len(want.output_ids) or want.finish_reason == "error"
    check_same_logprobs(seq.logprobs, want.logprobs[:n])
    check_same_logprobs(seq.prompt_logprobs, want.prompt_logprobs[: len(seq.prompt_logprobs)])


def check_traffic(kit, seed):
    traffic = Traffic(kit, seed)
    traffic.run()
    check_nothing_left(traffic.engine)
    assert traffic.joined == REQUESTS
    requests = {(tuple(prompt), params): None for _, prompt, params in traffic.wanted.values()}
    want = dict(zip(requests, plain_outputs(kit, list(requests)), strict=True))
    for seq, prompt, params in traffic.wanted.values():
        check(seq, want[tuple(prompt), params])
    seqs = [seq for seq, _, _ in traffic.wanted.values()]
    reasons = Counter(seq.finish_reason for seq in seqs)
    assert min(reasons[x] for x in ("stop", "length", "error", "abort")) >= 3, reasons
    assert min(traffic.did[x] for x in ("fork", "abort", "preempt", "hold")) >= 10, traffic.did
    assert traffic.engine.scheduler.num_preemptions > traffic.did["preempt"] + 3  # some for want of pages
    for what in ("drafted", "accepted"):
        assert sum(sum(getattr(seq.stats, what)) for seq in seqs) > REQUESTS
    used = {seq.draft and replace(seq.draft, gamma=1) for seq in seqs}
    assert used == {None, *(replace(draft, gamma=1) for draft in DRAFTS.values())}


def test_random_traffic(kit):
    check_traffic(kit, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 12))
def test_more_random_traffic(kit, seed):
    check_traffic(kit, seed)
