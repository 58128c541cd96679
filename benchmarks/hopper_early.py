"""The arithmetic of the time to the layer input: ours beside the whole time as shipped."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hopper_table import Run, Timed, best, verdict

TARGET = (1, 16, 2.5)
"""First and last token count, and how many times sooner than as shipped the layer input must be complete.

As shipped it is complete at the end: there the whole time is the time to it. The other way round it is not.
"""


@dataclass(frozen=True, slots=True)
class EarlyRow:
    """One token count.

    Attributes:
        ours: Who completes the layer input first.
        shipped_us: The whole time recorded as shipped; None where nothing was recorded for the device.
        ratios: In each run that over ours.
        target: How many times sooner it must be; None outside the target's counts.
    """

    num_tokens: int
    ours: Timed
    shipped_us: float | None
    ratios: tuple[float, ...]
    target: float | None

    @property
    def verdict(self) -> str:
        """Whether the target is met, beyond the spread of the runs."""
        if self.target is None:
            return ""
        return verdict(self.ratios, self.target) if self.ratios else "no record"


def early_row_of(runs: Sequence[Run], num_tokens: int, shipped_us: float | None) -> EarlyRow | None:
    """Return the row of a token count; None where no candidate was measured in every run."""
    ours = best(runs, num_tokens, lambda candidate: True)
    if ours is None:
        return None
    first, last, target = TARGET
    ratios = () if shipped_us is None else tuple(shipped_us / us for us in ours.each_us)
    wanted = target if first <= num_tokens <= last else None
    return EarlyRow(num_tokens, ours, shipped_us, ratios, wanted)


def early_lines(rows: Sequence[EarlyRow]) -> Iterator[str]:
    """Yield the table of one hidden size."""
    yield f"{'tokens':>6} {'ours us':>8} {'shipped':>8} {'ratio':>6} {'spread':>11} {'target':>6} verdict"
    for row in rows:
        shipped, ratio, spread = f"{'-':>8}", f"{'-':>6}", f"{'-':>11}"
        if row.shipped_us is not None:
            shipped, ratio = f"{row.shipped_us:8.2f}", f"{statistics.median(row.ratios):6.2f}"
            spread = f"{f'{min(row.ratios):.2f}-{max(row.ratios):.2f}':>11}"
        target = f"{row.target:.2f}" if row.target else "-"
        line = f"{row.num_tokens:6} {row.ours.us:8.2f} {shipped} {ratio} {spread} {target:>6} {row.verdict}"
        yield f"{line.rstrip():<60} {row.ours.candidate}"
    yield "ours: time to the layer input; shipped: the recorded whole time, at whose end its layer input is"


def to_data(row: EarlyRow) -> dict[str, Any]:
    """Return a row as JSON-able data."""
    ours = row.ours
    return {
        "num_tokens": row.num_tokens, "shipped_us": row.shipped_us, "ratios": row.ratios,
        "target": row.target, "verdict": row.verdict,
        "ours": {"arm": ours.candidate.arm, "config": ours.candidate.config, "each_us": ours.each_us},
    }  # fmt: skip
