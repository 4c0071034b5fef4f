"""Losses against their definitions, finite differences, and the whole distribution where only a part is known."""

from functools import partial

import pytest
import torch

from longdraft.errors import InvalidValueError
from longdraft.train.divergence import compare
from longdraft.train.losses import (
    LOSSES,
    Compared,
    MixedLoss,
    Text,
    Top,
    Whole,
    make_loss,
    mean_loss,
)

F64 = torch.float64
TYPES = (torch.bfloat16, torch.float32)
N, HIDDEN, V = 7, 5, 12


@pytest.fixture(autouse=True)
def strips(monkeypatch):
    """Two tokens are compared at once, so that no chunk is one strip."""
    monkeypatch.setattr("longdraft.train.losses.STRIP", 2)


def random(*shape, seed=0, scale=2.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


HEAD = random(V, HIDDEN, seed=9)
LABELS = torch.arange(N) % V


def logits(x):
    return x @ HEAD.T


def text(top=None, temperature=1.0, weights=None):
    y = random(N, HIDDEN, seed=1)
    return Text(LABELS, Whole(y, logits) if top is None else Top.of(logits(y), top, temperature), weights)


def pairs(top=None, seed=0):
    """log p and log q of many tokens, as a loss sees them."""
    p, q = random(400, V, seed=seed, scale=3.0), random(400, V, seed=seed + 1, scale=3.0)
    log_p, log_q = (
        Top.of(p, top).pair(slice(None), q.log_softmax(-1), 1.0) if top else (p.log_softmax(-1), q.log_softmax(-1))
    )
    return log_p, log_q


def forward_kl(log_p, log_q):
    return compare(log_p, log_q)[0]


def acceptance(log_p, log_q):
    return compare(log_p, log_q)[1]


def test_acceptance_is_one_less_the_variation_and_kl_is_that_of_torch():
    log_p, log_q = pairs()
    variation = (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    torch.testing.assert_close(acceptance(log_p, log_q), 1 - variation)
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(forward_kl(log_p, log_q), kl)
    never = torch.tensor([[0.0, -torch.inf]], dtype=F64)  # tokens that p excludes
    assert forward_kl(never, torch.full((1, 2), 0.5, dtype=F64).log()).item() == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize(("dtype", "limit"), [(F64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("top", [None, 4])
def test_gradients_in_closed_form_are_those_of_the_definitions(top, dtype, limit):
    """Also where p and q are equal, where p excludes tokens, and where only one of the two is asked for."""
    log_p, log_q = (x.to(dtype) for x in pairs(top))
    log_q[::3, 1:3] = log_p[::3, 1:3]
    log_p[9:12, 2] = -torch.inf
    log_q.requires_grad_()
    of_kl, of_alpha = (random(400, seed=seed).to(dtype) for seed in (5, 6))

    def by_definition(log_q):
        kl = (log_p.exp() * (log_p.clamp(min=-1e30) - log_q)).sum(-1)
        return kl, torch.minimum(log_p.exp(), log_q.exp()).sum(-1)

    for scales in ((of_kl, of_alpha), (of_kl, None), (None, of_alpha)):
        found = []
        for way in (partial(compare, log_p), by_definition):
            values = way(log_q)
            total = sum((scale * value).sum() for scale, value in zip(scales, values, strict=True) if scale is not None)
            found.append((*values, *torch.autograd.grad(total, log_q)))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)


def test_products_in_bfloat16_are_compared_in_float32():
    head, x = HEAD.bfloat16(), random(N, HIDDEN).bfloat16()
    p = Text(LABELS, Whole(random(N, HIDDEN, seed=1).float(), lambda y: y @ HEAD.float().T))
    found = [mean_loss(x.float(), lambda y, to=to: (y.bfloat16() @ head.T).to(to), p, MixedLoss()) for to in TYPES]
    assert found[0] == found[1]


def test_each_loss_by_its_definition():
    log_p, log_q = pairs()
    compared = Compared(log_q, log_p, log_q[:, 3])
    kl, alpha = forward_kl(log_p, log_q), acceptance(log_p, log_q)
    for omega in (0.0, 0.3, 1.0):
        torch.testing.assert_close(make_loss("mixed", omega)(compared), omega * kl - (1 - omega) * alpha)
    torch.testing.assert_close(make_loss("log_acceptance")(compared), -alpha.log())
    assert torch.equal(make_loss("hard")(compared), -log_q[:, 3])
    with pytest.raises(InvalidValueError, match="mixed, log_acceptance, hard"):
        make_loss("tv")
    with pytest.raises(InvalidValueError, match="omega"):
        MixedLoss(1.5)


@pytest.mark.parametrize(("name", "top"), [("mixed", None), ("mixed", 4), ("log_acceptance", 4), ("hard", None)])
def test_gradients_are_those_of_finite_differences(name, top):
    """Through chunks that do not divide the text, weights of positions, a temperature; the head's weights, too."""
    x, head = random(N, HIDDEN, seed=2).requires_grad_(), random(V, HIDDEN, seed=3).requires_grad_()
    given = text(top, 0.7, torch.tensor([4.0, 1, 0, 2, 2, 1, 3]))

    def value(x, head):
        total, _ = mean_loss(x, lambda y: y @ head.T, given, make_loss(name), temperature=0.7, learned=(head,), chunk=3)
        return 2 * total

    assert torch.autograd.gradcheck(value, (x, head), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_chunks_change_nothing_and_weights_are_those_of_a_mean(name):
    weights = torch.tensor([4.0, 1, 0, 2, 2, 1, 3])
    whole, figures = mean_loss(random(N, HIDDEN), logits, text(), make_loss(name), chunk=N)
    for chunk in (1, 3):
        value, again = mean_loss(random(N, HIDDEN), logits, text(), make_loss(name), chunk=chunk)
        assert value.item() == pytest.approx(whole.item(), rel=1e-12)
        assert again == pytest.approx(figures, rel=1e-12)
    each = [mean_loss(random(N, HIDDEN)[i : i + 1], logits, single(i), make_loss(name))[0].item() for i in range(N)]
    value, again = mean_loss(random(N, HIDDEN), logits, text(weights=weights), make_loss(name))
    assert value.item() == pytest.approx(sum(w * x for w, x in zip(weights.tolist(), each, strict=True)) / 13)
    assert again == pytest.approx(figures)  # what is shown is of all tokens alike


def single(i):
    whole = text()
    return Text(whole.labels[i : i + 1], Whole(whole.targets.streams[i : i + 1], logits))


def test_logits_never_exist_for_all_tokens():
    largest = []

    def watched(x):
        largest.append(len(x))
        return logits(x)

    x = random(N, HIDDEN).requires_grad_()
    value, _ = mean_loss(x, watched, Text(LABELS, Whole(random(N, HIDDEN), watched)), MixedLoss(), chunk=2)
    value.backward()
    assert max(largest) == 2 and len(largest) == 2 * 4  # once for p and once for q; nothing is computed again


def test_what_is_merged_bounds_what_is_not():
    """KL from below, α from above, by no more than the smaller rest; nearly all entries tell nearly all."""
    kl, alpha = forward_kl(*pairs()), acceptance(*pairs())
    before = None
    for top in (1, 3, 8, V - 1):
        log_p, log_q = pairs(top)
        torch.testing.assert_close(log_p.logsumexp(-1), torch.zeros(400, dtype=F64))
        torch.testing.assert_close(log_q.logsumexp(-1), torch.zeros(400, dtype=F64))
        gap = acceptance(log_p, log_q) - alpha
        rest = torch.minimum(log_p, log_q)[:, -1].exp()
        assert (gap > -1e-12).all() and (gap <= rest + 1e-12).all()
        assert (forward_kl(log_p, log_q) <= kl + 1e-12).all()
        assert before is None or gap.mean() < before
        before = gap.mean()
    torch.testing.assert_close(acceptance(*pairs(V - 1)), alpha)  # one token alone is the rest
    torch.testing.assert_close(forward_kl(*pairs(V - 1)), kl)
    with pytest.raises(InvalidValueError, match="top is 12"):
        Top.of(random(2, V), V)


def test_a_rest_far_below_one_is_exact():
    logits = torch.tensor([[60.0, 0.0, 0.0, 0.0]], dtype=F64)
    assert Top.of(logits, 1).log_rest.item() == pytest.approx(-60 + 1.0986, abs=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_a_temperature_is_that_of_both(name):
    """Of p known whole, and of p known but for one token, which was taken at that temperature."""
    values = [
        mean_loss(random(N, HIDDEN), logits, text(top, 0.7), make_loss(name), temperature=0.7) for top in (None, V - 1)
    ]
    assert values[0][0].item() == pytest.approx(values[1][0].item(), rel=1e-12)
    assert values[0][1] == pytest.approx(values[1][1], rel=1e-9)
    plain = mean_loss(random(N, HIDDEN), logits, text(), make_loss(name))[0].item()
    assert values[0][0].item() != pytest.approx(plain, rel=1e-3)


def test_hard_labels_need_no_target():
    value, figures = mean_loss(random(N, HIDDEN), logits, Text(LABELS, None), make_loss("hard"))
    expected = torch.nn.functional.cross_entropy(logits(random(N, HIDDEN)), LABELS).item()
    assert (value.item(), figures["cross_entropy"]) == pytest.approx((expected, expected))
    assert set(figures) == {"cross_entropy"}
