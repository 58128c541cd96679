"""A merge holds everything, is the same in any order, and says what contradicts itself."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mhctune.autotuner.conditions import Conditions
from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint, Sample, SweepState
from mhctune.db.derivation import derive_again, derive_stored, keep
from mhctune.db.engine import DatabaseError
from mhctune.db.lock import exclusive
from mhctune.db.merge import content_digest, merge
from mhctune.db.repository import Repository
from mhctune.db.rows import table_text
from mhctune.db.tables import load_table
from mhctune.kernels.dispatch import Fingerprint

Fill = Callable[..., Path]
WRONG = Failure(FailureKind.MISMATCH, "layer_input: 3 elements not written")


@pytest.fixture
def fill(make_sweep: Any, make_fingerprint: Callable[..., Fingerprint], tmp_path: Path) -> Fill:
    """Make a database with one sweep of a machine, its table and a gate run."""

    def make(name: str, driver: str, rounds: int = 6, pace: float = 1.0) -> Path:
        path = tmp_path / f"{name}.db"
        with Repository.open(path) as store:
            sweep = make_sweep(fingerprint=make_fingerprint(driver=driver), digest=driver * 8)
            sweep_id = store.begin(sweep, new=True)
            measure(store, sweep, sweep_id, rounds, pace)
            keep(store, derive_stored(store, store.sweep(sweep_id)).table)
            store.save_gate_run(store.tables()[0].id, "passed", {"driver": driver})
        return path

    return make


def measure(store: Repository, sweep: Any, sweep_id: int, rounds: int, pace: float) -> None:
    for count in sweep.token_counts:
        cell = Cell(sweep.seam, sweep.problem, count)
        *good, bad = sweep.candidates
        trials = [store.open_trial(sweep_id, cell, each, Footprint(1, 2, 3)) for each in good]
        for n in range(rounds):
            taken = [(t, Sample(0, n, k, 20, pace * (10.0 + k + n / 8))) for k, t in enumerate(trials)]
            store.add_samples(taken, taken[:1], Conditions("nvml", 1980, 40, (), 0))
        for trial in trials:
            store.finish_trial(trial)
        store.fail_trial(sweep_id, cell, bad, Footprint(1, 2, 3), WRONG)
    store.end(sweep_id, SweepState.COMPLETE)


@pytest.fixture
def three(fill: Fill) -> list[Path]:
    machines = (("a", "1", 1.0), ("b", "2", 0.9), ("c", "3", 1.2))
    return [fill(name, driver, pace=pace) for name, driver, pace in machines]


def test_three_databases_in_all_orders_give_the_same_bytes(three: list[Path], tmp_path: Path) -> None:
    results = []
    for number, order in enumerate(itertools.permutations(three)):
        out = tmp_path / f"out{number}.db"
        merged = merge(out, order)
        assert merged.conflicts == ()
        results.append((out.read_bytes(), merged.digest, content_digest(out)))
    assert len(set(results)) == 1
    assert results[0][1] == results[0][2]


def test_floors_are_merged_and_of_two_the_shorter_is_kept(fill: Fill, tmp_path: Path) -> None:
    one = fill("one", "1")
    two = tmp_path / "two.db"
    shutil.copy(one, two)
    for path, found in ((one, {1: 1.5, 8: 2.0}), (two, {1: 1.25, 64: 3.0})):
        with Repository.open(path) as store:
            record = store.record(1)
            for count, floor_us in found.items():
                store.keep_floor(1, Cell(record.seam, record.problem, count), floor_us)
    bytes_of = set()
    for number, order in enumerate(([one, two], [two, one])):
        out = tmp_path / f"floors{number}.db"
        merge(out, order)
        bytes_of.add(out.read_bytes())
        with Repository.open(out, readonly=True) as store:
            assert store.record(1).floors == {1: 1.25, 8: 2.0, 64: 3.0}
    assert len(bytes_of) == 1


def test_it_does_not_matter_how_it_is_grouped(three: list[Path], tmp_path: Path) -> None:
    a, b, c = three
    merge(tmp_path / "ab.db", [a, b])
    left = merge(tmp_path / "left.db", [tmp_path / "ab.db", c])
    merge(tmp_path / "bc.db", [b, c])
    right = merge(tmp_path / "right.db", [a, tmp_path / "bc.db"])
    assert left.digest == right.digest
    assert (tmp_path / "left.db").read_bytes() == (tmp_path / "right.db").read_bytes()


def test_merging_again_changes_nothing(three: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    first = merge(out, three)
    before = out.read_bytes()
    again = merge(out, three[:1])
    assert first.changed
    assert not again.changed
    assert (again.digest, out.read_bytes()) == (first.digest, before)


def test_what_the_result_holds_stays_and_what_is_new_comes_to_it(three: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    merge(out, three[:2])
    assert merge(out, three[2:]).digest == merge(tmp_path / "at_once.db", three).digest


def test_every_sweep_trial_sample_table_and_verdict_is_there(three: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    merged = merge(out, three)
    assert [(s.trials, s.tables) for s in merged.sweeps] == [(12, 1)] * 3
    assert {s.places for s in merged.sweeps} == {(str(path),) for path in three}
    with Repository.open(out, readonly=True) as store:
        by_driver = {sweep.record.fingerprint.driver: sweep for sweep in store.sweeps()}
        tables = {stored.sweep_id: stored for stored in store.tables()}
        for path, driver in zip(three, "123", strict=True):
            mine = by_driver[driver]
            with Repository.open(path, readonly=True) as source:
                (theirs,), (table,) = source.sweeps(), source.tables()
                assert replace(mine, id=0) == replace(theirs, id=0)
                assert mine.record.candidates == theirs.record.candidates
                told = [
                    [(t.cell, t.candidate, t.footprint, t.outcome, t.samples, t.twins) for t in trials]
                    for trials in (store.trials(mine.id), source.trials(theirs.id))
                ]
                assert told[0] == told[1]
                assert store.conditions(mine.id) == source.conditions(theirs.id)
                assert tables[mine.id].table == table.table
                (run,) = store.gate_runs(tables[mine.id].id)
                assert run.detail == {"driver": driver}


def test_the_newest_table_is_still_the_one_that_is_served(three: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    merge(out, reversed(three))
    assert load_table(out).digest == load_table(three[-1]).digest


def test_tables_derive_again_to_the_byte_from_a_merged_database(three: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    merge(out, three)
    with Repository.open(out, readonly=True) as store:
        for stored in store.tables():
            assert table_text(derive_again(store, stored).table) == table_text(stored.table)


def test_a_copy_that_went_further_is_the_same_sweep(make_sweep: Any, tmp_path: Path) -> None:
    early, late, sweep = tmp_path / "early.db", tmp_path / "late.db", make_sweep(token_counts=(1,))
    with Repository.open(early) as store:
        sweep_id = store.begin(sweep)
        cell = Cell(sweep.seam, sweep.problem, 1)
        trial = store.open_trial(sweep_id, cell, sweep.candidates[0], Footprint(1, 2, 3))
        store.add_samples([(trial, Sample(0, n, 0, 20, 3.0)) for n in range(3)])
        store.end(sweep_id, SweepState.INTERRUPTED)
    shutil.copy(early, late)
    with Repository.open(late) as store:
        store.begin(sweep)
        store.add_samples([(trial, Sample(0, n, 0, 20, 3.0)) for n in range(3, 6)])
        store.finish_trial(trial)
        store.end(sweep_id, SweepState.COMPLETE)
    for order in ((early, late), (late, early)):
        out = tmp_path / f"{order[0].stem}_first.db"
        merged = merge(out, order)
        assert merged.conflicts == ()
        assert content_digest(out) == content_digest(late)
    with Repository.open(out, readonly=True) as store:
        (only,) = store.sweeps()
        assert only.state is SweepState.COMPLETE


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE samples SET latency_us = 99 WHERE trial_id = 1 AND round = 2",
        "UPDATE trials SET state = 'failed', failure_kind = 'timeout', failure_detail = '' WHERE id = 1",
    ],
)
def test_a_trial_that_differs_is_a_conflict_in_either_order(
    three: list[Path], tmp_path: Path, damage: str
) -> None:
    other = tmp_path / "other.db"
    shutil.copy(three[0], other)
    with closing(sqlite3.connect(other)) as connection, connection:
        connection.execute(damage)
    found = [
        merge(tmp_path / f"{order[0].stem}_first.db", order)
        for order in ((three[0], other), (other, three[0]))
    ]
    assert found[0].digest == found[1].digest
    assert found[0].conflicts == found[1].conflicts
    (conflict,) = found[0].conflicts
    assert "NVIDIA H200: fused" in conflict
    assert "at 1 token differs: kept is the one measured, 6 samples, left out the one" in conflict


def test_a_result_that_is_no_file_or_is_being_swept_is_refused(three: list[Path], tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="is no file; merge into a file"):
        merge("postgresql://host/fleet", three)
    out = tmp_path / "out.db"
    merge(out, three[:1])
    before = out.read_bytes()
    with exclusive(str(out)), pytest.raises(DatabaseError, match="another sweep is writing"):
        merge(out, three)
    assert out.read_bytes() == before


def test_a_source_that_is_missing_leaves_no_result(three: list[Path], tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"no database at .*none\.db"):
        merge(tmp_path / "out.db", [three[0], tmp_path / "none.db"])
    assert not (tmp_path / "out.db").exists()
    assert list(tmp_path.glob(".*")) == []
