"""Checking the tables that the database holds, and an exported one against them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mhctune.autotuner.bands import NoBands
from mhctune.autotuner.check import Check, Finding, Verdict, agree, compare, current, label, legal
from mhctune.autotuner.speed import Then, stored_gate
from mhctune.autotuner.stats import TooFewSamples
from mhctune.autotuner.words import counted
from mhctune.db.derivation import derive_again
from mhctune.db.repository import Repository, StoredTable
from mhctune.db.tables import problem_key
from mhctune.kernels.dispatch import DispatchTable


@dataclass(frozen=True)
class Checked:
    """A table and what was found of it."""

    table: DispatchTable
    findings: tuple[Finding, ...]
    stored: StoredTable | None = None
    """The table in the database that it is, or was compared with."""


def check_tables(store: Repository, exported: DispatchTable | None = None) -> list[Checked]:
    """Check an exported table and its stored counterpart, or else the newest stored table of each kind.

    Tables are of one kind that may not stand side by side: same seam, problem, target, device and class.
    """
    newest: dict[tuple[object, ...], StoredTable] = {}
    for stored in store.tables():
        newest.setdefault(kind_of(stored.table), stored)
    if exported is None:
        return [Checked(each.table, _findings(store, each.table, each), each) for each in newest.values()]
    twin = newest.get(kind_of(exported))
    agreement = agree(exported, twin.table if twin else None, f"stored table {twin.id}" if twin else "")
    return [Checked(exported, (agreement, *_findings(store, exported, twin)), twin)]


def gate(
    store: Repository, checked: Checked, baseline: DispatchTable | None, tolerance: float
) -> list[Finding]:
    """Compare a table with a baseline by stored samples; no baseline, nothing to compare."""
    if baseline is None or (wrong := other_problem(checked.table, baseline)):
        return wrong if baseline else []
    if checked.stored is None:
        sentence = "the database does not hold the table's sweep, so that no sample says which is faster"
        return [Finding(label(checked.table), "gate", Verdict.MISSING, sentence)]
    grid = store.sweep(checked.stored.sweep_id).record.token_counts
    return stored_gate(checked.table, baseline, store.trials(checked.stored.sweep_id), grid, tolerance)


def finish(
    store: Repository,
    checked: Sequence[Checked],
    baseline: DispatchTable | None,
    tolerance: float,
    elsewhere: Callable[[DispatchTable], str],
    timed: Callable[[DispatchTable, Then], list[Finding]],
    more: Sequence[Finding] = (),
) -> Check:
    """Add to what was found, and to `more`, whether each table is as fast as before and as a baseline.

    `timed` measures a table's choices; where `elsewhere` says why it cannot, stored samples have to do.
    """
    findings, left_out = [found for each in checked for found in each.findings], []
    findings += more
    for each in checked:
        if reason := elsewhere(each.table):
            left_out.append(f"not measured again: {reason}")
            findings += gate(store, each, baseline, tolerance)
        else:
            findings += other_problem(each.table, baseline) if baseline else []
            findings += timed(each.table, then_of(store, each, baseline))
    return Check(findings, left_out)


def other_problem(table: DispatchTable, baseline: DispatchTable) -> list[Finding]:
    """Say that a baseline is of another seam, problem or target; empty where it is not."""
    ours, theirs = ((t.seam, problem_key(t), t.target, f"until {t.until}") for t in (table, baseline))
    if ours == theirs:
        return []
    sentence = f"the baseline is of {' '.join(theirs)}, the table of {' '.join(ours)}: nothing to compare"
    return [Finding(label(table), "gate", Verdict.MISSING, sentence)]


def then_of(store: Repository, checked: Checked, baseline: DispatchTable | None) -> Then:
    """Return what is known of a table's speed from before."""
    stored = checked.stored
    usable = baseline if baseline and not other_problem(checked.table, baseline) else None
    return Then(store.trials(stored.sweep_id) if stored else (), usable)


def save_runs(store: Repository, checked: Sequence[Checked], done: Check) -> int:
    """Keep the verdict on each stored table that was checked; return how many."""
    kept = 0
    for each in checked:
        if each.stored is not None:
            mine = Check([f for f in done.findings if f.table == label(each.table)], done.left_out)
            store.save_gate_run(each.stored.id, str(mine.verdict), mine.to_dict())
            kept += 1
    return kept


def kind_of(table: DispatchTable) -> tuple[str, ...]:
    """Return what tables share that take each other's place: seam, problem, target, device, class, until."""
    fingerprint = table.fingerprint
    key = table.seam, problem_key(table), table.target
    return *key, fingerprint.gpu_name, fingerprint.mig, table.numerics, table.until


def _findings(store: Repository, table: DispatchTable, stored: StoredTable | None) -> tuple[Finding, ...]:
    if stored is None:
        return (legal(table), current(table))
    return (legal(table), grid(store, stored), replay(store, stored), current(table))


def grid(store: Repository, stored: StoredTable) -> Finding:
    """Say whether a table covers the token counts that its sweep set out to measure."""
    table, sweep = stored.table, store.sweep(stored.sweep_id)
    declared = sweep.record.token_counts
    covered = sum(count <= table.max_tokens for count in declared)
    sentence = f"{covered} of the {counted(len(declared), 'token count')} of sweep {sweep.id} are covered"
    if covered == len(declared):
        return Finding(label(table), "grid", Verdict.PASSED, sentence)
    sentence += f"; it is {sweep.state}: run `mhctune sweep` as before, which takes up what is missing"
    return Finding(label(table), "grid", Verdict.MISSING, sentence)


def replay(store: Repository, stored: StoredTable) -> Finding:
    """Derive the bands of a stored table from its sweep's samples again, under its own bound."""
    table, sweep = stored.table, store.sweep(stored.sweep_id)
    name = label(table)
    try:
        derived = derive_again(store, stored)
    except TooFewSamples as error:
        return Finding(name, "replay", Verdict.CANNOT_TELL, str(error))
    except NoBands as error:
        return Finding(name, "replay", Verdict.DISAGREES, str(error))
    names = (f"table {stored.id}", f"the samples of sweep {sweep.id}")
    return compare(table, derived.table, "replay", names)
