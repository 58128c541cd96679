"""What the file system says about an SQLite file. Standard library only: serving runtimes import this."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

# Write-ahead logging shares memory between processes through a mapped file, which these do not keep coherent.
_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "afs",
    "fuse",
    "virtiofs",
    "gluster",
)


def connect_readonly(path: Path, timeout_s: float = 60.0) -> sqlite3.Connection:
    """Open a database that is only read, also where its folder cannot be written.

    A database in WAL mode needs a writable `-shm` file beside it. Where there can be none and no log is
    waiting, nobody writes either, and the file is read as it stands.

    Raises:
        sqlite3.Error: the file cannot be read, or a log is waiting that cannot be applied.
    """
    uri = f"{path.resolve().as_uri()}?mode=ro"
    try:
        return _probed(uri, timeout_s)
    except sqlite3.OperationalError:
        if _log_is_waiting(path):
            raise
        return _probed(f"{uri}&immutable=1", timeout_s)


def wal_works(path: Path) -> bool:
    """Return whether write-ahead logging may be used: not on a network file system, as far as known."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    kinds = {fields[1]: fields[2] for fields in (line.split() for line in lines) if len(fields) > 2}
    for folder in (path.resolve(), *path.resolve().parents):
        # The kernel escapes blanks in mount points, and only those of the usual characters.
        kind = kinds.get(str(folder).replace(" ", "\\040"))
        if kind is not None:
            return not kind.startswith(_NETWORK)
    return True


def siblings(path: Path) -> tuple[Path, ...]:
    """Return the files that SQLite may keep beside a database."""
    return tuple(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal"))


def _probed(uri: str, timeout_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=timeout_s, check_same_thread=False)
    try:
        # SQLite opens lazily: only a query shows whether the file can be read.
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _log_is_waiting(path: Path) -> bool:
    return any(os.path.exists(log) and os.path.getsize(log) > 0 for log in siblings(path)[::2])
