"""Reports as data: a title, columns and rows, for a terminal or a machine to show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from mhctune.autotuner.budget import size
from mhctune.autotuner.check import Check
from mhctune.autotuner.choose import price
from mhctune.autotuner.derive import Derived
from mhctune.autotuner.edges import Ahead, Edge
from mhctune.autotuner.exploration import forecast_notes, search_notes
from mhctune.autotuner.gain import gain_note
from mhctune.autotuner.hold import held_note
from mhctune.autotuner.planner import Forecast
from mhctune.autotuner.probe import Device, doctor_rows
from mhctune.autotuner.records import FailureKind, SweepState
from mhctune.autotuner.stats import NoiseFloor
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.terms import Terms
from mhctune.autotuner.words import counted, percent, size_text, token_range
from mhctune.configs.loader import Kind, names, recognise
from mhctune.kernels.dispatch import Answer, DispatchTable
from mhctune.kernels.frozen import plain
from mhctune.kernels.until import END, brief, told, until_of


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table to show; numbers are aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float, ...], ...]
    notes: tuple[str, ...] = ()


_PHASES = {
    "start": ("start",),
    "compile": ("compile_all", "request", "wait"),
    "check and capture": ("prepare",),
    "time": ("sample",),
}


def phases(seconds: Mapping[str, float]) -> str:
    """Return the wall seconds that a sweep waited for its worker, by phase."""
    named = {label: sum(seconds.get(call, 0.0) for call in calls) for label, calls in _PHASES.items()}
    named["the rest"] = sum(seconds.values()) - sum(named.values())
    return "worker seconds: " + ", ".join(f"{label} {taken:.1f}" for label, taken in named.items())


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
    conditions: str = ""
    """What its rounds were like; empty where there was nothing to read."""
    probes: int = 0
    """Trials at token counts between those of the grid."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data, without the long list of candidates: the space says them shorter."""
        brief = replace(self, record=replace(self.record, variants={}, search=None))
        data = asdict(brief, dict_factory=plain)
        del data["record"]["variants"]
        search = self.record.search
        data["record"]["search"] = search.summary() if search else None
        data["until"] = until_of(self.record.protocol)
        return data


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
                size_text(record.problem.to_dict()),
                f"{done}/{record.grid}",
                f"{line.started_at:%Y-%m-%d %H:%M}",
            )
        )
        came = outcomes(line.measured, line.failures)
        timed = f"timed {brief(until_of(record.protocol))}"
        notes.append(f"sweep {line.sweep}: {record.fingerprint.gpu_name}, {timed}; {came}")
        if record.search is not None:
            notes += [f"sweep {line.sweep}: {each}" for each in search_notes(record.search.summary())]
        if line.probes:
            notes.append(f"sweep {line.sweep}: {counted(line.probes, 'trial')} more at probed token counts")
        if line.conditions:
            notes.append(f"sweep {line.sweep}: {line.conditions}")
    columns = ("sweep", "state", "seam", "size", "trials", "started (UTC)")
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
        "table_status": str(table.status),
        "table": table.digest,
        "until": table.until,
    }


def answer_text(table: DispatchTable, answer: Answer) -> str:
    """Return the answer of a lookup as a line."""
    status = str(answer.status)
    if answer.status != table.status:
        status += f" (the table is {table.status})"
    tokens = token_range(answer.first, answer.last)
    until = "" if table.until == END else f"  tuned until {table.until}"
    return f"{answer.choice}  tokens {tokens}  status {status}  table {table.digest[:12]}{until}"


def config_text(config: Iterable[tuple[str, int]]) -> str:
    """Return a config for a narrow column."""
    return " ".join(f"{name}={value}" for name, value in config)


def bands_sheet(table: DispatchTable) -> Sheet:
    """Show the bands of a table: choice, and its worst regret with the upper limit of that.

    Where the choice is the best of every measured token count it says so: its regret is 0 by definition,
    which is no evidence.
    """
    rows = []
    for band in table.bands:
        measured = band.evidence.get("measured", [])
        regret, limit = "", ""
        if measured and all(m["best"] == str(band.choice) for m in measured):
            regret = "best"
        elif measured:
            worst = [max(m[key] for m in measured) for key in ("regret", "upper")]
            regret, limit = (f"{share:.1%}" if share < 1 else f"{share:.0%}" for share in worst)
        tokens = token_range(band.first, band.last)
        rows.append((tokens, band.choice.arm, config_text(band.choice.config), regret, limit))
    columns = ("tokens", "arm", "config", "regret", "limit")
    title = f"bands of {table.seam}, {size_text(table.problem)}" + _not_to_the_end(table)
    return Sheet(title, columns, tuple(rows), _bands_notes(table))


def _not_to_the_end(table: DispatchTable) -> str:
    return "" if table.until == END else f", timed {brief(table.until)}"


def front_sheet(derived: Derived) -> Sheet:
    """Show the three costs of bands, by number of kernels, and which were chosen."""
    chosen, rows = derived.chosen.point, []
    points = derived.chosen.front()
    same = next((p for p in points if (p.variants, p.bands) == (chosen.variants, chosen.bands)), None)
    if same is None or same.worst_upper != chosen.worst_upper:
        points = sorted([*points, chosen], key=lambda p: (p.variants, -p.worst_upper))
    for p in points:
        mark = "chosen" if (p.variants, p.worst_upper) == (chosen.variants, chosen.worst_upper) else ""
        rows.append((p.variants, p.bands, percent(p.worst_upper), percent(p.mean_regret), mark))
    columns = ("kernels", "bands", "worst limit", "mean regret", "")
    terms = Terms.of_evidence(derived.table.evidence)
    weighted = "weighted by traffic" if terms.traffic else "each measured token count alike"
    notes = [f"for each number of kernels the least worst limit; mean regret: {weighted}, ties count as none"]
    if terms.traffic and (beyond := terms.beyond(derived.table.max_tokens)):
        notes.append(f"{percent(beyond)} of the traffic is above the bands, where the default is served")
    notes += [line for line in (price(derived.chosen), gain_note(derived)) if line]
    return Sheet("what bands cost", columns, tuple(rows), tuple(notes))


def edges_sheet(derived: Derived) -> Sheet:
    """Show what was probed between the token counts of the sweep, and the edges before and after."""
    rows = tuple(
        (
            f"{edge.before} | {edge.above}",
            " ".join(f"{probe.num_tokens}:{probe.ahead.value}" for probe in edge.probes) or "-",
            edge.before,
            edge.last,
            edge.state.value + _as_served(edge),
        )
        for edge in derived.edges
    )
    points = sum(len(edge.probes) for edge in derived.edges)
    notes = (
        *(f"{e.before} | {e.above}: {e.lower} below, {e.upper} above" for e in derived.edges if e.probes),
        f"{counted(points, 'token count')} probed, each with the two choices of its edge alone: no other "
        "candidate was measured there",
        "edge: the last token count of the lower choice, by the sweep and by the probes; lower, upper: who "
        "is ahead there",
    )
    columns = ("between", "probed", "edge before", "after", "")
    return Sheet("edges between bands", columns, rows, notes)


def edge_notes(edge: Edge) -> list[str]:
    """Say what was probed at an edge, a line a token count."""
    lines = [
        f"edge at {edge.last} ({edge.before} by the sweep alone){_as_served(edge)}, {edge.state}: "
        f"{edge.lower} below, {edge.upper} above; "
        "between the sweep's token counts only these two were measured"
    ]
    for probe in edge.probes:
        line = f"probed at {counted(probe.num_tokens, 'token')}: {probe.ahead}"
        line += "" if probe.ahead is Ahead.TIED else " ahead"
        if (change := probe.change) is not None:
            line += (
                f", the lower one's latency {change.point:+.2%} ({change.lower:+.2%} to {change.upper:+.2%}"
            )
            line += f", {counted(change.n, 'round')})"
        lines.append(line)
    return lines


def _as_served(edge: Edge) -> str:
    if edge.served is None:
        return ""
    return ", as served" if edge.last == edge.served else f", {edge.served} as served"


def _bands_notes(table: DispatchTable) -> tuple[str, ...]:
    evidence = table.evidence
    notes = [f"above {table.max_tokens}: {table.default} (default, not measured)"]
    if "variants" in evidence:
        kernels = counted(len(evidence["variants"]), "compiled kernel")
        rounds = min(m["rounds"] for band in table.bands for m in band.evidence["measured"])
        mean, worst = percent(evidence["mean_regret"]), percent(evidence["worst_upper"])
        notes += [
            f"{counted(len(table.bands), 'band')}, {kernels}; mean regret {mean}, worst limit {worst} "
            f"(bound {percent(evidence['max_regret'])})",
            f"limit: upper 95 % limit of the regret from {rounds} rounds, each token count on its own",
            floor_note(evidence.get("noise_floor")),
        ]
        if evidence["max_regret"] > evidence.get("raced_under", evidence["max_regret"]):
            notes.append(
                f"raced under a bound of {percent(evidence['raced_under'])}: who was slower by more left "
                "early, so that fewer rounds speak for it; sweep with --max-regret to race by this bound"
            )
    notes += [held] if (held := held_note(evidence)) else []
    if "search" in evidence:
        notes += search_notes(evidence["search"])
    source = f"sweep {evidence.get('sweep', '?')}, table {table.digest[:12]}"
    return (*notes, f"timed {told(table.until)}", f"{table.fingerprint.gpu_name}, {source}")


def floor_note(floor: Sequence[float] | None) -> str:
    """Say what candidates differ by from themselves, given limits and pairs."""
    if floor is None:
        return "noise floor: unknown, no candidate was timed against itself in enough rounds"
    lower, upper, pairs = floor
    width = NoiseFloor(lower, upper, int(pairs)).width
    return (
        f"noise floor: {width:.2%}; the best against their twins {lower:+.2%} to {upper:+.2%}, "
        f"from {counted(int(pairs), 'round')}"
    )


def arms_sheet(derived: Derived) -> Sheet:
    """Show the best candidate of each arm at each measured token count, and what the bands serve there."""
    arms = list(dict.fromkeys(s.candidate.arm for rows in derived.cells.values() for s in rows))
    rows = []
    for count, standings in derived.cells.items():
        best = {arm: next((s for s in standings if s.candidate.arm == arm), None) for arm in arms}
        choice = derived.table.lookup(count).choice
        served = next(s for s in standings if str(s.candidate) == str(choice))
        undecided = sum(s is not None and s.tied for s in best.values()) > 1
        rows.append(
            (
                count,
                *(round(s.latency_us, 1) if s else "-" for s in best.values()),
                round(served.latency_us, 1),
                percent(served.regret.point),
                choice.arm + (" (arms tied)" if undecided else ""),
                sum(s.tied for s in standings),
                *([_share(derived.floors.get(count), served.latency_us)] if derived.floors else []),
            )
        )
    candidates = derived.table.evidence["candidates"]
    columns = ("tokens", *arms, "served", "regret", "served arm", "tied")
    notes: tuple[str, ...] = (
        "regret: median of the ratios to the best, round by round; not the ratio of the medians shown",
        f"tied: as good as the best within the noise, of {candidates} candidates; arms tied: of several arms",
    )
    if derived.floors:
        columns = (*columns, "byte floor")
        notes = (*notes, "byte floor: a copy of the cell's fewest bytes, as a share of what is served")
    return Sheet(
        f"median microseconds per launch{_not_to_the_end(derived.table)}: "
        "the best of each arm, and what is served",
        columns,
        tuple(rows),
        notes,
    )


def _share(floor_us: float | None, latency_us: float) -> str:
    return "-" if floor_us is None else percent(floor_us / latency_us)


def forecast_sheet(forecast: Forecast, cores: int) -> Sheet:
    """Show what a plan will cost."""
    rows = tuple((arm.arm, arm.points, arm.candidates, arm.raced, arm.variants) for arm in forecast.arms)
    notes = (
        *forecast_notes(forecast.anchors, [a.arm for a in forecast.arms if a.raced < a.candidates]),
        f"{forecast.variants} kernels to compile (shared ones once), {forecast.trials} trials",
        f"memory at the largest token count: inputs {size(forecast.input_bytes)}, one buffer set up to "
        f"{size(forecast.set_bytes)}, all candidates at once {size(forecast.resident_bytes)}",
        f"about {forecast.compile_s:.0f} s to start and compile with {counted(cores, 'core')}, "
        f"{forecast.race_s:.0f} s to check and race",
    )
    return Sheet("plan", ("arm", "points", "legal candidates", "raced", "kernels"), rows, notes)


def doctor_sheet(device: Device) -> Sheet:
    """Show the device, the toolchain, the arms on it and what is known."""
    found = recognise(device.gpu_name)
    target = found.name if found else f"none is written for {device.name}"
    kinds: tuple[Kind, ...] = ("gpu", "model", "sweep", "baseline")
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


def difference_sheet(name: str, lines: Sequence[str]) -> Sheet:
    """Show what two tables of one kind differ by, a line a difference."""
    return Sheet(f"diff of {name}", ("difference",), tuple((line,) for line in lines))


def merged_sheet(sweeps: Sequence[tuple[str, str, int, int, str]], place: str) -> Sheet:
    """Show the sweeps of a merged database: when, on what, trials, tables, and where they came from."""
    columns = ("started (UTC)", "device", "trials", "tables", "held by")
    return Sheet(f"sweeps of {place}", columns, tuple(sweeps))
