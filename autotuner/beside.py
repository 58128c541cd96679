"""As shipped beside tuned: what a runtime serves today and what the bands serve, of one sweep."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from mhctune.autotuner.derive import Derived
from mhctune.autotuner.report import Sheet, config_text
from mhctune.autotuner.shipped import shipped
from mhctune.autotuner.standings import Standing
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate


@dataclass(frozen=True, slots=True)
class Beside:
    """As shipped beside tuned at one token count; `shipped` is None where it was not measured."""

    num_tokens: int
    baseline: str
    candidate: Candidate | None
    shipped: Standing | None
    tuned: Standing
    status: str

    @property
    def ratio(self) -> float | None:
        """How many times faster the tuned one is: both were paired with the best, round by round."""
        if self.shipped is None:
            return None
        return (1 + self.shipped.regret.point) / (1 + self.tuned.regret.point)

    @property
    def limits(self) -> tuple[float, float] | None:
        """The limits of the ratio, from those of both: wider than from pairs of the two, never narrower."""
        if self.shipped is None:
            return None
        mine, other = self.tuned.regret, self.shipped.regret
        return (1 + other.lower) / (1 + mine.upper), (1 + other.upper) / (1 + mine.lower)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data; `regret` is against the best of the token count."""
        found: dict[str, Any] = {
            "num_tokens": self.num_tokens, "baseline": self.baseline, "status": self.status,
            "tuned": str(self.tuned.candidate), "tuned_us": self.tuned.latency_us,
        }  # fmt: skip
        if self.shipped is not None:
            shipped = self.shipped
            found |= {"shipped": str(shipped.candidate), "shipped_us": shipped.latency_us}
            found |= {"ratio": self.ratio, "regret": asdict(shipped.regret)}
        return found


def beside(derived: Derived) -> list[Beside]:
    """Return, for each measured token count, what a runtime ships beside what the bands serve.

    Without a baseline, or where what it serves is illegal here or was not measured, the status says so.
    """
    table, rows = derived.table, []
    seam, problem = SEAMS[table.seam], Problem(**table.problem)
    for count, standings in derived.cells.items():
        by_name = {str(standing.candidate): standing for standing in standings}
        tuned = by_name[str(table.lookup(count).choice)]
        found = shipped(seam, problem, table.target, table.fingerprint.sm_count, count)
        mine = by_name.get(str(found.candidate)) if found else None
        if found is None:
            status = "no baseline"
        elif found.candidate is None:
            status = f"illegal here: {found.reason}"
        elif mine is None:
            status = "not measured"
        else:
            status = "tuned" if mine is tuned else ""
        name, candidate = (found.baseline, found.candidate) if found else ("", None)
        row = Beside(count, name, candidate, mine, tuned, status)
        rows.append(row if status else replace(row, status=_status(row)))
    return rows


def _status(row: Beside) -> str:
    """Return what is shipped, against what the bands serve there: that is not always the best."""
    assert row.limits is not None
    low, high = row.limits
    return "slower" if low > 1 else "faster" if high < 1 else "tied"


def beside_sheet(derived: Derived) -> Sheet | None:
    """Show what is shipped beside what is tuned; None where nothing that is shipped was measured."""
    found = beside(derived)
    return sheet_of(derived, found) if any(row.shipped for row in found) else None


def sheet_of(derived: Derived, found: list[Beside]) -> Sheet:
    """Show what is shipped beside what is tuned, also where that is only why it cannot be shown."""
    rows = []
    for row in found:
        numbers: tuple[str | float, ...] = ("-", round(row.tuned.latency_us, 2), "-", "-")
        if row.shipped is not None:
            limits = row.limits or (0.0, 0.0)
            numbers = (
                round(row.shipped.latency_us, 2), round(row.tuned.latency_us, 2),
                f"{row.ratio:.2f}", f"{limits[0]:.2f}-{limits[1]:.2f}",
            )  # fmt: skip
        what = f"{row.candidate.arm} {config_text(row.candidate.items)}" if row.candidate else ""
        rows.append((row.num_tokens, *numbers, row.status, what))
    names = ", ".join(dict.fromkeys(row.baseline for row in found if row.baseline))
    notes = (
        "shipped: a runtime's constants in our kernels, what they leave open as the arm prefers it; "
        "ratio: shipped / tuned, each paired with the best round by round, and its limits",
    )
    title = f"as shipped ({names}) beside tuned, {derived.table.seam}" if names else (
        f"{derived.table.seam}: no baseline"
    )  # fmt: skip
    columns = ("tokens", "shipped us", "tuned us", "ratio", "limits", "shipped is", "shipped")
    return Sheet(title, columns, tuple(rows), notes if names else ())
