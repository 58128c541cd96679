"""The repository: what a sweep tells is kept, and given back to those who ask.

One process writes at a time. On SQLite a second writer waits up to a minute and then gets an error;
readers never wait. Two processes must not run the same sweep: both would resume it and race its trials.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Engine, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from mhctune.autotuner.conditions import Conditions
from mhctune.autotuner.records import Cell, Failure, Footprint, Sample, SweepState, Trial
from mhctune.autotuner.store import SweepRecord
from mhctune.db import rounds, rows
from mhctune.db.counts import Counts, counts_of
from mhctune.db.engine import READING, DatabaseError, Place, explained
from mhctune.db.models import (
    BandRow,
    CandidateRow,
    DispatchTableRow,
    FloorRow,
    GateRunRow,
    GpuRow,
    KernelSourceRow,
    Keyed,
    ProblemRow,
    SampleRow,
    SweepRow,
    ToolchainRow,
    TrialRow,
    TwinRow,
)
from mhctune.db.rows import StoredSweep
from mhctune.db.schema import open_database
from mhctune.kernels.dispatch import DispatchTable
from mhctune.kernels.space import Candidate


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A published dispatch table as the database holds it."""

    id: int
    sweep_id: int
    created_at: datetime
    table: DispatchTable


@dataclass(frozen=True, slots=True)
class GateRun:
    """One comparison by the CI gate as the database holds it."""

    id: int
    table_id: int
    verdict: str
    detail: Mapping[str, Any]
    created_at: datetime


class Repository:
    """Sweeps, trials, samples and tables; every method is one committed transaction.

    Fulfils `mhctune.autotuner.store.Store`. Any method raises `DatabaseError` when the database cannot be
    used.
    """

    def __init__(self, engine: Engine, place: Place) -> None:
        """Keep an open engine of the current schema; `place` names it in errors."""
        self._engine, self._place = engine, place

    @property
    def place(self) -> Place:
        """Where the database lives."""
        return self._place

    @classmethod
    def open(cls, target: str | Path, *, readonly: bool = False) -> Self:
        """Open a path or a `postgresql://` URL; a new file gets the schema unless `readonly`.

        Raises:
            DatabaseError: as `mhctune.db.schema.open_database`.
        """
        return cls(open_database(target, readonly=readonly), Place.of(target))

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        """Return the repository; it is closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    # The store: what a sweep tells.

    def begin(self, sweep: SweepRecord, *, new: bool = False) -> int:
        """Return the id of the newest unfinished sweep of this digest, or of a new one; it is running now.

        With `new` always a new one. A complete sweep of the same digest is not resumed: a new one begins.
        The bound is no part of the digest: a resumed sweep takes the one asked for now.
        """
        with self._write() as session:
            found = None if new else _unfinished(session, sweep.digest)
            if found is None:
                return _insert_sweep(session, sweep)
            found.state, found.ended_at, found.bound = SweepState.RUNNING, None, sweep.bound
            return found.id

    def record(self, sweep_id: int) -> SweepRecord:
        """Return the record of a sweep, with what a search has proposed since it was begun.

        Raises:
            DatabaseError: the sweep is unknown.
        """
        return self.sweep(sweep_id).record

    def propose(self, sweep_id: int, record: SweepRecord) -> None:
        """Keep what a search proposes before it is raced: the record's search, candidates and grid.

        Raises:
            DatabaseError: the sweep is unknown.
        """
        with self._write() as session:
            row, values = self._sweep_row(session, sweep_id), rows.sweep_values(record)
            row.search, row.variants, row.grid = values["search"], values["variants"], values["grid"]

    def keep_floor(self, sweep_id: int, cell: Cell, floor_us: float) -> None:
        """Keep the microseconds of a copy of the cell's fewest bytes, unless one was kept before."""
        key = {"sweep_id": sweep_id, "num_tokens": cell.num_tokens}
        with self._write() as session:
            if session.get(FloorRow, key) is None:
                session.add(FloorRow(**key, floor_us=floor_us))

    def trials(self, sweep_id: int, num_tokens: int | None = None) -> Sequence[Trial]:
        """Return the trials of a sweep, or of one cell, with their samples, in the order they were opened."""
        with self._read() as session:
            sweep = self._sweep(session, sweep_id).record
            samples = rounds.samples_of(session, sweep_id, SampleRow, num_tokens)
            twins = rounds.samples_of(session, sweep_id, TwinRow, num_tokens)
            query = select(TrialRow, CandidateRow.arm, CandidateRow.config)
            query = query.join(CandidateRow, CandidateRow.id == TrialRow.candidate_id)
            if num_tokens is not None:
                query = query.where(TrialRow.num_tokens == num_tokens)
            found = session.execute(query.where(TrialRow.sweep_id == sweep_id).order_by(TrialRow.id))
            return [
                rows.trial_of(sweep, row, arm, text, samples[row.id], twins[row.id])
                for row, arm, text in found
            ]

    def open_trial(self, sweep_id: int, cell: Cell, candidate: Candidate, footprint: Footprint) -> int:
        """Record that a candidate passed its check and will be raced; return the trial's id.

        A trial that was opened before is raced again under its id, and keeps its samples.
        """
        values = {"state": "racing", "failure_kind": None, "failure_detail": None}
        return self._put_trial(sweep_id, cell, candidate, footprint, values)

    def add_samples(
        self,
        samples: Sequence[tuple[int, Sample]],
        twins: Sequence[tuple[int, Sample]] = (),
        conditions: Conditions | None = None,
    ) -> None:
        """Keep the samples (trial id, sample) of one round, its twins' and its conditions, all or none.

        Raises:
            DatabaseError: a trial is unknown, or has a sample of that batch and round.
        """
        if samples:
            with self._write() as session:
                rounds.add_round(session, samples, twins, conditions)

    def conditions(self, sweep_id: int) -> Sequence[Conditions]:
        """Return the conditions of every round of a sweep, by token count, batch and round."""
        with self._read() as session:
            return rounds.conditions_of(session, sweep_id)

    def finish_trial(self, trial_id: int) -> None:
        """Record that a trial has all its samples: it is a measurement now.

        Raises:
            DatabaseError: the trial is unknown, or has no sample.
        """
        with self._write() as session:
            if session.scalar(select(SampleRow.round).where(SampleRow.trial_id == trial_id).limit(1)) is None:
                raise DatabaseError(
                    f"database {self._place}: trial {trial_id} has no sample to be measured by"
                )
            measured = {"state": "measured", "failure_kind": None, "failure_detail": None}
            session.execute(update(TrialRow).where(TrialRow.id == trial_id).values(measured))

    def fail_trial(
        self, sweep_id: int, cell: Cell, candidate: Candidate, footprint: Footprint, failure: Failure
    ) -> int:
        """Record a failure, for a trial that was opened before or not; return the trial's id."""
        values = {"state": "failed", "failure_kind": str(failure.kind), "failure_detail": failure.detail}
        return self._put_trial(sweep_id, cell, candidate, footprint, values)

    def end(self, sweep_id: int, state: SweepState) -> None:
        """Record how the sweep ended.

        Raises:
            DatabaseError: the sweep is unknown.
        """
        with self._write() as session:
            row = self._sweep_row(session, sweep_id)
            row.state, row.ended_at = state, datetime.now(UTC)

    # What others ask.

    def sweeps(self) -> Sequence[StoredSweep]:
        """Return all sweeps, the newest first."""
        with self._read() as session:
            found = session.scalars(select(SweepRow).order_by(SweepRow.id.desc()))
            return [rows.sweep_of(row) for row in found]

    def sweep(self, sweep_id: int) -> StoredSweep:
        """Return one sweep.

        Raises:
            DatabaseError: the sweep is unknown.
        """
        with self._read() as session:
            return self._sweep(session, sweep_id)

    def counts(self, sweep_id: int) -> Counts:
        """Return how many trials of a sweep came to what; all zero for an unknown one."""
        with self._read() as session:
            return counts_of(session, sweep_id)

    def save_table(self, sweep_id: int, table: DispatchTable) -> int:
        """Keep a dispatch table that was derived from a sweep; return its id.

        Its bound is the evidence's `max_regret`, or else the sweep's.

        Raises:
            TableError: the table does not survive its own JSON form, so that nobody could load it.
            DatabaseError: the sweep is unknown.
        """
        content = rows.table_text(table)
        with self._write() as session:
            sweep = self._sweep_row(session, sweep_id)
            row = DispatchTableRow(
                sweep_id=sweep_id,
                digest=table.digest,
                numerics=table.numerics,
                bound=table.evidence.get("max_regret", sweep.bound),
                content=content,
                created_at=datetime.now(UTC),
            )
            session.add(row)
            session.flush()
            session.execute(insert(BandRow), rows.band_values(row.id, table))
            return row.id

    def tables(self) -> Sequence[StoredTable]:
        """Return all dispatch tables, the newest first; their status is not judged yet.

        Raises:
            TableError: a stored table is damaged or of another version.
        """
        with self._read() as session:
            found = session.scalars(select(DispatchTableRow).order_by(DispatchTableRow.id.desc()))
            return [_stored_table(row, self._place) for row in found]

    def save_gate_run(self, table_id: int, verdict: str, detail: Mapping[str, Any]) -> int:
        """Keep a verdict of the CI gate on a table, with JSON-able detail; return its id."""
        values = {"table_id": table_id, "verdict": verdict, "detail": rows.canonical(dict(detail))}
        with self._write() as session:
            row = GateRunRow(**values, created_at=datetime.now(UTC))
            session.add(row)
            session.flush()
            return row.id

    def gate_runs(self, table_id: int) -> Sequence[GateRun]:
        """Return the gate's verdicts on a table, the newest first."""
        query = select(GateRunRow).where(GateRunRow.table_id == table_id).order_by(GateRunRow.id.desc())
        with self._read() as session:
            return [
                GateRun(row.id, row.table_id, row.verdict, json.loads(row.detail), row.created_at)
                for row in session.scalars(query)
            ]

    # How.

    @contextmanager
    def _write(self) -> Iterator[Session]:
        with explained(self._place), Session(self._engine) as session, session.begin():
            yield session

    @contextmanager
    def _read(self) -> Iterator[Session]:
        engine = self._engine.execution_options(**{READING: True})
        with explained(self._place), Session(engine) as session, session.begin():
            yield session

    def _sweep(self, session: Session, sweep_id: int) -> StoredSweep:
        return rows.sweep_of(self._sweep_row(session, sweep_id))

    def _sweep_row(self, session: Session, sweep_id: int) -> SweepRow:
        row = session.get(SweepRow, sweep_id)
        if row is None:
            newest = session.scalar(select(func.max(SweepRow.id)))
            known = "it holds none" if newest is None else f"the newest is {newest}"
            raise DatabaseError(f"database {self._place}: no sweep {sweep_id}; {known}, see `mhctune status`")
        return row

    def _put_trial(
        self,
        sweep_id: int,
        cell: Cell,
        candidate: Candidate,
        footprint: Footprint,
        outcome: dict[str, Any],
    ) -> int:
        with self._write() as session:
            chosen = intern(session, CandidateRow, {"arm": candidate.arm, "config": candidate.key})
            key = {"sweep_id": sweep_id, "num_tokens": cell.num_tokens, "candidate_id": chosen}
            values = {**rows.footprint_values(footprint), **outcome}
            found = session.scalar(select(TrialRow.id).filter_by(**key))
            if found is not None:
                session.execute(update(TrialRow).where(TrialRow.id == found).values(values))
                return found
            row = TrialRow(**key, **values, created_at=datetime.now(UTC))
            session.add(row)
            session.flush()
            return row.id


def _unfinished(session: Session, digest: str) -> SweepRow | None:
    query = select(SweepRow).where(SweepRow.digest == digest, SweepRow.state != SweepState.COMPLETE)
    return session.scalars(query.order_by(SweepRow.id.desc()).limit(1)).first()


def _insert_sweep(session: Session, sweep: SweepRecord) -> int:
    for arm, source_hash in sweep.sources.items():
        source = {"seam": sweep.seam, "arm": arm, "target": sweep.target, "source_hash": source_hash}
        intern(session, KernelSourceRow, source)
    row = SweepRow(
        **rows.sweep_values(sweep),
        gpu_id=intern(session, GpuRow, rows.gpu_values(sweep.fingerprint)),
        toolchain_id=intern(session, ToolchainRow, rows.toolchain_values(sweep.fingerprint)),
        problem_id=intern(session, ProblemRow, rows.problem_values(sweep.seam, sweep.problem)),
        state=SweepState.RUNNING,
        started_at=datetime.now(UTC),
    )
    session.add(row)
    session.flush()
    return row.id


def intern(session: Session, model: type[Keyed], values: Mapping[str, Any]) -> int:
    """Return the id of the row with these values, which is made when there is none."""
    query = select(model.id).filter_by(**values)
    found = session.scalar(query)
    if found is not None:
        return found
    row = model(**values)
    try:
        with session.begin_nested():
            session.add(row)
    except IntegrityError:
        # On PostgreSQL another writer may have been faster.
        found = session.scalar(query)
        if found is None:
            raise
        return found
    return row.id


def _stored_table(row: DispatchTableRow, place: Place) -> StoredTable:
    table = DispatchTable.from_dict(json.loads(row.content), f"{place}, table {row.id}")
    return StoredTable(row.id, row.sweep_id, row.created_at, table)
