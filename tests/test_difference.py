"""A difference names what moved and what changed, and whether the noise could have done it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mhctune.autotuner.difference import Noise, Side, difference, sentences
from mhctune.autotuner.records import Cell, Footprint, Measurement, Sample, Trial
from mhctune.kernels.dispatch import Band, Choice, DispatchTable, Fingerprint
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

A, B, C = (Choice.of("fused", {"tile_n": n}) for n in (2, 6, 12))


def trial(choice: Choice, count: int, latencies: list[float], twins: list[float] | None = None) -> Trial:
    samples = tuple(Sample(0, n, 0, 20, latency) for n, latency in enumerate(latencies))
    again = tuple(Sample(0, n, 1, 20, latency) for n, latency in enumerate(twins or []))
    cell = Cell("post_pre_delayed", Problem(hidden_size=5120), count)
    candidate = Candidate(choice.arm, choice.config)
    return Trial(cell, candidate, Footprint(1, 1, 1), Measurement(samples), samples, 0, again)


@pytest.fixture
def table(make_table: Callable[..., DispatchTable]) -> Callable[..., DispatchTable]:
    def make(*bands: tuple[int, Choice], **changes: object) -> DispatchTable:
        first, made = 1, []
        for last, choice in bands:
            made.append(Band(first, last, choice))
            first = last + 1
        return make_table(bands=tuple(made), default=bands[-1][1], **changes)

    return make


Make = Callable[..., DispatchTable]


def test_a_table_does_not_differ_from_itself(table: Make) -> None:
    found = difference(Side(table((8, A), (32, B))), Side(table((8, A), (32, B))))
    assert found.same
    assert sentences(found) == []


def test_a_split_band_of_one_choice_is_no_difference(table: Make) -> None:
    assert difference(Side(table((32, A))), Side(table((8, A), (32, A)))).same


def test_a_moved_edge_is_named_with_both_places_and_the_range_that_changed(table: Make) -> None:
    found = difference(Side(table((8, A), (32, B))), Side(table((12, A), (32, B))))
    assert not found.same
    assert [(e.before, e.after, e.lower, e.upper) for e in found.moved] == [(8, 12, A, B)]
    (change,) = found.changes
    assert (change.first, change.last, change.before, change.after) == (9, 12, B, A)
    assert change.noise is Noise.UNKNOWN
    assert sentences(found) == [
        "9-12: fused(tile_n=6) -> fused(tile_n=2) (no samples of both to tell)",
        "edge fused(tile_n=2) | fused(tile_n=6): 8 -> 12",
    ]


def test_another_default_is_open_above(table: Make) -> None:
    found = difference(Side(table((8, A))), Side(table((8, A)).replace(default=B)))
    assert [(c.first, c.last) for c in found.changes] == [(9, None)]
    assert sentences(found)[0].startswith("9 and up: ")


def test_bands_that_end_elsewhere_are_a_difference(table: Make) -> None:
    found = difference(Side(table((8, A))), Side(table((16, A))))
    assert not found.same
    assert sentences(found) == ["the bands end at 16, ended at 8"]


@pytest.mark.parametrize(
    ("slower", "noise"), [(0.0, Noise.INSIDE), (0.004, Noise.INSIDE), (0.03, Noise.OUTSIDE)]
)
@pytest.mark.parametrize("known_by", ["before", "after"])
def test_samples_of_either_side_tell_a_changed_choice_from_noise(
    table: Make, slower: float, noise: Noise, known_by: str
) -> None:
    """Rounds differ by 20 % for both alike; twins by 0.5 %: less is no difference."""
    rounds = [10.0 + 0.2 * n for n in range(10)]
    trials = [
        trial(A, 8, rounds, [latency * 1.005 for latency in rounds]),
        trial(B, 8, [latency * (1 + slower) for latency in rounds]),
    ]
    sides = Side(table((8, A))), Side(table((8, B)))
    if known_by == "before":
        sides = replace(sides[0], trials=trials), sides[1]
    else:
        sides = sides[0], replace(sides[1], trials=trials)
    assert {change.noise for change in difference(*sides).changes} >= {noise}
    assert difference(*sides).changes[0].noise is noise


def test_a_count_between_is_judged_by_the_next_measured_one(table: Make) -> None:
    rounds = [10.0] * 6
    trials = [trial(A, 8, rounds), trial(B, 8, [11.0] * 6), trial(A, 4, rounds), trial(B, 4, rounds)]
    found = difference(Side(table((5, A), (8, B))), Side(table((6, A), (8, B)), trials))
    assert [(c.first, c.last, c.noise) for c in found.changes] == [(6, 6, Noise.OUTSIDE)]


@pytest.mark.parametrize("rounds", [0, 4])
def test_too_few_rounds_tell_nothing(table: Make, rounds: int) -> None:
    trials = [trial(A, 8, [10.0] * rounds), trial(B, 8, [20.0] * 9)] if rounds else []
    (change, _) = difference(Side(table((8, A), (9, C))), Side(table((8, B), (9, A)), trials)).changes[:2]
    assert change.noise is Noise.UNKNOWN


def test_new_and_gone_variants_and_other_grounds_are_named(
    table: Make, make_fingerprint: Callable[..., Fingerprint]
) -> None:
    before = table((8, A), evidence={"variants": ["cuda:a()", "cuda:b()"], "sweep_digest": "1"})
    after = table(
        (8, A),
        evidence={"variants": ["cuda:b()", "cuda:c()"], "sweep_digest": "2"},
        fingerprint=make_fingerprint(driver="580"),
    )
    found = difference(Side(before), Side(after))
    assert found.same
    assert sentences(found) == [
        "new variant: cuda:c()",
        "gone variant: cuda:a()",
        "driver: '570.86' -> '580'",
        "sweep_digest: '1' -> '2'",
    ]
