"""Ratios over prompts: values, bootstrap intervals, paired differences."""

import numpy as np
import pytest

from longdraft.bench.ratios import Ratio


def test_a_ratio_of_sums_not_a_mean_of_ratios():
    assert Ratio(np.array([1, 0]), np.array([1, 9])).estimate().value == pytest.approx(0.1)


def test_intervals_fit_the_spread_of_prompts():
    """A mean of 400: 1.96 standard errors to both sides, and the same from the same seed."""
    values = np.random.default_rng(1).normal(0.7, 0.2, 400)
    ratio = Ratio(values, np.ones(400))
    found = ratio.estimate(5)
    half = 1.96 * values.std() / 20
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=0.004)
    assert ratio.estimate(5) == found
    assert ratio.estimate(6) != found


def test_differences_are_paired():
    """What is hard for both drafts does not blur how they differ."""
    random = np.random.default_rng(2)
    hard = random.uniform(0.2, 0.9, 32)
    a, b = Ratio(hard + 0.05 + random.normal(0, 0.01, 32), np.ones(32)), Ratio(hard, np.ones(32))
    found = a.minus(b)
    assert 0.04 < found.low < found.value < found.high < 0.06
    assert a.estimate().low < b.estimate().high  # not so, if each is looked at alone
    same = a.minus(a)
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_what_is_not_known():
    nothing, some = Ratio(np.zeros(4), np.zeros(4)), Ratio(np.ones(4), np.ones(4))
    missing = Ratio(np.array([1, np.nan, 1, 1]), np.ones(4))
    for ratio in (nothing, missing):
        assert ratio.estimate() is None
        assert ratio.minus(some) is None
        assert some.minus(ratio) is None


@pytest.mark.filterwarnings("error")
def test_resamples_without_a_value_do_not_count():
    """One prompt of 32 got that far: a third of the resamples lack it, and nothing is said of these."""
    bottom = np.zeros(32)
    bottom[0] = 4
    found = Ratio(bottom * 0.5, bottom).estimate()
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)
