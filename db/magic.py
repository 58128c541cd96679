"""How an SQLite file begins. Loading an exported table does not wait for sqlite3."""

from __future__ import annotations

from os import PathLike

MAGIC = b"SQLite format 3\x00"


def is_sqlite(path: str | PathLike[str]) -> bool:
    """Return whether a file begins as every SQLite database does.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC
