"""A worker that crashes, hangs or loses its device costs one failure row; the rest goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import hostile  # type: ignore[import-not-found]
import pytest

from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.race import Race
from mhctune.autotuner.records import Cell, Failure, FailureKind, Measurement
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.worker import Limits, RemoteBench, WorkerLost
from mhctune.db.repository import Repository
from mhctune.kernels.seam import Problem, Variant

CELL = Cell("post_pre_delayed", Problem(hidden_size=256), 8)
LIMITS = Limits(start_s=60, prepare_s=2, sample_s=2, compile_s=5)
DEEDS = {
    hostile.SEGFAULT: (FailureKind.CRASHED, "died by SIGSEGV"),
    hostile.EXIT: (FailureKind.CRASHED, "left with exit code 3"),
    hostile.LOOP: (FailureKind.TIMEOUT, "took more than 2 s; killed"),
    hostile.KILL: (FailureKind.CRASHED, "SIGKILL (the kernel kills so when the host is out of memory)"),
    hostile.ABORT: (FailureKind.CRASHED, "died by SIGABRT"),
    hostile.RAISE: (FailureKind.LAUNCH, "RuntimeError: no"),
    hostile.LOSE_DEVICE: (FailureKind.CRASHED, "the device was lost in sample: AcceleratorError"),
}


@pytest.fixture
def bench() -> Iterator[RemoteBench]:
    remote = RemoteBench(hostile.make, LIMITS)
    yield remote
    remote.close()


def test_every_hostile_candidate_costs_one_failure_row_and_the_rest_is_measured(
    bench: RemoteBench, repository: Repository, make_sweep: object
) -> None:
    harmless = [hostile.candidate(hostile.HARMLESS, number=number) for number in range(4)]
    bad = [hostile.candidate(deed) for deed in DEEDS]
    candidates = [x for pair in zip(bad, harmless, strict=False) for x in pair] + bad[4:]
    sweep: SweepRecord = make_sweep(problem=CELL.problem, token_counts=(8,))  # type: ignore[operator]
    sweep_id = repository.begin(sweep)
    race = Race(sweep_id, CELL, repository, bench, VramBudget(10**9, 10**9), Protocol(5))

    race.run(candidates, ())

    trials = {trial.candidate: trial.outcome for trial in repository.trials(sweep_id)}
    assert set(trials) == set(candidates)
    for deed, (kind, words) in DEEDS.items():
        outcome = trials[hostile.candidate(deed)]
        assert isinstance(outcome, Failure)
        assert outcome.kind is kind
        assert words in outcome.detail
    for number, candidate in enumerate(harmless):
        outcome = trials[candidate]
        assert isinstance(outcome, Measurement)
        assert outcome.latency_us == 100.0 + number
        assert len(outcome.samples) == 5
    # Segmentation fault, exit, loop, kill, abort and the lost device; an exception costs no worker.
    assert bench.respawns == 6


@pytest.mark.parametrize("deed", [hostile.SEGFAULT, hostile.EXIT, hostile.LOOP])
def test_the_residents_come_back_after_a_crash_in_prepare(bench: RemoteBench, deed: int) -> None:
    good, bad = hostile.candidate(hostile.HARMLESS, number=7), hostile.candidate(deed, hostile.PREPARE)
    bench.enter(CELL, 1)
    bench.prepare(good)

    failure = bench.prepare(bad)

    assert isinstance(failure, Failure)
    assert failure.kind is DEEDS[deed][0]
    assert "in prepare" in failure.detail or "prepare took" in failure.detail
    assert bench.sample(good, 0, 0, 1) == 107.0


def test_a_crash_of_the_compiler_leaves_a_worker_that_works(bench: RemoteBench) -> None:
    told: list[tuple[int, int]] = []
    variants = (Variant.of("post", "c"), Variant.of("fatal", "c"))

    bench.compile_all(variants, lambda done, total: told.append((done, total)))

    assert told == [(1, 2)]
    assert bench.respawns == 1
    assert bench.enter(CELL, 1) == 1000


def test_a_worker_that_does_not_start_says_so() -> None:
    with pytest.raises(WorkerLost, match="the worker left with exit code 1 in start"):
        RemoteBench(hostile.refuse, LIMITS)


def test_closing_ends_the_process(bench: RemoteBench) -> None:
    process = bench._process
    with suppress(OSError):
        bench.close()
    assert not process.is_alive()
