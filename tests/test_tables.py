"""Serving loads a table from a database or an exported file, with the standard library alone."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from mhctune.autotuner.records import SweepState
from mhctune.autotuner.store import SweepRecord
from mhctune.db.export import export
from mhctune.db.repository import Repository
from mhctune.db.tables import load_table, load_tables, problem_key
from mhctune.kernels.dispatch import DispatchTable, Fingerprint, Status, TableError
from mhctune.kernels.seam import Problem

MakeSweep = Callable[..., SweepRecord]
MakeTable = Callable[..., DispatchTable]
MakeFingerprint = Callable[..., Fingerprint]
OTHER = Problem(hidden_size=7168)


@pytest.fixture
def save(repository: Repository, make_sweep: MakeSweep) -> Callable[[DispatchTable], None]:
    """Keep a table under a sweep of its own."""

    def keep(table: DispatchTable) -> None:
        problem = Problem(**table.problem)
        sweep = make_sweep(seam=table.seam, problem=problem, fingerprint=table.fingerprint)
        repository.save_table(repository.begin(sweep, new=True), table)

    return keep


Save = Callable[[DispatchTable], None]

PROBE = """
import sys
before = set(sys.modules)
import mhctune.db.tables
load = sys.argv[1:] and mhctune.db.tables.load_table(sys.argv[1]).lookup(8)
names = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(names - set(sys.stdlib_module_names)))
"""


def test_loading_a_table_imports_no_other_package(save: Save, make_table: MakeTable, database: Path) -> None:
    save(make_table())
    command = [sys.executable, "-c", PROBE, str(database)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "['mhctune']\n"


def test_a_table_is_loaded_from_a_database(save: Save, make_table: MakeTable, database: Path) -> None:
    save(make_table())
    assert load_table(database) == make_table()


def test_a_table_is_loaded_from_an_exported_file(make_table: MakeTable, tmp_path: Path) -> None:
    assert load_table(export(make_table(), "json", tmp_path)) == make_table()


def test_the_content_decides_and_not_the_suffix(save: Save, make_table: MakeTable, database: Path) -> None:
    save(make_table())
    misnamed = database.with_name("table.json")
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("VACUUM INTO ?", (str(misnamed),))
    assert load_table(misnamed) == make_table()
    exported = export(make_table(), "json", database.parent)
    assert load_table(exported.rename(database.with_name("other.db"))) == make_table()


def test_the_newest_table_is_served(save: Save, make_table: MakeTable, database: Path) -> None:
    for numerics in ("rounded/1", "rounded/2", "rounded/4"):
        save(make_table(numerics=numerics))
    assert load_table(database).numerics == "rounded/4"


def test_the_status_is_judged_when_loaded(
    save: Save, make_table: MakeTable, make_fingerprint: MakeFingerprint, database: Path
) -> None:
    save(make_table())
    here = make_fingerprint(driver="580.1")
    assert load_table(database, here).lookup(8).status is Status.OTHER_DRIVER
    assert load_table(database, make_fingerprint()).status is Status.EXACT


def test_a_table_of_this_machine_goes_before_a_newer_one_of_another(
    save: Save, make_table: MakeTable, make_fingerprint: MakeFingerprint, database: Path
) -> None:
    save(make_table())
    save(make_table(fingerprint=make_fingerprint(gpu_name="NVIDIA B200")))
    assert load_table(database, make_fingerprint()) == make_table()
    assert load_table(database).fingerprint.gpu_name == "NVIDIA B200"


def test_seam_and_problem_choose(save: Save, make_table: MakeTable, database: Path) -> None:
    tables = [
        make_table(),
        make_table(problem=OTHER.to_dict()),
        make_table(seam="pre"),
        make_table(seam="pre", problem=OTHER.to_dict()),
    ]
    for table in tables:
        save(table)
    for table in tables:
        assert load_table(database, seam=table.seam, problem_digest=problem_key(table)) == table
    assert set(map(id_of, load_tables(database))) == set(map(id_of, tables))
    assert [table.seam for table in load_tables(database, problem_digest=OTHER.digest)] == [
        "post_pre_delayed",
        "pre",
    ]


def id_of(table: DispatchTable) -> str:
    return table.digest


def test_tables_of_several_problems_must_be_told_apart(
    save: Save, make_table: MakeTable, database: Path
) -> None:
    save(make_table())
    save(make_table(problem=OTHER.to_dict()))
    with pytest.raises(TableError, match=rf"tables of 2 problems match \(.*{OTHER.digest}.*; name seam and"):
        load_table(database)


def test_a_problem_is_keyed_as_its_class_does(make_table: MakeTable) -> None:
    assert problem_key(make_table(problem=OTHER.to_dict())) == OTHER.digest


@pytest.mark.parametrize("wanted", [{"seam": "head"}, {"problem_digest": "0" * 16}])
def test_what_is_not_held_is_named(
    save: Save, make_table: MakeTable, database: Path, wanted: dict[str, str]
) -> None:
    save(make_table())
    exported = export(make_table(), "json", database.parent)
    for path in (database, exported):
        with pytest.raises(TableError, match=f"{path}: holds no table of .*{next(iter(wanted.values()))}"):
            load_table(path, **wanted)


def test_a_database_without_tables_says_what_to_run(
    repository: Repository, make_sweep: MakeSweep, database: Path
) -> None:
    with pytest.raises(TableError, match="holds no table of seam any, problem any; run `mhctune sweep`"):
        load_table(database)
    sweep_id = repository.begin(make_sweep())
    with pytest.raises(TableError, match=r"holds no table of .*; run `mhctune sweep`"):  # it has not ended
        load_table(database)
    repository.end(sweep_id, SweepState.COMPLETE)
    with pytest.raises(TableError, match=r"holds no table of .*; run `mhctune bands --save`"):
        load_table(database)


def test_a_missing_file_is_named(database: Path) -> None:
    with pytest.raises(TableError, match=f"{database}: no such file"):
        load_table(database)
    assert not database.exists()


@pytest.mark.parametrize("content", [b"", b"BANDS = ()", b"\xff\xfe\x00", b"{"])
def test_a_file_of_neither_kind_is_named(database: Path, content: bytes) -> None:
    database.write_bytes(content)
    with pytest.raises(TableError, match=f"{database}: is neither an SQLite database nor an exported JSON"):
        load_table(database)


def test_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=f"{tmp_path}: cannot be read: Is a directory"):
        load_table(tmp_path)


def test_somebody_elses_database_is_named(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE people (name)")
    with pytest.raises(TableError, match=f"{database}: .*no such table"):
        load_table(database)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"mhctune_table": 2}, "schema 2 is not 1"),
        ({"digest": "0" * 64}, "does not match the content"),
        ({"seam": "pre"}, "does not match the content"),
        ({"bands": []}, "has no band"),
        ({"bands": [{"first": "one", "last": 2, "arm": "fused", "config": {}}]}, "one"),
        ({"bands": [{"first": 3, "last": 4, "arm": "fused", "config": {}}]}, "must begin at 1"),
        ({"fingerprint": {}}, "missing"),
    ],
)
def test_a_changed_file_is_refused_by_name_and_rule(
    make_table: MakeTable, tmp_path: Path, change: dict[str, object], rule: str
) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({**make_table().to_dict(), **change}))
    with pytest.raises(TableError, match=rf"{path}: .*{rule}"):
        load_table(path)


def test_a_list_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("[1]")
    with pytest.raises(TableError, match=f"{path}: an exported table is a JSON object, this is a list"):
        load_table(path)


def test_a_damaged_row_is_named(save: Save, make_table: MakeTable, database: Path) -> None:
    save(make_table())
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE dispatch_tables SET content = replace(content, 'unfused', 'fused')")
    with pytest.raises(TableError, match=f"{database}, table 1: digest .* does not match"):
        load_table(database)


@pytest.fixture
def without_shared_memory(database: Path, make_table: MakeTable, make_sweep: MakeSweep) -> Path:
    """A closed WAL database beside which SQLite can make no `-shm` file, as in a read-only folder."""
    with Repository.open(database) as repository:
        repository.save_table(repository.begin(make_sweep()), make_table())
    database.with_name(database.name + "-shm").symlink_to("/nowhere/at/all")
    return database


def test_a_database_in_a_folder_that_cannot_be_written_is_read(
    without_shared_memory: Path, make_table: MakeTable
) -> None:
    with (
        closing(sqlite3.connect(f"{without_shared_memory.as_uri()}?mode=ro", uri=True)) as plain,
        pytest.raises(sqlite3.OperationalError),
    ):
        plain.execute("SELECT * FROM sweeps")
    assert load_table(without_shared_memory) == make_table()
    with Repository.open(without_shared_memory, readonly=True) as repository:
        assert [stored.table for stored in repository.tables()] == [make_table()]


def test_a_log_that_cannot_be_applied_is_not_overlooked(without_shared_memory: Path) -> None:
    without_shared_memory.with_name(without_shared_memory.name + "-wal").write_bytes(b"frames")
    with pytest.raises(TableError, match="unable to open database file"):
        load_table(without_shared_memory)
