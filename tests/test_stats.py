"""Paired ratios and the limits of a regret."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
from scipy.stats import quantile_test

from mhctune.autotuner.records import Cell, Footprint, Sample, Trial
from mhctune.autotuner.stats import (
    NoiseFloor,
    TooFewSamples,
    noise_floor,
    paired_ratios,
    pairs_needed,
    regret,
    steady,
)
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate


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


def test_a_throttled_sample_has_no_pair() -> None:
    mine = rounds([2.0, 3.0, 4.0])
    assert paired_ratios([mine[0], replace(mine[1], throttled=True), mine[2]], rounds([1.0] * 3)) == (
        2.0,
        4.0,
    )
    with pytest.raises(TooFewSamples, match="4 paired rounds"):
        regret(rounds([1.1] * 5), [*rounds([1.0] * 4), replace(rounds([1.0], first=4)[0], throttled=True)])


# Without drift.

A, B, C = (Candidate.of("fused", {"tile_n": n}) for n in range(3))


def test_a_median_without_drift_is_that_of_a_machine_that_keeps_its_pace() -> None:
    drift = [1.0, 2.0, 4.0, 1.0, 0.5, 1.0, 1.0]
    found = steady({A: rounds([3 * d for d in drift]), B: rounds([5 * d for d in drift])})
    assert found == {A: 3.0, B: 5.0}


def test_who_left_while_the_machine_was_fast_is_not_fast_for_that() -> None:
    pace = [1.0] * 6 + [2.0] * 7
    stayed, left = rounds([10 * p for p in pace]), rounds([12.0] * 6)
    assert statistics.median(s.latency_us for s in left) < statistics.median(s.latency_us for s in stayed)
    found = steady({A: stayed, B: left})
    assert found[B] / found[A] == pytest.approx(1.2)


def test_a_round_that_hit_one_candidate_alone_is_no_drift() -> None:
    hit = [10.0, 10.0, 90.0, 10.0, 10.0]
    assert steady({A: rounds(hit), B: rounds([11.0] * 5), C: rounds([12.0] * 5)}) == {
        A: 10.0,
        B: 11.0,
        C: 12.0,
    }


def test_throttled_samples_have_no_part_in_it() -> None:
    hot = [replace(s, throttled=True) for s in rounds([50.0] * 5)]
    assert steady({A: [*rounds([10.0] * 5, batch=1), *hot], B: hot}) == {A: 10.0}


# The noise floor.


def trial(own: Sequence[Sample], twins: Sequence[Sample]) -> Trial:
    cell = Cell("post_pre_delayed", Problem(hidden_size=256), 8)
    return Trial(cell, A, Footprint(1, 1, 1), None, tuple(own), 1, tuple(twins))


def test_the_noise_floor_is_what_a_candidate_differs_by_from_its_twin() -> None:
    found = noise_floor([trial(rounds([1.0] * 9), rounds([1.0, 1.25, 1.5, 1.25, 1.25], first=4))])
    assert found == NoiseFloor(0.0, 0.5, 5)
    assert found.width == 0.5


def test_a_twin_that_is_faster_is_as_much_noise_as_one_that_is_slower() -> None:
    assert NoiseFloor(-0.02, 0.01, 9).width == NoiseFloor(-0.01, 0.02, 9).width == 0.02


def test_the_pairs_of_all_cells_narrow_the_floor() -> None:
    cell = trial(rounds([1.0] * 9), rounds([1 + place / 64 for place in range(-4, 5)]))
    assert noise_floor([cell]) == NoiseFloor(-3 / 64, 3 / 64, 9)
    assert noise_floor([cell] * 3) == NoiseFloor(-2 / 64, 2 / 64, 27)
    assert noise_floor([cell] * 30) == NoiseFloor(0.0, 0.0, 270)


def test_twins_of_several_batches_are_pooled_and_each_is_compared_with_its_own() -> None:
    carried = [*rounds([2.0] * 3), *rounds([7.0] * 3, batch=1)]
    first = trial(carried, rounds([2.5] * 3))
    second = trial(rounds([4.0] * 3, batch=1), rounds([5.0] * 3, batch=1))
    assert noise_floor([first, second]) == NoiseFloor(0.25, 0.25, 6)


def test_too_few_twins_give_no_floor() -> None:
    assert noise_floor([trial(rounds([1.0] * 9), rounds([1.1] * 4))]) is None
    assert noise_floor([trial(rounds([1.0] * 9), ())]) is None
    assert noise_floor([]) is None


# Placements.


def placed(latencies: Sequence[Sequence[float]]) -> list[Sample]:
    """Rounds of one batch, placement by placement; the first one is where it began."""
    return [
        Sample(0, 1000 * place + n, 0, 20, latency)
        for place, row in enumerate(latencies)
        for n, latency in enumerate(row)
    ]


def test_rounds_of_one_placement_are_no_independent_evidence() -> None:
    """What 60 rounds share tells nothing: the limits are as wide as the placements lie apart."""
    biases = [1.02, 1.01, 0.99, 1.015, 0.985, 1.02, 1.0, 0.98]
    mine, best = placed([[100 * b] * 60 for b in biases]), placed([[100.0] * 60] * 8)
    found = regret(mine, best)
    assert found.n == 480
    assert found.point == pytest.approx(statistics.median(biases) - 1)
    assert (found.lower, found.upper) == (pytest.approx(0.985 - 1), pytest.approx(1.02 - 1))
    stayed = regret(rounds([102.0] * 60), rounds([100.0] * 60))
    assert (stayed.lower, stayed.upper) == (pytest.approx(0.02), pytest.approx(0.02))


def test_each_placement_counts_once_however_many_rounds_it_had() -> None:
    mine = placed([[110.0] * 15, *([[100.0] * 2] * 7)])
    assert regret(mine, placed([[100.0] * 15, *([[100.0] * 2] * 7)])).point == 0.0
    other = Candidate.of("fused", {"n": 1})
    levels = steady(
        {other: mine, Candidate.of("fused", {"n": 2}): placed([[100.0] * 15, *([[100.0] * 2] * 7)])}
    )
    assert levels[other] == pytest.approx(100.0)


def test_fewer_placements_than_the_level_can_bear_leave_the_limits_to_the_rounds() -> None:
    few = [[101.0, 102.0, 103.0], [102.0, 103.0]]
    found = regret(placed(few), placed([[100.0] * 3, [100.0] * 2]))
    assert (found.lower, found.upper) == (pytest.approx(0.01), pytest.approx(0.03))


def test_limits_of_placements_hold_as_often_as_they_say_and_those_of_rounds_do_not() -> None:
    """No true difference, a bias of each placement: the lower limit is above 0 too often."""
    rng = random.Random(3)
    missed = {"placements": 0, "rounds": 0}
    for _ in range(400):
        biases = [rng.gauss(1, 0.014) for _ in range(8)]
        rows = [[100 * b * rng.gauss(1, 0.003) for _ in range(4)] for b in biases]
        base = [[100.0] * 4] * 8
        missed["placements"] += regret(placed(rows), placed(base)).lower > 0
        missed["rounds"] += regret(rounds([us for row in rows for us in row]), rounds([100.0] * 32)).lower > 0
    assert missed["placements"] / 400 <= 0.05
    assert missed["rounds"] / 400 > 0.1


def test_the_noise_floor_counts_a_placement_of_a_twin_once() -> None:
    cell = Cell("post_pre_delayed", Problem(hidden_size=256), 1)
    biases = [1.02, 0.98, 1.01, 0.99, 1.0, 1.015, 0.985]
    original, twin = placed([[100.0] * 3] * 8), placed([[], *[[100 * b] * 3 for b in biases]])
    trial = Trial(
        cell, Candidate.of("fused", {"n": 1}), Footprint(0, 1, 0), None, tuple(original), 1, tuple(twin)
    )
    found = noise_floor([trial])
    assert found is not None
    assert (found.lower, found.upper, found.n) == (pytest.approx(-0.02), pytest.approx(0.02), 21)
