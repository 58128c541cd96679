"""A worker that crashes, hangs or loses its device costs one failure row; the rest goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import hostile  # type: ignore[import-not-found]
import pytest

from mhctune.autotuner.bench import BenchLost
from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.race import Race, Stopped
from mhctune.autotuner.records import Cell, Failure, FailureKind, Measurement
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.worker import Limits, RemoteBench
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


@pytest.fixture(scope="module")
def shared() -> Iterator[RemoteBench]:
    """One bench for the tests after which its worker, or the one in its place, still answers."""
    remote = RemoteBench(hostile.make, LIMITS)
    yield remote
    remote.close()


@pytest.fixture
def bench(shared: RemoteBench) -> Iterator[RemoteBench]:
    """That bench, without a cell and without respawns: a worker takes 4 s of processor time to start."""
    shared.leave()
    shared.respawns = 0
    yield shared
    assert shared._process.is_alive()


@pytest.fixture
def own() -> Iterator[RemoteBench]:
    """A bench of the test's own, which ends it."""
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


def test_a_crash_of_a_compiler_in_the_background_leaves_a_worker_that_works(bench: RemoteBench) -> None:
    bench.enter(CELL, 1)
    bench.request((Variant.of("post", "c"),))
    bench.wait((Variant.of("fatal", "c"),), lambda done, total: None)
    assert bench.respawns == 1
    good = hostile.candidate(hostile.HARMLESS, number=7)
    bench.prepare(good)
    assert bench.sample(good, 0, 0, 1) == 107.0


def test_a_worker_that_does_not_start_says_so() -> None:
    with pytest.raises(BenchLost, match="the worker left with exit code 1 in start"):
        RemoteBench(hostile.refuse, LIMITS)


def test_a_worker_hears_neither_ctrl_c_nor_a_job_manager_that_signals_everybody(bench: RemoteBench) -> None:
    good = hostile.candidate(hostile.HARMLESS, number=7)
    bench.enter(CELL, 1)
    bench.prepare(good)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(bench._process.pid or 0, number)
    assert bench.sample(good, 0, 0, 1) == 107.0
    assert bench.respawns == 0
    assert os.getsid(bench._process.pid or 0) == bench._process.pid  # out of reach of a signal to our group


def test_a_worker_dies_with_its_parent() -> None:
    code = (
        "import hostile, os, signal\n"
        "from mhctune.autotuner.worker import Limits, RemoteBench\n"
        "bench = RemoteBench(hostile.make, Limits())\n"
        "print(bench._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-c", f"if __name__ == '__main__':\n    exec({code!r})"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.05)


def test_the_answer_to_a_call_that_was_cut_short_is_not_taken_for_the_next_one(bench: RemoteBench) -> None:
    good = hostile.candidate(hostile.HARMLESS, number=7)
    bench.enter(CELL, 1)
    bench.prepare(good)
    # As if an exception had come between the call and its answer.
    bench._connection.send((99, "forecast", (good,)))
    assert bench.sample(good, 0, 0, 1) == 107.0


def test_leaving_after_an_interrupted_call_ends_the_worker_instead_of_waiting(own: RemoteBench) -> None:
    variants = tuple(Variant.of(f"kernel{number}", "c") for number in range(3))
    own.enter(CELL, 1)

    def stop(done: int, total: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        own.compile_all(variants, stop)
    own.leave()
    assert not own._process.is_alive()
    assert own.respawns == 0  # nobody waited for the answer, and no fresh worker was asked instead


def test_closing_ends_the_process(own: RemoteBench) -> None:
    process = own._process
    with suppress(OSError):
        own.close()
    assert not process.is_alive()
