"""A recorded sweep gives its bands back anywhere; those that are shipped say what their makers saw."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mhctune.autotuner.derive import Derived, derive
from mhctune.autotuner.recording import Unfinished, recording, replay
from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint, Measurement, Sample, SweepState
from mhctune.configs.errors import ConfigError
from mhctune.configs.recorded import load_recorded
from mhctune.db.repository import Repository
from mhctune.kernels.space import Candidate

ROOT = Path(__file__).resolve().parents[1]

# Whole seam as vLLM 0.33 ships it on one H200, hidden 5120, us (shared project data, 2026-11-29).
AS_SHIPPED = {
    1: 7.99,
    2: 8.08,
    4: 8.42,
    8: 8.96,
    16: 9.82,
    24: 10.69,
    32: 12.82,
    48: 14.44,
    64: 14.50,
    128: 14.86,
}


def derived(name: str, bound: float) -> Derived:
    sweep, trials = replay(load_recorded(name))
    return derive(sweep, 1, trials, bound)


def test_floors_are_recorded_where_there_are_any(make_sweep: Any, tmp_path: Path) -> None:
    for floors in ({}, {1: 1.25, 8: 1.5}):
        sweep = replace(make_sweep(), floors=floors)
        path = tmp_path / f"{len(floors)}.jsonl"
        path.write_text("\n".join(recording(sweep, [], "what", "where")) + "\n")
        assert ("floors" in path.read_text()) == bool(floors)
        assert replay(load_recorded(path))[0].floors == floors


def test_a_recording_holds_every_trial_failures_included(
    repository: Repository, make_sweep: Any, tmp_path: Path
) -> None:
    sweep = make_sweep()
    sweep_id = repository.begin(sweep)
    cell = Cell(sweep.seam, sweep.problem, 8)
    good, bad = (Candidate.of("fused", {"tile_n": 24, "n_splits": n}) for n in (1, 4))
    trial = repository.open_trial(sweep_id, cell, good, Footprint(10, 20, 30, 40, 50))
    taken = [Sample(0, round, 0, 40, 3.125 + round, throttled=round == 3) for round in range(5)]
    twins = [Sample(0, 4, 1, 40, 7.25)]
    repository.add_samples([(trial, s) for s in taken], [(trial, s) for s in twins])
    repository.finish_trial(trial)
    failure = Failure(FailureKind.MISMATCH, "layer_input: 3 elements not written")
    repository.fail_trial(sweep_id, cell, bad, Footprint(10, 20, 30), failure)
    path = tmp_path / "sweep.jsonl"
    lines = recording(sweep, repository.trials(sweep_id), "what", "where")
    path.write_text("\n".join(lines) + "\n")

    again, trials = replay(load_recorded(path))

    assert again == sweep
    assert again.candidates == sweep.candidates
    assert [t.candidate for t in trials] == [good, bad]
    outcome = trials[0].outcome
    assert isinstance(outcome, Measurement)
    assert [(s.round, s.launches, s.latency_us, s.throttled) for s in outcome.samples] == [
        (round, 40, 3.125 + round, round == 3) for round in range(5)
    ]
    assert [(s.round, s.latency_us) for s in trials[0].twins] == [(4, 7.25)]
    assert trials[1].twins == ()
    assert trials[1].outcome == failure
    assert [t.footprint for t in trials] == [Footprint(10, 20, 30, 40, 50), Footprint(10, 20, 30)]


def test_a_trial_that_still_races_is_not_recorded_as_a_measurement(
    repository: Repository, make_sweep: Any
) -> None:
    sweep = make_sweep()
    sweep_id = repository.begin(sweep)
    cell = Cell(sweep.seam, sweep.problem, 8)
    trial = repository.open_trial(sweep_id, cell, sweep.candidates[0], Footprint(10, 20, 30))
    repository.add_samples([(trial, Sample(0, round, 0, 40, 3.0)) for round in range(5)])
    with pytest.raises(Unfinished, match="1 trial of 1 still race"):
        recording(sweep, repository.trials(sweep_id), "what", "where")


@pytest.fixture
def record(database: Path, tmp_path: Path) -> Callable[[], Path]:
    """Run `benchmarks/record.py` on sweep 1."""

    def run() -> Path:
        out = tmp_path / "out.jsonl"
        runpy.run_path(str(ROOT / "benchmarks" / "record.py"))["main"](database, "1", out, "what", "where")
        return out

    return run


@pytest.mark.parametrize("state", [SweepState.RUNNING, SweepState.INTERRUPTED])
def test_only_a_sweep_that_has_ended_is_recorded(
    repository: Repository, make_sweep: Any, record: Callable[[], Path], state: SweepState, tmp_path: Path
) -> None:
    repository.end(repository.begin(make_sweep()), state)
    with pytest.raises(SystemExit, match=f"sweep 1 of .* is {state}; run it to its end"):
        record()
    assert not (tmp_path / "out.jsonl").exists()
    repository.end(1, SweepState.INCOMPLETE)
    assert replay(load_recorded(record()))[0] == make_sweep()


def test_a_recording_that_lacks_what_a_sweep_needs_is_refused(make_sweep: Any, tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    path.write_text(recording(make_sweep(), (), "what", "where")[0] + "\n")
    whole = load_recorded(path)
    assert whole.sweep is not None
    without = {name: value for name, value in whole.sweep.items() if name != "variants"}
    with pytest.raises(ConfigError, match="'what' does not hold what a sweep needs: 'variants'"):
        replay(replace(whole, sweep=without))


@pytest.mark.parametrize("name", ["cpu_quick_hidden5120", "h200_decode_hidden5120"])
def test_the_shipped_sweeps_were_measured_on_the_whole_grid_that_they_name(name: str) -> None:
    sweep, trials = replay(load_recorded(name))
    assert sweep.grid == len(trials) == len(sweep.candidates) * len(sweep.token_counts)
    assert {trial.candidate for trial in trials} == set(sweep.candidates)
    assert all(sweep.variants.values())
    assert all(t.footprint.input_bytes > 0 and t.footprint.measured_bytes > 0 for t in trials)


def test_single_timings_are_no_sweep() -> None:
    with pytest.raises(ConfigError, match="single timings, not of a sweep"):
        replay(load_recorded("h200_post_pre_hidden5120_prototype"))


def test_the_h200_sweep_cuts_over_from_fused_to_tensor_cores() -> None:
    found = derived("h200_decode_hidden5120", 0.05)
    bands = [(band.first, band.last, band.choice.arm) for band in found.table.bands]
    fused = [(1, 1, "fused"), (2, 4, "fused"), (5, 16, "fused"), (17, 24, "fused")]
    assert bands == [*fused, (25, 64, "fused_mma"), (65, 128, "fused_mma")]
    assert found.derivation.worst_upper < 0.05
    assert found.missing == {}


def test_the_h200_winners_beat_what_is_shipped_at_every_token_count() -> None:
    cells = derived("h200_decode_hidden5120", 0.05).cells
    assert set(cells) == set(AS_SHIPPED)
    faster = {count: AS_SHIPPED[count] / rows[0].latency_us for count, rows in cells.items()}
    assert all(ratio > 1.2 for ratio in faster.values()), faster
    assert faster[1] > 2


@pytest.mark.parametrize("bound", [0.01, 0.02, 0.05, 0.10])
def test_the_cpu_sweep_has_a_cut_over_and_several_variants_under_every_bound(bound: float) -> None:
    found = derived("cpu_quick_hidden5120", bound)
    assert {band.choice.arm for band in found.table.bands} == {"fused", "unfused"}
    assert len(found.derivation.variants) >= 2
    assert found.derivation.worst_upper <= bound
