"""The incumbent: what is served today, by token count, from a table or from a maintainer's hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mhctune.kernels.dispatch import Choice, DispatchTable
from mhctune.kernels.space import Candidate

Served = tuple[int, int | None, Choice]
"""First and last token count (None: open above) and what is served there."""


@dataclass(frozen=True)
class Incumbent:
    """What is served today; `name` says where that is known from. Ranges rise and do not overlap."""

    name: str
    served: tuple[Served, ...]

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

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON-able data, for the evidence of a table: a replay needs the same incumbent."""
        served = [[first, last, choice.arm, dict(choice.config)] for first, last, choice in self.served]
        return {"name": self.name, "served": served}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Incumbent:
        """Read what `to_data` returned."""
        served = tuple((first, last, Choice.of(arm, config)) for first, last, arm, config in data["served"])
        return cls(data["name"], served)
