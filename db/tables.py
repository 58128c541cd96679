"""The read side for serving: dispatch tables from a database or an exported file.

Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence

from mhctune.db.magic import is_sqlite
from mhctune.kernels.dispatch import SCHEMA_VERSION, DispatchTable, Fingerprint, Status, TableError
from mhctune.kernels.until import END

TYPE_CHECKING = False  # as type checkers read it, see `mhctune.kernels.dispatch`
if TYPE_CHECKING:  # a policy logs, and logging is a tenth of what importing this module costs; so are paths
    from pathlib import Path
    from typing import Any

    from mhctune.db.policy import Policy


def load_table(
    path: str | Path,
    fingerprint: Fingerprint | None = None,
    *,
    seam: str | None = None,
    problem_digest: str | None = None,
    policy: Policy | None = None,
    until: str = END,
) -> DispatchTable:
    """Return the table to serve from an SQLite database or an exported JSON file.

    Of several that match, the one with the best status on a machine that is `fingerprint`, then the
    newest. Without a fingerprint the newest, and its status is `exact`: not judged. A policy, which needs a
    fingerprint, decides which statuses are served, and logs once why one that is not exact is.
    A table that was tuned until another moment than `until` (`layer_input`) matches nothing: its latencies
    are not of the whole launch.

    Raises:
        ValueError: a policy without a fingerprint.
        TableError: the file is missing, unreadable, damaged or neither of the two; no table matches; or
            tables of several seams or problems match, so that one must be named.
    """
    if policy is not None and fingerprint is None:
        raise ValueError(
            "a policy needs the fingerprint of this machine: mhctune.autotuner.probe.fingerprint"
        )
    found = load_tables(path, fingerprint, seam=seam, problem_digest=problem_digest, until=until)
    table = only(found, str(path))
    return policy.admit(table, fingerprint) if policy and fingerprint else table


def load_tables(
    path: str | Path,
    fingerprint: Fingerprint | None = None,
    *,
    seam: str | None = None,
    problem_digest: str | None = None,
    until: str = END,
) -> tuple[DispatchTable, ...]:
    """Return one table per seam and problem, chosen as `load_table` does, ordered by seam and problem.

    Raises:
        TableError: the file is missing, unreadable, damaged or neither kind, or no table matches.
    """
    return best(matching(path, seam, problem_digest, until), fingerprint)


def matching(
    path: str | Path,
    seam: str | None = None,
    problem_digest: str | None = None,
    until: str | None = None,
) -> tuple[DispatchTable, ...]:
    """Return the tables of a seam and problem as they were measured, the newest first; None matches any.

    Raises:
        TableError: as `load_tables`.
    """
    path = os.fspath(path)
    texts = _contents(path, seam, problem_digest)
    tables = [_parsed(text, where) for where, text in texts]
    return of_kind(tables, seam, problem_digest, until, f"{path}: ", lambda: _advice(path))


def of_kind(
    tables: Iterable[DispatchTable],
    seam: str | None,
    problem_digest: str | None,
    until: str | None,
    where: str,
    advice: Callable[[], str],
) -> tuple[DispatchTable, ...]:
    """Return the tables of a seam and problem that were tuned until then; None matches any.

    Raises:
        TableError: there is none; says so where those there are were tuned until another moment.
    """
    wanted = [
        table for table in tables
        if seam in (None, table.seam) and problem_digest in (None, problem_key(table))
    ]  # fmt: skip
    found = tuple(table for table in wanted if until in (None, table.until))
    if wanted and not found:
        others = ", ".join(sorted({table.until for table in wanted}))
        raise TableError(
            f"{where}{no_table(seam, problem_digest)} that was tuned until {until}, only until {others}, "
            f"whose times are others; take that one by --until {others} (until={others!r} in Python), "
            f"or tune one by `mhctune sweep --until {until}`"
        )
    if not found:
        raise TableError(f"{where}{no_table(seam, problem_digest)}; {advice()}")
    return found


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
    if judged.status is not Status.FOREIGN or not other_name:
        return judged
    from mhctune.configs.families import same_family  # only another device has to wait for it

    if same_family(*names):
        return judged.replace(status=Status.FAMILY)
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


def problem_key(table: DispatchTable) -> str:
    """Return the 16 hex digits that name a table's problem: `Problem.digest`, without importing torch."""
    text = json.dumps(dict(table.problem), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _contents(path: str, seam: str | None, digest: str | None) -> Iterable[tuple[str, str]]:
    try:
        if is_sqlite(path):
            from mhctune.db.table_rows import table_rows  # a file needs no sqlite3

            return table_rows(path, seam, digest)
        with open(path, encoding="utf-8") as file:
            return [(path, file.read())]
    except FileNotFoundError:
        raise TableError(f"{path}: no such file; export a table, or name a database of mhctune") from None
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise TableError(f"{path}: is neither an SQLite database nor an exported JSON table") from None


def _advice(path: str) -> str:
    if not is_sqlite(path):
        return "export the one you want"
    from mhctune.db.table_rows import advice

    return advice(path)


def _parsed(text: str, where: str) -> DispatchTable:
    from mhctune.db.table_rules import RepeatedKey, repeated_key, violation  # compiles patterns

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
