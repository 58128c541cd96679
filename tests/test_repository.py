"""The repository keeps what it is told, once, and through a kill."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import event

from mhctune.autotuner.conditions import Conditions
from mhctune.autotuner.records import (
    Cell,
    Failure,
    FailureKind,
    Footprint,
    Measurement,
    Sample,
    SweepState,
)
from mhctune.autotuner.store import Store, SweepRecord
from mhctune.db.engine import DatabaseError
from mhctune.db.repository import Repository
from mhctune.kernels.dispatch import DispatchTable, TableError
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

CELL = Cell("post_pre_delayed", Problem(hidden_size=5120), 8)
FUSED = Candidate.of("fused", {"tile_n": 24, "n_splits": 4})
UNFUSED = Candidate.of("unfused", {"tile_n": 32})
BYTES = Footprint(5 << 30, 6 << 30, 7, 8, 9)
MakeSweep = Callable[..., SweepRecord]
MakeTable = Callable[..., DispatchTable]


def samples(batch: int = 0, rounds: int = 3) -> list[Sample]:
    return [Sample(batch, n, n % 2, 20, 3.1 + n / 10) for n in range(rounds)]


def test_it_is_a_store(repository: Repository, make_sweep: MakeSweep) -> None:
    store: Store = repository
    assert store.begin(make_sweep()) == 1


def test_a_sweep_comes_back_as_it_was_told(repository: Repository, make_sweep: MakeSweep) -> None:
    before = datetime.now(UTC)
    stored = repository.sweep(repository.begin(make_sweep()))
    assert stored.record == make_sweep()
    assert stored.state is SweepState.RUNNING
    assert before <= stored.started_at <= datetime.now(UTC)
    assert stored.ended_at is None


def test_an_ended_sweep_has_its_state_and_time(repository: Repository, make_sweep: MakeSweep) -> None:
    sweep_id = repository.begin(make_sweep())
    repository.end(sweep_id, SweepState.INCOMPLETE)
    stored = repository.sweep(sweep_id)
    assert stored.state is SweepState.INCOMPLETE
    assert stored.ended_at is not None
    assert stored.ended_at >= stored.started_at


@pytest.mark.parametrize("state", [SweepState.RUNNING, SweepState.INTERRUPTED, SweepState.INCOMPLETE])
def test_an_unfinished_sweep_is_resumed(
    repository: Repository, make_sweep: MakeSweep, state: SweepState
) -> None:
    sweep_id = repository.begin(make_sweep())
    repository.end(sweep_id, state)
    assert repository.begin(make_sweep()) == sweep_id
    resumed = repository.sweep(sweep_id)
    assert (resumed.state, resumed.ended_at) == (SweepState.RUNNING, None)


def test_a_resumed_sweep_takes_the_bound_asked_for_now(repository: Repository, make_sweep: MakeSweep) -> None:
    sweep_id = repository.begin(make_sweep())
    repository.begin(make_sweep(bound=0.02))
    assert repository.sweep(sweep_id).record == make_sweep(bound=0.02)


def test_a_complete_sweep_is_not_resumed(repository: Repository, make_sweep: MakeSweep) -> None:
    first = repository.begin(make_sweep())
    repository.end(first, SweepState.COMPLETE)
    assert repository.begin(make_sweep()) != first


def test_new_starts_over_and_the_newest_is_resumed(repository: Repository, make_sweep: MakeSweep) -> None:
    first = repository.begin(make_sweep())
    second = repository.begin(make_sweep(), new=True)
    assert second != first
    assert repository.begin(make_sweep()) == second


def test_another_digest_is_another_sweep(repository: Repository, make_sweep: MakeSweep) -> None:
    first = repository.begin(make_sweep())
    assert repository.begin(make_sweep(digest="e" * 64)) != first
    assert [stored.id for stored in repository.sweeps()] == [first + 1, first]


def test_two_seams_may_share_a_problem(repository: Repository, make_sweep: MakeSweep) -> None:
    repository.begin(make_sweep())
    other = repository.begin(make_sweep(digest="e" * 64, seam="pre"))
    assert repository.sweep(other).record.seam == "pre"


def test_facts_that_sweeps_share_are_kept_once(
    repository: Repository, make_sweep: MakeSweep, database: Path
) -> None:
    for _ in range(3):
        repository.begin(make_sweep(), new=True)
    with closing(sqlite3.connect(database)) as connection:
        for table, expected in {"gpus": 1, "toolchains": 1, "problems": 1, "kernel_sources": 2}.items():
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (expected,), table


def test_a_measurement_comes_back_with_every_sample(repository: Repository, make_sweep: MakeSweep) -> None:
    sweep_id = repository.begin(make_sweep())
    trial_id = repository.open_trial(sweep_id, CELL, FUSED, BYTES)
    repository.add_samples([(trial_id, sample) for sample in samples()])
    repository.finish_trial(trial_id)
    (trial,) = repository.trials(sweep_id)
    assert (trial.id, trial.cell, trial.candidate, trial.footprint) == (trial_id, CELL, FUSED, BYTES)
    assert trial.outcome == Measurement(tuple(samples()))
    assert trial.samples == tuple(samples())


def test_a_round_comes_back_with_its_twins_and_conditions(
    repository: Repository, make_sweep: MakeSweep
) -> None:
    sweep_id = repository.begin(make_sweep())
    trial_id, other = (repository.open_trial(sweep_id, CELL, c, BYTES) for c in (FUSED, UNFUSED))
    cool = Conditions("nvml", 1980, 61, ("gpu_idle",), 0)
    hot = Conditions("nvml", 1410, None, ("gpu_idle", "hw_slowdown"), 2)
    for round, conditions in enumerate((cool, hot)):
        clock, throttled = conditions.sm_clock_mhz, conditions.throttled
        mine, others, twin = (Sample(1, round, n, 20, 3.0 + n, clock, throttled) for n in range(3))
        repository.add_samples([(trial_id, mine), (other, others)], [(trial_id, twin)], conditions)
    first, second = repository.trials(sweep_id)
    assert [(s.latency_us, s.sm_clock_mhz, s.throttled) for s in first.samples] == [
        (3.0, 1980, False), (3.0, 1410, True),
    ]  # fmt: skip
    assert [(s.round, s.latency_us, s.throttled) for s in first.twins] == [(0, 5.0, False), (1, 5.0, True)]
    assert second.twins == ()
    assert repository.conditions(sweep_id) == [cool, hot]
    assert repository.conditions(sweep_id + 1) == []


def test_a_round_is_kept_with_its_twins_or_not_at_all(repository: Repository, make_sweep: MakeSweep) -> None:
    sweep_id = repository.begin(make_sweep())
    trial_id = repository.open_trial(sweep_id, CELL, FUSED, BYTES)
    (sample,) = samples(rounds=1)
    with pytest.raises(DatabaseError, match="FOREIGN KEY"):
        repository.add_samples([(trial_id, sample)], [(trial_id + 9, sample)], Conditions("nvml"))
    (trial,) = repository.trials(sweep_id)
    assert (trial.samples, trial.twins, repository.conditions(sweep_id)) == ((), (), [])


def test_a_trial_that_is_raced_has_samples_and_no_outcome(
    repository: Repository, make_sweep: MakeSweep
) -> None:
    sweep_id = repository.begin(make_sweep())
    trial_id = repository.open_trial(sweep_id, CELL, FUSED, BYTES)
    repository.add_samples([(trial_id, samples()[0])])
    (trial,) = repository.trials(sweep_id)
    assert trial.outcome is None
    assert trial.samples == (samples()[0],)


@pytest.mark.parametrize("kind", FailureKind)
def test_a_failure_comes_back(repository: Repository, make_sweep: MakeSweep, kind: FailureKind) -> None:
    sweep_id = repository.begin(make_sweep())
    failure = Failure(kind, "tile_n 24: ptxas said “no”\nand more")
    trial_id = repository.fail_trial(sweep_id, CELL, FUSED, BYTES, failure)
    (trial,) = repository.trials(sweep_id)
    assert (trial.id, trial.outcome, trial.footprint) == (trial_id, failure, BYTES)


def test_an_opened_trial_may_fail_and_keeps_its_samples(
    repository: Repository, make_sweep: MakeSweep
) -> None:
    sweep_id = repository.begin(make_sweep())
    trial_id = repository.open_trial(sweep_id, CELL, FUSED, BYTES)
    repository.add_samples([(trial_id, sample) for sample in samples()])
    failure = Failure(FailureKind.CRASHED, "illegal address")
    assert repository.fail_trial(sweep_id, CELL, FUSED, BYTES, failure) == trial_id
    (trial,) = repository.trials(sweep_id)
    assert (trial.outcome, trial.samples) == (failure, tuple(samples()))


def test_opening_a_trial_again_keeps_its_id_and_samples(
    repository: Repository, make_sweep: MakeSweep
) -> None:
    sweep_id = repository.begin(make_sweep())
    trial_id = repository.open_trial(sweep_id, CELL, FUSED, BYTES)
    repository.add_samples([(trial_id, sample) for sample in samples()])
    repository.fail_trial(sweep_id, CELL, FUSED, BYTES, Failure(FailureKind.TIMEOUT, "10 s"))
    assert repository.open_trial(sweep_id, CELL, FUSED, Footprint(1, 2, 3)) == trial_id
    (trial,) = repository.trials(sweep_id)
    assert (trial.outcome, trial.samples, trial.footprint) == (None, tuple(samples()), Footprint(1, 2, 3))


def test_trials_come_in_the_order_they_were_opened(repository: Repository, make_sweep: MakeSweep) -> None:
    sweep_id = repository.begin(make_sweep())
    for cell in (CELL, Cell(CELL.seam, CELL.problem, 1)):
        for candidate in (UNFUSED, FUSED):
            repository.open_trial(sweep_id, cell, candidate, BYTES)
    found = [(trial.cell.num_tokens, trial.candidate) for trial in repository.trials(sweep_id)]
    assert found == [(8, UNFUSED), (8, FUSED), (1, UNFUSED), (1, FUSED)]


def test_trials_of_other_sweeps_are_left_out(repository: Repository, make_sweep: MakeSweep) -> None:
    first, second = repository.begin(make_sweep()), repository.begin(make_sweep(), new=True)
    mine = repository.open_trial(first, CELL, FUSED, BYTES)
    other = repository.open_trial(second, CELL, FUSED, BYTES)
    repository.add_samples([(mine, samples()[0]), (other, samples()[1])])
    (trial,) = repository.trials(first)
    assert (trial.id, trial.samples) == (mine, (samples()[0],))


def test_reading_many_trials_takes_as_many_queries_as_reading_one(
    repository: Repository, make_sweep: MakeSweep
) -> None:
    def queries(sweep_id: int) -> int:
        seen: list[str] = []

        def listen(connection: object, cursor: object, statement: str, *rest: object) -> None:
            seen.append(statement)

        event.listen(repository._engine, "before_cursor_execute", listen)
        repository.trials(sweep_id)
        event.remove(repository._engine, "before_cursor_execute", listen)
        return sum(statement.startswith("SELECT") for statement in seen)

    small, large = repository.begin(make_sweep()), repository.begin(make_sweep(), new=True)
    repository.open_trial(small, CELL, FUSED, BYTES)
    for count in range(1, 30):
        trial_id = repository.open_trial(large, Cell(CELL.seam, CELL.problem, count), FUSED, BYTES)
        repository.add_samples([(trial_id, samples()[0])])
    assert 0 < queries(small) == queries(large)


def test_a_round_is_kept_whole_or_not_at_all(repository: Repository, make_sweep: MakeSweep) -> None:
    sweep_id = repository.begin(make_sweep())
    first = repository.open_trial(sweep_id, CELL, FUSED, BYTES)
    second = repository.open_trial(sweep_id, CELL, UNFUSED, BYTES)
    repository.add_samples([(second, samples()[0])])
    with pytest.raises(DatabaseError, match="UNIQUE constraint failed"):
        repository.add_samples([(first, samples()[0]), (second, samples()[0])])
    assert [len(trial.samples) for trial in repository.trials(sweep_id)] == [0, 1]


def test_samples_of_an_unknown_trial_are_refused(repository: Repository) -> None:
    with pytest.raises(DatabaseError, match=r"mhctune\.db: FOREIGN KEY constraint failed"):
        repository.add_samples([(99, samples()[0])])


def test_a_trial_without_samples_cannot_be_finished(repository: Repository, make_sweep: MakeSweep) -> None:
    trial_id = repository.open_trial(repository.begin(make_sweep()), CELL, FUSED, BYTES)
    with pytest.raises(DatabaseError, match=f"trial {trial_id} has no sample"):
        repository.finish_trial(trial_id)


def test_the_schema_refuses_a_second_trial_of_a_candidate_in_a_cell(
    repository: Repository, make_sweep: MakeSweep, database: Path
) -> None:
    repository.open_trial(repository.begin(make_sweep()), CELL, FUSED, BYTES)
    columns = "sweep_id, num_tokens, candidate_id, state, input_bytes, output_bytes, scratch_bytes, "
    columns += "graph_bytes, measured_bytes, created_at"
    with (
        closing(sqlite3.connect(database)) as connection,
        pytest.raises(sqlite3.IntegrityError, match="UNIQUE constraint failed: trials"),
    ):
        connection.execute(f"INSERT INTO trials ({columns}) SELECT {columns} FROM trials")


def test_an_unknown_sweep_is_named_with_the_newest(repository: Repository, make_sweep: MakeSweep) -> None:
    with pytest.raises(DatabaseError, match="no sweep 7; it holds none"):
        repository.sweep(7)
    repository.begin(make_sweep())
    for ask in (repository.sweep, repository.trials, lambda n: repository.end(n, SweepState.COMPLETE)):
        with pytest.raises(DatabaseError, match="no sweep 7; the newest is 1"):
            ask(7)


def test_counts_tell_outcomes_and_kinds_of_failure(repository: Repository, make_sweep: MakeSweep) -> None:
    sweep_id = repository.begin(make_sweep(token_counts=(1, 2, 3, 4, 5, 6, 9)))
    cells = [Cell(CELL.seam, CELL.problem, count) for count in range(1, 7)]
    for cell in cells[:2]:
        trial_id = repository.open_trial(sweep_id, cell, FUSED, BYTES)
        repository.add_samples([(trial_id, samples()[0])])
        repository.finish_trial(trial_id)
    repository.open_trial(sweep_id, cells[2], FUSED, BYTES)
    for cell, kind in zip(cells[3:], ["compile", "compile", "timeout"], strict=True):
        repository.fail_trial(sweep_id, cell, FUSED, BYTES, Failure(FailureKind(kind), ""))
    counts = repository.counts(sweep_id)
    assert (counts.measured, counts.racing, counts.failed) == (2, 1, 3)
    assert counts.failures == {FailureKind.COMPILE: 2, FailureKind.TIMEOUT: 1}


def test_probes_between_the_token_counts_are_counted_apart(
    repository: Repository, make_sweep: MakeSweep
) -> None:
    sweep_id = repository.begin(make_sweep(token_counts=(1, 8, 64)))
    for count in (1, 4, 8, 36, 63, 65):
        cell = Cell(CELL.seam, CELL.problem, count)
        trial_id = repository.open_trial(sweep_id, cell, FUSED, BYTES)
        repository.add_samples([(trial_id, samples()[0])])
        repository.finish_trial(trial_id)
    repository.fail_trial(
        sweep_id, Cell(CELL.seam, CELL.problem, 5), FUSED, BYTES, Failure(FailureKind.TIMEOUT, "")
    )
    counts = repository.counts(sweep_id)
    assert (counts.measured, counts.failed, counts.racing, counts.failures) == (2, 0, 0, {})
    assert counts.probes == 5
    assert [t.cell.num_tokens for t in repository.trials(sweep_id, 36)] == [36]
    assert repository.trials(sweep_id, 7) == []


def test_the_first_floor_of_a_cell_is_kept(repository: Repository, make_sweep: MakeSweep) -> None:
    sweep_id = repository.begin(make_sweep())
    for count, floor_us in ((8, 1.5), (1, 1.25), (8, 9.0)):
        repository.keep_floor(sweep_id, Cell(CELL.seam, CELL.problem, count), floor_us)
    assert repository.record(sweep_id).floors == {1: 1.25, 8: 1.5}


def test_tables_come_back_newest_first(
    repository: Repository, make_sweep: MakeSweep, make_table: MakeTable
) -> None:
    sweep_id = repository.begin(make_sweep())
    old, new = make_table(), make_table(numerics="rounded/4")
    ids = [repository.save_table(sweep_id, table) for table in (old, new)]
    found = repository.tables()
    assert [stored.id for stored in found] == ids[::-1]
    assert [stored.table for stored in found] == [new, old]
    assert {stored.sweep_id for stored in found} == {sweep_id}


def test_bands_can_be_asked_for_in_sql(
    repository: Repository, make_sweep: MakeSweep, make_table: MakeTable, database: Path
) -> None:
    table_id = repository.save_table(repository.begin(make_sweep()), make_table())
    with closing(sqlite3.connect(database)) as connection:
        query = "SELECT first, last, arm, config FROM bands WHERE table_id = ? ORDER BY first"
        found = connection.execute(query, (table_id,)).fetchall()
    fused, unfused = '{"n_splits":4,"n_thr":128,"tile_n":24}', '{"n_splits":1,"tile_n":32}'
    assert found == [(1, 1, "fused", fused), (2, 17, "unfused", unfused), (18, 64, "fused", fused)]


@pytest.mark.parametrize(("evidence", "bound"), [({}, 0.05), ({"max_regret": 0.02}, 0.02)])
def test_a_table_is_kept_with_the_bound_it_was_derived_under(
    repository: Repository,
    make_sweep: MakeSweep,
    make_table: MakeTable,
    database: Path,
    evidence: dict[str, float],
    bound: float,
) -> None:
    repository.save_table(repository.begin(make_sweep()), make_table(evidence=evidence))
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT bound FROM dispatch_tables").fetchone() == (bound,)


@pytest.mark.parametrize("evidence", [{"regret": float("nan")}, {"by_count": {2: 1.0, 10: 2.0}}])
def test_a_table_that_json_would_change_is_not_kept(
    repository: Repository, make_sweep: MakeSweep, make_table: MakeTable, evidence: dict[str, object]
) -> None:
    sweep_id = repository.begin(make_sweep())
    with pytest.raises(TableError, match="post_pre_delayed"):
        repository.save_table(sweep_id, make_table(evidence=evidence))
    assert repository.tables() == []


def test_a_table_of_an_unknown_sweep_is_refused(repository: Repository, make_table: MakeTable) -> None:
    with pytest.raises(DatabaseError, match="no sweep 3"):
        repository.save_table(3, make_table())


def test_gate_runs_come_back_newest_first(
    repository: Repository, make_sweep: MakeSweep, make_table: MakeTable
) -> None:
    table_id = repository.save_table(repository.begin(make_sweep()), make_table())
    repository.save_gate_run(table_id, "passed", {"cells": 3})
    repository.save_gate_run(table_id, "regressed", {"worst": 0.2})
    found = [(run.verdict, run.detail) for run in repository.gate_runs(table_id)]
    assert found == [("regressed", {"worst": 0.2}), ("passed", {"cells": 3})]


def test_a_reader_sees_what_is_committed_and_cannot_write(
    repository: Repository, make_sweep: MakeSweep, database: Path
) -> None:
    sweep_id = repository.begin(make_sweep())
    with Repository.open(database, readonly=True) as reader:
        repository.open_trial(sweep_id, CELL, FUSED, BYTES)
        assert reader.counts(sweep_id).racing == 1
        with pytest.raises(DatabaseError, match="readonly database"):
            reader.begin(make_sweep(), new=True)


def test_reading_does_not_wait_for_a_writer(
    repository: Repository, make_sweep: MakeSweep, database: Path
) -> None:
    sweep_id = repository.begin(make_sweep())
    with closing(sqlite3.connect(database, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        assert repository.sweep(sweep_id).id == sweep_id


WRITER = """
import sys
from mhctune.autotuner.records import Cell, Footprint, Sample
from mhctune.db.repository import Repository
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

repository = Repository.open(sys.argv[1])
candidate = Candidate.of("fused", {"tile_n": 24})
for count in range(1, 100_000):
    cell = Cell("post_pre_delayed", Problem(hidden_size=5120), count)
    trial = repository.open_trial(1, cell, candidate, Footprint(1, 2, 3))
    repository.add_samples([(trial, Sample(0, n, 0, 20, 3.1)) for n in range(50)])
    repository.finish_trial(trial)
    print(count, flush=True)
"""


def test_a_killed_sweep_loses_nothing_that_was_told(database: Path, make_sweep: MakeSweep) -> None:
    with Repository.open(database) as repository:
        sweep_id = repository.begin(make_sweep())
    with subprocess.Popen([sys.executable, "-c", WRITER, str(database)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) == 20:
                os.kill(writer.pid, signal.SIGKILL)
                break
        told = [20, *map(int, writer.stdout.read().split())][-1]
    assert writer.returncode == -signal.SIGKILL
    with Repository.open(database) as repository:
        assert repository.begin(make_sweep()) == sweep_id
        trials = repository.trials(sweep_id)
    finished = [trial for trial in trials if trial.outcome is not None]
    assert len(finished) >= told
    assert all(len(trial.samples) == 50 for trial in finished)
    assert len(trials) - len(finished) <= 1
    assert len({(trial.cell, trial.candidate) for trial in trials}) == len(trials)
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
