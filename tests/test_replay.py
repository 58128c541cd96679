"""Bands come again from samples, on any machine, and a kept table to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mhctune.autotuner.check import Verdict
from mhctune.autotuner.incumbent import Incumbent
from mhctune.autotuner.recording import recording
from mhctune.autotuner.records import Cell, Footprint, Sample, SweepState
from mhctune.db.derivation import derive_stored, keep
from mhctune.db.export import export
from mhctune.db.replay import replay_database, replay_recording
from mhctune.db.repository import Repository
from mhctune.db.tables import load_table
from mhctune.kernels.dispatch import Choice


@pytest.fixture
def swept(repository: Repository, make_sweep: Any) -> Callable[[], int]:
    """Keep a complete sweep in which two candidates are tied, and its table."""

    def sweep() -> int:
        record = make_sweep()
        sweep_id = repository.begin(record, new=True)
        for count in record.token_counts:
            cell = Cell(record.seam, record.problem, count)
            for place, candidate in enumerate(record.candidates):
                trial = repository.open_trial(sweep_id, cell, candidate, Footprint(1, 2, 3))
                level = 10.0 if place < 2 else 12.0
                repository.add_samples([(trial, Sample(0, n, 0, 20, level + n / 8)) for n in range(6)])
                repository.finish_trial(trial)
        repository.end(sweep_id, SweepState.COMPLETE)
        return sweep_id

    return sweep


def test_a_stored_table_comes_again_to_the_byte_with_its_incumbent(
    repository: Repository, swept: Callable[[], int]
) -> None:
    first = repository.sweep(swept())
    second = first.record.candidates[1]
    incumbent = Incumbent("hand", ((1, None, Choice.of(second.arm, second.config)),))
    keep(repository, derive_stored(repository, first, incumbent=incumbent).table)
    keep(repository, derive_stored(repository, repository.sweep(swept())).table)
    tables = repository.tables()
    assert [str(table.table.bands[0].choice) for table in tables] == [str(second)] * 2
    (replayed,) = replay_database(repository)
    assert replayed.finding is not None
    assert replayed.finding.verdict is Verdict.PASSED
    assert "to the byte" in replayed.finding.sentence
    (older,) = replay_database(repository, tables[1].table)
    assert older.finding is not None
    assert older.finding.verdict is Verdict.DISAGREES


def test_a_recording_gives_the_exported_table_to_the_byte(
    repository: Repository, swept: Callable[[], int], tmp_path: Path
) -> None:
    swept()
    stored = repository.sweep(swept())
    keep(repository, derive_stored(repository, stored, 0.25).table)
    table = load_table(export(repository.tables()[0].table, "json", tmp_path))
    path = tmp_path / "sweep.jsonl"
    lines = recording(stored.record, repository.trials(stored.id), "what", "where")
    path.write_text("\n".join(lines) + "\n")
    found = replay_recording(path, table).finding
    assert found is not None
    assert found.verdict is Verdict.PASSED, found.sentence
    assert replay_recording(path).finding is None
    assert replay_recording(path).derived.table.evidence["max_regret"] == 0.05


def test_what_differs_is_named(repository: Repository, swept: Callable[[], int]) -> None:
    keep(repository, derive_stored(repository, repository.sweep(swept())).table)
    table = repository.tables()[0].table
    other = table.replace(evidence={**table.evidence, "mean_regret": 0.5, "note": 1})
    (replayed,) = replay_database(repository, other)
    assert replayed.finding is not None
    assert replayed.finding.sentence == "same bands, but other evidence (mean_regret, note)"
    moved = table.replace(default=table.default.replace(arm="unfused"))
    (replayed,) = replay_database(repository, moved)
    assert replayed.finding is not None
    assert "tokens 65 and up" in replayed.finding.sentence


def test_without_a_table_the_newest_sweep_is_derived(
    repository: Repository, swept: Callable[[], int]
) -> None:
    swept()
    (replayed,) = replay_database(repository)
    assert replayed.finding is None
    assert replayed.derived.table.evidence["sweep"] == 1


@pytest.mark.parametrize("name", ["h200_decode_hidden5120", "cpu_quick_hidden5120"])
def test_the_shipped_recordings_give_the_same_bytes_twice(name: str, tmp_path: Path) -> None:
    first, second = (replay_recording(name).derived.table for _ in range(2))
    paths = [export(table, "json", tmp_path / side) for table, side in ((first, "a"), (second, "b"))]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    found = replay_recording(name, load_table(paths[0])).finding
    assert found is not None
    assert found.verdict is Verdict.PASSED
