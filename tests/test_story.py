"""The story of a tuner that ran out of memory: outputs allocated again in every capture (seeds/000).

13.2 GB are free and the budget is half of it. A primed candidate holds 336,199,680 bytes; each capture of a
functional candidate reserves another 379,584,512 bytes, which nobody budgeted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.race import Race
from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint, Measurement
from mhctune.autotuner.store import SweepRecord
from mhctune.db.repository import Repository
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

FREE = 13_200_000_000
PRIMED, CAPTURE = 336_199_680, 379_584_512
BUDGET = VramBudget(FREE // 2, FREE)


@dataclass
class FakeAllocator:
    """Counts bytes and refuses what is not there."""

    live: int = 0
    peak: int = 0

    def take(self, count: int) -> None:
        if self.live + count > FREE:
            raise MemoryError(f"tried to allocate {count:,} bytes, {FREE - self.live:,} are free")
        self.live += count
        self.peak = max(self.peak, self.live)

    def give(self, count: int) -> None:
        self.live -= count


@dataclass
class FakeBench:
    """Primes in `prepare`, captures with the first sample, as the tuner of the story did."""

    memory: FakeAllocator
    capture_bytes: int
    held: dict[Candidate, int] = field(default_factory=dict)
    captured: list[Candidate] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    """How many were captured when a capture found no memory, and what it said."""
    most_resident: int = 0

    def input_bytes(self, cell: Cell) -> int:
        return 0

    def enter(self, cell: Cell, seed: int) -> int:
        return 0

    def floor_us(self) -> float:
        return 0.0

    def forecast(self, candidate: Candidate) -> Footprint:
        return Footprint(0, PRIMED, 0)

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        self.memory.take(PRIMED)
        self.held[candidate] = PRIMED
        self.most_resident = max(self.most_resident, len(self.held))
        return self.forecast(candidate)

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        if candidate not in self.captured:
            try:
                self.memory.take(self.capture_bytes)
            except MemoryError as error:
                self.refused.append((len(self.captured), str(error)))
                return Failure(FailureKind.OUT_OF_MEMORY, str(error))
            self.held[candidate] += self.capture_bytes
            self.captured.append(candidate)
        return 10.0 + candidate.config["number"]

    def move(self, candidate: Candidate, placement: int) -> Failure | None:
        return None

    def release(self, candidate: Candidate) -> None:
        self.memory.give(self.held.pop(candidate, 0))
        if candidate in self.captured:
            self.captured.remove(candidate)

    def leave(self) -> None:
        pass


def candidates(count: int) -> list[Candidate]:
    return [Candidate.of("fused", {"number": number}) for number in range(count)]


def search(
    repository: Repository, make_sweep: object, count: int, capture_bytes: int, memory: FakeAllocator
) -> tuple[FakeBench, dict[Candidate, Measurement | Failure | None]]:
    sweep: SweepRecord = make_sweep(problem=Problem(4096), token_counts=(4096,))  # type: ignore[operator]
    sweep_id = repository.begin(sweep, new=True)
    bench = FakeBench(memory, capture_bytes)
    cell = Cell(sweep.seam, sweep.problem, 4096)
    Race(sweep_id, cell, repository, bench, BUDGET, Protocol(1)).run(candidates(count), ())
    return bench, {trial.candidate: trial.outcome for trial in repository.trials(sweep_id)}


def test_nineteen_primed_candidates_fit_the_budget_and_a_twentieth_does_not() -> None:
    footprints = [Footprint(0, PRIMED, 0)] * 20
    assert BUDGET.fits(0, footprints[:19])
    assert not BUDGET.fits(0, footprints)


def test_captures_that_allocate_outputs_again_fail_at_the_eighteenth(
    repository: Repository, make_sweep: object
) -> None:
    memory = FakeAllocator()
    bench, outcomes = search(repository, make_sweep, 19, CAPTURE, memory)
    captured, detail = bench.refused[0]
    assert captured == 17  # seventeen captures went well
    assert "tried to allocate 379,584,512 bytes" in detail
    # Half as many at a time then: nothing is dropped, but it took more than the one batch of owned outputs.
    assert all(isinstance(outcome, Measurement) for outcome in outcomes.values())
    assert max(s.batch for o in outcomes.values() if isinstance(o, Measurement) for s in o.samples) > 0
    assert memory.live == 0


def test_owned_outputs_let_the_same_search_finish(repository: Repository, make_sweep: object) -> None:
    memory = FakeAllocator()
    bench, outcomes = search(repository, make_sweep, 19, 0, memory)
    assert all(isinstance(outcome, Measurement) for outcome in outcomes.values())
    assert bench.refused == []
    assert bench.most_resident == 19
    assert memory.peak == 19 * PRIMED
    assert memory.live == 0


def test_the_twentieth_waits_and_the_champion_is_carried_to_it(
    repository: Repository, make_sweep: object
) -> None:
    memory = FakeAllocator()
    bench, outcomes = search(repository, make_sweep, 20, 0, memory)
    assert bench.most_resident == 19
    batches = {
        c.config["number"]: {s.batch for s in outcome.samples}
        for c, outcome in outcomes.items()
        if isinstance(outcome, Measurement)
    }
    assert batches == {0: {0, 1}, **{number: {0} for number in range(1, 19)}, 19: {1}}


@pytest.mark.parametrize("capture_bytes", [0, CAPTURE])
def test_a_hundred_and_sixty_searches_leave_nothing_behind(
    repository: Repository, make_sweep: object, capture_bytes: int
) -> None:
    memory = FakeAllocator()
    for _ in range(160):
        search(repository, make_sweep, 19, capture_bytes, memory)
        assert memory.live == 0
    assert memory.peak <= FREE
