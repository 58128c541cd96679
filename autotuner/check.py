"""The check: does a table still say what is true, of its file, of the samples and of this machine?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from mhctune.autotuner.bench import Bench
from mhctune.autotuner.difference import changed_ranges
from mhctune.autotuner.probe import Device
from mhctune.autotuner.protocol import PROTOCOL_VERSION, Protocol
from mhctune.autotuner.records import UNMEASURED, Cell, Failure, Footprint
from mhctune.autotuner.runner import sampled
from mhctune.autotuner.stats import CONFIDENCE, pairs_needed
from mhctune.autotuner.sweep import Watcher
from mhctune.autotuner.words import counted, percent
from mhctune.kernels.dispatch import Choice, DispatchTable
from mhctune.kernels.legality import problem_of, refusals
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Variant
from mhctune.kernels.space import Candidate

CompileAll = Callable[[tuple[Variant, ...], Callable[[int, int], None]], None]
"""Compiles all variants; the callable hears how many are done."""


class Verdict(StrEnum):
    """What a comparison came to."""

    REGRESSED = "regressed"
    DISAGREES = "disagrees"
    MISSING = "missing"
    CANNOT_TELL = "cannot_tell"
    PASSED = "passed"


_EXIT_CODES: Mapping[Verdict, int] = {
    Verdict.REGRESSED: 1,
    Verdict.DISAGREES: 1,
    Verdict.MISSING: 3,
    Verdict.CANNOT_TELL: 4,
    Verdict.PASSED: 0,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison: of which table, what was compared, what it came to, and a sentence."""

    table: str
    what: str
    verdict: Verdict
    sentence: str

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.verdict is Verdict.PASSED


@dataclass(frozen=True)
class Check:
    """All that was found, and what was left out and why."""

    findings: Sequence[Finding]
    left_out: Sequence[str] = ()

    @property
    def verdict(self) -> Verdict:
        """The gravest verdict; nothing compared is `missing`."""
        came = {finding.verdict for finding in self.findings} or {Verdict.MISSING}
        return next(verdict for verdict in Verdict if verdict in came)

    @property
    def exit_code(self) -> int:
        """What `mhctune check` leaves with."""
        return _EXIT_CODES[self.verdict]

    @property
    def notes(self) -> tuple[str, ...]:
        """What to say after the findings; the last line is the verdict."""
        wrong = sum(not finding.ok for finding in self.findings)
        if not self.findings:
            return ("missing: the database holds no table, so nothing was compared; run `mhctune sweep`",)
        counts = f"{counted(len(self.findings), 'comparison')}, {wrong} not passed"
        return (*self.left_out, f"{self.verdict}: {counts}")

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        findings = [asdict(finding) for finding in self.findings]
        return {"verdict": self.verdict, "findings": findings, "left_out": list(self.left_out)}


def label(table: DispatchTable) -> str:
    """Return what a person calls a table."""
    hidden = table.problem.get("hidden_size", "?")
    return f"{table.seam}, hidden {hidden}, {table.fingerprint.gpu_name}, table {table.digest[:12]}"


def differences(ours: DispatchTable, theirs: DispatchTable) -> list[tuple[str, Choice, Choice]]:
    """Return the token ranges where two tables choose differently, with both choices."""
    return [(_range(first, last), a, b) for first, last, a, b in changed_ranges(ours, theirs)]


def _range(first: int, last: int | None) -> str:
    if last is None:
        return f"tokens {first} and up"
    return (
        f"{first} tokens" if last == first > 1 else f"tokens {first} to {last}" if last > first else "1 token"
    )


def compare(table: DispatchTable, other: DispatchTable, what: str, names: tuple[str, str]) -> Finding:
    """Compare the choices and edges of two tables; `names` say whose they are, in that order."""
    edges = [[(band.first, band.last) for band in each.bands] for each in (table, other)]
    parts = [f"{where}: {a} in {names[0]}, {b} in {names[1]}" for where, a, b in differences(table, other)]
    if not parts and edges[0] != edges[1]:
        texts = [", ".join(f"{first}-{last}" for first, last in each) for each in edges]
        parts = [f"same choices, other edges: {texts[0]} in {names[0]}, {texts[1]} in {names[1]}"]
    if parts:
        return Finding(label(table), what, Verdict.DISAGREES, "; ".join(parts))
    sentence = (
        f"{counted(len(table.bands), 'band')} and the default are the same in {names[0]} and {names[1]}"
    )
    return Finding(label(table), what, Verdict.PASSED, sentence)


def agree(exported: DispatchTable, stored: DispatchTable | None, stored_name: str) -> Finding:
    """Compare an exported table with the newest stored one of its kind."""
    name = label(exported)
    if stored is None:
        return Finding(
            name, "export", Verdict.MISSING, "the database holds no table of this seam, problem and device"
        )
    if exported.digest == stored.digest:
        return Finding(
            name, "export", Verdict.PASSED, f"the file is {stored_name}, digest {stored.digest[:12]}"
        )
    found = compare(exported, stored, "export", ("the file", stored_name))
    if not found.ok:
        return found
    sentence = (
        f"{found.sentence}, but what they stand on differs ({_grounds(exported, stored)}); export again"
    )
    return Finding(name, "export", Verdict.DISAGREES, sentence)


def _grounds(exported: DispatchTable, stored: DispatchTable) -> str:
    fields = exported.fingerprint.differences(stored.fingerprint)
    parts = [f"{field} {mine!r}, now {theirs!r}" for field, (mine, theirs) in fields.items()]
    sweeps = [table.evidence.get("sweep") for table in (exported, stored)]
    if sweeps[0] != sweeps[1]:
        parts.append(f"sweep {sweeps[0]}, now {sweeps[1]}")
    return "; ".join(parts) or "evidence"


def legal(table: DispatchTable) -> Finding:
    """Check that every choice can be launched; that bands are contiguous from 1 no table may break."""
    wrong = refusals(table)
    if wrong:
        return Finding(label(table), "legal", Verdict.DISAGREES, "; ".join(wrong.values()))
    sentence = (
        f"{counted(len(table.bands), 'band')} contiguous from 1 to {table.max_tokens}, "
        f"{counted(len(table.choices), 'choice')} with the default, all legal"
    )
    return Finding(label(table), "legal", Verdict.PASSED, sentence)


def current(table: DispatchTable) -> Finding:
    """Check that the arms' sources are those that were measured."""
    try:
        seam = find_seam(table.seam)
    except KeyError as error:
        return Finding(label(table), "sources", Verdict.DISAGREES, str(error.args[0]))
    now = seam.source_hash(table.target)
    if table.fingerprint.source_hash == now:
        return Finding(
            label(table), "sources", Verdict.PASSED, f"unchanged since they were measured ({now[:12]})"
        )
    then: Mapping[str, str] = table.evidence.get("sources", {})
    changed = [a.name for a in seam.arms(table.target) if then.get(a.name, a.source_hash) != a.source_hash]
    arms = f"of {', '.join(changed)} " if changed else ""
    sentence = (
        f"other_source: the sources {arms}changed since they were measured "
        f"({table.fingerprint.source_hash[:12]}, now {now[:12]}); sweep again"
    )
    return Finding(label(table), "sources", Verdict.DISAGREES, sentence)


@dataclass(frozen=True, slots=True)
class _Spot:
    """A measured token count of a band, what it serves there and how fast that was."""

    num_tokens: int
    choice: Choice
    latency_us: float

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.choice.arm, self.choice.config)


def elsewhere(table: DispatchTable, device: Device) -> str:
    """Return why a table's speed cannot be measured on this device; empty where it can."""
    if (table.target, table.fingerprint.gpu_name) == (device.target, device.name):
        return ""
    return f"its device is {table.fingerprint.gpu_name}, this machine's is {device.name}"


class _Unable(Exception):
    """Why nothing can be said of a table's speed."""


def remeasure(
    table: DispatchTable,
    bench: Bench,
    compile_all: CompileAll,
    tolerance: float,
    watcher: Watcher | None = None,
) -> list[Finding]:
    """Time each band's choice again at the token counts it was measured at, by the protocol of its sweep.

    Slower than `tolerance` by the median is `regressed`. A choice that is illegal here is left to `legal`.
    """
    watcher, name, wrong = watcher or Watcher(), label(table), refusals(table)
    if None in wrong:
        return []
    try:
        protocol, spots = _protocol(table.evidence), _spots(table)
    except _Unable as error:
        return [Finding(name, "speed", Verdict.CANNOT_TELL, str(error))]
    silent = [band for band in table.bands if not band.evidence.get("measured")]
    findings = [
        Finding(
            name,
            f"speed, {_range(b.first, b.last)}",
            Verdict.MISSING,
            "the table holds no latency to compare",
        )
        for b in silent
    ]
    spots = [spot for spot in spots if spot.choice not in wrong]
    arms, problem = find_seam(table.seam), problem_of(table)
    variants = (
        v
        for spot in spots
        for v in arms.arm(table.target, spot.choice.arm).variants(problem, dict(spot.choice.config))
    )
    watcher.begun(table.evidence.get("sweep", 0), 0, len(spots))
    compile_all(tuple(dict.fromkeys(variants)), watcher.compiled)
    for index, spot in enumerate(spots):
        cell = Cell(table.seam, problem, spot.num_tokens)
        watcher.entered(cell, index, len(spots))
        outcome = _time(bench, cell, spot.candidate, protocol)
        watcher.told(cell, spot.candidate, outcome)
        findings.append(_judged(name, spot, outcome, tolerance))
    return findings


def _protocol(evidence: Mapping[str, Any]) -> Protocol:
    try:
        protocol = Protocol(**evidence["protocol"])
    except (KeyError, TypeError):
        raise _Unable("the table does not say by which protocol it was measured; sweep again") from None
    if protocol.version != PROTOCOL_VERSION:
        raise _Unable(
            f"measured by protocol {protocol.version}, this mhctune has {PROTOCOL_VERSION}; sweep again"
        )
    if protocol.samples < pairs_needed(CONFIDENCE):
        rounds = counted(protocol.samples, "round")
        raise _Unable(f"{rounds} of the protocol say too little; {pairs_needed(CONFIDENCE)} are needed")
    return protocol


def _spots(table: DispatchTable) -> list[_Spot]:
    try:
        return [
            _Spot(int(row["num_tokens"]), band.choice, float(row["latency_us"]))
            for band in table.bands
            for row in band.evidence.get("measured") or ()
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _Unable(f"the evidence of its bands cannot be read: {error}; sweep again") from error


def _time(bench: Bench, cell: Cell, candidate: Candidate, protocol: Protocol) -> float | Failure:
    """Return the median of a candidate's rounds in a cell of its own, as a race takes them."""
    bench.enter(cell, protocol.seed + cell.num_tokens)
    try:
        prepared: Footprint | Failure = bench.prepare(candidate)
        if isinstance(prepared, Failure):
            return prepared
        rough = bench.sample(candidate, 0, 0, 1)
        if isinstance(rough, Failure):
            return rough
        launches = protocol.launches(rough if rough > 0 else 1.0)
        taken: list[float] = []
        for round in range(protocol.samples):
            latency = sampled(bench, candidate, 0, round, launches)
            if isinstance(latency, Failure):
                return latency
            taken.append(latency)
        bench.release(candidate)
        return statistics.median(taken)
    finally:
        bench.leave()


def _judged(name: str, spot: _Spot, outcome: float | Failure, tolerance: float) -> Finding:
    what = f"speed, {counted(spot.num_tokens, 'token')}"
    if isinstance(outcome, Failure):
        verdict = Verdict.CANNOT_TELL if outcome.kind in UNMEASURED else Verdict.DISAGREES
        sentence = f"{spot.choice} failed, {spot.latency_us:.2f} us before: {outcome.kind}: {outcome.detail}"
        return Finding(name, what, verdict, sentence)
    change = outcome / spot.latency_us - 1
    slower = change > tolerance
    pace = f"{percent(abs(change))} {'slower' if change > 0 else 'faster'}"
    sentence = (
        f"{spot.choice} takes {outcome:.2f} us, {spot.latency_us:.2f} us before: {pace} "
        f"({percent(tolerance)} slower is allowed)"
    )
    return Finding(name, what, Verdict.REGRESSED if slower else Verdict.PASSED, sentence)
