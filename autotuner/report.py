"""Reports as data: a title, columns and rows, for a terminal or a machine to show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from mhctune.autotuner.budget import size
from mhctune.autotuner.check import Check
from mhctune.autotuner.derive import Derived, Standing
from mhctune.autotuner.planner import Forecast
from mhctune.autotuner.probe import Device, doctor_rows
from mhctune.autotuner.records import Failure, FailureKind, Footprint, SweepState, Trial
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.words import counted, percent
from mhctune.configs.loader import Kind, names, recognise
from mhctune.kernels.dispatch import Answer, DispatchTable
from mhctune.kernels.space import Candidate


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


def outcomes(measured: int, failures: Mapping[FailureKind, int]) -> str:
    """Return how many trials came to what."""
    kinds = ", ".join(f"{kind.value} {count}" for kind, count in failures.items())
    failed = f"{sum(failures.values())} failed" + (f" ({kinds})" if kinds else "")
    return f"{counted(measured, 'trial')} measured, {failed}"


@dataclass(frozen=True)
class SweepLine:
    """A stored sweep and how far it has come."""

    sweep: int
    state: SweepState
    started_at: datetime
    record: SweepRecord
    measured: int
    failures: Mapping[FailureKind, int]


def sweeps_sheet(lines: Sequence[SweepLine], place: str) -> Sheet:
    """Show the sweeps of a database."""
    rows, notes = [], []
    for line in lines:
        record, done = line.record, line.measured + sum(line.failures.values())
        rows.append(
            (
                line.sweep,
                line.state.value,
                record.seam,
                record.problem.hidden_size,
                f"{done}/{record.grid}",
                f"{line.started_at:%Y-%m-%d %H:%M}",
            )
        )
        came = outcomes(line.measured, line.failures)
        notes.append(f"sweep {line.sweep}: {record.fingerprint.gpu_name}; {came}")
    columns = ("sweep", "state", "seam", "hidden", "trials", "started (UTC)")
    return Sheet(
        f"sweeps of {place}", columns, tuple(rows), tuple(notes or ["none yet: run `mhctune sweep`"])
    )


def answer_dict(table: DispatchTable, answer: Answer) -> dict[str, Any]:
    """Return the answer of a lookup as JSON-able data."""
    return {
        "arm": answer.choice.arm,
        "config": dict(answer.choice.config),
        "first": answer.first,
        "last": answer.last,
        "status": str(answer.status),
        "table": table.digest,
    }


def answer_text(table: DispatchTable, answer: Answer) -> str:
    """Return the answer of a lookup as a line."""
    tokens = f"tokens {answer.first} to {'up' if answer.last is None else answer.last}"
    return f"{answer.choice}  {tokens}  status {answer.status}  table {table.digest[:12]}"


def config_text(config: Iterable[tuple[str, int]]) -> str:
    """Return a config for a narrow column."""
    return " ".join(f"{name}={value}" for name, value in config)


def bands_sheet(table: DispatchTable) -> Sheet:
    """Show the bands of a table: choice, and its worst regret with the upper limit of that."""
    rows = []
    for band in table.bands:
        measured = band.evidence.get("measured", [])
        rows.append(
            (
                f"{band.first}-{band.last}" if band.last > band.first else str(band.first),
                band.choice.arm,
                config_text(band.choice.config),
                percent(max((m["regret"] for m in measured), default=0.0)),
                percent(max((m["upper"] for m in measured), default=0.0)),
            )
        )
    evidence = table.evidence
    notes = [f"above {table.max_tokens}: {table.default} (default)"]
    if "variants" in evidence:
        kernels = counted(len(evidence["variants"]), "compiled kernel")
        notes.append(
            f"{counted(len(table.bands), 'band')}, {kernels}; regret against the best of each measured token "
            f"count: mean {percent(evidence['mean_regret'])}, upper limit {percent(evidence['worst_upper'])} "
            f"(bound {percent(evidence['max_regret'])})"
        )
    notes.append(
        f"{table.fingerprint.gpu_name}, sweep {evidence.get('sweep', '?')}, table {table.digest[:12]}"
    )
    columns = ("tokens", "arm", "config", "regret", "limit")
    title = f"bands of {table.seam}, hidden {table.problem['hidden_size']}"
    return Sheet(title, columns, tuple(rows), tuple(notes))


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
    columns = ("tokens", *(f"best {arm}" for arm in arms), "served", "served arm", "tied")
    notes = ("tied: candidates that the samples do not tell from the best",)
    return Sheet("median microseconds per launch", columns, tuple(rows), notes)


@dataclass(frozen=True)
class Explanation:
    """Why a choice is served at a token count.

    `measured_at` is the measured token count that speaks for it: the next one, or the last of all.
    """

    num_tokens: int
    answer: Answer
    measured_at: int
    standings: Sequence[Standing]
    footprint: Footprint
    failures: Mapping[Candidate, Failure]

    def to_dict(self, limit: int) -> dict[str, Any]:
        """Return it as JSON-able data, with the first `limit` candidates."""
        return {
            "choice": str(self.answer.choice),
            "measured_at": self.measured_at,
            "bytes": asdict(self.footprint),
            "candidates": [
                {
                    "candidate": str(s.candidate),
                    "latency_us": s.latency_us,
                    **asdict(s.regret),
                    "tied": s.tied,
                }
                for s in self.standings[:limit]
            ],
            "failures": [{"candidate": str(c), **asdict(failure)} for c, failure in self.failures.items()],
        }

    def sheet(self, limit: int) -> Sheet:
        """Show the first `limit` candidates with their regret and its limits, the bytes and the failures."""
        rows = tuple(
            (
                s.candidate.arm,
                config_text(s.candidate.items),
                round(s.latency_us, 1),
                percent(s.regret.point),
                percent(s.regret.lower),
                percent(s.regret.upper),
            )
            for s in self.standings[:limit]
        )
        tied, footprint = sum(s.tied for s in self.standings), self.footprint
        notes = (
            f"{counted(len(self.standings), 'candidate')} measured at {counted(self.measured_at, 'token')}, "
            f"{tied} tied with the best (lower limit not above 0)",
            f"bytes of the choice: inputs {footprint.input_bytes:,}, outputs {footprint.output_bytes:,}, "
            f"scratch {footprint.scratch_bytes:,}, graph {footprint.graph_bytes:,}",
            *(f"failed: {candidate}: {f.kind}: {f.detail}" for candidate, f in self.failures.items()),
        )
        until = self.answer.last if self.answer.last is not None else "up"
        title = (
            f"{counted(self.num_tokens, 'token')}: {self.answer.choice}, "
            f"{self.answer.status}, for {self.answer.first} to {until}"
        )
        return Sheet(title, ("arm", "config", "us", "regret", "lower", "upper"), rows, notes)


def explain(derived: Derived, trials: Sequence[Trial], num_tokens: int) -> Explanation:
    """Explain what derived bands serve at a token count, from the trials that they were derived from."""
    answer = derived.table.lookup(num_tokens)
    count = next((n for n in derived.cells if n >= num_tokens), max(derived.cells))
    here = [trial for trial in trials if trial.cell.num_tokens == count]
    return Explanation(
        num_tokens,
        answer,
        count,
        derived.cells[count],
        next(trial.footprint for trial in here if str(trial.candidate) == str(answer.choice)),
        {t.candidate: t.outcome for t in here if isinstance(t.outcome, Failure)},
    )


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


def doctor_sheet(device: Device) -> Sheet:
    """Show the device, the toolchain, the arms on it and what is known."""
    found = recognise(device.gpu_name)
    target = found.name if found else f"none is written for {device.name}"
    kinds: tuple[Kind, ...] = ("gpu", "model", "sweep")
    known = [(f"known {'target' if kind == 'gpu' else kind}s", ", ".join(names(kind))) for kind in kinds]
    return Sheet("doctor", ("what", "found"), (("target", target), *doctor_rows(device), *known))


def check_sheets(checked: Check) -> list[Sheet]:
    """Show what a check found, a sheet a table; the last one ends with the verdict."""
    by_table: dict[str, list[tuple[str, str, str]]] = {}
    for found in checked.findings:
        by_table.setdefault(found.table, []).append((found.what, found.verdict.value, found.sentence))
    columns = ("compared", "verdict", "found")
    sheets = [Sheet(f"check of {table}", columns, tuple(rows)) for table, rows in by_table.items()]
    last = sheets.pop() if sheets else Sheet("check", columns, ())
    return [*sheets, replace(last, notes=checked.notes)]
