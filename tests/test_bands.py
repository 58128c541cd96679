"""The derivation of bands against brute force, and on the recorded H200 sweep."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mhctune.autotuner.bands import BandDeriver, NoBands, Option, Segment
from mhctune.kernels.space import Candidate

H200 = Path(__file__).parent.parent / "configs" / "recorded" / "h200_post_pre_hidden5120_prototype.jsonl"


def candidate(number: int) -> Candidate:
    return Candidate.of("fused", {"tile_n": number})


def option(
    number: int,
    regret: Sequence[float | None],
    variants: str | None = None,
    upper: Sequence[float | None] | None = None,
    memory: int = 0,
) -> Option:
    """An option; each letter of `variants` is one, by default it has its own."""
    names = frozenset([f"own{number}"] if variants is None else variants)
    return Option(candidate(number), names, memory, tuple(regret), tuple(regret if upper is None else upper))


def objective(
    choices: Sequence[int],
    token_counts: Sequence[int],
    options: Sequence[Option],
    incumbent: Mapping[int, Candidate],
) -> tuple[int, int, int, int, int, tuple[int, ...]]:
    regrets = [options[g].regret[place] for place, g in enumerate(choices)]
    return (
        len(frozenset().union(*(options[g].variants for g in choices))),
        sum(1 for _ in itertools.groupby(choices)),
        -sum(
            options[g].candidate == incumbent.get(count)
            for g, count in zip(choices, token_counts, strict=True)
        ),
        sum(round(regret * 1e12) for regret in regrets if regret is not None),
        sum(options[g].memory_bytes for g in choices),
        tuple(choices),
    )


def brute_force(
    bound: float,
    token_counts: Sequence[int],
    options: Sequence[Option],
    incumbent: Mapping[int, Candidate],
) -> tuple[int, ...] | None:
    within = [
        [g for g, o in enumerate(options) if (upper := o.upper[place]) is not None and upper <= bound]
        for place in range(len(token_counts))
    ]
    return min(
        itertools.product(*within),
        key=lambda choices: objective(choices, token_counts, options, incumbent),
        default=None,
    )


def small_instance(
    rng: random.Random,
) -> tuple[float, list[int], list[Option], dict[int, Candidate]]:
    """A few values each, so that every level of the objective is tied often."""
    length, pool = rng.randint(1, 5), rng.choice(["ab", "abcd", "abcdefgh"])
    token_counts = sorted(rng.sample(range(1, 40), length))
    hole = rng.choice([0.0, 0.2, 0.5])
    options = []
    for number in range(rng.randint(1, 5)):
        points = [None if rng.random() < hole else rng.choice([0.0, 0.01, 0.02]) for _ in range(length)]
        uppers = [None if point is None else point + rng.choice([0.0, 0.02, 0.04]) for point in points]
        variants = "".join(rng.sample(pool, rng.randint(1, min(3, len(pool)))))
        options.append(option(number, points, variants, uppers, memory=rng.randint(0, 2)))
    incumbent = {count: candidate(rng.randint(0, 6)) for count in token_counts if rng.random() < 0.5}
    return rng.choice([0.0, 0.02, 0.04, 0.06]), token_counts, options, incumbent


@pytest.mark.parametrize("seed", range(8))
def test_the_derivation_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    solved = 0
    for _ in range(150):
        bound, token_counts, options, incumbent = small_instance(rng)
        expected = brute_force(bound, token_counts, options, incumbent)
        if expected is None:
            with pytest.raises(NoBands):
                BandDeriver(bound).derive(token_counts, options, incumbent)
            continue
        solved += 1
        derivation = BandDeriver(bound).derive(token_counts, options, incumbent)
        assert derivation.choices == expected
        assert derivation.variants == frozenset().union(*(options[g].variants for g in expected))
    assert solved >= 50


def test_longer_instances_with_many_shared_variants_equal_brute_force() -> None:
    rng = random.Random(99)
    for _ in range(10):
        pairs = [f"{post}{projection}" for post in "ab" for projection in "pqr"]
        options = [
            option(g, [rng.choice([0.0, 0.01, 0.02, 0.2]) for _ in range(6)], variants)
            for g, variants in enumerate([*rng.sample(pairs, 3), "f", ""])
        ]
        options.append(option(9, [0.05] * 6, "z"))
        token_counts = [1, 2, 4, 8, 16, 32]
        expected = brute_force(0.05, token_counts, options, {})
        assert BandDeriver(0.05).derive(token_counts, options).choices == expected


def test_a_variant_returns_when_that_saves_one() -> None:
    a, b, c = option(0, [0, 0.2, 0]), option(1, [0.2, 0, 0.2]), option(2, [0.3, 0.3, 0.01])
    derivation = BandDeriver().derive([1, 8, 64], [a, b, c])
    assert derivation.choices == (0, 1, 0)
    assert derivation.segments == (Segment(1, 1, 0, (1,)), Segment(2, 8, 1, (8,)), Segment(9, 64, 0, (64,)))
    assert derivation.variants == {"own0", "own1"}


def test_fewer_variants_are_worth_more_bands() -> None:
    # One band each for 2 and 3 would do, with three variants; two variants need five bands.
    options = [
        option(0, [0, 1, 0, 1, 0]),
        option(1, [1, 0, 1, 0, 1]),
        option(2, [0, 0, 1, 1, 1]),
        option(3, [1, 1, 0, 0, 1]),
    ]
    derivation = BandDeriver().derive([1, 2, 3, 4, 5], options)
    assert (len(derivation.variants), len(derivation.segments)) == (2, 5)


def test_two_options_of_one_variant_make_two_bands() -> None:
    derivation = BandDeriver().derive([1, 2], [option(0, [0, 1], "a"), option(1, [1, 0], "a")])
    assert (len(derivation.variants), len(derivation.segments)) == (1, 2)


def test_an_option_of_two_variants_costs_both() -> None:
    derivation = BandDeriver().derive([1], [option(0, [0], "ab"), option(1, [0.04], "c")])
    assert derivation.choices == (1,)


def test_the_incumbent_wins_over_a_lower_regret_but_not_over_fewer_bands() -> None:
    faster, served = option(0, [0, 0]), option(1, [0.03, 0.03])
    everywhere = {1: candidate(1), 2: candidate(1)}
    assert BandDeriver().derive([1, 2], [faster, served], everywhere).choices == (1, 1)
    half = option(1, [0.03, None])
    assert BandDeriver().derive([1, 2], [faster, half], everywhere).choices == (0, 0)


def test_ties_go_to_the_lower_regret_then_to_less_memory_then_to_the_first_option() -> None:
    small, large = option(0, [0.02], memory=1), option(1, [0.01], memory=9)
    assert BandDeriver().derive([1], [small, large]).choices == (1,)
    assert BandDeriver().derive([1], [option(0, [0.01], memory=2), option(1, [0.01], memory=1)]).choices == (
        1,
    )
    assert BandDeriver().derive([1], [option(0, [0.01]), option(1, [0.01])]).choices == (0,)


def test_the_upper_limit_bounds_and_not_the_point() -> None:
    unsure, sure = option(0, [0.0], upper=[0.06]), option(1, [0.04], upper=[0.05])
    derivation = BandDeriver(0.05).derive([1], [unsure, sure])
    assert derivation.choices == (1,)
    assert (derivation.worst_upper, derivation.mean_regret) == (0.05, 0.04)


def test_a_single_token_count_makes_one_band_from_one() -> None:
    derivation = BandDeriver().derive([64], [option(0, [0.0])])
    assert derivation.segments == (Segment(1, 64, 0, (64,)),)


def test_a_bound_of_zero_leaves_the_winners() -> None:
    derivation = BandDeriver(0).derive([1, 2], [option(0, [0.0, 1e-9]), option(1, [1e-9, 0.0])])
    assert derivation.choices == (0, 1)
    assert derivation.worst_upper == 0


def test_an_option_is_not_chosen_where_it_was_not_measured() -> None:
    derivation = BandDeriver().derive([1, 2, 3], [option(0, [0, None, 0]), option(1, [None, 0.04, None])])
    assert derivation.choices == (0, 1, 0)


@pytest.mark.parametrize("bound", [-0.01, math.nan])
def test_a_bound_that_is_none_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="max_regret is"):
        BandDeriver(bound)


def test_a_token_count_without_measurement_is_named() -> None:
    with pytest.raises(NoBands, match="nothing was measured at 8 tokens"):
        BandDeriver().derive([1, 8], [option(0, [0, None])])
    with pytest.raises(NoBands, match="nothing was measured at 1 token;"):
        BandDeriver().derive([1], [])


def test_a_token_count_where_the_bound_cannot_be_kept_is_named_with_the_smallest_limit() -> None:
    options = [option(0, [0, 0], upper=[0, 0.25]), option(1, [0, 0], upper=[0, 0.125])]
    with pytest.raises(NoBands, match=r"within 5\.00% at 8 tokens.* is 12\.50%, of fused\(tile_n=1\)"):
        BandDeriver(0.05).derive([1, 8], options)


@pytest.mark.parametrize("token_counts", [[], [0], [2, 1], [1, 1]])
def test_token_counts_that_do_not_rise_are_refused(token_counts: list[int]) -> None:
    with pytest.raises(NoBands, match="token counts"):
        BandDeriver().derive(token_counts, [option(0, [0.0] * len(token_counts))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([option(0, [0.0])], "1 regrets and 1 upper limits for 2 token counts"),
        ([option(0, [0.0, 0.0], upper=[0.0])], "2 regrets and 1 upper limits for 2 token counts"),
        ([option(0, [0.0, None], upper=[0.0, 0.0])], "has regret None with upper limit 0.0"),
        ([option(0, [0.0, 0.0], upper=[0.0, math.nan])], "not finite"),
        ([option(0, [0.0, 0.0]), option(0, [0.0, 0.0])], "given twice"),
    ],
)
def test_malformed_options_are_refused(options: list[Option], message: str) -> None:
    with pytest.raises(NoBands, match=message):
        BandDeriver().derive([1, 2], options)


def h200_options() -> tuple[list[int], list[Option]]:
    """One latency a point and no samples: the upper limit is the regret; every candidate is a variant."""
    header, *lines = H200.read_text().splitlines()
    columns = json.loads(header)["columns"]
    latencies: dict[Candidate, dict[int, float]] = {}
    for line in lines:
        row = dict(zip(columns, json.loads(line), strict=True))
        config = {name: row[name] for name in ("tile_n", "n_splits", "n_thr", "vec")}
        latencies.setdefault(Candidate.of("fused", config), {})[row["num_tokens"]] = row["latency_us"]
    token_counts = sorted({count for measured in latencies.values() for count in measured})
    best = {count: min(measured[count] for measured in latencies.values()) for count in token_counts}
    options = []
    for choice, measured in sorted(latencies.items()):
        regret = tuple(measured[count] / best[count] - 1 for count in token_counts)
        options.append(Option(choice, frozenset([str(choice)]), 0, regret, regret))
    return token_counts, options


@pytest.mark.parametrize(
    ("bound", "variants", "bands", "worst", "mean"),
    [
        (0.01, 8, 8, 0.0082, 0.0009),
        (0.02, 7, 7, 0.0199, 0.0029),
        (0.05, 4, 5, 0.0496, 0.0156),
        (0.10, 4, 4, 0.0585, 0.0187),
    ],
)
def test_the_h200_sweep_needs_few_variants(
    bound: float, variants: int, bands: int, worst: float, mean: float
) -> None:
    token_counts, options = h200_options()
    derivation = BandDeriver(bound).derive(token_counts, options)
    assert (len(derivation.variants), len(derivation.segments)) == (variants, bands)
    assert derivation.worst_upper == pytest.approx(worst, abs=5e-5)
    assert derivation.mean_regret == pytest.approx(mean, abs=5e-5)


def test_at_five_percent_an_h200_variant_returns() -> None:
    token_counts, options = h200_options()
    segments = BandDeriver(0.05).derive(token_counts, options).segments
    assert [(segment.first, segment.last) for segment in segments] == [
        (1, 8), (9, 16), (17, 32), (33, 48), (49, 128),
    ]  # fmt: skip
    assert segments[2].option == segments[4].option
