"""A database opens as it should, or says why not and leaves nothing behind."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from mhctune.db import engine as engine_module
from mhctune.db import sqlite_file
from mhctune.db.engine import DatabaseError, Place
from mhctune.db.repository import Repository
from mhctune.db.schema import open_database


def pragma(path: Path, name: str, *, readonly: bool = False) -> object:
    engine = open_database(path, readonly=readonly)
    try:
        with engine.connect() as connection:
            return connection.exec_driver_sql(f"PRAGMA {name}").scalar()
    finally:
        engine.dispose()


@pytest.mark.parametrize(
    ("name", "value"),
    [("journal_mode", "wal"), ("synchronous", 1), ("foreign_keys", 1), ("busy_timeout", 60_000)],
)
def test_a_local_database_is_set_up(database: Path, name: str, value: object) -> None:
    assert pragma(database, name) == value


def test_a_network_disk_gets_a_plain_journal(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "wal_works", lambda path: False)
    assert pragma(database, "journal_mode") == "delete"


def test_where_wal_is_refused_a_plain_journal_is_used(database: Path) -> None:
    # WAL cannot be set while somebody reads in the plain journal's way.
    open_database(database).dispose()
    with closing(sqlite3.connect(database, isolation_level=None)) as reader:
        reader.execute("PRAGMA journal_mode=DELETE")
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM gpus").fetchall()
        with closing(sqlite3.connect(database, timeout=0)) as connection:
            engine_module._set_journal(connection, "WAL")
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


@pytest.mark.parametrize(
    ("kind", "works"),
    [("ext4", True), ("xfs", True), ("nfs4", False), ("lustre", False), ("fuse.sshfs", False)],
)
def test_network_file_systems_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, works: bool
) -> None:
    mounts = f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: mounts)
    assert sqlite_file.wal_works(tmp_path / "deeper" / "x.db") is works


@pytest.mark.parametrize("name", ["with blank.db", "a?mode=memory#b.db", "100%.db", "ä.db"])
def test_any_file_name_works(tmp_path: Path, name: str) -> None:
    Repository.open(tmp_path / name).close()
    with Repository.open(tmp_path / name, readonly=True) as repository:
        assert repository.sweeps() == []
    assert (tmp_path / name).is_file()


def test_a_missing_file_is_not_made_by_reading(database: Path) -> None:
    with pytest.raises(DatabaseError, match=r"no database at .*mhctune\.db; run `mhctune sweep`"):
        open_database(database, readonly=True)
    assert list(database.parent.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"no folder .*/nowhere for the database x\.db; create it"):
        open_database(tmp_path / "nowhere" / "x.db")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests may run as root, whom permissions do not stop.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != database.parent)
    with pytest.raises(DatabaseError, match=f"folder {database.parent} of the database cannot be written"):
        open_database(database)
    assert list(database.parent.iterdir()) == []


def test_a_place_where_no_file_can_be_made_is_named() -> None:
    with pytest.raises(DatabaseError, match=r"/proc/.*cannot be written|database /proc/.*unable to open"):
        open_database("/proc/self/mhctune.db")


def test_a_write_protected_file_is_read_only(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_database(database).dispose()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != database)
    with pytest.raises(DatabaseError, match="is write-protected"):
        open_database(database)
    open_database(database, readonly=True).dispose()


@pytest.mark.parametrize("readonly", [True, False])
def test_a_file_of_another_kind_is_refused_and_kept(database: Path, readonly: bool) -> None:
    database.write_text('{"mhctune_table": 1}')
    with pytest.raises(DatabaseError, match="is no SQLite database"):
        open_database(database, readonly=readonly)
    assert database.read_text() == '{"mhctune_table": 1}'


@pytest.mark.parametrize("readonly", [True, False])
def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path, readonly: bool) -> None:
    with pytest.raises(DatabaseError, match=r"cannot be read|no SQLite database|unable to open"):
        open_database(tmp_path, readonly=readonly)


@pytest.mark.parametrize("readonly", [True, False])
def test_somebody_elses_database_is_refused_and_kept(database: Path, readonly: bool) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
    with pytest.raises(DatabaseError, match="is a database, but not mhctune's"):
        open_database(database, readonly=readonly)
    with closing(sqlite3.connect(database)) as connection:
        found = connection.execute("SELECT name FROM sqlite_master").fetchall()
    assert found == [("alembic_version",)]


def test_an_empty_file_is_a_new_database_to_a_writer_only(database: Path) -> None:
    database.touch()
    with pytest.raises(DatabaseError, match="not mhctune's"):
        open_database(database, readonly=True)
    open_database(database).dispose()
    open_database(database, readonly=True).dispose()


def test_a_damaged_database_is_named(database: Path) -> None:
    open_database(database).dispose()
    content = bytearray(database.read_bytes())
    content[100:4096] = b"\xff" * 3996
    database.write_bytes(content)
    with pytest.raises(DatabaseError, match=r"mhctune\.db: .*malformed; the file is damaged"):
        open_database(database, readonly=True)


def test_a_second_writer_is_told_after_waiting(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_database(database).dispose()
    monkeypatch.setattr(engine_module, "BUSY_TIMEOUT_S", 0.05)
    with closing(sqlite3.connect(database, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseError, match=r"locked .*another process is writing"):
            open_database(database)


@pytest.mark.parametrize("url", ["mysql://host/db", "http://host/db"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(DatabaseError, match="allowed: a file's path, or postgresql://"):
        Place.of(url)


def test_an_sqlite_url_is_its_path(database: Path) -> None:
    assert Place.of(f"sqlite:///{database}") == Place.of(database) == Place.of(str(database))


@pytest.mark.parametrize("kind", ["postgres", "postgresql", "postgresql+psycopg"])
def test_a_postgresql_url_is_named_without_its_password(kind: str) -> None:
    place = Place.of(f"{kind}://me:secret@host/fleet")
    assert str(place) == "postgresql+psycopg://me:***@host/fleet"


def test_a_missing_postgresql_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'psycopg'", name="psycopg")

    monkeypatch.setattr(engine_module, "create_engine", missing)
    with pytest.raises(DatabaseError, match=r"needs psycopg, .*pip install 'mhctune\[postgres\]'"):
        open_database("postgresql://host/fleet")
