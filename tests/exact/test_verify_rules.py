"""The two rules of acceptance: exact laws, simulated laws, acceptance as promised, ragged rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft import SamplingParams
from longdraft.spec import verify
from longdraft.spec.acceptance import coupled_overlap, expected_tokens, overlap
from longdraft.spec.noise import (
    ACCEPT,
    COUPLED,
    DRAFT,
    RESIDUAL,
    accept_uniforms,
    all_gumbels,
    gumbels,
    philox,
    uniforms,
)
from longdraft.spec.sample import draw
from longdraft.spec.verify import acceptance_probability, draft_draw, residual
from tests.exact.laws import (
    Toy,
    counts,
    coupled,
    deterministic,
    first_tokens,
    g_test,
    generate,
    joint,
    maximal,
    plain,
    propose,
    speculative_joint,
)

EXACT = 1e-12
N = 40_000  # seeds of a simulation
GOOD = 1e-3  # a right law's p-value is above it


@pytest.fixture(autouse=True)
def wide_draws(monkeypatch):
    """Thousands of tiny rows at once."""
    monkeypatch.setattr(verify, "DRAW_ROWS", 1 << 20)


def normed(weights):
    x = torch.tensor(weights, dtype=torch.float64)
    return x / x.sum()


weight = st.one_of(st.just(0.0), st.just(1e-30), st.floats(1e-6, 1))
laws = st.lists(weight, min_size=6, max_size=6).filter(lambda x: sum(x) > 1e-3).map(normed)
one_hots = st.integers(0, 5).map(lambda i: torch.eye(6, dtype=torch.float64)[i])
halves = st.tuples(laws, st.booleans()).map(lambda x: torch.cat([x[0], 0 * x[0]][:: 1 if x[1] else -1]))
pairs = st.one_of(
    st.tuples(laws, laws), st.tuples(one_hots, laws), st.tuples(laws, one_hots), laws.map(lambda p: (p, p.clone()))
).map(lambda pair: tuple(torch.cat([x, torch.zeros(6).double()]) for x in pair))


# The closed form.


@settings(max_examples=300, deadline=None)
@given(st.one_of(pairs, st.tuples(halves, halves)))
def test_maximal_rule_emits_the_targets_law(pair):
    """Zeros, disjoint supports, one-hots, masked halves, p = q, tiny 1e-30."""
    p, q = pair
    kept = q * acceptance_probability(p, q)
    assert (kept + (1 - kept.sum()) * residual(p, q) - p).abs().max() < EXACT
    assert residual(p, q).sum() == pytest.approx(1, abs=EXACT)


@settings(max_examples=100, deadline=None)
@given(st.one_of(pairs, st.tuples(halves, halves)))
def test_acceptance_formulas(pair):
    """The fast formula of coupled acceptance equals the double sum and keeps its bounds."""
    p, q = pair
    slow = sum(
        1 / torch.maximum(p / p[i], q / q[i]).sum().item() for i in range(len(p)) if p[i].item() > 0 and q[i].item() > 0
    )
    agree, most = coupled_overlap(p, q).item(), overlap(p, q).item()
    assert agree == pytest.approx(slow, abs=EXACT)
    assert most / (2 - most) - EXACT <= agree <= most + EXACT


def test_nothing_can_be_said_for_a_token_the_draft_cannot_draw():
    p, q = normed([1.0, 1.0]), torch.tensor([1.0, 0.0]).double()
    assert acceptance_probability(p, q).tolist() == [0.5, 0.0]
    broken = torch.full_like(q, math.nan)
    assert acceptance_probability(p, broken).tolist() == [0, 0]
    assert torch.equal(residual(p, broken), p)


# Exact and simulated laws of several tokens.


@pytest.mark.parametrize(("vocab", "gamma"), [(3, 1), (3, 3), (4, 2), (5, 1), (5, 3)])
def test_joint_law_by_enumeration(vocab, gamma):
    target, draft = Toy(vocab, gamma + 1, 1), Toy(vocab, gamma + 1, 2)
    for n in (gamma + 1, gamma + 2):
        assert (speculative_joint(target, draft, gamma, n) - joint(target, n)).abs().max() < EXACT


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_joint_law_by_simulation(gamma):
    target, draft = Toy(4, gamma * 2, 3), Toy(4, gamma * 2, 4)
    tokens = generate(target, draft, gamma, gamma + 1, torch.arange(N))
    assert g_test(counts(tokens, 4), joint(target, gamma + 1)) > GOOD


def test_all_continuations_of_three_tokens():
    """V = 8, both rules; the coupled rule also equals plain decoding token for token, whatever the draft."""
    target, draft = Toy(8, 4, 5), Toy(8, 4, 6)
    seeds, law = torch.arange(20_000), joint(target, 3)
    assert g_test(counts(generate(target, draft, 2, 3, seeds), 8), law) > GOOD
    own = plain(target, 3, seeds)
    assert g_test(counts(own, 8), law) > GOOD
    for choose in (draw, draft_draw, lambda log_q, s, _: s % 8):
        assert torch.equal(generate(target, draft, 2, 3, seeds, coupled, choose), own)


def test_deterministic_draft_is_one_hot():
    target, draft = Toy(4, 4, 7), Toy(4, 4, 8)
    tokens = generate(target, draft, 2, 3, torch.arange(N), deterministic, lambda log_q, *_: log_q.argmax(-1))
    assert g_test(counts(tokens, 4), joint(target, 3)) > GOOD


# Case O06: the draft's distribution must be the one its token was drawn from.


@pytest.mark.parametrize(("rule", "choose"), [(maximal, draft_draw), (coupled, draw)])
@pytest.mark.parametrize(
    "params", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.5}, {"temperature": 0.5}, {"temperature": 1.7}], ids=str
)
def test_filtered_drafts_keep_the_law(params, rule, choose):
    observed, law = first_tokens(SamplingParams(**params), rule=rule, choose=choose)
    assert g_test(observed, law) > GOOD
    if params == {"top_k": 3}:
        assert law.tolist() == pytest.approx([0.4, 1 / 3, 0.2667, 0, 0, 0], abs=1e-4)


# Acceptance as promised.


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("rule", "choose", "formula"), [(maximal, draft_draw, overlap), (coupled, draw, coupled_overlap)]
)
def test_realised_acceptance(seed, rule, choose, formula):
    """One token of random laws with masked entries, within 4 sigma; then the mean of a chain of independent ones."""
    p, q = Toy(12, 1, 20 + seed).log_probs[1], Toy(12, 1, 40 + seed).log_probs[1]
    n, gamma = 8_000, 3
    seeds, positions = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    drafted = torch.stack([choose(q.expand(n, -1), seeds, positions + i) for i in range(gamma)], dim=1)
    log_p, log_q = p.expand(n * (gamma + 1), -1), q.expand(n, gamma, -1)
    accepted = torch.tensor(rule(log_p, drafted.tolist(), log_q, seeds, positions).accepted).double()
    alpha = formula(p.exp(), q.exp()).item()
    assert abs((accepted > 0).double().mean() - alpha) < 4 * math.sqrt(alpha * (1 - alpha) / n)
    assert abs(accepted.mean() + 1 - expected_tokens(alpha, gamma)) < 4 * accepted.std() / math.sqrt(n)


@pytest.mark.parametrize(("rule", "choose"), [(maximal, draft_draw), (coupled, draw)])
def test_the_target_as_its_own_draft_is_always_accepted(rule, choose):
    p, seeds = Toy(8, 3, 11), torch.arange(500)
    chain = propose(p, torch.ones_like(seeds), 3, seeds, seeds, choose)
    log_p = p.log_probs[chain].flatten(0, 1)
    verdict = rule(log_p, (chain[:, 1:] % 8).tolist(), p.log_probs[chain[:, :-1]], seeds, seeds)
    assert verdict.accepted == [3] * 500


# Ragged rows and noise.


def rejoin(rule, p, tokens, q, seeds, positions):
    return rule(torch.cat(p), tokens, torch.cat(q), seeds, positions)


@pytest.mark.parametrize("wide", [2, 16])
@pytest.mark.parametrize("rule", [maximal, deterministic, coupled])
def test_rows_do_not_depend_on_other_rows(rule, wide, monkeypatch):
    """Rows without a proposal among others, in one slice of draws and in several."""
    monkeypatch.setattr(verify, "DRAW_ROWS", wide)
    lengths, p, q, tokens = [0, 3, 1, 0, 2, 5, 0], [], [], []
    torch.manual_seed(0)
    for g in lengths:
        p.append(Toy(4, 2, 12).log_probs[torch.randint(1, 32, (g + 1,))])
        q.append(Toy(4, 2, 13).log_probs[torch.randint(1, 32, (g,))])
        tokens.append(p[-1][:-1].argmax(dim=-1).tolist())
    seen = set()
    for trial in range(20):
        seeds, positions = torch.arange(7) + 100 * trial, torch.arange(7) * 3
        together = rejoin(rule, p, tokens, q, seeds, positions)
        for b in range(7):
            one = slice(b, b + 1)
            alone = rejoin(rule, p[one], tokens[one], q[one], seeds[one], positions[one])
            assert alone.tokens == together.tokens[one] and alone.accepted == together.accepted[one]
            assert alone.tokens[0][:-1] == tokens[b][: alone.accepted[0]]
            seen.add(alone.accepted[0])
    assert len(seen) > 2


@pytest.mark.parametrize("rule", [maximal, deterministic, coupled])
def test_an_empty_batch_is_an_empty_verdict(rule):
    none = torch.empty(0, dtype=torch.int64)
    assert rule(torch.empty(0, 4).double(), [], torch.empty(0, 4).double(), none, none) == verify.Verdict([], [])


def test_noise_of_a_role():
    """Role 0 is the stream without a role; sparse and full noise agree in each; every two are independent."""
    n, zero = 20_000, torch.zeros(20_000, dtype=torch.int64)
    at = torch.arange(n)
    words = philox((zero, at, zero, zero), zero)[:, 0]
    assert torch.equal(uniforms(zero, at, zero), (words.double() + 0.5) / 2**32)
    assert torch.equal(accept_uniforms(zero, at), uniforms(zero, at, zero, ACCEPT))
    streams = [uniforms(zero, at, zero, role) for role in (COUPLED, DRAFT, ACCEPT, RESIDUAL)]
    for role, u in enumerate(streams):
        assert torch.equal(all_gumbels(zero[:9], at[:9], 3, role)[:, 0], gumbels(zero[:9], at[:9], zero[:9], role))
        for v in streams[:role]:
            cells = torch.bincount((u * 8).long() * 8 + (v * 8).long(), minlength=64).double()
            assert g_test(cells, torch.full((64,), 1 / 64).double()) > 1e-4
