"""Paired ratios and the limits of a regret."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest
from scipy.stats import quantile_test

from mhctune.autotuner.records import Sample
from mhctune.autotuner.stats import TooFewSamples, paired_ratios, pairs_needed, regret


def rounds(latencies: Sequence[float], batch: int = 0, first: int = 0) -> list[Sample]:
    return [Sample(batch, first + i, 0, 20, latency) for i, latency in enumerate(latencies)]


def test_samples_are_paired_by_batch_and_round_whatever_their_order() -> None:
    mine = [*rounds([2.0, 3.0]), *rounds([8.0], batch=1)]
    best = [*rounds([4.0], batch=1), *reversed(rounds([1.0, 1.0]))]
    assert paired_ratios(mine, best) == (2.0, 3.0, 2.0)


def test_a_round_that_only_one_of_them_ran_has_no_pair() -> None:
    assert paired_ratios(rounds([2.0, 2.0], first=1), rounds([1.0, 1.0])) == (2.0,)
    assert paired_ratios(rounds([2.0]), rounds([1.0], batch=1)) == ()


def test_two_samples_of_one_round_are_refused() -> None:
    with pytest.raises(ValueError, match="batch 0, round 3 holds two samples"):
        paired_ratios([*rounds([1.0], first=3), *rounds([1.0], first=3)], rounds([1.0]))


@pytest.mark.parametrize("latency", [0.0, -1.0, math.nan, math.inf])
def test_a_sample_that_is_no_latency_is_refused(latency: float) -> None:
    with pytest.raises(ValueError, match=r"batch 0, round 1 is .* positive finite"):
        paired_ratios(rounds([1.0, latency]), rounds([1.0]))
    with pytest.raises(ValueError, match=r"batch 0, round 1 is .* positive finite"):
        regret(rounds([1.0] * 5), rounds([1.0, latency, 1.0, 1.0, 1.0]))


def test_the_point_is_the_median_of_ratios_and_not_the_ratio_of_medians() -> None:
    mine, best = rounds([1.0, 4.0, 9.0, 3.0, 4.0]), rounds([1.0, 2.0, 3.0, 3.0, 8.0])
    assert regret(mine, best).point == 0.0
    assert statistics.median([1, 4, 9, 3, 4]) / statistics.median([1, 2, 3, 3, 8]) > 1.3


def test_drift_that_hits_both_of_a_round_leaves_no_trace() -> None:
    drift = [1.0, 1.5, 2.0, 4.0, 0.5, 8.0]
    interval = regret(rounds([3 * d for d in drift]), rounds([2 * d for d in drift]))
    assert (interval.point, interval.lower, interval.upper, interval.n) == (0.5, 0.5, 0.5, 6)


def test_the_best_has_no_regret_against_itself() -> None:
    best = rounds([1.0, 1.2, 0.9, 1.1, 1.0])
    interval = regret(best, best)
    assert (interval.point, interval.lower, interval.upper) == (0.0, 0.0, 0.0)


def test_fewer_pairs_than_the_level_can_bear_give_an_error_and_no_number() -> None:
    with pytest.raises(
        TooFewSamples, match=r"4 paired rounds give no limit at 0\.95 confidence; 5 are needed"
    ):
        regret(rounds([1.1] * 9), rounds([1.0] * 4))
    with pytest.raises(TooFewSamples, match="0 paired rounds"):
        regret([], [])
    assert regret(rounds([1.1] * 9), rounds([1.0] * 5)).n == 5


@pytest.mark.parametrize("confidence", [0.4, 1.0, 1.5, math.nan])
def test_a_confidence_that_is_none_is_refused(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence is"):
        regret(rounds([1.0] * 9), rounds([1.0] * 9), confidence)


@pytest.mark.parametrize("confidence", [0.5, 0.75, 0.9, 0.9375, 0.95, 0.98, 0.99, 0.999])
def test_limits_are_the_tightest_order_statistics_that_keep_their_level(confidence: float) -> None:
    for n in range(pairs_needed(confidence), 40):
        # P(the median lies below the k-th smallest) = P(at most k - 1 of n lie below the median)
        chance = [sum(math.comb(n, j) for j in range(k)) / 2**n for k in range(n + 1)]
        interval = regret(rounds([1 + i / 64 for i in range(1, n + 1)]), rounds([1.0] * n), confidence)
        above, below = round(interval.upper * 64), n + 1 - round(interval.lower * 64)
        assert chance[above] >= confidence
        assert chance[below] >= confidence
        assert chance[above - 1] <= confidence
        assert chance[below - 1] <= confidence


def test_limits_equal_those_of_the_quantile_test_with_ties_and_outliers() -> None:
    rng = random.Random(7)
    for n in range(5, 30):
        ratios = [rng.choice([1.0, 1.01, 1.02, 1.5, 12.0]) for _ in range(n)]
        interval = regret(rounds(ratios), rounds([1.0] * n))
        high = quantile_test(ratios, p=0.5, alternative="less").confidence_interval(0.95).high
        low = quantile_test(ratios, p=0.5, alternative="greater").confidence_interval(0.95).low
        assert (interval.lower, interval.upper) == (low - 1, high - 1)


def test_the_upper_limit_holds_as_often_as_it_says() -> None:
    rng = random.Random(3)
    held = 0
    for _ in range(1000):
        # A skewed ratio with median 1.05: log-normal, as timings are.
        ratios = [1.05 * math.exp(rng.gauss(0, 0.2)) for _ in range(9)]
        held += regret(rounds(ratios), rounds([1.0] * 9)).upper >= 0.05
    assert held >= 960  # 9 pairs: the eighth smallest, 98.0 % exactly
