"""The rows of dispatch tables in an SQLite file. Standard library only: serving runtimes import this."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from mhctune.db.sqlite_file import connect_readonly
from mhctune.kernels.dispatch import TableError

_QUERY = """
SELECT dispatch_tables.id, dispatch_tables.content
FROM dispatch_tables
JOIN sweeps ON sweeps.id = dispatch_tables.sweep_id
JOIN problems ON problems.id = sweeps.problem_id
WHERE (:seam IS NULL OR problems.seam = :seam)
  AND (:digest IS NULL OR problems.digest = :digest)
ORDER BY dispatch_tables.id DESC
"""


def table_rows(path: str, seam: str | None, digest: str | None) -> list[tuple[str, str]]:
    """Return where each table of a seam and problem stands and its text, the newest first; None matches any.

    Raises:
        TableError: it is no database of mhctune, or cannot be read.
    """
    try:
        with closing(connect_readonly(Path(path))) as connection:
            found = connection.execute(_QUERY, {"seam": seam, "digest": digest}).fetchall()
    except sqlite3.Error as error:
        raise TableError(
            f"{path}: cannot be read as mhctune's database: {error}; check the file, "
            "or run `mhctune db upgrade`"
        ) from error
    return [(f"{path}, table {number}", content) for number, content in found]


def advice(path: str) -> str:
    """Return what to do about a database that does not hold the wanted table."""
    with closing(connect_readonly(Path(path))) as connection:
        ended = "SELECT count(*) FROM sweeps WHERE state IN ('complete', 'incomplete')"
        (sweeps,) = connection.execute(ended).fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM dispatch_tables").fetchone()
    if tables:
        return "`mhctune status` lists the sweeps it holds"
    return "run `mhctune bands --save`" if sweeps else "run `mhctune sweep`"
