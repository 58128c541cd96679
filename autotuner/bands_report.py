"""The report of derived bands: them, what each arm's best would do, and what they stand beside."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mhctune.autotuner import report
from mhctune.autotuner.beside import beside, beside_sheet
from mhctune.autotuner.derive import Derived
from mhctune.autotuner.gain import gains
from mhctune.autotuner.naive import naive_cutovers, naive_sheet
from mhctune.autotuner.report import Sheet


def bands_sheets(derived: Derived) -> list[Sheet]:
    """Show the bands, and what each arm's best would do."""
    sheets = [report.bands_sheet(derived.table), report.arms_sheet(derived)]
    if (shipped := beside_sheet(derived)) is not None:
        sheets.append(shipped)
    if naive := naive_cutovers(derived):
        sheets.append(naive_sheet(naive))
    if any(edge.probes for edge in derived.edges):
        sheets.append(report.edges_sheet(derived))
    return sheets


def uncovered_note(derived: Derived) -> str:
    """Return why token counts have no band, a line each; empty where all have one."""
    return "\n".join(f"no band covers {reason}" for reason in derived.missing.values())


def bands_dict(derived: Derived, *, pareto: bool = False) -> dict[str, Any]:
    """Return the table as JSON-able data beside what runtimes ship; `pareto`: and what other choices cost."""
    data = derived.table.to_dict()
    if pareto:
        data["front"] = [asdict(point) for point in derived.chosen.front()]
        data["gain"] = [asdict(gain) for gain in gains(derived)]
        data["naive"] = [asdict(cutover) for cutover in naive_cutovers(derived)]
    ships = beside(derived)
    if any(row.shipped for row in ships):
        data["shipped"] = [row.to_dict() for row in ships]
    return data
