"""Reports as data: a title, columns and rows, for a terminal or a machine to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mhctune.autotuner.budget import size
from mhctune.autotuner.derive import Derived, Standing
from mhctune.autotuner.planner import Forecast
from mhctune.kernels.dispatch import DispatchTable


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table to show; numbers are aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float, ...], ...]
    notes: tuple[str, ...] = ()

    def to_dicts(self) -> list[dict[str, str | int | float]]:
        """Return the rows by column name."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def percent(share: float) -> str:
    """Return a share as a percentage with one decimal."""
    return f"{share * 100:.1f} %"


def bands_sheet(table: DispatchTable) -> Sheet:
    """Show the bands of a table: choice, worst regret with its upper limit, and the latencies measured."""
    rows = []
    for band in table.bands:
        measured = band.evidence.get("measured", [])
        config = " ".join(f"{name}={value}" for name, value in band.choice.config)
        rows.append(
            (
                f"{band.first}-{band.last}" if band.last > band.first else str(band.first),
                band.choice.arm,
                config,
                percent(max((m["regret"] for m in measured), default=0.0)),
                percent(max((m["upper"] for m in measured), default=0.0)),
                ", ".join(f"{m['num_tokens']}: {m['latency_us']:.0f}" if m["latency_us"] >= 100
                          else f"{m['num_tokens']}: {m['latency_us']:.2f}" for m in measured),
            )
        )  # fmt: skip
    evidence = table.evidence
    notes = [f"above {table.max_tokens}: {table.default} (default)"]
    if "variants" in evidence:
        notes.append(
            f"{len(evidence['variants'])} compiled kernels, {len(table.bands)} bands, worst regret "
            f"{percent(evidence['worst_upper'])} (upper limit; bound {percent(evidence['max_regret'])}), "
            f"mean {percent(evidence['mean_regret'])}"
        )
    notes.append(
        f"{table.fingerprint.gpu_name}, sweep {evidence.get('sweep', '?')}, table {table.digest[:12]}"
    )
    columns = ("tokens", "arm", "config", "worst regret", "upper limit", "us at measured tokens")
    return Sheet(f"{table.seam}, hidden {table.problem['hidden_size']}", columns, tuple(rows), tuple(notes))


def arms_sheet(derived: Derived) -> Sheet:
    """Show the best candidate of each arm at each measured token count, and what the bands serve there."""
    arms = list(dict.fromkeys(s.candidate.arm for rows in derived.cells.values() for s in rows))
    rows = []
    for count, standings in derived.cells.items():
        best = {arm: next((s for s in standings if s.candidate.arm == arm), None) for arm in arms}
        served = derived.table.lookup(count).choice
        rows.append(
            (
                count,
                *(round(s.latency_us, 1) if s else "-" for s in best.values()),
                round(next(s for s in standings if str(s.candidate) == str(served)).latency_us, 1),
                served.arm,
                sum(s.tied for s in standings),
            )
        )
    columns = ("tokens", *(f"best {arm} us" for arm in arms), "served us", "served arm", "tied with the best")
    return Sheet("arms, median us per launch", columns, tuple(rows))


def explain_sheet(standings: Sequence[Standing], num_tokens: int, limit: int) -> Sheet:
    """Show the best candidates of one cell with their regret intervals."""
    rows = tuple(
        (
            str(s.candidate),
            round(s.latency_us, 3),
            percent(s.regret.point),
            f"{percent(s.regret.lower)} to {percent(s.regret.upper)}",
            "tie" if s.tied else "",
        )
        for s in standings[:limit]
    )
    columns = ("candidate", "us", "regret", "95 % limits", "")
    notes = (f"{len(standings)} candidates measured at {num_tokens} tokens",)
    return Sheet(f"candidates at {num_tokens} tokens", columns, rows, notes)


def forecast_sheet(forecast: Forecast) -> Sheet:
    """Show what a plan will cost."""
    rows = tuple((arm.arm, arm.points, arm.candidates, arm.variants) for arm in forecast.arms)
    notes = (
        f"{forecast.variants} kernels to compile (shared ones once), {forecast.trials} trials",
        f"memory at the largest token count: inputs {size(forecast.input_bytes)}, one buffer set up to "
        f"{size(forecast.set_bytes)}, all candidates at once {size(forecast.resident_bytes)}",
        f"about {forecast.compile_s:.0f} s to start and compile, {forecast.race_s:.0f} s to check and race",
    )
    return Sheet("plan", ("arm", "points", "legal candidates", "kernels"), rows, notes)
