"""The race measures everything once, in interleaved rounds, and goes on where it was stopped."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.conditions import NVML, Conditions, not_applicable
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.race import Race, Stopped
from mhctune.autotuner.records import (
    Cell,
    Failure,
    FailureKind,
    Footprint,
    Measurement,
    Outcome,
    Sample,
    SweepState,
    Trial,
    kept_us,
)
from mhctune.autotuner.standings import standings
from mhctune.autotuner.stats import TooFewSamples
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.twin import Twin
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

CELL = Cell("post_pre_delayed", Problem(hidden_size=256), 8)
ROUNDS = 5
ALL_ROUNDS = Protocol(ROUNDS)
LOOKS = Protocol(13, screening=6, confirmation=6)
INPUT_BYTES, SET_BYTES = 1000, 100
A, B, C, D, E, F, G = SEVEN = tuple(Candidate.of("fused", {"tile_n": n}) for n in range(7))
MISMATCH = Failure(FailureKind.MISMATCH, "layer_input: 3 elements not written")
NO_MEMORY = Failure(FailureKind.OUT_OF_MEMORY, "the host is out of memory")
LAUNCH = Failure(FailureKind.LAUNCH, "RuntimeError: no")
AMPLE = VramBudget(10**9, 10**9)


def room_for(sets: int) -> VramBudget:
    return VramBudget(INPUT_BYTES + sets * SET_BYTES, 10**9)


def latency_of(candidate: Candidate, batch: int, round: int) -> float:
    """Repeatable noise of 5 % on a latency of its own for each candidate, as a sample keeps it."""
    noise = random.Random(f"{candidate} {batch} {round}").uniform(1.0, 1.05)
    return kept_us((100.0 + 7.0 * (candidate.config["tile_n"] * 3 % 7)) * noise)


@dataclass
class FakeBench:
    """Candidates without kernels: each takes 100 bytes, and fails where it is told to.

    `room` is how many may be resident before memory is out, whatever the budget says. `odd` holds answers
    by (candidate, batch, round) in the order they are given; then the latency follows.
    """

    refused: dict[Candidate, Failure] = field(default_factory=dict)
    odd: dict[tuple[Candidate, int, int], list[float | Failure]] = field(default_factory=dict)
    bytes_of: dict[Candidate, int] = field(default_factory=dict)
    room: int = 99
    prepared: list[Candidate] = field(default_factory=list)
    timed: list[tuple[Candidate, int, int]] = field(default_factory=list)
    primed: list[Candidate] = field(default_factory=list)
    resident: list[Candidate] = field(default_factory=list)
    most_resident: int = 0
    entered: int = 0
    floor: float = 0.0
    moved: list[tuple[Candidate, int]] = field(default_factory=list)
    stuck: dict[Candidate, Failure] = field(default_factory=dict)

    def input_bytes(self, cell: Cell) -> int:
        return INPUT_BYTES

    def enter(self, cell: Cell, seed: int) -> int:
        self.entered += 1
        return INPUT_BYTES

    def floor_us(self) -> float:
        return self.floor

    def forecast(self, candidate: Candidate) -> Footprint:
        return Footprint(INPUT_BYTES, self.bytes_of.get(candidate, SET_BYTES), 0)

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        assert candidate not in self.resident
        self.prepared.append(candidate)
        if len(self.resident) >= self.room:
            return NO_MEMORY
        if candidate in self.refused:
            return self.refused[candidate]
        self.resident.append(candidate)
        self.most_resident = max(self.most_resident, len(self.resident))
        return replace(self.forecast(candidate), measured_bytes=self.bytes_of.get(candidate, SET_BYTES) + 1)

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        assert candidate in self.resident
        if launches == 1:
            self.primed.append(candidate)
            return latency_of(candidate, batch, round)
        self.timed.append((candidate, batch, round))
        answers = self.odd.get((candidate, batch, round), [])
        return answers.pop(0) if answers else latency_of(candidate, batch, round)

    def move(self, candidate: Candidate, placement: int) -> Failure | None:
        assert candidate in self.resident
        self.moved.append((candidate, placement))
        return self.stuck.get(candidate)

    def release(self, candidate: Candidate) -> None:
        if candidate in self.resident:
            self.resident.remove(candidate)

    def leave(self) -> None:
        self.resident.clear()


@dataclass
class ListStore:
    """A store in memory, with what was committed and when."""

    rows: dict[Candidate, Trial] = field(default_factory=dict)
    commits: list[list[tuple[Candidate, Sample]]] = field(default_factory=list)
    conditions: list[Conditions | None] = field(default_factory=list)
    floors: dict[int, float] = field(default_factory=dict)

    def begin(self, sweep: SweepRecord, *, new: bool = False) -> int:
        return 1

    def keep_floor(self, sweep_id: int, cell: Cell, floor_us: float) -> None:
        self.floors.setdefault(cell.num_tokens, floor_us)

    def trials(self, sweep_id: int, num_tokens: int | None = None) -> Sequence[Trial]:
        return list(self.rows.values())

    def open_trial(self, sweep_id: int, cell: Cell, candidate: Candidate, footprint: Footprint) -> int:
        return self._put(cell, candidate, footprint, None)

    def add_samples(
        self,
        samples: Sequence[tuple[int, Sample]],
        twins: Sequence[tuple[int, Sample]] = (),
        conditions: Conditions | None = None,
    ) -> None:
        candidates = {trial.id: candidate for candidate, trial in self.rows.items()}
        self.commits.append([(candidates[number], sample) for number, sample in samples])
        self.conditions.append(conditions)
        for number, sample in twins:
            trial = self.rows[candidates[number]]
            self.rows[candidates[number]] = replace(trial, twins=(*trial.twins, sample))
        for number, sample in samples:
            trial = self.rows[candidates[number]]
            assert (sample.batch, sample.round) not in {(s.batch, s.round) for s in trial.samples}
            self.rows[candidates[number]] = replace(trial, samples=(*trial.samples, sample))

    def finish_trial(self, trial_id: int) -> None:
        candidate = next(c for c, trial in self.rows.items() if trial.id == trial_id)
        trial = self.rows[candidate]
        assert trial.outcome is None
        self.rows[candidate] = replace(trial, outcome=Measurement(trial.samples))

    def fail_trial(
        self, sweep_id: int, cell: Cell, candidate: Candidate, footprint: Footprint, failure: Failure
    ) -> int:
        return self._put(cell, candidate, footprint, failure)

    def end(self, sweep_id: int, state: SweepState) -> None:
        """Nothing to keep."""

    def _put(self, cell: Cell, candidate: Candidate, footprint: Footprint, outcome: Outcome | None) -> int:
        before = self.rows.get(candidate)
        number = before.id if before else len(self.rows) + 1
        samples, twins = (before.samples, before.twins) if before else ((), ())
        self.rows[candidate] = Trial(cell, candidate, footprint, outcome, samples, number, twins)
        return number

    def kinds(self) -> dict[Candidate, FailureKind | None]:
        """What became of each candidate: None is a measurement."""
        outcomes = {candidate: trial.outcome for candidate, trial in self.rows.items()}
        assert None not in outcomes.values()
        return {c: o.kind if isinstance(o, Failure) else None for c, o in outcomes.items()}

    def rounds(self) -> dict[Candidate, list[tuple[int, int]]]:
        """The (batch, round) of every sample."""
        return {c: [(s.batch, s.round) for s in trial.samples] for c, trial in self.rows.items()}


def never() -> bool:
    return False


def race(
    bench: FakeBench,
    store: ListStore,
    budget: VramBudget = AMPLE,
    stop: Callable[[], bool] = never,
    candidates: Sequence[Candidate] = SEVEN,
    protocol: Protocol = ALL_ROUNDS,
    read: Callable[[], Conditions] = not_applicable,
    max_regret: float = 0.05,
) -> ListStore:
    run = Race(1, CELL, store, bench, budget, protocol, stop, max_regret=max_regret, read=read)
    run.run(candidates, store.trials(1))
    return store


def batches(store: ListStore) -> dict[int, set[Candidate]]:
    found: dict[int, set[Candidate]] = {}
    for candidate, taken in store.rounds().items():
        for batch, _ in taken:
            found.setdefault(batch, set()).add(candidate)
    return found


def test_every_candidate_gets_every_round_once() -> None:
    bench, store = FakeBench(), ListStore()
    race(bench, store)
    assert store.kinds() == dict.fromkeys(SEVEN)
    assert store.rounds() == {c: [(0, n) for n in range(ROUNDS)] for c in SEVEN}
    assert Counter(bench.timed) == {(c, 0, n): 1 for c in SEVEN for n in range(ROUNDS)}
    assert Counter(bench.primed) == Counter(bench.prepared) == dict.fromkeys(SEVEN, 1)


def test_rounds_run_forward_and_back_in_turn() -> None:
    bench, store = FakeBench(), ListStore()
    race(bench, store, candidates=(A, B, C))
    order = [candidate for candidate, _, _ in bench.timed]
    assert order == [A, B, C, C, B, A, A, B, C, C, B, A, A, B, C]
    assert [s.position for s in store.rows[A].samples] == [0, 2, 0, 2, 0]


@dataclass
class Idling(FakeBench):
    """Whoever is timed first after a pause is slower by 4 %; conditions are read in a pause."""

    idle: bool = True

    def read(self) -> Conditions:
        self.idle = True
        return not_applicable()

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        found, late = super().sample(candidate, batch, round, launches), self.idle
        self.idle = False
        return found if isinstance(found, Failure) else found * (1.04 if late and launches > 1 else 1.0)


@pytest.mark.parametrize("discarded", [0, 1])
def test_nobody_is_slower_for_being_first_in_a_round_if_that_sample_is_thrown_away(discarded: int) -> None:
    bench, store = Idling(), ListStore()
    protocol = replace(LOOKS, discarded=discarded)
    Race(1, CELL, store, bench, AMPLE, protocol, read=bench.read).run((A, B, C), ())  # type: ignore[arg-type]
    late = [
        sample.position
        for candidate, trial in store.rows.items()
        for sample in trial.samples
        if sample.latency_us != latency_of(candidate, sample.batch, sample.round)
    ]
    assert set(late) == (set() if discarded else {0})
    # What is thrown away is whom the round ends with: nobody is timed right behind itself.
    if discarded:
        assert bench.timed[:4] == [(c, 0, 0) for c in (C, A, B, C)]
        assert bench.timed[4:8] == [(c, 0, 1) for c in (A, C, B, A)]


def test_who_fails_while_its_sample_is_thrown_away_is_a_row_and_the_rest_goes_on() -> None:
    bench, store = FakeBench(odd={(C, 0, 0): [LAUNCH]}), ListStore()
    Race(1, CELL, store, bench, AMPLE, replace(ALL_ROUNDS, discarded=1)).run((A, B, C), ())  # type: ignore[arg-type]
    assert store.kinds() == {A: None, B: None, C: FailureKind.LAUNCH}
    assert store.rounds()[C] == []


def test_the_samples_of_a_round_are_committed_together_and_at_once() -> None:
    store = race(FakeBench(), ListStore(), candidates=(A, B, C))
    assert [{sample.round for _, sample in commit} for commit in store.commits] == [{n} for n in range(5)]
    assert all({candidate for candidate, _ in commit} == {A, B, C} for commit in store.commits)


def test_all_samples_of_a_batch_average_the_same_number_of_launches() -> None:
    store = race(FakeBench(), ListStore())
    fastest = min(latency_of(c, 0, 0) for c in SEVEN)
    launches = {s.launches for trial in store.rows.values() for s in trial.samples}
    protocol = Protocol(ROUNDS)
    assert launches == {protocol.launches(fastest)}
    assert (min(launches) - 1) * fastest < protocol.replay_us <= min(launches) * fastest


def test_the_bytes_of_a_trial_are_the_measured_ones_and_of_a_failure_the_forecast() -> None:
    store = race(FakeBench({B: MISMATCH}, bytes_of={A: 300}), ListStore(), candidates=(A, B))
    assert store.rows[A].footprint == Footprint(INPUT_BYTES, 300, 0, measured_bytes=301)
    assert store.rows[B].footprint == Footprint(INPUT_BYTES, SET_BYTES, 0)


def test_a_candidate_that_fails_its_check_is_a_row_and_the_rest_goes_on() -> None:
    bench = FakeBench({B: MISMATCH, D: LAUNCH})
    store = race(bench, ListStore())
    assert store.rows[B].outcome == MISMATCH
    assert store.rows[D].outcome == LAUNCH
    assert {c for c, kind in store.kinds().items() if kind is None} == {A, C, E, F, G}
    assert not {B, D} & {candidate for candidate, _, _ in bench.timed}


def test_a_candidate_that_fails_while_it_is_timed_keeps_its_samples_and_the_rest_goes_on() -> None:
    store = race(FakeBench(odd={(C, 0, 2): [LAUNCH]}), ListStore())
    assert store.rows[C].outcome == LAUNCH
    assert [s.round for s in store.rows[C].samples] == [0, 1]
    assert all(len(store.rows[c].samples) == ROUNDS for c in SEVEN if c != C)


@pytest.mark.parametrize("odd", [0.0, 4e-5, -3.0, math.nan, math.inf, -math.inf])
def test_an_implausible_time_is_measured_once_more(odd: float) -> None:
    bench = FakeBench(odd={(B, 0, 1): [odd]})
    store = race(bench, ListStore())
    assert store.kinds() == dict.fromkeys(SEVEN)
    assert Counter(bench.timed)[B, 0, 1] == 2
    assert [s.latency_us for s in store.rows[B].samples] == [latency_of(B, 0, n) for n in range(ROUNDS)]


@pytest.mark.parametrize("odd", [0.0, 4e-5, -3.0, math.nan, math.inf])
def test_an_implausible_time_twice_in_a_row_is_a_failure(odd: float) -> None:
    bench = FakeBench(odd={(B, 0, 1): [odd, odd]})
    store = race(bench, ListStore())
    outcome = store.rows[B].outcome
    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.IMPLAUSIBLE
    assert outcome.detail == f"{odd} us per launch, twice in a row"
    assert max(bench.timed.count(key) for key in bench.timed) == 2
    assert {c for c, kind in store.kinds().items() if kind is None} == set(SEVEN) - {B}


def test_a_budget_makes_batches_and_the_champion_is_carried_into_the_next() -> None:
    bench, store = FakeBench(), ListStore()
    race(bench, store, room_for(3))
    first, second, third = (batches(store)[n] for n in range(3))
    assert first == {A, B, C}
    champion = min(first, key=lambda c: store.rows[c].samples[2].latency_us)
    assert second == {champion, D, E}
    assert third >= {F, G}
    assert len(third & (first | second)) == 1
    assert store.kinds() == dict.fromkeys(SEVEN)
    assert bench.most_resident == 3


def test_the_champion_is_the_fastest_so_far_and_not_only_of_the_last_batch() -> None:
    # A and B in turn, then C and D: B is carried until something beats it.
    fast, slow = Candidate.of("fused", {"tile_n": 0}), Candidate.of("fused", {"tile_n": 2})
    later = [Candidate.of("unfused", {"tile_n": n}) for n in (1, 3, 5)]
    store = race(FakeBench(), ListStore(), room_for(2), candidates=(fast, slow, *later))
    assert [batches(store)[n] for n in range(4)] == [
        {fast, slow}, {fast, later[0]}, {fast, later[1]}, {fast, later[2]},
    ]  # fmt: skip


def test_the_champions_rounds_of_every_batch_are_kept() -> None:
    store = race(FakeBench(), ListStore(), room_for(3))
    carried = [c for c, taken in store.rounds().items() if len(taken) > ROUNDS]
    assert carried
    assert all(len(set(taken)) == len(taken) for taken in store.rounds().values())


def test_a_failure_leaves_its_place_in_the_batch_to_the_next() -> None:
    store = race(FakeBench({A: MISMATCH, B: LAUNCH}), ListStore(), room_for(3))
    assert batches(store)[0] == {C, D, E}


def test_a_candidate_that_alone_exceeds_the_budget_is_a_row_with_the_numbers() -> None:
    bench = FakeBench(bytes_of={B: 5000, G: 5000})
    store = race(bench, ListStore(), room_for(3))
    assert {c for c, kind in store.kinds().items() if kind is not None} == {B, G}
    outcome = store.rows[B].outcome
    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.OVER_BUDGET
    for fragment in ("1,000 bytes", "5,000 bytes", "5.9 KiB", "1.3 KiB", "Raise --vram-budget"):
        assert fragment in outcome.detail
    assert not {B, G} & set(bench.prepared)


def test_a_candidate_that_fits_only_without_the_champion_runs_alone() -> None:
    bench = FakeBench(bytes_of={D: 300})
    store = race(bench, ListStore(), room_for(3))
    assert store.kinds() == dict.fromkeys(SEVEN)
    assert [b for b in batches(store).values() if D in b] == [{D}]
    assert len([b for b in batches(store).values() if len(b) > 1]) == 3


def test_out_of_memory_halves_the_batch_and_nothing_is_dropped() -> None:
    bench, store = FakeBench(room=4), ListStore()
    race(bench, store)
    assert store.kinds() == dict.fromkeys(SEVEN)
    assert [len(batches(store)[n]) for n in range(len(batches(store)))] == [4, 3, 2]
    assert bench.most_resident == 4


def test_room_for_one_candidate_only_still_measures_all() -> None:
    store = race(FakeBench(room=1), ListStore())
    assert store.kinds() == dict.fromkeys(SEVEN)
    assert all(len(found) == 1 for found in batches(store).values())


def test_a_champion_that_finds_no_memory_again_stays_measured() -> None:
    store = race(FakeBench(), ListStore(), candidates=(A, B))
    race(FakeBench(room=0), store, candidates=(A, B, C))
    assert store.kinds() == {A: None, B: None, C: FailureKind.OUT_OF_MEMORY}


def test_a_champion_that_fails_its_second_check_is_a_failure() -> None:
    store = race(FakeBench(), ListStore(), candidates=(A, B))
    champion = min((A, B), key=lambda c: store.rows[c].samples[2].latency_us)
    race(FakeBench({champion: MISMATCH}), store, candidates=(A, B, C))
    assert store.rows[champion].outcome == MISMATCH
    assert store.kinds()[C] is None
    assert batches(store)[1] == {A, B, C} - {champion}


def test_nobody_new_to_time_means_no_rounds_for_the_champion() -> None:
    store = race(FakeBench(), ListStore(), candidates=(A, B))
    bench = FakeBench({C: MISMATCH})
    race(bench, store, candidates=(A, B, C))
    assert not bench.timed
    assert store.kinds() == {A: None, B: None, C: FailureKind.MISMATCH}


def test_a_settled_cell_is_not_entered() -> None:
    store = race(FakeBench({B: MISMATCH}), ListStore())
    bench = FakeBench()
    race(bench, store)
    assert (bench.entered, bench.prepared, bench.timed) == (0, [], [])


def test_what_found_no_memory_is_tried_again_and_other_failures_are_not() -> None:
    store = race(FakeBench({B: MISMATCH}, bytes_of={D: 5000}), ListStore(), room_for(20))
    bench = FakeBench()
    race(bench, store)
    assert store.kinds() == {**dict.fromkeys(SEVEN), B: FailureKind.MISMATCH}
    assert {c for c, _, _ in bench.timed} >= {D}
    assert B not in bench.prepared


SCENARIOS: dict[str, tuple[Callable[[], FakeBench], VramBudget]] = {
    "one batch": (FakeBench, AMPLE),
    "batches": (FakeBench, room_for(3)),
    "failures": (lambda: FakeBench({B: MISMATCH}, {(D, 0, 0): [LAUNCH], (F, 0, 3): [LAUNCH]}), AMPLE),
    "batches and failures": (
        lambda: FakeBench({B: MISMATCH, G: LAUNCH}, {(C, 0, 2): [0.0, 0.0], (E, 1, 0): [LAUNCH]}),
        room_for(3),
    ),
    "a champion that fails": (lambda: FakeBench(odd={(A, 1, 2): [LAUNCH]}), room_for(2)),
}


def stops_at(call: int) -> Callable[[], bool]:
    calls = iter(range(10**6))
    return lambda: next(calls) == call


@pytest.mark.parametrize("rounds", ["all rounds", "looks, finalists and a twin"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_race_stopped_anywhere_and_run_again_equals_one_that_was_not(name: str, rounds: str) -> None:
    (make, budget), protocol = SCENARIOS[name], PROTOCOLS[rounds]
    asked = iter(range(10**6))
    uncut = make()
    whole = race(uncut, ListStore(), budget, lambda: next(asked) < 0, protocol=protocol)
    points = next(asked)
    assert points >= 12
    for point in range(points):
        store, first, second = ListStore(), make(), make()
        with pytest.raises(Stopped):
            race(first, store, budget, stops_at(point), protocol=protocol)
        assert first.resident == []
        race(second, store, budget, protocol=protocol)
        assert taken(store) == taken(whole)
        assert store.kinds() == whole.kinds()
        assert Counter(first.timed + second.timed) == Counter(uncut.timed)


def taken(store: ListStore) -> dict[Candidate, tuple[tuple[Sample, ...], tuple[Sample, ...]]]:
    return {c: (trial.samples, trial.twins) for c, trial in store.rows.items()}


PROTOCOLS = {"all rounds": ALL_ROUNDS, "looks, finalists and a twin": LOOKS}


def test_the_scenario_of_a_failing_champion_is_one() -> None:
    make, budget = SCENARIOS["a champion that fails"]
    store = race(make(), ListStore(), budget)
    assert store.rows[A].outcome == LAUNCH
    assert A in batches(store)[0] & batches(store)[1]
    assert set(store.kinds().values()) == {None, FailureKind.LAUNCH}


@pytest.mark.parametrize("every", [1, 4, 11])
def test_a_race_stopped_again_and_again_equals_one_that_was_not(every: int) -> None:
    whole = race(FakeBench(), ListStore(), room_for(3))
    store, runs = ListStore(), 0
    while any(trial.outcome is None for trial in store.rows.values()) or len(store.rows) < len(SEVEN):
        bench = FakeBench()
        with suppress(Stopped):
            race(bench, store, room_for(3), partial(has_timed, bench, every))
        runs += 1
    assert runs >= 3
    assert store.rows == whole.rows


def has_timed(bench: FakeBench, count: int) -> bool:
    return len(bench.timed) >= count


def test_a_kill_between_finished_trials_of_a_batch_measures_nothing_again() -> None:
    whole = race(FakeBench(), ListStore(), room_for(3))
    cut = ListStore()
    race(FakeBench(), cut, room_for(3), candidates=(A, B, C))
    for candidate in (B, C):  # as if the process had died after A's `finish_trial`
        cut.rows[candidate] = replace(cut.rows[candidate], outcome=None)
    bench = FakeBench()
    race(bench, cut, room_for(3))
    assert {c: t.samples for c, t in cut.rows.items()} == {c: t.samples for c, t in whole.rows.items()}
    assert not [key for key in bench.timed if key[1] == 0]


def test_a_smaller_budget_on_resuming_is_kept_and_nothing_is_dropped() -> None:
    store = ListStore()
    with pytest.raises(Stopped):
        race(FakeBench(), store, AMPLE, stops_at(7 + 2))
    bench = FakeBench()
    race(bench, store, room_for(2))
    assert bench.most_resident == 2
    assert store.kinds() == dict.fromkeys(SEVEN)
    assert all(len(taken) >= ROUNDS for taken in store.rounds().values())


# Losers leave, finalists are confirmed, the best is timed against itself.


def steady(**times: float) -> dict[Candidate, float]:
    return {c: times.get(name, 200.0) for name, c in zip("ABCDEFG", SEVEN, strict=True)}


@dataclass
class SteadyBench(FakeBench):
    """Each candidate takes its own time, with a noise of 0.1 % that repeats; twins are slower by `twin`."""

    times: dict[Candidate, float] = field(default_factory=dict)
    twin: float = 1.0

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        found = super().sample(candidate, batch, round, launches)
        if isinstance(found, Failure) or (candidate, batch, round) in self.odd:
            return found
        noise = random.Random(f"{candidate} {batch} {round}").uniform(1.0, 1.001)
        original = Candidate(candidate.arm, candidate.items)
        return self.times[original] * noise * (self.twin if isinstance(candidate, Twin) else 1.0)


def test_who_is_surely_slower_by_more_than_the_bound_leaves_at_the_first_look() -> None:
    bench = SteadyBench(times=steady(A=100.0, B=103.0, C=107.0))
    store = race(bench, ListStore(), protocol=LOOKS)
    rounds = {c: len(trial.samples) for c, trial in store.rows.items()}
    assert rounds == {A: 13 + 6, B: 13, **dict.fromkeys((C, D, E, F, G), 6)}
    assert store.kinds() == dict.fromkeys(SEVEN)


def test_a_wider_bound_keeps_in_the_race_who_may_be_let_into_a_band() -> None:
    bench = SteadyBench(times=steady(A=100.0, B=103.0, C=107.0))
    store = race(bench, ListStore(), protocol=LOOKS, max_regret=0.1)
    assert {c: len(store.rows[c].samples) for c in (A, B, C, D)} == {A: 19, B: 13, C: 13, D: 6}


def test_a_loser_frees_its_room_at_once() -> None:
    resident: list[tuple[int, int]] = []

    class Watched(SteadyBench):
        def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
            if launches > 1:  # no priming
                resident.append((round, len(self.resident)))
            return super().sample(candidate, batch, round, launches)

    race(Watched(times=steady(A=100.0, B=103.0)), ListStore(), protocol=LOOKS)
    assert {n for round, n in resident if round < 6} == {7}
    assert {n for round, n in resident if 6 <= round < 13} == {2}
    assert {n for round, n in resident if round >= 13} == {2}  # A and its twin


def test_finalists_and_the_twin_of_the_best_are_timed_together_in_further_rounds() -> None:
    bench = SteadyBench(times=steady(A=100.0, B=100.0, C=103.0), twin=1.25)
    store = race(bench, ListStore(), protocol=LOOKS)
    assert {c: len(store.rows[c].samples) for c in (A, B, C)} == {A: 19, B: 19, C: 13}
    twinned = [c for c, trial in store.rows.items() if trial.twins]
    assert twinned in ([A], [B])
    twins = store.rows[twinned[0]].twins
    assert [s.round for s in twins] == list(range(13, 19))
    order = [c for c, _, round in bench.timed if round in (13, 14)]
    twin = Twin.to(twinned[0])
    assert order == [twin, B, A, A, B, twin]
    assert all(s.latency_us > 120 for s in twins)
    assert all(s.latency_us < 110 for s in store.rows[twinned[0]].samples)


def test_a_clear_best_is_timed_against_its_twin_too() -> None:
    store = race(SteadyBench(times=steady(A=100.0)), ListStore(), protocol=LOOKS)
    assert [len(store.rows[c].twins) for c in SEVEN] == [6, 0, 0, 0, 0, 0, 0]


def test_a_twin_that_finds_no_memory_leaves_the_rounds_as_they_are() -> None:
    bench = SteadyBench(times=steady(A=100.0, B=100.0))
    store = race(bench, ListStore(), room_for(2), candidates=(A, B), protocol=LOOKS)
    assert [len(store.rows[c].samples) for c in (A, B)] == [19, 19]
    assert not any(store.rows[c].twins for c in (A, B))


class Fickle(SteadyBench):
    """Its candidates fail their second check."""

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        return MISMATCH if isinstance(candidate, Twin) else super().prepare(candidate)


def test_what_its_twin_fails_by_is_the_candidates_failure_and_the_others_go_on() -> None:
    bench = Fickle(times=steady(A=100.0, B=100.0))
    store = race(bench, ListStore(), candidates=(A, B), protocol=LOOKS)
    failed = [c for c, kind in store.kinds().items() if kind is FailureKind.MISMATCH]
    assert len(failed) == 1
    (other,) = {A, B} - set(failed)
    assert len(store.rows[other].samples) == 19


def test_a_carried_champion_races_the_next_batch_and_may_lose_it() -> None:
    bench = SteadyBench(times=steady(A=110.0, C=100.0))
    store = race(bench, ListStore(), room_for(2), candidates=(A, B, C), protocol=LOOKS)
    assert [(s.batch, s.round) for s in store.rows[A].samples if s.batch == 1] == [(1, n) for n in range(6)]
    assert {c: {s.batch for s in t.samples} for c, t in store.rows.items()} == {A: {0, 1}, B: {0}, C: {1}}


def test_a_resumed_race_with_a_wider_bound_takes_back_who_had_left() -> None:
    times = steady(A=100.0, C=107.0)
    store = ListStore()
    first = SteadyBench(times=times)
    with pytest.raises(Stopped):
        race(first, store, AMPLE, lambda: len(first.timed) >= 7 * 6 + 2, protocol=LOOKS)
    race(SteadyBench(times=times), store, protocol=LOOKS, max_regret=0.1)
    assert [s.round for s in store.rows[C].samples] == [*range(6), *range(8, 13)]
    assert len(store.rows[D].samples) == 6


# Finalists move.

MOVES = Protocol(13, screening=6, confirmation=6, placements=4)
ON = Protocol(13, screening=6, confirmation=7, placements=7, further=3)


def places(store: ListStore, candidate: Candidate) -> list[int]:
    return [s.round for s in store.rows[candidate].samples][13:]


def test_finalists_and_the_twin_move_before_the_rounds_of_each_placement() -> None:
    bench = SteadyBench(times=steady(A=100.0, B=102.0, C=104.0))
    store = race(bench, ListStore(), protocol=MOVES)
    assert [s.round for s in store.rows[C].samples] == [
        *range(13)
    ]  # surely slower by more than places differ
    assert [s.placement for s in store.rows[A].samples] == [0] * 13 + [1, 1, 2, 3, 3, 4]
    numbers = places(store, A)
    assert numbers == places(store, B) == [s.round for s in store.rows[A].twins]
    assert [n // 1000 for n in numbers] == [1, 1, 2, 3, 3, 4]
    twin = Twin.to(A)
    assert bench.moved == [(c, place) for place in range(1, 5) for c in (A, B, twin)]
    order = [(c, round) for c, _, round in bench.timed if round >= 1000]
    assert [c for c, round in order if round == numbers[2]] in ([A, B, twin], [twin, B, A])
    assert store.kinds() == dict.fromkeys(SEVEN)


def test_who_finds_no_memory_for_a_move_stays_and_is_timed_there() -> None:
    bench = SteadyBench(times=steady(A=100.0, B=100.0), stuck={B: NO_MEMORY})
    store = race(bench, ListStore(), protocol=MOVES)
    assert places(store, A) == places(store, B)
    assert store.kinds() == dict.fromkeys(SEVEN)


def test_without_room_for_a_second_set_nobody_is_asked_to_move() -> None:
    bench = SteadyBench(times=steady(A=100.0, B=100.0))
    store = race(bench, ListStore(), room_for(3), candidates=(A, B), protocol=MOVES)
    assert bench.moved == []
    assert len(places(store, A)) == len(places(store, B)) == 6
    bench = SteadyBench(times=steady(A=100.0, B=100.0))
    race(bench, ListStore(), room_for(4), candidates=(A, B), protocol=MOVES)
    assert len(bench.moved) == 4 * 3
    assert bench.most_resident == 3


def test_other_bits_at_other_addresses_are_a_failure_and_the_others_go_on() -> None:
    bench = SteadyBench(times=steady(A=100.0, B=100.0), stuck={B: MISMATCH})
    store = race(bench, ListStore(), protocol=MOVES)
    assert store.rows[B].outcome == MISMATCH
    assert len(places(store, A)) == 6
    assert {c for c, kind in store.kinds().items() if kind is None} == set(SEVEN) - {B}


def test_what_a_twin_fails_by_when_it_moves_is_the_originals_failure() -> None:
    times = steady(A=100.0, B=102.0)
    store = race(SteadyBench(times=times, stuck={Twin.to(A): LAUNCH}), ListStore(), protocol=MOVES)
    assert store.rows[A].outcome == LAUNCH
    assert len(places(store, B)) == 6


@pytest.mark.parametrize("every", [3, 7])
@pytest.mark.parametrize(("protocol", "last"), [(MOVES, 4), (ON, 10)], ids=["moves", "further moves"])
def test_a_race_stopped_between_moves_equals_one_that_was_not(
    protocol: Protocol, last: int, every: int
) -> None:
    times = steady(A=100.0, B=100.5, C=102.0)
    whole = race(SteadyBench(times=times), ListStore(), protocol=protocol)
    assert max(s.placement for s in whole.rows[A].samples) == last
    store = ListStore()
    while any(trial.outcome is None for trial in store.rows.values()) or len(store.rows) < len(SEVEN):
        bench = SteadyBench(times=times)
        with suppress(Stopped):
            race(bench, store, AMPLE, partial(has_timed, bench, every), protocol=protocol)
    assert store.rows == whole.rows


def test_who_is_not_told_apart_moves_on_without_the_twin_and_who_is_stops() -> None:
    bench = SteadyBench(times=steady(A=100.0, B=100.5, C=102.0))
    store = race(bench, ListStore(), protocol=ON)
    further = [*(1000 * p for p in range(1, 8)), *(1000 * p + n for p in (8, 9, 10) for n in range(3))]
    assert [n // 1000 for n in places(store, A)] == [n // 1000 for n in further]
    assert places(store, A) == places(store, B)
    assert [n // 1000 for n in places(store, C)] == list(range(1, 8))
    assert [s.placement for s in store.rows[A].twins] == list(range(1, 8))
    assert bench.moved[-6:] == [(c, place) for place in (8, 9, 10) for c in (A, B)]
    assert store.kinds() == dict.fromkeys(SEVEN)


def test_who_fails_at_a_further_place_is_a_row_and_the_race_ends() -> None:
    bench = SteadyBench(times=steady(A=100.0, B=100.5), odd={(B, 0, 8001): [LAUNCH]})
    store = race(bench, ListStore(), protocol=ON)
    assert store.rows[B].outcome == LAUNCH
    assert store.kinds()[A] is None
    assert standings(store.trials(1))[0].candidate == A


def test_batches_confirm_and_go_on_each_for_itself() -> None:
    times = steady(A=100.0, B=100.5, C=100.2)
    store = race(SteadyBench(times=times), ListStore(), room_for(5), protocol=ON)
    reached = {
        n: {c: max(s.placement for s in t.samples if s.batch == n)
            for c, t in store.rows.items() if any(s.batch == n for s in t.samples)}
        for n in batches(store)
    }  # fmt: skip
    assert reached[0][A] == reached[0][B] == 10
    assert len(reached) > 1
    whole = [replace(t, outcome=Measurement(t.samples)) for t in store.trials(1)]  # carried ones, too
    assert standings(whole)[0].candidate == A


def test_a_throttled_round_is_taken_again_in_its_placement() -> None:
    bench = SteadyBench(times=steady(A=100.0))
    store = race(bench, ListStore(), candidates=(A, B), protocol=MOVES, read=reader(14))
    confirming = store.rows[A].samples[13:]
    assert [s.placement for s in confirming] == [1, 1, 1, 1, 2, 3, 3, 4]
    assert [s.throttled for s in confirming] == [True, True, *[False] * 6]


# Conditions.

FINE = Conditions(NVML, 1980, 55, ("application_clocks",), 0)
HOT = Conditions(NVML, 1200, 88, ("hw_thermal_slowdown",), 0)


def reader(*heats: int) -> Callable[[], Conditions]:
    """Conditions that are hot at the readings of these numbers."""
    asked = iter(range(10**6))
    return lambda: HOT if next(asked) in heats else FINE


def test_what_the_device_was_like_is_kept_with_every_round() -> None:
    store = race(FakeBench(), ListStore(), read=reader())
    assert store.conditions == [FINE] * ROUNDS
    assert {(s.sm_clock_mhz, s.throttled) for t in store.rows.values() for s in t.samples} == {(1980, False)}


def test_a_cpu_has_no_conditions_and_says_so() -> None:
    store = race(FakeBench(), ListStore())
    assert {c.source for c in store.conditions if c} == {"not applicable"}
    assert {(s.sm_clock_mhz, s.throttled) for t in store.rows.values() for s in t.samples} == {(None, False)}


def test_a_throttled_round_is_kept_marked_and_another_takes_its_place() -> None:
    # Reading 0 is before the first round; reading 3 ends round 2 and begins round 3.
    store = race(FakeBench(), ListStore(), candidates=(A, B), read=reader(3))
    marks = {s.round: s.throttled for s in store.rows[A].samples}
    assert marks == {0: False, 1: False, 2: True, 3: True, 4: False, 5: False, 6: False}
    outcome = store.rows[A].outcome
    assert isinstance(outcome, Measurement)
    sound = [s.latency_us for s in store.rows[A].samples if not s.throttled]
    assert outcome.latency_us == sorted(sound)[len(sound) // 2]
    during = [c for c in store.conditions if c and c.throttled]
    assert [c.sm_clock_mhz for c in during] == [1200, 1980]


def test_a_device_that_always_throttles_ends_the_race_with_marked_rounds() -> None:
    protocol = Protocol(ROUNDS, repeats=3)
    store = race(FakeBench(), ListStore(), candidates=(A, B), read=lambda: HOT, protocol=protocol)
    assert [s.throttled for s in store.rows[A].samples] == [True] * (ROUNDS + 3)
    with pytest.raises(TooFewSamples, match=r"0 rounds at 8 tokens \(8 throttled rounds left out\)"):
        standings(store.trials(1))


def test_a_resumed_race_knows_its_throttled_rounds() -> None:
    whole = race(FakeBench(), ListStore(), candidates=(A, B), read=reader(3))
    store, bench = ListStore(), FakeBench()
    with pytest.raises(Stopped):
        race(bench, store, AMPLE, lambda: len(bench.timed) >= 8, (A, B), read=reader(3))
    race(FakeBench(), store, candidates=(A, B), read=reader())
    assert taken(store) == taken(whole)


# The floor.


def test_faster_than_a_copy_of_the_same_bytes_is_implausible() -> None:
    floor = 151.0  # 1 us is its launch, 0.8 of the rest 120 us
    bench = SteadyBench(times=steady(A=100.0, B=121.0), floor=floor)
    store = race(bench, ListStore(), candidates=(A, B))
    outcome = store.rows[A].outcome
    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.IMPLAUSIBLE
    assert "below 0.8 of the 150.00 us that a copy of the cell's fewest bytes takes" in outcome.detail
    assert store.floors == {CELL.num_tokens: 151.0}
    assert store.kinds()[B] is None


def test_a_kernel_that_hides_its_launch_is_faster_than_the_copy_and_plausible() -> None:
    store = race(SteadyBench(times=steady(A=0.55, B=1.2), floor=1.16), ListStore(), candidates=(A, B))
    assert not any(store.kinds().values())


def test_one_sample_faster_than_a_copy_is_taken_again() -> None:
    bench = FakeBench(odd={(B, 0, 1): [20.0]}, floor=100.0)
    store = race(bench, ListStore())
    assert store.kinds() == dict.fromkeys(SEVEN)
    assert Counter(bench.timed)[B, 0, 1] == 2
