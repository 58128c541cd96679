"""The policy of a serving runtime: which statuses it serves. Standard library only."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from mhctune.kernels.dispatch import DispatchTable, Fingerprint, Status, TableError

LOGGER = logging.getLogger("mhctune")


class Policy:
    """Which statuses are served; what is served though it is not exact is logged, once a table and status.

    Above the last band a lookup is `out_of_range`, whatever the policy: its default is part of the table.
    """

    def __init__(self, worst: Status = Status.OTHER_DRIVER, *, also: Iterable[Status] = ()) -> None:
        """Serve everything down to `worst`, in the order of statuses, and `also` some below it.

        Raises:
            ValueError: a status that no table has as a whole (`out_of_range`, `default`).
        """
        extra = frozenset(also)
        for status in (worst, *extra):
            if status > Status.FOREIGN:
                raise ValueError(f"status {status} is no table's; allowed are exact to {Status.FOREIGN}")
        self._allowed = frozenset(status for status in Status if status <= worst) | extra
        self._told: set[tuple[str, Status]] = set()

    def admit(self, table: DispatchTable, here: Fingerprint) -> DispatchTable:
        """Return a table that was judged against `here`, if it may be served.

        Raises:
            TableError: its status is not served: which, why, and what is allowed.
        """
        why = reason(table, here)
        if table.status not in self._allowed:
            allowed = ", ".join(str(status) for status in sorted(self._allowed))
            raise TableError(
                f"table {table.digest[:12]} is {table.status} here ({why}) and the policy serves {allowed}: "
                "sweep here, or allow it"
            )
        if table.status is not Status.EXACT and (table.digest, table.status) not in self._told:
            self._told.add((table.digest, table.status))
            LOGGER.warning(
                "table %s is served though it is %s here: %s", table.digest[:12], table.status, why
            )
        return table


def reason(table: DispatchTable, here: Fingerprint) -> str:
    """Return what differs between where a table was measured and `here`; empty where nothing does."""
    pairs = table.fingerprint.differences(here).items()
    return "; ".join(f"{name} {measured!r}, here {now!r}" for name, (measured, now) in pairs)
