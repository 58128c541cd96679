"""Merging: the sweeps of several databases in one, the same whatever the order they are given in."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from mhctune.autotuner.words import counted
from mhctune.db import bundle as bundles
from mhctune.db.bundle import Bundle, SweepKey, TableBundle, TrialBundle, TrialKey, digest_of, text_of
from mhctune.db.engine import READING, DatabaseError, Place, explained
from mhctune.db.lock import exclusive
from mhctune.db.schema import open_database
from mhctune.db.sqlite_file import siblings

_STATES = ("running", "interrupted", "incomplete", "complete")
_OUTCOMES = ("racing", "failed", "measured")


@dataclass(frozen=True)
class MergedSweep:
    """A sweep of the result: when it began, on what device, and the databases that hold it."""

    key: SweepKey
    gpu_name: str
    trials: int
    tables: int
    places: tuple[str, ...]

    @property
    def row(self) -> tuple[str, str, int, int, str]:
        """What to show of it, for `mhctune.autotuner.report.merged_sheet`."""
        began = f"{self.key[0]:%Y-%m-%d %H:%M:%S}"
        return began, self.gpu_name, self.trials, self.tables, " ".join(self.places)


@dataclass(frozen=True)
class Merged:
    """What a merge came to; `changed` is false where the result held all of it before."""

    digest: str
    sweeps: tuple[MergedSweep, ...]
    conflicts: tuple[str, ...]
    changed: bool

    @property
    def lines(self) -> tuple[str, ...]:
        """What to show besides the sweeps: each conflict, then what the content is known by."""
        return *(f"conflict: {each}" for each in self.conflicts), f"content {self.digest[:12]}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data, a row a sweep."""
        rows = [sweep.row for sweep in self.sweeps]
        return {"digest": self.digest, "changed": self.changed, "sweeps": rows, "conflicts": self.conflicts}


def merge(target: str | Path, sources: Sequence[str | Path]) -> Merged:
    """Write everything that `sources`, and `target` where it exists, hold into `target`.

    Two sweeps are one if their digest and their beginning are the same (a copy that was taken further). Of a
    trial that both hold the one that came further counts: measured before failed before racing, then more
    rounds, then the later, then the greater text. What it does not hold of the other is a conflict, and said.
    The result has the same digest, and as a new file the same bytes, in whatever order the sources are given.

    Raises:
        DatabaseError: a source cannot be read, or `target` cannot be written, is no file, or is being
            written to by a sweep.
    """
    place = Place.of(target)
    if place.path is None:
        raise DatabaseError(f"{place} is no file; merge into a file, and copy it where it is needed")
    place.require_writable()
    exists = not place.awaits_writing
    with exclusive(str(place.path)) if exists else nullcontext():
        merged, combined = _merged(place.path, sources, exists)
        if merged.changed:
            _publish(place.path, combined, exists)
    return merged


def _merged(path: Path, sources: Sequence[str | Path], exists: bool) -> tuple[Merged, list[Bundle]]:
    """Read all sources and the result as it was, and combine them; whole sweeps are held in memory."""
    with ExitStack() as stack:
        # The result as it was is a source like the others.
        names = {str(each): each for each in ((path, *sources) if exists else sources)}
        opened = [(name, stack.enter_context(_reading(each))) for name, each in names.items()]
        held = _held(opened)
        combined, conflicts = _combined(held)
        sweeps = tuple(_summary(each, [name for name, _ in held[each.key]]) for each in combined)
        digest = digest_of(combined)
        changed = not exists or digest != _digest_of(opened[0][1])
    return Merged(digest, sweeps, conflicts, changed), combined


def content_digest(target: str | Path) -> str:
    """Return the digest of what a database holds: the same for two that hold the same sweeps and tables.

    Raises:
        DatabaseError: it cannot be read.
    """
    with _reading(target) as session:
        return _digest_of(session)


def _digest_of(session: Session) -> str:
    return digest_of(bundles.read(session, key) for key in bundles.keys(session))


@contextmanager
def _reading(target: str | Path) -> Iterator[Session]:
    place, engine = Place.of(target), open_database(target, readonly=True)
    try:
        with explained(place), Session(engine.execution_options(**{READING: True})) as session:
            yield session
    finally:
        engine.dispose()


def _held(opened: Sequence[tuple[str, Session]]) -> dict[SweepKey, list[tuple[str, Session]]]:
    held: dict[SweepKey, list[tuple[str, Session]]] = {}
    for name, session in opened:
        for key in dict.fromkeys(bundles.keys(session)):
            held.setdefault(key, []).append((name, session))
    return dict(sorted(held.items()))


def _combined(held: dict[SweepKey, list[tuple[str, Session]]]) -> tuple[list[Bundle], tuple[str, ...]]:
    combined, conflicts = [], []
    for key, places in held.items():
        found, wrong = combine([bundles.read(session, key) for _, session in places])
        combined.append(found)
        conflicts += wrong
    return combined, tuple(conflicts)


def combine(versions: Sequence[Bundle]) -> tuple[Bundle, list[str]]:
    """Return one sweep from its versions, at least one, and a sentence for each conflict.

    Both depend on the set of versions alone, not on their order.
    """
    chosen = max(versions, key=_sweep_rank)
    whole, conflicts = Bundle(chosen.sweep, chosen.parents), []
    for key in sorted(set().union(*(each.trials for each in versions))):
        found = [each.trials[key] for each in versions if key in each.trials]
        whole.trials[key] = best = max(found, key=_trial_rank)
        lost = {text_of(each): each for each in found if not _within(each, best)}
        conflicts += [_conflict(chosen, key, best, lost[text]) for text in sorted(lost)]
    # Rounds that differ are their trials' conflicts; here the order is only kept out of the result.
    for version in sorted(versions, key=lambda each: text_of(sorted(each.conditions.items()))):
        whole.conditions |= version.conditions
    # Two floors of one cell are two timings of the same copy: the shorter one is the nearer to what it takes.
    for floor in (f for version in versions for f in version.floors.values()):
        known = whole.floors.get(floor["num_tokens"], floor)
        whole.floors[floor["num_tokens"]] = min(known, floor, key=lambda each: each["floor_us"])
    for at in sorted(set().union(*(each.tables for each in versions))):
        tables = [each.tables[at] for each in versions if at in each.tables]
        runs = {text_of(run): run for table in tables for run in table.gate_runs}
        values = max((table.values for table in tables), key=text_of)
        whole.tables[at] = TableBundle(values, tuple(runs[text] for text in sorted(runs)))
    return whole, conflicts


def _sweep_rank(version: Bundle) -> tuple[int, str, str]:
    ended = version.sweep["ended_at"]
    return _STATES.index(version.sweep["state"]), ended.isoformat() if ended else "", text_of(version.sweep)


def _trial_rank(trial: TrialBundle) -> tuple[int, int, str, str]:
    outcome, rounds = _OUTCOMES.index(trial.values["state"]), len(trial.samples) + len(trial.twins)
    return outcome, rounds, trial.values["created_at"].isoformat(), text_of(trial)


def _within(trial: TrialBundle, chosen: TrialBundle) -> bool:
    """Say whether a version is an earlier state of the chosen one, so that nothing of it is lost."""
    earlier = trial.values["state"] == "racing" or trial.values["state"] == chosen.values["state"]
    pairs = ((trial.samples, chosen.samples), (trial.twins, chosen.twins))
    return earlier and all(mine.items() <= theirs.items() for mine, theirs in pairs)


def _conflict(sweep: Bundle, key: TrialKey, kept: TrialBundle, lost: TrialBundle) -> str:
    count, arm, config = key
    kept_text, lost_text = (f"{each.values['state']}, {len(each.samples)} samples" for each in (kept, lost))
    return (
        f"sweep of {sweep.key[0]:%Y-%m-%d %H:%M:%S}, {sweep.parents['gpu']['name']}: {arm} {config} at "
        f"{counted(count, 'token')} differs: kept is the one {kept_text}, left out the one {lost_text}"
    )


def _summary(sweep: Bundle, places: list[str]) -> MergedSweep:
    gpu = sweep.parents["gpu"]["name"]
    return MergedSweep(sweep.key, gpu, len(sweep.trials), len(sweep.tables), tuple(sorted(places)))


def _publish(path: Path, combined: Sequence[Bundle], exists: bool) -> None:
    """Write a new file beside and put it in place; into a file that others may have open it is copied."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write(open_database(draft), draft, combined)
        if not exists:
            os.replace(draft, path)
            return
        with closing(sqlite3.connect(draft)) as source, closing(sqlite3.connect(path)) as goal:
            source.backup(goal)
    except (OSError, sqlite3.Error) as error:
        raise DatabaseError(f"{path} cannot be written: {error}; name another file") from error
    finally:
        for file in (draft, *siblings(draft)):
            file.unlink(missing_ok=True)


def _write(engine: Engine, draft: Path, combined: Sequence[Bundle]) -> None:
    try:
        with explained(Place(path=draft)), Session(engine) as session, session.begin():
            bundles.write(session, combined)
    finally:
        engine.dispose()
