"""The memory budget: which candidates may be resident at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mhctune.autotuner.records import Footprint

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip


class BudgetError(ValueError):
    """A budget that cannot be read, or that holds not even one candidate."""


@dataclass(frozen=True, slots=True)
class VramBudget:
    """Bytes that inputs and resident output-buffer sets may take; of host memory on the target `c`."""

    limit_bytes: int
    free_bytes: int

    @classmethod
    def parse(cls, text: str, free_bytes: int) -> VramBudget:
        """Read `4GiB`, `500MB`, a number of bytes, or a share of what is free such as `60%`.

        Raises:
            BudgetError: the text is neither, or the budget is not positive or above what is free.
        """
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[KMGT]?i?B?)\s*", text, re.IGNORECASE)
        unit = match.group(2).upper() if match else None
        if match is None or (unit != "%" and unit not in _UNITS):
            raise BudgetError(
                f"VRAM budget {text!r} is not a size; write a number with KiB, MiB, GiB, KB, MB or GB "
                "(4GiB), or a share of what is free (60%)"
            )
        number = float(match.group(1))
        limit = int(number / 100 * free_bytes) if unit == "%" else int(number * _UNITS[unit or ""])
        if not 0 < limit <= free_bytes:
            raise BudgetError(
                f"VRAM budget {text} is {size(limit)}; it must be more than 0 and at most the "
                f"{size(free_bytes)} that are free"
            )
        return cls(limit, free_bytes)

    def fits(self, input_bytes: int, footprints: Sequence[Footprint]) -> bool:
        """Whether the inputs and these candidates may be resident together."""
        return input_bytes + sum(f.forecast_bytes for f in footprints) <= self.limit_bytes

    def shortfall(self, input_bytes: int, footprint: Footprint) -> str:
        """Return the sentence for a candidate that alone exceeds the budget."""
        need = input_bytes + footprint.forecast_bytes
        return (
            f"inputs of {input_bytes:,} bytes and one buffer set of {footprint.forecast_bytes:,} bytes "
            f"need {size(need)}, the budget is {size(self.limit_bytes)} ({size(self.free_bytes)} are free). "
            "Raise --vram-budget"
        )


def size(count: int) -> str:
    """Return a byte count for people."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
