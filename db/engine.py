"""Where a database lives, and how it is connected to: an SQLite file or a PostgreSQL URL."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from mhctune.db.magic import is_sqlite
from mhctune.db.sqlite_file import connect_readonly, siblings, wal_works

BUSY_TIMEOUT_S = 60.0
READING = "mhctune_reading"
"""Execution option of a connection that will not write: it waits for no writer."""

_POSTGRES = ("postgresql", "postgres")


class DatabaseError(Exception):
    """A database that cannot be used: what is wrong, with which one, and what to do next."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a database lives: exactly one of `path` and `url` is set."""

    path: Path | None = None
    url: URL | None = None

    @classmethod
    def of(cls, target: str | Path) -> Place:
        """Read a path, an `sqlite:///` path or a `postgresql://` URL.

        Raises:
            DatabaseError: a URL that cannot be read or is of another kind.
        """
        text = str(target)
        if isinstance(target, Path) or "://" not in text:
            return cls(path=Path(target))
        if text.startswith("sqlite:///"):
            return cls(path=Path(text.removeprefix("sqlite:///")))
        kind = text.partition("://")[0]
        if kind.partition("+")[0] not in _POSTGRES:
            raise DatabaseError(f"database URL of kind {kind!r}; allowed: a file's path, or postgresql://…")
        try:
            url = make_url(text)
        except ArgumentError as error:
            raise DatabaseError(f"database URL of kind {kind!r} cannot be read: {error}") from error
        driver = kind if "+" in kind else "postgresql+psycopg"
        return cls(url=url.set(drivername=driver))

    def __str__(self) -> str:
        """Return the path, or the URL without its password."""
        return str(self.path) if self.url is None else self.url.render_as_string(hide_password=True)

    @property
    def location(self) -> str:
        """The absolute path, or the URL without its password: what a command that wrote prints."""
        return str(self) if self.path is None else os.path.abspath(self.path)

    @property
    def is_new(self) -> bool:
        """Whether opening it for writing would create a file."""
        return self.path is not None and not self.path.exists()

    @property
    def awaits_writing(self) -> bool:
        """Whether only a writer can say what it holds: no file, or a journal to roll back."""
        if self.path is None or self.is_new or self.path.stat().st_size == 0:
            return True
        journal = siblings(self.path)[2]
        return journal.exists() and journal.stat().st_size > 0

    def require_readable(self) -> None:
        """Refuse a file that is missing or no SQLite database.

        Raises:
            DatabaseError: it is.
        """
        if self.path is None:
            return
        if not self.path.exists():
            raise DatabaseError(
                f"no database at {self.path}; run `mhctune sweep` to make one, or name another with --db"
            )
        self._require_sqlite(self.path)

    def require_writable(self) -> None:
        """Refuse a file that cannot be written or created, or is no SQLite database.

        Raises:
            DatabaseError: it is.
        """
        if self.path is None:
            return
        folder = self.path.parent
        if not folder.is_dir():
            raise DatabaseError(f"no folder {folder} for the database {self.path.name}; create it first")
        if not os.access(folder, os.W_OK):
            raise DatabaseError(f"folder {folder} of the database cannot be written; name another with --db")
        if not self.path.exists():
            return
        self._require_sqlite(self.path)
        if not os.access(self.path, os.W_OK):
            raise DatabaseError(
                f"database {self.path} is write-protected; copy it, or name another with --db"
            )

    @staticmethod
    def _require_sqlite(path: Path) -> None:
        try:
            known = path.stat().st_size == 0 or is_sqlite(path)
        except OSError as error:
            raise DatabaseError(f"database {path} cannot be read: {error.strerror}") from error
        if not known:
            raise DatabaseError(
                f"{path} is no SQLite database; name another with --db (an exported table is not one)"
            )

    def remove_if_empty(self) -> None:
        """Delete a file that holds no table, and what SQLite keeps beside it.

        One that holds tables was made by another process in the meantime.
        """
        if self.path is None or not self.path.is_file():
            return
        try:
            with closing(connect_readonly(self.path)) as connection:
                (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error:
            return
        if tables == 0:
            for file in (self.path, *siblings(self.path)):
                file.unlink(missing_ok=True)

    def engine(self, *, readonly: bool) -> Engine:
        """Return an engine; nothing is opened until it is used.

        Raises:
            DatabaseError: the driver for PostgreSQL is not installed.
        """
        if self.path is not None:
            return _sqlite_engine(self.path, readonly=readonly)
        assert self.url is not None
        options: dict[str, Any] = {"execution_options": {"postgresql_readonly": True}} if readonly else {}
        try:
            return create_engine(self.url, **options)
        except ModuleNotFoundError as error:
            raise DatabaseError(
                f"PostgreSQL needs {error.name}, which is not installed; "
                "run `pip install 'mhctune[postgres]'`"
            ) from error


@contextmanager
def explained(place: Place) -> Iterator[None]:
    """Turn what SQLAlchemy and SQLite raise into one error that names the database.

    Raises:
        DatabaseError: the body failed in the database.
    """
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error) as error:
        reason = str(getattr(error, "orig", None) or error).strip()
        raise DatabaseError(f"database {place}: {reason}{_advice(reason)}") from error


def _advice(reason: str) -> str:
    if "locked" in reason:
        return f" (waited {BUSY_TIMEOUT_S:.0f} s); another process is writing, wait for it or stop it"
    if "readonly" in reason or "unable to open" in reason:
        return "; check that the file and its folder may be written"
    if "malformed" in reason or "not a database" in reason:
        return "; the file is damaged, restore a copy"
    return ""


def _sqlite_engine(path: Path, *, readonly: bool) -> Engine:
    def connect() -> sqlite3.Connection:
        return connect_readonly(path, BUSY_TIMEOUT_S) if readonly else _connect_writing(path)

    # A creator instead of a URL: a path may hold `?`, `#` and `%`.
    engine = create_engine("sqlite+pysqlite://", creator=connect, poolclass=QueuePool)
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin_reading if readonly else _begin)
    return engine


def _connect_writing(path: Path) -> sqlite3.Connection:
    uri = f"{path.resolve().as_uri()}?mode=rwc"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
    try:
        _set_journal(connection, "WAL" if wal_works(path) else "DELETE")
        connection.execute("PRAGMA synchronous=NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _set_journal(connection: sqlite3.Connection, mode: str) -> None:
    try:
        connection.execute(f"PRAGMA journal_mode={mode}")
    except sqlite3.OperationalError:
        # Some file systems refuse the shared memory that WAL needs only when it is used.
        connection.execute("PRAGMA journal_mode=DELETE")


def _prepare(connection: sqlite3.Connection, record: object) -> None:
    # The driver would begin transactions by itself, after DDL and too late; `_begin` does.
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys=ON")


def _begin(connection: Connection) -> None:
    # IMMEDIATE: a transaction that reads first and then writes would fail, not wait, beside another writer.
    reading = connection.get_execution_options().get(READING, False)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _begin_reading(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")
