"""Which schema a database has, how it is brought up to date, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect

from mhctune.db.engine import DatabaseError, Place, explained
from mhctune.db.models import VERSION_TABLE

MIGRATIONS = Path(__file__).resolve().parent / "migrations"


def config() -> Config:
    """Return Alembic's settings; there is no alembic.ini, the migrations travel in the package."""
    settings = Config()
    settings.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return settings


def head() -> str:
    """Return the schema revision of this mhctune."""
    revision = ScriptDirectory.from_config(config()).get_current_head()
    assert revision is not None
    return revision


def current(target: str | Path) -> str:
    """Return the schema revision of a database, be it older or newer than this mhctune.

    Raises:
        DatabaseError: it cannot be read, or is not mhctune's.
    """
    place = Place.of(target)
    place.require_readable()
    with _engine(place, readonly=True) as engine, engine.begin() as connection:
        return _revision(connection, place)


def upgrade(target: str | Path) -> str:
    """Bring a database to the schema of this mhctune, creating it where there is none; return the revision.

    One transaction: a failed upgrade leaves the database as it was.

    Raises:
        DatabaseError: it cannot be written, is not mhctune's, or is newer than this mhctune.
    """
    place = Place.of(target)
    place.require_writable()
    _require_ours(place, _require_known)
    with _engine(place, readonly=False) as engine, engine.begin() as connection:
        if not _is_empty(connection):
            _require_known(_revision(connection, place), place)
        _migrate(connection)
    return head()


def open_database(target: str | Path, *, readonly: bool = False) -> Engine:
    """Open a database of this mhctune's schema; a new or empty one is created unless `readonly`.

    An older schema is never upgraded silently. The caller disposes of the engine.

    Raises:
        DatabaseError: it is missing, cannot be read or written, is not mhctune's, or its schema is older
            or newer.
    """
    place = Place.of(target)
    if readonly:
        place.require_readable()
    else:
        place.require_writable()
        _require_ours(place, _require_current)
    with _engine(place, readonly=readonly, keep=True) as engine, engine.begin() as connection:
        if not readonly and _is_empty(connection):
            _migrate(connection)
        _require_current(_revision(connection, place), place)
    return engine


@contextmanager
def _engine(place: Place, *, readonly: bool, keep: bool = False) -> Iterator[Engine]:
    """Yield an engine and close it, unless it is to be kept; a failure leaves no new file behind."""
    new = place.is_new
    engine = place.engine(readonly=readonly)
    try:
        with explained(place):
            yield engine
    except BaseException:
        engine.dispose()
        if new:
            place.remove_if_empty()
        raise
    if not keep:
        engine.dispose()


def _require_ours(place: Place, require: Callable[[str, Place], None]) -> None:
    """Refuse a file before it is opened for writing, which sets its journal: that is a change."""
    if place.awaits_writing:
        return
    with _engine(place, readonly=True) as engine, engine.begin() as connection:
        if not _is_empty(connection):
            require(_revision(connection, place), place)


def _is_empty(connection: Connection) -> bool:
    return not inspect(connection).get_table_names()


def _revision(connection: Connection, place: Place) -> str:
    if VERSION_TABLE not in inspect(connection).get_table_names():
        raise DatabaseError(f"{place} is a database, but not mhctune's; name another with --db")
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    revision = context.get_current_revision()
    if revision is None:
        raise DatabaseError(f"{place} says of itself no schema revision; it is damaged, restore a copy")
    return revision


def _require_known(revision: str, place: Place) -> None:
    known = [script.revision for script in ScriptDirectory.from_config(config()).walk_revisions()]
    if revision not in known:
        raise DatabaseError(
            f"{place} has schema {revision}, newer than this mhctune knows ({head()}); "
            "install the mhctune that wrote it, or a newer one"
        )


def _require_current(revision: str, place: Place) -> None:
    _require_known(revision, place)
    if revision != head():
        raise DatabaseError(
            f"{place} has schema {revision}, older than this mhctune's ({head()}); "
            f"run `mhctune db upgrade` on it, after copying it if an older mhctune still reads it"
        )


def _migrate(connection: Connection) -> None:
    settings = config()
    settings.attributes["connection"] = connection
    command.upgrade(settings, "head")
