"""Compiling ahead: who is compiled is checked at once, and nothing is timed while a compiler runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from mhctune.autotuner.ahead import AheadBench, Tell
from mhctune.autotuner.benches import open_bench
from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.race import Stopped
from mhctune.autotuner.records import Cell, Measurement, SweepState
from mhctune.autotuner.sweep import Sweep, Watcher
from mhctune.db.repository import Repository
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Problem, Variant
from mhctune.kernels.space import Candidate

CELL = Cell("post_pre_delayed", Problem(hidden_size=256), 8)
A, B = (Candidate.of("fused", {"tile_n": n}) for n in (1, 2))
SHARED = Variant.of("epilogue", "cuda")
ALL = (Variant.of("a", "cuda"), SHARED, Variant.of("b", "cuda"))


def variants_of(candidate: Candidate) -> tuple[Variant, ...]:
    return (ALL[0] if candidate == A else ALL[2]), SHARED


@dataclass
class Log:
    """A bench and a background that write down who is called, and with what."""

    calls: list[Any] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> float:
            self.calls.append((name, *arguments))
            return 1.0

        return call

    def request(self, variants: Sequence[Variant]) -> None:
        self.calls.append(("request", tuple(variants)))

    def wait(self, variants: Sequence[Variant], tell: Tell) -> None:
        self.calls.append(("wait", tuple(variants)))
        tell(len(variants), 3)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def bench(log: Log) -> AheadBench:
    return AheadBench(log, log, variants_of)


def test_candidates_wait_for_their_own_kernels_and_samples_for_all(log: Log, bench: AheadBench) -> None:
    told: list[tuple[int, int]] = []
    bench.compile_all(ALL, lambda done, total: told.append((done, total)))
    bench.enter(CELL, 1)
    bench.floor_us()
    bench.prepare(A)
    bench.prepare(B)
    bench.sample(A, 0, 0, 1)
    bench.sample(B, 0, 0, 1)
    bench.prepare(B)
    assert log.calls == [
        ("enter", CELL, 1),
        ("floor_us",),  # timed before a compiler runs
        ("request", ALL),
        ("wait", variants_of(A)), ("prepare", A),
        ("wait", variants_of(B)), ("prepare", B),
        ("wait", ALL), ("sample", A, 0, 0, 1),
        ("sample", B, 0, 0, 1),
        ("prepare", B),
    ]  # fmt: skip
    assert told == [(2, 3), (2, 3), (3, 3)]


def test_the_floor_of_another_cell_waits_for_the_compilers_too(log: Log, bench: AheadBench) -> None:
    bench.compile_all(ALL, lambda done, total: None)
    bench.prepare(A)
    bench.floor_us()
    assert [call[0] for call in log.calls] == ["request", "wait", "prepare", "wait", "floor_us"]


def test_what_is_wanted_next_waits_for_what_runs(log: Log, bench: AheadBench) -> None:
    bench.compile_all(ALL[:1], lambda done, total: None)
    bench.prepare(A)
    bench.compile_all(ALL[2:], lambda done, total: None)
    bench.sample(A, 0, 0, 1)  # nothing runs: the next cell has not begun
    bench.floor_us()
    assert [call[0] for call in log.calls] == [
        "request",
        "wait",
        "prepare",
        "wait",
        "sample",
        "floor_us",
        "request",
    ]
    assert log.calls[-1] == ("request", ALL[2:])


def test_nothing_is_compiled_for_cells_that_nobody_races_in(log: Log, bench: AheadBench) -> None:
    bench.compile_all(ALL, lambda done, total: None)
    assert log.calls == []


# With real kernels, in a real worker.


@pytest.fixture
def plan(make_fingerprint: Callable[..., Fingerprint]) -> SweepPlan:
    seam, problem = find_seam("post_pre_delayed"), Problem(hidden_size=256)
    values = {"tile_n": [12, 24], "n_splits": [1], "block_h": [64], "block_m": [1]}
    spaces = {arm.name: arm.space(problem).restricted(values) for arm in seam.arms("c")[:2]}
    return SweepPlan(seam, problem, "c", (1, 4), spaces, Protocol(5, replay_us=50), make_fingerprint(), 0.05)


class Notes(Watcher):
    def __init__(self) -> None:
        self.compiled_of: list[tuple[int, int]] = []

    def compiled(self, done: int, total: int) -> None:
        self.compiled_of.append((done, total))


def test_a_sweep_that_compiles_ahead_measures_everything_and_its_bar_is_honest(
    plan: SweepPlan, repository: Repository
) -> None:
    notes, ample = Notes(), VramBudget(10**9, 10**9)
    with open_bench(plan.seam.name, "c") as remote:
        ahead = AheadBench(remote, remote, plan.variants_of)
        result = Sweep(plan, repository, ahead, ample, ahead.compile_all, watcher=notes).run()
    assert result.state is SweepState.COMPLETE
    trials = repository.trials(result.sweep_id)
    assert len(trials) == plan.grid
    assert all(isinstance(trial.outcome, Measurement) for trial in trials)
    done, totals = [each[0] for each in notes.compiled_of], {each[1] for each in notes.compiled_of}
    assert totals == {len(plan.variants)}
    assert done == sorted(done)
    assert done[-1] == len(plan.variants)
    assert remote.seconds["wait"] > 0
    assert "compile_all" not in remote.seconds


def test_a_stop_is_heard_while_a_candidate_waits_for_its_kernels(plan: SweepPlan) -> None:
    def stop(done: int, total: int) -> None:
        raise Stopped

    with open_bench(plan.seam.name, "c") as remote:
        ahead = AheadBench(remote, remote, plan.variants_of)
        ahead.compile_all(plan.variants, stop)
        ahead.enter(plan.cells[0], 1)
        with pytest.raises(Stopped):
            ahead.prepare(plan.candidates[0])
        ahead.leave()
        assert not remote._process.is_alive()
