"""Checking the tables that the database holds, and an exported one against them."""

from __future__ import annotations

from dataclasses import dataclass

from mhctune.autotuner.bands import NoBands
from mhctune.autotuner.check import Finding, Verdict, agree, compare, current, label, legal
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


def check_tables(store: Repository, exported: DispatchTable | None = None) -> list[Checked]:
    """Check an exported table and its stored counterpart, or else the newest stored table of each kind.

    Tables are of one kind that may not stand side by side: same seam, problem, target, device and class.
    """
    newest: dict[tuple[object, ...], StoredTable] = {}
    for stored in store.tables():
        newest.setdefault(kind_of(stored.table), stored)
    if exported is None:
        return [Checked(each.table, _findings(store, each.table, each)) for each in newest.values()]
    twin = newest.get(kind_of(exported))
    agreement = agree(exported, twin.table if twin else None, f"stored table {twin.id}" if twin else "")
    return [Checked(exported, (agreement, *_findings(store, exported, twin)))]


def kind_of(table: DispatchTable) -> tuple[str, ...]:
    """Return what tables share that take each other's place: seam, problem, target, device and class."""
    fingerprint = table.fingerprint
    key = table.seam, problem_key(table), table.target
    return *key, fingerprint.gpu_name, fingerprint.mig, table.numerics


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
