"""Differences between two databases or exported files, table by table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mhctune.autotuner.check import label
from mhctune.autotuner.difference import Difference, Side, difference, sentences
from mhctune.db.checks import kind_of
from mhctune.db.engine import Place
from mhctune.db.magic import is_sqlite
from mhctune.db.repository import Repository
from mhctune.db.tables import matching, no_table
from mhctune.kernels.dispatch import TableError
from mhctune.kernels.frozen import plain

Kind = tuple[str, ...]


@dataclass(frozen=True)
class Compared:
    """What became of one kind of table; `found` is None where only one side has it: `only_in`."""

    name: str
    found: Difference | None
    only_in: str = ""

    @property
    def same(self) -> bool:
        """Whether both sides have it and answer every token count alike."""
        return self.found is not None and self.found.same

    @property
    def lines(self) -> tuple[str, ...]:
        """What to show: each difference, then whether both answer alike."""
        found = sentences(self.found) if self.found else [f"only in {self.only_in}"]
        return *found, "every token count is answered alike" if self.same else "they answer differently"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data; a choice is its arm and config."""
        data: dict[str, Any] = {"table": self.name, "same": self.same, "only_in": self.only_in or None}
        return data | (asdict(self.found, dict_factory=plain) if self.found else {})


def diff(before: str, after: str) -> list[Compared]:
    """Compare the newest table of each kind (seam, problem, target, device, class) in two places.

    Samples of either place say whether a changed choice is inside the noise.

    Raises:
        TableError, DatabaseError: a place cannot be read, or holds no table.
    """
    sides = sides_of(before), sides_of(after)
    compared = []
    for kind in sorted(set(sides[0]) | set(sides[1])):
        both = [side.get(kind) for side in sides]
        if both[0] is not None and both[1] is not None:
            compared.append(Compared(label(both[1].table), difference(both[0], both[1])))
        else:
            (only,) = [side for side in both if side is not None]
            compared.append(Compared(label(only.table), None, before if both[0] is not None else after))
    return compared


def sides_of(target: str) -> dict[Kind, Side]:
    """Return the newest table of each kind in a database or exported file, with its sweep's trials.

    Raises:
        TableError, DatabaseError: it cannot be read, or holds no table.
    """
    place = Place.of(target)
    if place.path is not None and not (place.path.exists() and is_sqlite(place.path)):
        return {kind_of(table): Side(table) for table in reversed(matching(place.path))}
    with Repository.open(target, readonly=True) as store:
        newest = {kind_of(stored.table): stored for stored in reversed(store.tables())}
        if not newest:
            raise TableError(f"{place}: {no_table(None, None)}; run `mhctune bands --save`")
        return {kind: Side(each.table, store.trials(each.sweep_id)) for kind, each in newest.items()}
