"""Logits → distribution → draw: filters against brute force, greedy one-hot, the law of the draw."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from longdraft import SamplingParams
from longdraft.errors import InvalidValueError
from longdraft.spec.probs import to_log_probs
from longdraft.spec.sample import draw


def brute_force(logits, p):
    """The filters one token at a time, in plain Python."""
    best = max(logits)
    scaled = [(x - best) / p.temperature for x in logits]
    alive = [i for i, x in enumerate(scaled) if math.exp(x) >= p.min_p]
    alive.sort(key=lambda i: (-scaled[i], i))
    if p.top_k > 0:
        alive = alive[: p.top_k]
    total, kept, mass = sum(math.exp(scaled[i]) for i in alive), [], 0.0
    for i in alive:
        if kept and mass >= p.top_p and p.top_p < 1:
            break
        kept.append(i)
        mass += math.exp(scaled[i]) / total
    norm = sum(math.exp(scaled[i]) for i in kept)
    return [math.exp(scaled[i]) / norm if i in kept else 0.0 for i in range(len(logits))]


params = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(-1, 12),
    top_p=st.floats(0.05, 1).filter(lambda x: x > 0.05),
    min_p=st.floats(0, 0.9),
)


def nudged(p):
    """``p`` with its borders moved by a rounding error either way: a border may fall on either side."""
    for d in (0.0, 1e-9, -1e-9):
        yield replace(p, top_p=min(1.0, p.top_p * (1 + d)), min_p=p.min_p * (1 + d))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-8, 8), min_size=9, max_size=9, unique=True), st.lists(params, min_size=1, max_size=4))
def test_filters_match_brute_force(logits, rows):
    x = torch.tensor([logits] * len(rows), dtype=torch.float64)
    for row, p in zip(to_log_probs(x, rows).exp().tolist(), rows, strict=True):
        assert any(row == pytest.approx(brute_force(logits, near), abs=1e-7) for near in nudged(p))


def test_greedy_is_one_hot_and_ties_go_to_the_lowest_id():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    log_probs = to_log_probs(logits, [SamplingParams(temperature=0)])
    assert log_probs.exp().tolist() == [[0, 1, 0, 0]]
    assert draw(log_probs, torch.tensor([1]), torch.tensor([1])).tolist() == [1]


def test_tiny_temperature_is_finite_and_greedy():
    log_probs = to_log_probs(torch.tensor([[1e4, 1e4 - 1, -1e4]]), [SamplingParams(temperature=1e-6)])
    assert log_probs.exp().tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (SamplingParams(), (0.30, 0.25, 0.20, 0.12, 0.08, 0.05)),
        (SamplingParams(top_k=3), (0.4, 1 / 3, 0.2667, 0, 0, 0)),
        (SamplingParams(top_p=0.5), (0.30 / 0.55, 0.25 / 0.55, 0, 0, 0, 0)),
        (SamplingParams(min_p=0.6), (0.4, 1 / 3, 0.2667, 0, 0, 0)),
    ],
)
def test_draws_follow_the_distribution(p, expected):
    """50,000 draws of the distribution of case O06, by chi-square; masked tokens never appear."""
    logits = torch.tensor([0.30, 0.25, 0.20, 0.12, 0.08, 0.05]).log()
    log_probs = to_log_probs(logits[None], [p])
    n = 50_000
    tokens = draw(log_probs.expand(n, -1), torch.full((n,), 11), torch.arange(n))
    counts = torch.bincount(tokens, minlength=6).double()
    want = torch.tensor(expected, dtype=torch.float64)
    assert counts[want == 0].sum() == 0
    want = want[want > 0] / want.sum() * n
    assert stats.chisquare(counts[: len(want)].numpy(), want.numpy()).pvalue > 1e-3


def test_sparse_and_dense_draws_agree():
    """The same row drawn alone (sparse noise) and beside a full row (dense noise) gives the same token."""
    torch.manual_seed(0)
    logits = torch.randn(2, 40) * 3
    seeds, positions = torch.tensor([3, 4]), torch.tensor([7, 8])
    narrow, wide = SamplingParams(top_k=5), SamplingParams()
    together = draw(to_log_probs(logits, [narrow, wide]), seeds, positions)
    alone = draw(to_log_probs(logits[:1], [narrow]), seeds[:1], positions[:1])
    assert together[0] == alone[0]


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "top_k", "max_tokens", "seed"])
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -2, "1", True, [], {}, 2**64, 10**5000, -(10**400)], ids=lambda v: type(v).__name__
)
def test_bad_values_are_refused_by_name(field, value):
    """Also numbers of more digits than Python prints."""
    with pytest.raises(InvalidValueError, match=field):
        SamplingParams(**{field: value})


def test_zero_tokens_and_zero_top_p_are_refused():
    for bad in ({"max_tokens": 0}, {"top_p": 0}, {"stop_token_ids": [-1]}, {"stop_token_ids": "5"}, {"ignore_eos": 1}):
        with pytest.raises(InvalidValueError):
            SamplingParams(**bad)


@pytest.mark.parametrize("seed", range(40))
def test_looking_at_a_few_tokens_first_changes_nothing(seed, monkeypatch):
    """Whatever part of the vocabulary is sorted at first, ties at its border included, the same tokens are kept."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(6, 700, generator=generator)).round(decimals=seed % 3)  # many ties
    logits[1] = 0.0
    logits[2, 5:] = -torch.inf
    rng = torch.rand(6, 4, generator=generator).tolist()
    rows = [
        SamplingParams(
            temperature=0.2 + 3 * a,
            top_p=max(0.01, b) if seed % 2 else 1.0,
            top_k=int(300 * c) if c < 0.6 else 0,
            min_p=d / 3 if d < 0.5 else 0.0,
        )
        for a, b, c, d in rng
    ]
    outcomes = []
    for first in (1, 7, 10_000):
        monkeypatch.setattr("longdraft.spec.probs.FIRST_LOOK", first)
        outcomes.append(to_log_probs(logits, rows))
    for other in outcomes[1:]:
        assert torch.equal(outcomes[0] > -torch.inf, other > -torch.inf)
        torch.testing.assert_close(outcomes[0], other, rtol=1e-12, atol=1e-12)
