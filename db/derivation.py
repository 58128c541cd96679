"""Deriving bands from what the database holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mhctune.autotuner.bands import NoBands
from mhctune.autotuner.derive import Derived, derive, incumbent_for
from mhctune.autotuner.edges import known_to
from mhctune.autotuner.incumbent import Incumbent
from mhctune.autotuner.other_times import OtherTimes
from mhctune.autotuner.records import SweepState
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.terms import Terms
from mhctune.autotuner.words import counted
from mhctune.configs.hand_bands import load_hand_bands
from mhctune.db.repository import Repository, StoredTable
from mhctune.db.rows import StoredSweep
from mhctune.db.tables import best, matching, only
from mhctune.kernels.dispatch import Choice, DispatchTable
from mhctune.kernels.until import until_of

ENDED = (SweepState.COMPLETE, SweepState.INCOMPLETE)


def chosen_sweep(store: Repository, sweep_id: int | None = None) -> StoredSweep:
    """Return the named sweep, or the newest that ended.

    Raises:
        DatabaseError: the named sweep is unknown.
        NoBands: no sweep has ended.
    """
    if sweep_id is not None:
        return store.sweep(sweep_id)
    found = next((sweep for sweep in store.sweeps() if sweep.state in ENDED), None)
    if found is None:
        raise NoBands(
            "no sweep in this database has ended; run `mhctune sweep` (the same command resumes one)"
        )
    return found


def derive_stored(
    store: Repository,
    sweep: StoredSweep,
    max_regret: float | None = None,
    *,
    incumbent: Incumbent | None = None,
    terms: Terms | None = None,
) -> Derived:
    """Derive the bands of a stored sweep under a bound (default: the sweep's own).

    The incumbent, unless one is given, is the newest table of the same seam, problem and target and the same
    fingerprint that an earlier sweep gave, timed until the same moment; batch-invariant or not as the terms
    are, because these stand side by side and neither takes the other's place.

    Raises:
        NoBands: as `derive`.
    """
    bound = sweep.record.bound if max_regret is None else max_regret
    invariant = terms is not None and terms.batch_invariant
    known = incumbent or _incumbent_of(sweep, [t for t in store.tables() if _invariant(t.table) == invariant])
    return derive(sweep.record, sweep.id, store.trials(sweep.id), bound, known, terms)


def other_times(store: Repository, sweep: StoredSweep) -> OtherTimes | None:
    """Return what the newest ended sweep measured that is alike but for until when it timed; None without.

    Alike: seam, problem, target and fingerprint, protocol version, L2 state, PDL and unrolled launches; how
    many rounds there were, in which order and of which candidates may differ. Its probes are left out: two
    candidates alone would stand there for all.
    """

    def kind(record: SweepRecord) -> tuple[object, ...]:
        protocol = {k: v for k, v in record.protocol.items() if k in ("l2", "pdl", "unroll", "version")}
        return record.seam, record.problem, record.target, record.fingerprint, protocol

    until = until_of(sweep.record.protocol)
    for other in store.sweeps():
        now, ended = until_of(other.record.protocol), other.state in ENDED
        if ended and now != until and kind(other.record) == kind(sweep.record):
            return OtherTimes.of(other.id, now, other.record.without_probes(store.trials(other.id)))
    return None


def load_incumbent(path: Path) -> Incumbent:
    """Load what is served today: an exported table, or bands that a maintainer wrote by hand.

    Raises:
        ConfigError: bands by hand that are not what they must be.
        TableError: an exported table that is damaged.
    """
    if path.suffix == ".json" and path.is_file() and '"mhctune_table"' in path.read_text(errors="replace"):
        return Incumbent.of(only(best(matching(path)), str(path)))
    bands = load_hand_bands(path)
    served = tuple((band.first, band.last, Choice.of(band.arm, band.config)) for band in bands)
    return Incumbent(path.name, served)


def derive_again(store: Repository, stored: StoredTable) -> Derived:
    """Derive a stored table again, from its sweep's samples and on its own terms.

    Edges are those of the probes that its evidence names: later ones are another table's.
    The sweep has the number in it that it had where the table was derived: a merge gives others. A table
    kept by a version that did not write its incumbent down gets the one that it had then: the newest of any
    class, and not held.

    Raises:
        NoBands, TooFewSamples: as `derive`.
    """
    sweep, evidence = store.sweep(stored.sweep_id), stored.table.evidence
    bound = evidence.get("max_regret", sweep.record.bound)
    if "incumbent" in evidence:
        data = evidence["incumbent"]
        incumbent = Incumbent.from_data(data) if data else None
    else:
        known = _incumbent_of(sweep, [t for t in store.tables() if t.id < stored.id])
        incumbent = replace(known, hold=0.0) if known else None
    number = evidence.get("sweep", sweep.id)
    terms = Terms.of_evidence(evidence)
    trials = known_to(evidence, sweep.record.token_counts, store.trials(sweep.id))
    return derive(sweep.record, number, trials, bound, incumbent, terms)


def _incumbent_of(sweep: StoredSweep, tables: Sequence[StoredTable]) -> Incumbent | None:
    """Return the newest of the tables, newest first, that an earlier sweep alike gave."""
    earlier = [t.table for t in tables if t.sweep_id < sweep.id and _same(t.table, sweep)]
    found = incumbent_for(sweep.record.fingerprint, earlier)
    return Incumbent.of(found) if found else None


def _invariant(table: DispatchTable) -> bool:
    return Terms.of_evidence(table.evidence).batch_invariant


def keep(store: Repository, table: DispatchTable) -> str:
    """Keep a table that was derived from its evidence's sweep; return what to warn of, empty if nothing.

    The newest table is served, also where it ends earlier than the one that it takes the place of.
    """
    sweep = store.sweep(table.evidence["sweep"])
    same_class = (t.table for t in store.tables() if t.table.numerics == table.numerics)
    before = incumbent_for(table.fingerprint, [t for t in same_class if _same(t, sweep)])
    store.save_table(sweep.id, table)
    if before is None or table.max_tokens >= before.max_tokens:
        return ""
    return (
        f"the bands now end at {counted(table.max_tokens, 'token')}; those of sweep "
        f"{before.evidence.get('sweep', '?')}, which they take the place of, end at {before.max_tokens}"
    )


def _same(table: DispatchTable, sweep: StoredSweep) -> bool:
    record = sweep.record
    return (
        table.seam == record.seam
        and table.target == record.target
        and dict(table.problem) == record.problem.to_dict()
        and table.until == until_of(record.protocol)
    )
