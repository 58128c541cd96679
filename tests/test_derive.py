"""From trials to a table: who wins where, how surely, and what is left out."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mhctune.autotuner.bands import NoBands
from mhctune.autotuner.derive import derive, incumbent_for
from mhctune.autotuner.incumbent import Incumbent
from mhctune.autotuner.records import (
    Cell,
    Failure,
    FailureKind,
    Footprint,
    Measurement,
    Outcome,
    Sample,
    Trial,
)
from mhctune.autotuner.standings import standings, winner
from mhctune.autotuner.stats import TooFewSamples, regret
from mhctune.autotuner.store import SweepRecord, variants_of, variants_to_data
from mhctune.kernels.dispatch import Choice, DispatchTable, Fingerprint
from mhctune.kernels.post_pre_delayed import PostPreDelayed
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

PROBLEM = Problem(hidden_size=256)
COUNTS = (1, 4, 16)
SPACE: dict[str, dict[str, list[int]]] = {
    "fused": {"tile_n": [12, 24], "n_splits": [1], "block_h": [64], "block_m": [1]},
    "unfused": {"tile_n": [12, 24], "n_splits": [1], "block_h": [64], "block_m": [1]},
}


def candidate(arm: str, tile_n: int) -> Candidate:
    return Candidate.of(arm, {"tile_n": tile_n, "n_splits": 1, "block_h": 64, "block_m": 1})


F12, F24, U12, U24 = ALL = (
    candidate("fused", 12), candidate("fused", 24), candidate("unfused", 12), candidate("unfused", 24),
)  # fmt: skip
ROUNDS = 9
VARIANTS = {
    of: tuple(str(v) for v in PostPreDelayed().arm("c", of.arm).variants(PROBLEM, of.config)) for of in ALL
}


def record(fingerprint: Fingerprint, **changes: Any) -> SweepRecord:
    values: dict[str, Any] = {
        "digest": "d" * 64,
        "seam": "post_pre_delayed",
        "problem": PROBLEM,
        "target": "c",
        "token_counts": COUNTS,
        "grid": 12,
        "space": SPACE,
        "variants": VARIANTS,
        "protocol": {"version": 1, "samples": ROUNDS},
        "fingerprint": fingerprint,
        "sources": {"fused": "a" * 64, "unfused": "b" * 64},
        "bound": 0.05,
    }
    return SweepRecord(**{**values, **changes})


@pytest.fixture
def fingerprint(make_fingerprint: Any) -> Fingerprint:
    made: Fingerprint = make_fingerprint()
    return made


def drift(round: int) -> float:
    """A machine that slows down and recovers, for all candidates of a round alike."""
    return 1 + 0.3 * (round % 4)


def samples(
    latency: float, batches: Sequence[int] = (0,), noise: float = 0.0, seed: object = 0
) -> list[Sample]:
    rng = random.Random(f"{seed} {latency}")
    return [
        Sample(b, n, 0, 20, latency * drift(n) * (1 + rng.uniform(-noise, noise)))
        for b in batches
        for n in range(ROUNDS)
    ]


def trial(count: int, of: Candidate, outcome: Outcome | Sequence[Sample] | None, memory: int = 100) -> Trial:
    cell = Cell("post_pre_delayed", PROBLEM, count)
    if outcome is None or isinstance(outcome, Failure | Measurement):
        return Trial(cell, of, Footprint(10, memory, 0), outcome)
    taken = tuple(outcome)
    return Trial(cell, of, Footprint(10, memory, 0), Measurement(taken), taken)


def grid(latencies: Mapping[int, Sequence[float | Failure]], noise: float = 0.0) -> list[Trial]:
    """Trials of all four candidates: latencies by token count, in the order of `ALL`."""
    return [
        trial(
            count, of, value if isinstance(value, Failure) else samples(value, noise=noise, seed=(count, of))
        )
        for count, row in latencies.items()
        for of, value in zip(ALL, row, strict=True)
    ]


CUT_OVER = {1: (10.0, 12.0, 15.0, 15.0), 4: (20.0, 24.0, 30.0, 30.0), 16: (99.0, 99.0, 60.0, 70.0)}
NO_ROOM = Failure(FailureKind.OVER_BUDGET, "too much")
WRONG = Failure(FailureKind.MISMATCH, "wrong")


# Standings of a cell.


def test_the_standings_are_in_order_of_the_median_and_the_best_has_no_regret() -> None:
    found = standings(grid({1: (12.0, 10.0, 11.0, 20.0)}))
    assert [s.candidate for s in found] == [F24, U12, F12, U24]
    assert [round(s.regret.point, 9) for s in found] == [0.0, 0.1, 0.2, 1.0]
    assert found[0].latency_us == 10.0 * sorted(drift(n) for n in range(ROUNDS))[ROUNDS // 2]


def test_a_drift_that_hits_all_candidates_of_a_round_leaves_no_trace() -> None:
    for standing in standings(grid({1: (12.0, 10.0, 11.0, 20.0)})):
        assert standing.regret.upper - standing.regret.lower < 1e-12


def test_failures_and_trials_that_still_race_do_not_stand() -> None:
    trials = [*grid({1: (12.0, WRONG, 11.0, 20.0)}), trial(1, candidate("fused", 6), None)]
    assert [s.candidate for s in standings(trials)] == [U12, F12, U24]
    assert standings([trial(1, F12, WRONG)]) == []


def test_what_the_noise_does_not_tell_apart_is_tied() -> None:
    found = standings(grid({1: (10.0, 10.05, 20.0, 21.0)}, noise=0.1))
    assert [s.tied for s in found] == [True, True, False, False]


def test_too_few_rounds_for_a_limit_are_an_error_and_no_guess() -> None:
    short = [trial(1, F12, samples(10.0)[:4]), trial(1, F24, samples(11.0)[:4])]
    with pytest.raises(TooFewSamples):
        standings(short)


def test_a_difference_below_the_noise_floor_is_none() -> None:
    trials = grid({1: (10.0, 10.02, 10.2, 21.0)})
    assert [s.tied for s in standings(trials, floor=0.01)] == [True, True, False, False]
    assert [s.tied for s in standings(trials)] == [True, False, False, False]


def test_the_noise_floor_leaves_memory_to_decide_between_bands(fingerprint: Fingerprint) -> None:
    flat = grid({count: (10.0, 10.02, 15.0, 15.0) for count in COUNTS})
    small = [replace(t, footprint=Footprint(10, 50, 0)) if t.candidate == F24 else t for t in flat]
    assert str(derive(record(fingerprint), 3, small, 0.05).table.lookup(4).choice) == str(F12)
    for place, t in enumerate(small):
        if t.candidate == F12:
            twins = tuple(replace(s, latency_us=s.latency_us * 1.01) for s in t.samples)
            small[place] = replace(t, twins=twins)
    derived = derive(record(fingerprint), 3, small, 0.05)
    assert str(derived.table.lookup(4).choice) == str(F24)
    assert derived.table.evidence["mean_regret"] == pytest.approx(0.002)  # as measured
    assert derived.table.evidence["noise_floor"] == [0.01, 0.01, 3 * ROUNDS]


def test_a_winner_among_the_tied_is_the_incumbent_then_kernels_then_memory_then_order() -> None:
    rows = standings(grid({1: (10.0, 10.0, 10.0, 20.0)}))
    equal = dict.fromkeys(ALL, 100)
    variants = {of: VARIANTS[of] for of in ALL}
    assert winner(rows, variants, equal, U12) == U12
    assert winner(rows, variants, equal, U24) == F12  # an incumbent that is slower is none
    assert winner(rows, variants, {**equal, F24: 50, U12: 10}) == F24  # unfused launches a kernel more
    assert winner(rows, variants, equal) == F12
    assert winner(rows, dict(reversed(variants.items())), equal) == F24


def test_who_left_early_stands_with_the_limits_of_the_rounds_that_it_ran() -> None:
    # The machine slowed down after the loser had left: by plain medians it would be the best.
    pace = [1.0] * 6 + [2.0] * 7
    stayed = [Sample(0, n, 0, 20, 10 * p) for n, p in enumerate(pace)]
    left = [Sample(0, n, 0, 20, us) for n, us in enumerate([11.0, 12.0, 12.0, 12.0, 12.0, 13.0])]
    found = standings([trial(1, F12, stayed), trial(1, F24, left)])
    assert [s.candidate for s in found] == [F12, F24]
    assert (found[1].regret.n, found[1].tied) == (6, False)
    assert (found[1].regret.lower, found[1].regret.upper) == pytest.approx((0.1, 0.3))


# Several batches: the champion is the bridge.


def test_who_left_before_the_last_placement_is_not_the_best_however_low_its_median() -> None:
    def moved(us: float, batch: int, last: int) -> list[Sample]:
        return [Sample(batch, 1000 * place, 0, 1, us) for place in range(last + 1)]

    left, stayed, other = (candidate("fused", n) for n in (4, 8, 16))
    taken = {left: moved(9.0, 0, 7), stayed: moved(10.0, 0, 18), other: moved(10.1, 0, 18)}
    rows = standings([trial(1, c, samples) for c, samples in taken.items()])
    assert rows[0].candidate == stayed
    taken[left] += moved(9.0, 1, 7)  # of a later batch, in which nobody went on
    assert standings([trial(1, c, samples) for c, samples in taken.items()])[0].candidate == left


def three_batches(noise: float = 0.0) -> list[Trial]:
    """As a race makes them: F24 wins batch 0, U12 beats it in batch 1 and is carried into batch 2."""
    return [
        trial(1, F12, samples(12.0, (0,), noise)),
        trial(1, F24, samples(11.0, (0, 1), noise)),
        trial(1, U12, samples(10.0, (1, 2), noise)),
        trial(1, U24, samples(15.0, (2,), noise)),
    ]


def test_a_candidate_of_another_batch_is_placed_over_the_champion_that_was_carried() -> None:
    found = {s.candidate: s.regret for s in standings(three_batches())}
    assert found[U12].point == 0
    assert found[F24].point == pytest.approx(0.1)
    assert found[U24].point == pytest.approx(0.5)
    assert found[F12].point == pytest.approx(12 / 11 * 1.1 - 1)  # never timed beside U12


def test_the_limits_over_a_bridge_are_products_of_its_limits() -> None:
    trials = three_batches(noise=0.05)
    by = {t.candidate: t.samples for t in trials}
    over, onward = regret(by[F12], by[F24]), regret(by[F24], by[U12])
    found = next(s.regret for s in standings(trials) if s.candidate == F12)
    assert found.point == (1 + over.point) * (1 + onward.point) - 1
    assert found.lower == (1 + over.lower) * (1 + onward.lower) - 1
    assert found.upper == (1 + over.upper) * (1 + onward.upper) - 1
    assert found.lower < found.point < found.upper
    assert found.n == ROUNDS


def test_two_bridges_in_a_row_lead_to_the_best() -> None:
    trials = [
        trial(1, F12, samples(20.0, (0,))),
        trial(1, F24, samples(15.0, (0, 1))),
        trial(1, U12, samples(12.0, (1, 2))),
        trial(1, U24, samples(10.0, (2,))),
    ]
    found = {s.candidate: s.regret.point for s in standings(trials)}
    assert found == pytest.approx({U24: 0.0, U12: 0.2, F24: 0.5, F12: 1.0})


def test_rounds_shared_with_the_best_go_before_any_bridge() -> None:
    trials = three_batches(noise=0.05)
    by = {t.candidate: t.samples for t in trials}
    found = {s.candidate: s.regret for s in standings(trials)}
    assert found[F24] == regret(by[F24], by[U12])
    assert found[U24] == regret(by[U24], by[U12])


def test_of_two_bridges_the_one_with_the_smaller_upper_limit_counts() -> None:
    noisy = [Sample(0, n, 0, 20, 11.0 * (1.0 if n % 2 else 0.7)) for n in range(ROUNDS)]
    steady = [Sample(0, n, 0, 20, 11.0) for n in range(ROUNDS)]
    with_best = [Sample(1, n, 0, 20, 11.0) for n in range(ROUNDS)]
    trials = [
        trial(1, F12, [Sample(0, n, 0, 20, 12.0) for n in range(ROUNDS)]),
        trial(1, F24, [*noisy, *with_best]),
        trial(1, U24, [*steady, *with_best]),
        trial(1, U12, [Sample(1, n, 0, 20, 10.0) for n in range(ROUNDS)]),
    ]
    found = next(s.regret for s in standings(trials) if s.candidate == F12)
    assert found.upper == pytest.approx(0.2)
    assert found.lower == pytest.approx(0.2)


def test_without_a_bridge_the_error_names_both_and_what_to_do() -> None:
    trials = [trial(4, F12, samples(12.0, (0,))), trial(4, U12, samples(10.0, (1,)))]
    with pytest.raises(TooFewSamples) as refused:
        standings(trials)
    for fragment in (str(F12), str(U12), "fewer than 5 rounds at 4 tokens", "--vram-budget"):
        assert fragment in str(refused.value)


def test_a_bridged_upper_limit_covers_the_true_regret_as_often_as_it_says() -> None:
    covered, runs = 0, 400
    for number in range(runs):
        rng = random.Random(number)
        latencies = {F12: (12.0, (0,)), F24: (11.0, (0, 1)), U12: (10.0, (1,))}
        trials = [
            trial(
                1,
                of,
                [Sample(b, n, 0, 20, us * rng.lognormvariate(0, 0.05)) for b in at for n in range(ROUNDS)],
            )
            for of, (us, at) in latencies.items()
        ]
        found = {s.candidate: s.regret for s in standings(trials)}
        covered += found[F12].upper >= 0.2
    assert covered / runs >= 0.9  # 2 c - 1 for c = 0.95


# Bands.


def test_a_cut_over_between_arms_is_a_band_edge(fingerprint: Fingerprint) -> None:
    derived = derive(record(fingerprint), 3, grid(CUT_OVER), 0.05)
    table = derived.table
    assert [(b.first, b.last, b.choice.arm) for b in table.bands] == [(1, 4, "fused"), (5, 16, "unfused")]
    assert table.lookup(4).choice == Choice("fused", F12.items)
    assert table.lookup(16).choice == Choice("unfused", U12.items)
    assert derived.missing == {}


def test_a_wide_bound_needs_one_band_where_a_narrow_one_needs_two(fingerprint: Fingerprint) -> None:
    wide = derive(record(fingerprint), 3, grid(CUT_OVER), 0.7)
    assert len(wide.table.bands) == 1
    assert wide.derivation.worst_upper <= 0.7


def test_the_last_choice_is_served_above_the_bands(fingerprint: Fingerprint) -> None:
    table = derive(record(fingerprint), 3, grid(CUT_OVER), 0.05).table
    assert table.default == table.bands[-1].choice
    assert str(table.lookup(17).status) == "out_of_range"


def test_the_table_says_what_it_was_made_for(fingerprint: Fingerprint) -> None:
    table = derive(record(fingerprint), 3, grid(CUT_OVER), 0.05).table
    assert (table.seam, table.target, table.fingerprint) == ("post_pre_delayed", "c", fingerprint)
    assert table.problem == PROBLEM.to_dict()


def test_every_band_carries_what_was_measured_in_it(fingerprint: Fingerprint) -> None:
    latencies = {1: (10.0, 12.0, 15.0, 15.0), 4: (20.4, 20.0, 30.0, 30.0), 16: (99.0, 99.0, 60.0, 60.0)}
    table = derive(record(fingerprint), 3, grid(latencies), 0.05).table
    first = table.bands[0].evidence["measured"]
    assert [row["num_tokens"] for row in first] == [1, 4]
    assert first[1]["best"] == str(F24)
    assert first[1]["regret"] == first[1]["upper"] == 0.02
    assert first[1]["latency_us"] / first[1]["best_us"] == pytest.approx(1.02)
    assert first[1]["rounds"] == ROUNDS
    assert table.bands[0].evidence["worst_upper"] == 0.02
    assert table.bands[1].evidence["measured"][0]["tie_set"] == 2


def test_the_table_carries_the_sweeps_evidence(fingerprint: Fingerprint) -> None:
    latencies = {**CUT_OVER, 4: (20.0, WRONG, 30.0, 30.0)}
    evidence = derive(record(fingerprint), 3, grid(latencies), 0.05).table.evidence
    assert evidence["sweep"] == 3
    assert evidence["sweep_digest"] == "d" * 64
    assert evidence["max_regret"] == 0.05
    assert evidence["candidates"] == 4
    assert evidence["failures"] == {"mismatch": 1}
    assert evidence["protocol"] == {"version": 1, "samples": ROUNDS}
    assert evidence["sources"] == {"fused": "a" * 64, "unfused": "b" * 64}
    assert {name.split("(")[0] for name in evidence["variants"]} == {
        "c:post_pre", "c:post", "c:projection", "c:epilogue",
    }  # fmt: skip
    assert DispatchTable.from_dict(derive(record(fingerprint), 3, grid(latencies), 0.05).table.to_dict())


@pytest.mark.parametrize(
    ("hole", "fragment"),
    [((99.0, NO_ROOM, 60.0, 70.0), "1 found no memory"), ((WRONG,) * 4, "0 of 4 candidates measured")],
)
def test_a_count_that_was_not_measured_ends_the_bands_before_it(
    fingerprint: Fingerprint, hole: Sequence[float | Failure], fragment: str
) -> None:
    latencies = {1: CUT_OVER[1], 4: hole, 16: CUT_OVER[16]}
    derived = derive(record(fingerprint), 3, grid(latencies), 0.05)
    assert derived.table.max_tokens == 1
    assert list(derived.cells) == [1]
    assert list(derived.missing) == [4]
    assert fragment in derived.missing[4]


def test_a_candidate_that_was_not_run_leaves_its_count_out(fingerprint: Fingerprint) -> None:
    trials = [t for t in grid(CUT_OVER) if (t.cell.num_tokens, t.candidate) != (16, U24)]
    derived = derive(record(fingerprint), 3, trials, 0.05)
    assert derived.table.max_tokens == 4
    assert "1 not run" in derived.missing[16]


def test_a_hole_at_the_smallest_count_leaves_no_bands(fingerprint: Fingerprint) -> None:
    with pytest.raises(NoBands, match=r"sweep 3 has nothing to derive bands from: 1 token: 0 of 4"):
        derive(record(fingerprint), 3, grid({**CUT_OVER, 1: (WRONG,) * 4}), 0.05)


def test_a_mismatch_costs_the_candidate_and_not_the_band(fingerprint: Fingerprint) -> None:
    latencies = {**CUT_OVER, 4: (WRONG, 24.0, 30.0, 30.0)}
    derived = derive(record(fingerprint), 3, grid(latencies), 0.25)
    assert derived.missing == {}
    assert str(derived.table.lookup(4).choice) == str(F24)


def test_the_incumbent_stays_inside_the_bound_and_goes_outside_it(fingerprint: Fingerprint) -> None:
    flat = {count: (10.0, 10.2, 15.0, 15.0) for count in COUNTS}
    fresh = derive(record(fingerprint), 3, grid(flat), 0.05)
    assert str(fresh.table.lookup(4).choice) == str(F12)
    other = {count: (15.0, 10.0, 15.0, 15.0) for count in COUNTS}
    served = derive(record(fingerprint), 2, grid(other), 0.05).table
    kept = derive(record(fingerprint), 3, grid(flat), 0.05, Incumbent.of(served))
    assert str(kept.table.lookup(4).choice) == str(F24)
    strict = derive(record(fingerprint), 3, grid(flat), 0.01, Incumbent.of(served))
    assert str(strict.table.lookup(4).choice) == str(F12)


def test_the_incumbent_is_the_newest_table_of_the_same_fingerprint(
    make_table: Any, make_fingerprint: Any
) -> None:
    here, other = make_fingerprint(), make_fingerprint(driver="1")
    tables = [make_table(fingerprint=other), make_table(evidence={"sweep": 2}), make_table()]
    assert incumbent_for(here, tables) is tables[1]
    assert incumbent_for(make_fingerprint(driver="2"), tables) is None


def test_a_sweep_of_arms_and_tunables_that_are_gone_gives_its_bands(
    fingerprint: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PostPreDelayed, "arms", lambda seam, target: ())
    kept = derive(record(fingerprint), 3, grid(CUT_OVER), 0.05)
    assert [band.choice.arm for band in kept.table.bands] == ["fused", "unfused"]
    gone = [Candidate.of("folded", {"lanes": lanes}) for lanes in (8, 4)]
    variants = {gone[0]: ("c:fold(lanes=8)",), gone[1]: ("c:fold(lanes=4)", "c:end()")}
    old = record(fingerprint, seam="pots", space={"folded": {"lanes": [8, 4]}}, variants=variants)
    trials = [trial(n, of, samples(us)) for n in COUNTS for of, us in zip(gone, (10.0, 10.0), strict=True)]
    found = derive(old, 3, trials, 0.05)
    assert [str(band.choice) for band in found.table.bands] == ["folded(lanes=8)"]
    assert found.derivation.variants == {"c:fold(lanes=8)"}
    assert found.table.evidence["candidates"] == 2


def test_ties_are_broken_in_the_order_that_was_kept(fingerprint: Fingerprint) -> None:
    equal = grid({count: (10.0, 10.0, 10.0, 10.0) for count in COUNTS})
    for order in ((F12, F24, U12, U24), (F24, F12, U12, U24)):
        kept = {of: ("c:one()",) for of in order}
        found = derive(record(fingerprint, variants=kept), 3, equal, 0.05)
        assert str(found.table.lookup(1).choice) == str(order[0])


def test_candidates_and_kernels_keep_their_order_as_data(fingerprint: Fingerprint) -> None:
    turned = dict(reversed(VARIANTS.items()))
    again = variants_of(json.loads(json.dumps(variants_to_data(turned), sort_keys=True)))
    assert list(again.items()) == list(turned.items())
    assert record(fingerprint, variants=again).candidates == ALL[::-1]


def test_two_configs_that_share_kernels_count_their_variants_once(fingerprint: Fingerprint) -> None:
    derived = derive(record(fingerprint), 3, grid(CUT_OVER), 0.05)
    seam = PostPreDelayed()
    used = {str(v) for c in (F12, U12) for v in seam.arm("c", c.arm).variants(PROBLEM, c.config)}
    assert derived.derivation.variants == used
    assert len(used) == 4  # the epilogue is shared


def test_every_order_of_the_trials_gives_the_same_table(fingerprint: Fingerprint) -> None:
    trials = grid(CUT_OVER, noise=0.02)
    digests = set()
    for number, shuffled in enumerate(itertools.repeat(trials, 4)):
        mixed = list(shuffled)
        random.Random(number).shuffle(mixed)
        digests.add(derive(record(fingerprint), 3, mixed, 0.05).table.digest)
    assert len(digests) == 1
