"""The read side for serving: dispatch tables from a database or an exported file.

Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mhctune.configs.families import same_family
from mhctune.db.sqlite_file import connect_readonly, is_sqlite
from mhctune.db.table_rules import RepeatedKey, repeated_key, violation
from mhctune.kernels.dispatch import SCHEMA_VERSION, DispatchTable, Fingerprint, Status, TableError

if TYPE_CHECKING:  # it logs, and logging is a tenth of what importing this module costs
    from mhctune.db.policy import Policy

_QUERY = """
SELECT dispatch_tables.id, dispatch_tables.content
FROM dispatch_tables
JOIN sweeps ON sweeps.id = dispatch_tables.sweep_id
JOIN problems ON problems.id = sweeps.problem_id
WHERE (:seam IS NULL OR problems.seam = :seam)
  AND (:digest IS NULL OR problems.digest = :digest)
ORDER BY dispatch_tables.id DESC
"""


def load_table(
    path: str | Path,
    fingerprint: Fingerprint | None = None,
    *,
    seam: str | None = None,
    problem_digest: str | None = None,
    policy: Policy | None = None,
) -> DispatchTable:
    """Return the table to serve from an SQLite database or an exported JSON file.

    Of several that match, the one with the best status on a machine that is `fingerprint`, then the
    newest. Without a fingerprint the newest, and its status is `exact`: not judged. A policy, which needs a
    fingerprint, decides which statuses are served, and logs once why one that is not exact is.

    Raises:
        ValueError: a policy without a fingerprint.
        TableError: the file is missing, unreadable, damaged or neither of the two; no table matches; or
            tables of several seams or problems match, so that one must be named.
    """
    if policy is not None and fingerprint is None:
        raise ValueError(
            "a policy needs the fingerprint of this machine: mhctune.autotuner.probe.fingerprint"
        )
    table = only(load_tables(path, fingerprint, seam=seam, problem_digest=problem_digest), str(path))
    return policy.admit(table, fingerprint) if policy and fingerprint else table


def load_tables(
    path: str | Path,
    fingerprint: Fingerprint | None = None,
    *,
    seam: str | None = None,
    problem_digest: str | None = None,
) -> tuple[DispatchTable, ...]:
    """Return one table per seam and problem, chosen as `load_table` does, ordered by seam and problem.

    Raises:
        TableError: the file is missing, unreadable, damaged or neither kind, or no table matches.
    """
    return best(matching(path, seam, problem_digest), fingerprint)


def matching(
    path: str | Path, seam: str | None = None, problem_digest: str | None = None
) -> tuple[DispatchTable, ...]:
    """Return the tables of a seam and problem as they were measured, the newest first; None matches any.

    Raises:
        TableError: as `load_tables`.
    """
    texts = _contents(Path(path), seam, problem_digest)
    tables = [_parsed(text, where) for where, text in texts]
    found = tuple(table for table in tables if is_of(table, seam, problem_digest))
    if not found:
        raise TableError(f"{path}: {no_table(seam, problem_digest)}; {_advice(Path(path))}")
    return found


def is_of(table: DispatchTable, seam: str | None, problem_digest: str | None) -> bool:
    """Return whether a table is of a seam and problem; None matches any."""
    return seam in (None, table.seam) and problem_digest in (None, problem_key(table))


def no_table(seam: str | None, problem_digest: str | None) -> str:
    """Return the sentence for a place without a table of a seam and problem."""
    return f"holds no table of seam {seam or 'any'}, problem {problem_digest or 'any'}"


def best(
    tables: Iterable[DispatchTable], fingerprint: Fingerprint | None = None
) -> tuple[DispatchTable, ...]:
    """Return one table per seam and problem, chosen as `load_table` does; `tables` come newest first."""
    chosen: dict[tuple[str, str], DispatchTable] = {}
    for table in tables:
        judged = table if fingerprint is None else against(table, fingerprint)
        key = (table.seam, problem_key(table))
        if key not in chosen or judged.status < chosen[key].status:
            chosen[key] = judged
    return tuple(chosen[key] for key in sorted(chosen))


def against(table: DispatchTable, here: Fingerprint) -> DispatchTable:
    """Return a table with its status on a machine that is `here`.

    A device of another name that is an alias of the same GPU target is `family`, not `foreign`; a slice of
    a device (MIG) is none.
    """
    judged, names = table.against(here), (table.fingerprint.gpu_name, here.gpu_name)
    other_name = names[0] != names[1] and table.fingerprint.mig == here.mig
    if judged.status is Status.FOREIGN and other_name and same_family(*names):
        return replace(judged, status=Status.FAMILY)
    return judged


def only(found: Sequence[DispatchTable], where: str) -> DispatchTable:
    """Return the one table of what `best` chose.

    Raises:
        TableError: there are several, so that seam or problem must be named.
    """
    if len(found) > 1:
        known = ", ".join(f"{table.seam} {problem_key(table)}" for table in found)
        raise TableError(
            f"{where}: tables of {len(found)} problems match ({known}); name seam and problem_digest"
        )
    return found[0]


def _advice(path: Path) -> str:
    if not is_sqlite(path):
        return "export the one you want"
    with closing(connect_readonly(path)) as connection:
        ended = "SELECT count(*) FROM sweeps WHERE state IN ('complete', 'incomplete')"
        (sweeps,) = connection.execute(ended).fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM dispatch_tables").fetchone()
    if tables:
        return "`mhctune status` lists the sweeps it holds"
    return "run `mhctune bands --save`" if sweeps else "run `mhctune sweep`"


def problem_key(table: DispatchTable) -> str:
    """Return the 16 hex digits that name a table's problem: `Problem.digest`, without importing torch."""
    text = json.dumps(dict(table.problem), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _contents(path: Path, seam: str | None, digest: str | None) -> Iterable[tuple[str, str]]:
    try:
        if is_sqlite(path):
            return _rows(path, seam, digest)
        return [(str(path), path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        raise TableError(f"{path}: no such file; export a table, or name a database of mhctune") from None
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise TableError(f"{path}: is neither an SQLite database nor an exported JSON table") from None


def _rows(path: Path, seam: str | None, digest: str | None) -> list[tuple[str, str]]:
    try:
        with closing(connect_readonly(path)) as connection:
            found = connection.execute(_QUERY, {"seam": seam, "digest": digest}).fetchall()
    except sqlite3.Error as error:
        raise TableError(
            f"{path}: cannot be read as mhctune's database: {error}; check the file, "
            "or run `mhctune db upgrade`"
        ) from error
    return [(f"{path}, table {number}", content) for number, content in found]


def _parsed(text: str, where: str) -> DispatchTable:
    try:
        data: Any = json.loads(text, object_pairs_hook=repeated_key)
    except RepeatedKey as error:
        raise TableError(f"{where}: {error}; export it again") from None
    except ValueError as error:
        at = f" (line {error.lineno}: {error.msg})" if isinstance(error, json.JSONDecodeError) else ""
        kinds = "is neither an SQLite database nor an exported JSON table"
        raise TableError(f"{where}: {kinds}{at if text.lstrip().startswith('{') else ''}") from None
    if not isinstance(data, dict):
        raise TableError(f"{where}: an exported table is a JSON object, this is a {type(data).__name__}")
    # Before it is built, which would read 17.5 as 17.
    if data.get("mhctune_table") == SCHEMA_VERSION and (broken := violation(text, data)):
        raise TableError(f"{where}: {broken}")
    try:
        return DispatchTable.from_dict(data, where)
    except ValueError as error:
        # The rules on bands do not know the file.
        message = str(error)
        raise TableError(message if where in message else f"{where}: {message}") from error
