"""Who races on follows from the samples of a batch, and from nothing else."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from mhctune.autotuner.field import LOOK, NEAREST, Field, boundaries, counted, field_after
from mhctune.autotuner.protocol import FURTHER, Protocol
from mhctune.autotuner.records import Sample
from mhctune.autotuner.stats import CONFIDENCE, regret
from mhctune.kernels.space import Candidate

A, B, C = (Candidate.of("fused", {"tile_n": n}) for n in range(3))
PROTOCOL = Protocol(13, screening=6, confirmation=5)


def rounds(latencies: Sequence[float], throttled: Sequence[int] = ()) -> list[Sample]:
    return [Sample(0, n, 0, 20, us, throttled=n in throttled) for n, us in enumerate(latencies)]


def batch(count: int, **times: float) -> dict[Candidate, list[Sample]]:
    return {c: rounds([times[name]] * count) for name, c in zip("ABC", (A, B, C), strict=True)}


def test_everybody_races_until_the_first_look() -> None:
    for count in range(6):
        assert field_after(batch(count, A=1.0, B=2.0, C=3.0), PROTOCOL, 0.05) == Field((A, B, C))


def test_the_looks_and_the_ends_of_a_race_are_known_beforehand() -> None:
    assert PROTOCOL.looks == (6, 12)
    assert boundaries(PROTOCOL) == (6, 12, 13, 18)
    assert Protocol(6, screening=6).looks == ()  # the end of the rounds is no look before the end


def test_who_is_slower_by_more_than_the_bound_leaves_and_who_is_within_it_stays() -> None:
    found = field_after(batch(6, A=1.0, B=1.04, C=1.06), PROTOCOL, 0.05)
    assert (found.racing, found.done) == ((A, B), {C})


def test_nobody_leaves_at_one_place_who_is_nearer_than_places_differ() -> None:
    close = batch(6, A=1.0, B=1.02, C=1.04)
    assert field_after(close, PROTOCOL, 0.01).racing == (A,)
    assert field_after(close, MOVES, 0.01).racing == (A, B)


def test_whom_the_rounds_do_not_tell_apart_is_confirmed_beside_the_twin_of_the_best() -> None:
    close = {A: rounds([1.0, 1.02] * 7), B: rounds([1.01] * 14), C: rounds([1.03] * 14)}
    found = field_after({c: taken[:13] for c, taken in close.items()}, PROTOCOL, 0.05)
    assert found == Field((A, B), frozenset({C}), A)
    assert field_after(batch(18, A=1.0, B=1.0, C=1.03), PROTOCOL, 0.05) == Field((), frozenset({A, B, C}))


def test_who_is_kept_is_confirmed_whatever_its_rounds_say() -> None:
    times = {"A": 1.0, "B": 1.5, "C": 1.5}
    at = [field_after(batch(n, **times), PROTOCOL, 0.05, keep={C}) for n in (6, 12, 13, 17)]
    assert [field.racing for field in at] == [(A, C)] * 4
    assert (at[3].done, at[3].twin) == ({B}, A)
    assert field_after(batch(18, **times), PROTOCOL, 0.05, keep={C}).done == {A, B, C}


def test_without_a_confirmation_the_batch_ends_after_its_samples() -> None:
    over = field_after(batch(13, A=1.0, B=1.0, C=1.03), replace(PROTOCOL, confirmation=0), 0.05)
    assert over == Field((), frozenset({A, B, C}))


def test_one_slow_round_does_not_send_anybody_away() -> None:
    slow = {A: rounds([1.0] * 6), B: rounds([1.5, 1.0, 1.5, 1.5, 1.5, 1.5]), C: rounds([1.5] * 6)}
    assert field_after(slow, PROTOCOL, 0.05).racing == (A, B)


def test_a_drift_of_the_machine_sends_nobody_away() -> None:
    drift = [1.0, 1.2, 1.5, 2.0, 2.5, 3.0]
    found = field_after({A: rounds(drift), B: rounds([1.04 * d for d in drift])}, PROTOCOL, 0.05)
    assert found.racing == (A, B)


def test_throttled_rounds_count_only_beyond_the_repeats_and_are_never_judged() -> None:
    assert counted({0: False, 1: True, 2: True, 3: True, 4: False}, repeats=2) == [0, 3, 4]
    assert counted({}, repeats=2) == []
    hot = {A: rounds([1.0] * 6, throttled=[2]), B: rounds([2.0] * 6, throttled=[2])}
    assert field_after(hot, PROTOCOL, 0.05).racing == (A, B)  # five sound rounds are no look yet
    hot = {A: rounds([1.0] * 7, throttled=[2]), B: rounds([2.0] * 7, throttled=[2])}
    assert field_after(hot, PROTOCOL, 0.05).racing == (A,)
    always = {A: rounds([1.0] * 6, range(6)), B: rounds([2.0] * 6, range(6))}
    assert field_after(always, replace(PROTOCOL, repeats=0), 0.05).racing == (A, B)


def test_who_failed_is_compared_with_as_long_as_it_raced() -> None:
    """So that a resumed race, which knows of the failure, decides as the first run that did not yet."""
    failed_later = {A: rounds([1.0] * 7), B: rounds([1.2] * 9), C: rounds([1.0] * 9)}
    assert field_after(failed_later, PROTOCOL, 0.05).racing == (A, C)
    failed_before = {A: rounds([1.0] * 4), B: rounds([1.2] * 9), C: rounds([1.19] * 9)}
    assert field_after(failed_before, PROTOCOL, 0.05).racing == (B, C)


def test_the_field_after_each_round_agrees_with_that_after_all_of_them() -> None:
    rng = random.Random(5)
    times = {c: [1 + n / 50 + rng.uniform(0, 0.1) for _ in range(18)] for n, c in enumerate((A, B, C))}
    left: frozenset[Candidate] = frozenset()
    for count in range(19):
        found = field_after({c: rounds(us[:count]) for c, us in times.items()}, PROTOCOL, 0.02)
        assert found.done >= left
        left = found.done
    assert left == {A, B, C}


@pytest.mark.parametrize("looks", [1, 2])
def test_a_candidate_exactly_at_the_bound_leaves_as_seldom_as_the_level_says(looks: int) -> None:
    """Exactly: each ratio lies above the bound with a chance of one half; every pattern is tried."""
    protocol = Protocol(6 * looks + 1, screening=6)
    count, left = 6 * looks, 0
    for pattern in itertools.product((1.0, 1.1), repeat=count):
        samples: Mapping[Candidate, Sequence[Sample]] = {A: rounds([1.0] * count), B: rounds(pattern)}
        left += B in field_after(samples, protocol, 0.05).done
    assert 0 < left / 2**count <= 0.05


MOVES = replace(PROTOCOL, placements=5)


def test_who_is_within_what_places_differ_by_is_confirmed_elsewhere_although_the_rounds_tell_it_apart() -> (
    None
):
    near = batch(13, A=1.0, B=1.029, C=1.031)
    assert field_after(near, MOVES, 0.05) == Field((A, B), frozenset({C}), A, 1)
    assert field_after(near, PROTOCOL, 0.05) == Field((A,), frozenset({B, C}), A)


def test_the_placement_follows_from_the_rounds_that_count() -> None:
    assert boundaries(MOVES) == (6, 12, 13, 14, 15, 16, 17, 18)
    numbers = [*range(13), 1000, 2000, 3000]

    def moved(hot: Sequence[int] = ()) -> dict[Candidate, list[Sample]]:
        return {c: [Sample(0, n, 0, 20, 1.0, throttled=n in hot) for n in numbers] for c in (A, B, C)}

    assert field_after(moved(), MOVES, 0.05).placement == 4
    assert field_after(moved(hot=[3000]), MOVES, 0.05).placement == 3  # once more in the same place
    assert field_after(moved(), replace(MOVES, confirmation=3, placements=3), 0.05).racing == ()


ON = Protocol.of("cuda", 15)


def placed(*latencies: Sequence[float], last: int = 7) -> dict[Candidate, list[Sample]]:
    """Candidates in 15 rounds and then in those of each placement, of one latency each, to the `last`."""
    places = [*range(1, 8), *(8 + n for n in range(FURTHER))]
    counts = [15, *(sum(ON.placement(n) == p for n in range(15 + ON.extension)) for p in places)][: last + 1]
    return {
        Candidate.of("fused", {"tile_n": name}): [
            Sample(0, 1000 * place + n, 0, 20, us[place])
            for place, count in enumerate(counts)
            for n in range(count)
        ]
        for name, us in enumerate(latencies)
    }


def test_who_is_not_told_from_the_leader_goes_on_to_further_places_and_nobody_else() -> None:
    close = [1.02] * 3 + [1.009] + [1.02] * 15  # one of eight placements says that it loses less
    found = field_after(placed([1.0] * 19, close, [1.011] * 19), ON, 0.05)
    assert found == Field((A, B), frozenset({C}), None, 8)
    assert field_after(placed([1.0] * 19, close, [1.011] * 19, last=17), ON, 0.05).placement == 18
    over = field_after(placed([1.0] * 19, close, [1.011] * 19, last=18), ON, 0.05)
    assert over == Field((), frozenset({A, B, C}))


def test_who_leads_alone_does_not_go_on() -> None:
    assert field_after(placed([1.0] * 8, [1.011] * 8, [1.02] * 8), ON, 0.05) == Field(
        (), frozenset({A, B, C})
    )
    near = placed([1.0] * 8, [1.0] * 8)
    assert field_after(near, ON, 0.05).racing == (A, B)
    assert field_after(near, replace(ON, further=0), 0.05).racing == ()


def test_the_leader_is_who_leads_over_the_placements_and_not_who_led_before() -> None:
    found = field_after(placed([1.0, *[1.03] * 7], [1.01] * 8, [1.012] * 8), ON, 0.05)
    assert found.racing == (A, B, C)  # the first placement says that A loses nothing
    found = field_after(placed([1.005, *[1.03] * 7], [1.01] * 8, [1.012] * 8), ON, 0.05)
    assert found.racing == (A, B, C)
    found = field_after(placed([1.025] * 8, [1.01] * 8, [1.012] * 8), ON, 0.05)
    assert (found.racing, found.done) == ((B, C), {A})


def test_the_nearest_go_on_and_no_more_than_that() -> None:
    found = field_after(placed(*([1.0 + n / 2000] * 8 for n in range(NEAREST + 3))), ON, 0.05)
    assert [c.config["tile_n"] for c in found.racing] == list(range(NEAREST))
    assert len(found.done) == 3


def test_who_failed_in_the_confirmation_neither_leads_nor_goes_on() -> None:
    batch = placed([0.98] * 8, [1.0] * 8, [1.0] * 8)
    batch[A] = batch[A][:-1]
    assert field_after(batch, ON, 0.05).racing == (B, C)


def test_the_field_changes_with_each_further_place_and_follows_from_rounds_alone() -> None:
    assert boundaries(ON)[-12:] == (*range(30, 63, 3), 63)
    rng, left = random.Random(3), frozenset[Candidate]()
    full = placed(*([1 + rng.uniform(0, 0.02) for _ in range(19)] for _ in range(3)), last=18)
    for count in range(64):
        found = field_after({c: taken[:count] for c, taken in full.items()}, ON, 0.05)
        assert found.done >= left
        left = found.done
    assert left == {A, B, C}


def test_limits_hold_although_a_look_decides_who_goes_on() -> None:
    """Exactly: of a candidate that truly loses 1 %, or any share below the median, in every pattern of signs.

    A placement's ratio lies below 1 % (chance q), between that and its median, or above (one half).
    """
    upper = [_left_and_too_low(q / 100) + _stayed_and_wrong(q / 100) for q in range(51)]
    assert max(upper) <= 1 - CONFIDENCE
    lower = 0.5**8 + _tail(19, 5)  # left by the least of eight, or the sixth of 19 is above the median
    assert lower <= 1 - CONFIDENCE
    ends = [[Sample(0, 1000 * p, 0, 1, 1 + v / 1000) for p, v in enumerate(range(n))] for n in (8, 19)]
    ones = [[Sample(0, 1000 * p, 0, 1, 1.0) for p in range(n)] for n in (8, 19)]
    eight, all_of_them = (regret(mine, one) for mine, one in zip(ends, ones, strict=True))
    assert regret(ends[0], ones[0], LOOK).lower == pytest.approx(0.0)
    assert (eight.lower, all_of_them.lower) == (pytest.approx(0.001), pytest.approx(0.005))


def _tail(n: int, most: int) -> float:
    return sum(math.comb(n, k) for k in range(most + 1)) / 2**n


def _left_and_too_low(q: float) -> float:
    """All of eight above 1 %, at most one above the median: the upper limit, the last but one, is below."""
    return sum(math.comb(8, high) * (0.5 - q) ** (8 - high) * 0.5**high for high in (0, 1))


def _stayed_and_wrong(q: float) -> float:
    """At most five of 19 above the median, less those patterns whose first eight are all above 1 %."""
    gone = sum(
        math.comb(8, high) * 0.5**high * (0.5 - q) ** (8 - high) * _tail(11, 5 - high) for high in range(6)
    )
    return _tail(19, 5) - gone
