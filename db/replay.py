"""Replay: bands again from stored samples, on any machine, and whether they are a kept table to the byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mhctune.autotuner.check import Finding, Verdict, compare, label
from mhctune.autotuner.derive import Derived, derive
from mhctune.autotuner.edges import known_to
from mhctune.autotuner.incumbent import Incumbent
from mhctune.autotuner.recording import replay as read_recording
from mhctune.autotuner.terms import Terms
from mhctune.configs.recorded import load_recorded, recorded_names
from mhctune.db.checks import kind_of
from mhctune.db.derivation import chosen_sweep, derive_again, derive_stored
from mhctune.db.repository import Repository
from mhctune.db.rows import table_text
from mhctune.kernels.dispatch import DispatchTable


@dataclass(frozen=True)
class Replayed:
    """Bands that were derived again, and the kept table that they were compared with, if there is one."""

    derived: Derived
    kept: DispatchTable | None = None

    @property
    def finding(self) -> Finding | None:
        """Compare them to the byte; None where there was nothing to compare with."""
        if self.kept is None:
            return None
        again, kept = self.derived.table, self.kept
        if table_text(again) == table_text(kept):
            sentence = f"the samples give the table to the byte, digest {kept.digest[:12]}"
            return Finding(label(kept), "replay", Verdict.PASSED, sentence)
        found = compare(kept, again, "replay", ("the kept table", "the samples"))
        if not found.ok:
            return found
        others = ", ".join(_others(kept, again))
        return Finding(label(kept), "replay", Verdict.DISAGREES, f"same bands, but other {others}")


def _others(kept: DispatchTable, again: DispatchTable) -> Iterable[str]:
    mine, theirs = kept.to_dict(), again.to_dict()
    for name in ("problem", "target", "numerics", "fingerprint"):
        if mine[name] != theirs[name]:
            yield name
    if [b["evidence"] for b in mine["bands"]] != [b["evidence"] for b in theirs["bands"]]:
        yield "evidence of the bands"
    keys = sorted({*mine["evidence"], *theirs["evidence"]})
    different = [key for key in keys if mine["evidence"].get(key, ...) != theirs["evidence"].get(key, ...)]
    if different:
        yield f"evidence ({', '.join(different)})"


def replay(source: str, kept: DispatchTable | None = None) -> list[Replayed]:
    """Derive bands again from a recording (a `.jsonl` file or a name of one), or else from a database.

    Raises:
        as `replay_recording` and `replay_database`.
        DatabaseError: the database cannot be read.
    """
    if source.endswith(".jsonl") or source in recorded_names():
        return [replay_recording(source, kept)]
    with Repository.open(source, readonly=True) as store:
        return replay_database(store, kept)


def replay_recording(name_or_path: str | Path, kept: DispatchTable | None = None) -> Replayed:
    """Derive the bands of a recorded sweep; on the terms of a kept table where one is given.

    Raises:
        ConfigError: it is no recording of a sweep.
        NoBands, TooFewSamples: as `derive`.
    """
    sweep, trials = read_recording(load_recorded(name_or_path))
    evidence = kept.evidence if kept else {}
    if kept:
        trials = known_to(evidence, sweep.token_counts, trials)
    known = evidence.get("incumbent")
    incumbent = Incumbent.from_data(known) if known else None
    bound = evidence.get("max_regret", sweep.bound)
    terms = Terms.of_evidence(evidence)
    return Replayed(derive(sweep, evidence.get("sweep", 1), trials, bound, incumbent, terms), kept)


def replay_database(store: Repository, kept: DispatchTable | None = None) -> list[Replayed]:
    """Derive the newest table of each kind again; where none was kept, the newest sweep that ended.

    With `kept` only the table of its kind, compared with `kept`.

    Raises:
        NoBands: there is nothing to derive from, or none of `kept`'s kind.
        TooFewSamples: as `derive`.
    """
    newest = {kind_of(stored.table): stored for stored in reversed(store.tables())}
    if kept is not None:
        same_kind = newest.get(kind_of(kept))
        return [Replayed(derive_again(store, same_kind), kept)] if same_kind else []
    if not newest:
        return [Replayed(derive_stored(store, chosen_sweep(store)))]
    return [Replayed(derive_again(store, each), each.table) for each in newest.values()]
