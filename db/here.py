"""A table as it stands on the machine at hand, from a file or from PostgreSQL."""

from __future__ import annotations

from mhctune.autotuner.planner import known_seam
from mhctune.autotuner.probe import Device, fingerprint
from mhctune.db.engine import Place
from mhctune.db.repository import Repository
from mhctune.db.tables import best, matching, of_kind, only
from mhctune.kernels.compiler import Passes
from mhctune.kernels.dispatch import DispatchTable, Fingerprint
from mhctune.kernels.until import END


def load_measured(
    db: str, seam: str | None = None, problem_digest: str | None = None, until: str | None = END
) -> DispatchTable:
    """Return the newest table of a file or a `postgresql://` URL, not judged against any machine.

    Only one that was tuned `until` then; with None whatever it was tuned until.

    Raises:
        TableError: as `mhctune.db.tables.load_table`.
        DatabaseError: the URL, or what it names, cannot be used.
    """
    return only(best(_stored(db, seam, problem_digest, until)), str(Place.of(db)))


def fingerprint_for(table: DispatchTable, passes: Passes | None = None) -> Fingerprint:
    """Return what this machine is for a table's seam and target, compiling with `passes` if some are given.

    Raises:
        ConfigError: the table's seam is unknown here.
    """
    return fingerprint(known_seam(table.seam), table.target, passes)


def load_here(
    db: str,
    device: Device,
    seam: str | None = None,
    problem_digest: str | None = None,
    until: str = END,
) -> DispatchTable:
    """Return the table to serve on a device of this machine, with its status there.

    Tables of the device's target go before newer ones of another; among them the best status, then the
    newest. It is `foreign` only where none of that target was measured on such a device.

    Raises:
        TableError, DatabaseError: as `load_measured`.
        ConfigError: the table is of a seam that this version does not know.
    """
    found = _stored(db, seam, problem_digest, until)
    newest = only(best(found), str(Place.of(db)))
    mine = [table for table in found if table.target == device.target]
    if not mine:
        return newest.elsewhere()
    here = fingerprint(known_seam(newest.seam), device.target)
    (table,) = best(mine, here)
    return table


def _stored(
    db: str, seam: str | None, problem_digest: str | None, until: str | None
) -> tuple[DispatchTable, ...]:
    """Return the tables of a seam and problem, the newest first; at least one."""
    place = Place.of(db)
    if place.path is not None:
        return matching(place.path, seam, problem_digest, until)
    with Repository.open(db, readonly=True) as store:
        tables = [each.table for each in store.tables()]
    advice = "`mhctune status` lists its sweeps"
    return of_kind(tables, seam, problem_digest, until, f"{place}: ", lambda: advice)
