"""One sweep a database at a time: two that resume the same one would race its trials twice."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from mhctune.db.engine import DatabaseError, Place


@contextmanager
def exclusive(target: str) -> Iterator[None]:
    """Hold a database file for one sweep; the lock goes with the process, however that ends.

    It is `flock`, which SQLite's own locks do not meet, so that readers go on. A PostgreSQL database is not
    held: there each machine has sweeps of its own.

    Raises:
        DatabaseError: another sweep holds it.
    """
    place = Place.of(target)
    if place.path is None:
        yield
        return
    with place.path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DatabaseError(
                f"another sweep is writing to {place}; wait for it, or name another database with --db"
            ) from error
        yield
