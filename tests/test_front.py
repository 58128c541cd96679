"""The front holds the bands that nothing beats in all three costs; terms choose among them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from mhctune.autotuner.bands import BandDeriver, NoBands, Option
from mhctune.autotuner.choose import choose, price
from mhctune.autotuner.front import bound_for, pareto, smallest_bound
from mhctune.autotuner.terms import Terms, numerics_of
from mhctune.kernels.space import Candidate


def option(tile: int, splits: int, regrets: Sequence[float], *kernels: str) -> Option:
    candidate = Candidate.of("fused", {"tile_n": tile, "n_splits": splits})
    names = frozenset(kernels or [str(candidate)])
    return Option(candidate, names, 0, tuple(regrets), tuple(r + 0.001 if r else 0.0 for r in regrets))


COUNTS = (1, 8, 64)
A = option(2, 8, [0.0, 0.04, 0.5])
B = option(6, 8, [0.1, 0.0, 0.06])
C = option(12, 1, [0.3, 0.2, 0.0])
ALL = [A, B, C]


def brute(options: Sequence[Option], variants: int) -> float | None:
    """The smallest worst limit of all choices of one option a token count with so many variants."""
    found = [
        max(option.upper[place] or 0.0 for place, option in enumerate(chosen))
        for chosen in itertools.product(options, repeat=len(options[0].upper))
        if len(frozenset().union(*(option.variants for option in chosen))) <= variants
    ]
    return min(found, default=None)


def test_the_smallest_bound_is_that_of_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        kernels = [["a"], ["b"], ["c"], ["a", "d"], ["b", "d"], ["e"]]
        options = [
            option(n, 1, [draw.choice([0.0, 0.01, 0.05, 0.2, 0.4]) for _ in range(3)], *kernels[n])
            for n in range(6)
        ]
        for variants in range(1, 5):
            assert smallest_bound(COUNTS, options, variants) == brute(options, variants)
        for point in pareto(COUNTS, options):
            assert point.worst_upper == brute(options, point.variants)


def test_the_front_falls_in_worst_regret_as_variants_rise_and_has_nothing_dominated() -> None:
    points = pareto(COUNTS, ALL)
    assert [(p.variants, round(p.worst_upper, 3)) for p in points] == [(1, 0.101), (2, 0.041), (3, 0.0)]
    assert not any(a.dominates(b) for a in points for b in points)
    assert points[0].mean_regret == pytest.approx((0.1 + 0.0 + 0.06) / 3)


def test_an_option_that_was_not_measured_everywhere_cannot_serve_alone() -> None:
    partly = Option(A.candidate, A.variants, 0, (0.0, None, None), (0.0, None, None))
    assert smallest_bound((1, 8, 64), [partly], 5) is None
    assert smallest_bound((1, 8, 64), [partly, B], 1) == B.upper[0]


def test_at_most_so_many_variants_have_the_least_worst_regret_under_the_bound() -> None:
    terms = Terms(max_variants=2)
    chosen = choose(COUNTS, ALL, 0.2, {}, terms)
    assert chosen.point.variants == 2
    assert chosen.point.worst_upper == pytest.approx(0.041)
    free = BandDeriver(0.2).derive(COUNTS, ALL)
    assert len(free.variants) == 1
    with pytest.raises(NoBands, match=r"of 1 variant is within 5\.0 %, the least has 10\.1 %: raise"):
        choose(COUNTS, ALL, 0.05, {}, Terms(max_variants=1))
    with pytest.raises(NoBands, match="no choice of 1 variant serves every token count"):
        bound_for(COUNTS, [option(2, 1, [0.0] * 3, "a", "b")], 1, 1.0)


def test_a_batch_invariant_table_has_one_class_and_says_what_that_costs() -> None:
    chosen = choose(COUNTS, ALL, 0.07, {}, Terms(batch_invariant=True))
    assert chosen.numerics == "rounded/8"
    served = {chosen.options[g].candidate for g in chosen.derivation.choices}
    assert {numerics_of(candidate) for candidate in served} == {"rounded/8"}
    assert chosen.point.worst_upper == pytest.approx(0.061)
    strict = choose(COUNTS, [A, B, C, option(24, 1, [0.0, 0.0, 0.01])], 0.07, {}, Terms(batch_invariant=True))
    assert strict.numerics == "rounded/1"  # one kernel does there
    assert price(strict).startswith("batch-invariant: only rounded/1; 1 kernel, 1 band, ")
    assert "Without: 1 kernel" in price(strict)
    assert price(choose(COUNTS, ALL, 0.07, {}, Terms())) == ""


def test_no_class_within_the_bound_names_the_nearest() -> None:
    with pytest.raises(NoBands, match=r"within 5\.0 % at every .* the nearest, rounded/8, needs 6\.1 %"):
        choose(COUNTS, ALL, 0.05, {}, Terms(batch_invariant=True))


def test_traffic_weighs_the_mean_and_decides_between_equals() -> None:
    """Both serve everything within 10 %; one is best at 1 token, the other at 64."""
    low, high = option(2, 8, [0.0, 0.02, 0.08]), option(6, 8, [0.09, 0.02, 0.0])
    for traffic, expected in (({1: 900, 64: 1}, low), ({1: 1, 60: 900}, high)):
        chosen = choose(COUNTS, [low, high], 0.1, {}, Terms(traffic=traffic))
        assert chosen.options[chosen.derivation.choices[0]] is expected
        weights = chosen.weights
        assert sum(weights) == pytest.approx(1)
        regrets = [r or 0.0 for r in expected.regret]
        mean = sum(w * r for w, r in zip(weights, regrets, strict=True))
        assert chosen.derivation.mean_regret == pytest.approx(mean)


@pytest.mark.parametrize(
    ("traffic", "weights", "beyond"),
    [
        (None, [1 / 3] * 3, 0.0),
        ({1: 1, 2: 1, 8: 2, 9: 4}, [1 / 8, 3 / 8, 4 / 8], 0.0),
        ({1: 1, 65: 3}, [1.0, 0.0, 0.0], 0.75),
        ({100: 5}, [1 / 3] * 3, 1.0),
    ],
)
def test_calls_count_for_the_next_measured_token_count(
    traffic: dict[int, int] | None, weights: list[float], beyond: float
) -> None:
    terms = Terms(traffic=traffic)
    assert terms.weights(COUNTS) == pytest.approx(weights)
    assert terms.beyond(64) == beyond


@pytest.mark.parametrize("terms", [Terms(), Terms(3), Terms(None, True), Terms(2, True, {1: 5, 64: 7})])
def test_terms_come_back_from_evidence(terms: Terms) -> None:
    assert Terms.of_evidence(terms.to_evidence()) == terms
