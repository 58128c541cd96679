"""The migrations lead to the models, in one piece, and old and new schemas are told apart."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_mock_engine
from sqlalchemy.schema import CreateTable

from mhctune.autotuner.records import Cell, Footprint, Measurement, Sample
from mhctune.db import engine, schema
from mhctune.db.engine import DatabaseError
from mhctune.db.models import VERSION_TABLE, Base
from mhctune.db.repository import Repository
from mhctune.db.schema import open_database
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate


def tables_of(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def take_back(path: Path, revision: str) -> None:
    """Downgrade a database, which is created where there is none."""
    opened = open_database(path)
    with opened.begin() as connection:
        settings = schema.config()
        settings.attributes["connection"] = connection
        command.downgrade(settings, revision)
    opened.dispose()


def set_revision(path: Path, revision: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = ?", (revision,))


@pytest.fixture
def next_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend that this mhctune is one schema ahead; return the file of the new migration."""
    migrations = tmp_path / "migrations 100%"
    shutil.copytree(schema.MIGRATIONS, migrations, ignore=shutil.ignore_patterns("__pycache__"))
    script = migrations / "versions" / "9999_next.py"
    script.write_text(
        "from alembic import op\nimport sqlalchemy as sa\n"
        f"revision = '9999'\ndown_revision = {schema.head()!r}\n\n\n"
        "def upgrade():\n    op.create_table('later', sa.Column('id', sa.Integer(), primary_key=True))\n"
    )
    monkeypatch.setattr(schema, "MIGRATIONS", migrations)
    return script


def test_the_migrations_lead_to_the_models(database: Path) -> None:
    schema.upgrade(database)
    opened = open_database(database, readonly=True)
    with opened.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "compare_type": True}
        )
        assert compare_metadata(context, Base.metadata) == []
    opened.dispose()
    assert tables_of(database) == {*Base.metadata.tables, VERSION_TABLE}


def test_checks_and_storage_are_those_of_the_models_too(database: Path) -> None:
    # compare_metadata does not see these.
    schema.upgrade(database)
    with closing(sqlite3.connect(database)) as connection:
        live = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall())
    dialect = create_mock_engine("sqlite://", print).dialect
    for table in Base.metadata.sorted_tables:
        wanted = str(CreateTable(table).compile(dialect=dialect))
        assert sorted(_words(live[table.name])) == sorted(_words(wanted)), table.name


def _words(sql: str) -> list[str]:
    return sql.replace(",", " ").split()


def test_postgresql_accepts_the_types_of_the_models() -> None:
    statements: list[str] = []
    engine = create_mock_engine(
        "postgresql://", lambda sql, *_, **__: statements.append(str(sql.compile(dialect=engine.dialect)))
    )
    Base.metadata.create_all(engine, checkfirst=False)
    text = "\n".join(statements)
    assert text.count("CREATE TABLE") == len(Base.metadata.tables)
    assert "TIMESTAMP WITH TIME ZONE" in text
    assert "WITHOUT ROWID" not in text


def test_the_first_schema_can_be_taken_back(database: Path) -> None:
    take_back(database, "base")
    assert tables_of(database) == {VERSION_TABLE}


def test_a_sweep_of_the_first_schema_is_read_after_the_upgrade(database: Path, make_sweep: Any) -> None:
    """Samples of the first schema: none is throttled, nothing is known of twins and conditions."""
    cell, candidate = Cell("post_pre_delayed", Problem(hidden_size=5120), 8), Candidate.of("fused", {"n": 1})
    taken = [Sample(0, round, 0, 20, 3.0 + round) for round in range(5)]
    with Repository.open(database) as store:
        sweep_id = store.begin(make_sweep())
        trial_id = store.open_trial(sweep_id, cell, candidate, Footprint(1, 2, 3))
        store.add_samples([(trial_id, sample) for sample in taken])
        store.finish_trial(trial_id)
    take_back(database, "0001")
    assert schema.current(database) == "0001"
    assert not {"twins", "conditions"} & tables_of(database)
    with closing(sqlite3.connect(database)) as direct:
        columns = [row[1] for row in direct.execute("PRAGMA table_info(samples)")]
    assert "throttled" not in columns

    schema.upgrade(database)
    with Repository.open(database, readonly=True) as store:
        (trial,) = store.trials(sweep_id)
        assert trial.outcome == Measurement(tuple(taken))
        assert (trial.twins, store.conditions(sweep_id)) == ((), [])


def test_a_sweep_of_the_third_schema_has_no_floors_and_gets_some(database: Path, make_sweep: Any) -> None:
    cell = Cell("post_pre_delayed", Problem(hidden_size=5120), 8)
    with Repository.open(database) as store:
        sweep_id = store.begin(make_sweep())
    take_back(database, "0003")
    assert "floors" not in tables_of(database)
    with pytest.raises(DatabaseError, match=r"schema 0003, older .* run `mhctune db upgrade`"):
        Repository.open(database)
    schema.upgrade(database)
    with Repository.open(database) as store:
        assert store.record(sweep_id).floors == {}
        store.keep_floor(sweep_id, cell, 1.5)
        assert store.record(sweep_id).floors == {8: 1.5}


def test_upgrade_creates_a_missing_database(database: Path) -> None:
    assert schema.upgrade(database) == schema.head()
    assert schema.current(database) == schema.head()


def test_upgrade_of_a_current_database_changes_nothing(database: Path) -> None:
    schema.upgrade(database)
    before = database.read_bytes()
    assert schema.upgrade(database) == schema.head()
    assert database.read_bytes() == before


def test_an_older_schema_is_not_upgraded_silently(database: Path, next_revision: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", Path(schema.__file__).parent / "migrations")
        shipped = schema.upgrade(database)
    for readonly in (True, False):
        with pytest.raises(
            DatabaseError, match=rf"schema {shipped}, older than .*9999.*run `mhctune db upgrade`"
        ):
            open_database(database, readonly=readonly)
    assert schema.current(database) == shipped
    assert schema.upgrade(database) == "9999"
    assert "later" in tables_of(database)
    open_database(database).dispose()


@pytest.mark.parametrize("readonly", [True, False])
def test_a_newer_schema_is_refused(database: Path, readonly: bool) -> None:
    schema.upgrade(database)
    set_revision(database, "9999")
    with pytest.raises(DatabaseError, match="schema 9999, newer than this mhctune knows"):
        open_database(database, readonly=readonly)
    with pytest.raises(DatabaseError, match="newer"):
        schema.upgrade(database)
    assert schema.current(database) == "9999"


def test_a_failed_upgrade_leaves_the_database_as_it_was(database: Path, next_revision: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", Path(schema.__file__).parent / "migrations")
        shipped = schema.upgrade(database)
    next_revision.write_text(next_revision.read_text() + "    op.execute('SELECT * FROM nowhere')\n")
    with pytest.raises(DatabaseError, match="no such table: nowhere"):
        schema.upgrade(database)
    assert schema.current(database) == shipped
    assert "later" not in tables_of(database)


def test_a_failed_creation_leaves_no_file(database: Path, next_revision: Path) -> None:
    next_revision.write_text(next_revision.read_text() + "    op.execute('SELECT * FROM nowhere')\n")
    for create in (schema.upgrade, open_database):
        with pytest.raises(DatabaseError, match="nowhere"):
            create(database)
        assert list(database.parent.glob("*.db*")) == []


def test_a_failed_creation_keeps_what_another_process_made_meanwhile(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beaten(connection: object) -> None:
        with closing(sqlite3.connect(database)) as other:
            other.execute("CREATE TABLE theirs (x)")
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(schema, "_is_empty", beaten)
    monkeypatch.setattr(engine, "_begin", engine._begin_reading)
    with pytest.raises(DatabaseError, match="disk I/O error"):
        open_database(database)
    assert tables_of(database) == {"theirs"}


@pytest.mark.parametrize("write", [schema.upgrade, open_database])
@pytest.mark.parametrize("whose", ["another program's", "a newer mhctune's"])
@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_a_database_that_is_refused_keeps_every_byte(
    database: Path, write: Callable[[Path], object], whose: str, mode: str
) -> None:
    if whose == "a newer mhctune's":
        schema.upgrade(database)
        set_revision(database, "9999")
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
        connection.execute(f"PRAGMA journal_mode={mode}")
    before = database.read_bytes()
    with pytest.raises(DatabaseError, match=r"not mhctune's|newer than"):
        write(database)
    assert database.read_bytes() == before


def test_a_journal_that_a_killed_writer_left_is_rolled_back(database: Path, tmp_path: Path) -> None:
    schema.upgrade(database)
    killed = tmp_path / "killed.db"
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("PRAGMA cache_size=1")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE songs (title TEXT)")
        connection.execute("INSERT INTO songs SELECT printf('%4000d', sqlite_version())")
        connection.execute("INSERT INTO songs SELECT a.title FROM songs a, pragma_function_list LIMIT 200")
        for suffix in ("", "-journal"):
            shutil.copy(f"{database}{suffix}", f"{killed}{suffix}")
    with pytest.raises(DatabaseError):
        open_database(killed, readonly=True)
    open_database(killed).dispose()
    assert tables_of(killed) == {*Base.metadata.tables, VERSION_TABLE}
