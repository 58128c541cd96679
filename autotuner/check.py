"""The check: does a table still say what is true, of its file, of the samples and of the sources?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from mhctune.autotuner.difference import changed_ranges
from mhctune.autotuner.words import counted, size_text
from mhctune.kernels.dispatch import Choice, DispatchTable
from mhctune.kernels.legality import refusals
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Variant
from mhctune.kernels.until import END

CompileAll = Callable[[tuple[Variant, ...], Callable[[int, int], None]], None]
"""Compiles all variants; the callable hears how many are done."""


class Verdict(StrEnum):
    """What a comparison came to."""

    REGRESSED = "regressed"
    DISAGREES = "disagrees"
    MISSING = "missing"
    CANNOT_TELL = "cannot_tell"
    IMPROVED = "improved"
    PASSED = "passed"


_EXIT_CODES: Mapping[Verdict, int] = {
    Verdict.REGRESSED: 1,
    Verdict.DISAGREES: 1,
    Verdict.MISSING: 3,
    Verdict.CANNOT_TELL: 4,
    Verdict.IMPROVED: 0,
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
        return self.verdict in (Verdict.PASSED, Verdict.IMPROVED)


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
    until = "" if table.until == END else f", until {table.until}"
    what = f"{table.seam}, {size_text(table.problem)}{until}"
    return f"{what}, {table.fingerprint.gpu_name}, table {table.digest[:12]}"


def differences(ours: DispatchTable, theirs: DispatchTable) -> list[tuple[str, Choice, Choice]]:
    """Return the token ranges where two tables choose differently, with both choices."""
    return [(span(first, last), a, b) for first, last, a, b in changed_ranges(ours, theirs)]


def span(first: int, last: int | None) -> str:
    """Return a token range in a sentence; one without an end is open above."""
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
