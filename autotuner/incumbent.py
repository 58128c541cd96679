"""The incumbent: what is served today, by token count, from a table or from a maintainer's hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mhctune.kernels.dispatch import Choice, DispatchTable
from mhctune.kernels.space import Candidate

HOLD = 2**0.5
"""How many of its spreads a limit must lie below the bound for its choice to take an incumbent's place.

A limit is computed anew in every sweep: two of one truth differ by √2 times what one does. A limit's spread
is what lies between it and its point, which is what noise moves a point by, with 95 % confidence.
"""

Served = tuple[int, int | None, Choice]
"""First and last token count (None: open above) and what is served there."""


@dataclass(frozen=True)
class Incumbent:
    """What is served today; `name` says where that is known from. Ranges rise and do not overlap.

    `hold` is how firmly it is kept, see `HOLD`; 0: any fewer kernels or bands within the bound replace it,
    which was the rule of tables that do not say it. `holds_edges` is whether its edges stay where probes do
    not tell their choices apart; tables that do not say it moved them.
    """

    name: str
    served: tuple[Served, ...]
    hold: float = HOLD
    holds_edges: bool = True

    @classmethod
    def of(cls, table: DispatchTable) -> Incumbent:
        """Return what a table serves, the default above its bands included."""
        bands: list[Served] = [(band.first, band.last, band.choice) for band in table.bands]
        return cls(f"table {table.digest[:12]}", (*bands, (table.max_tokens + 1, None, table.default)))

    def candidate(self, num_tokens: int) -> Candidate | None:
        """Return what is served at a token count; None where nothing is known of it."""
        for first, last, choice in self.served:
            if first <= num_tokens and (last is None or num_tokens <= last):
                return Candidate(choice.arm, choice.config)
        return None

    def edge(self, lower: Candidate, upper: Candidate, before: int, above: int) -> int | None:
        """Return the last token count of `lower`, from `before` on and below `above`, if `upper` follows it.

        None where the two do not meet there, or edges are not held.
        """
        if not (self.hold and self.holds_edges):
            return None
        lasts = [last for _, last, _ in self.served if last is not None and before <= last < above]
        meets = (last for last in lasts if (self.candidate(last), self.candidate(last + 1)) == (lower, upper))
        return next(meets, None)

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON-able data, for the evidence of a table: a replay needs the same incumbent."""
        served = [[first, last, choice.arm, dict(choice.config)] for first, last, choice in self.served]
        edges = {"holds_edges": True} if self.holds_edges else {}
        return {"name": self.name, "served": served, **({"hold": self.hold, **edges} if self.hold else {})}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Incumbent:
        """Read what `to_data` returned."""
        served = tuple((first, last, Choice.of(arm, config)) for first, last, arm, config in data["served"])
        return cls(data["name"], served, data.get("hold", 0.0), data.get("holds_edges", False))
