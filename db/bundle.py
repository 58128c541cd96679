"""Bundles: a sweep and everything that hangs on it, without the numbers that one database gave them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import insert, inspect, select
from sqlalchemy.orm import Session

from mhctune.db import rows
from mhctune.db.models import (
    BandRow,
    Base,
    CandidateRow,
    ConditionsRow,
    DispatchTableRow,
    FloorRow,
    GateRunRow,
    GpuRow,
    KernelSourceRow,
    ProblemRow,
    SampleRow,
    SweepRow,
    ToolchainRow,
    TrialRow,
    TwinRow,
)
from mhctune.db.repository import intern
from mhctune.kernels.dispatch import DispatchTable

Values = dict[str, Any]
"""Columns by name, without ids."""
SweepKey = tuple[datetime, str]
"""When a sweep began (UTC, to the microsecond) and its digest, which holds the fingerprint."""
TrialKey = tuple[int, str, str]
"""Token count, arm and config."""
Round = tuple[int, int]
"""Batch and round."""

_PARENTS: Mapping[str, type[GpuRow] | type[ToolchainRow] | type[ProblemRow]] = {
    "gpu": GpuRow,
    "toolchain": ToolchainRow,
    "problem": ProblemRow,
}


@dataclass(frozen=True)
class TrialBundle:
    """One trial: its columns, and its samples and its twin's by round."""

    values: Values
    samples: Mapping[Round, Values]
    twins: Mapping[Round, Values]


@dataclass(frozen=True)
class TableBundle:
    """One published table: its columns, and the gate's verdicts on it."""

    values: Values
    gate_runs: tuple[Values, ...] = ()


@dataclass
class Bundle:
    """One sweep: its columns and those it refers to, trials, conditions, floors and tables."""

    sweep: Values
    parents: Mapping[str, Values]
    trials: dict[TrialKey, TrialBundle] = field(default_factory=dict)
    conditions: dict[tuple[int, int, int], Values] = field(default_factory=dict)
    floors: dict[int, Values] = field(default_factory=dict)
    tables: dict[tuple[datetime, str], TableBundle] = field(default_factory=dict)

    @property
    def key(self) -> SweepKey:
        """What says that two sweeps of two databases are the same one."""
        return self.sweep["started_at"], self.sweep["digest"]


def text_of(value: Any) -> str:
    """Return the one text of columns, times as ISO 8601."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def digest_of(bundles: Iterable[Bundle]) -> str:
    """Return the SHA-256 of what bundles say, in the order of their keys; row numbers are no part of it."""
    digest = hashlib.sha256()
    for bundle in sorted(bundles, key=lambda bundle: bundle.key):
        digest.update(text_of([bundle.sweep, bundle.parents]).encode() + b"\n")
        for name in ("trials", "conditions", "floors", "tables"):
            held = getattr(bundle, name)
            for key in sorted(held):
                digest.update(text_of([name, key, held[key]]).encode() + b"\n")
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, TrialBundle):
        return [value.values, sorted(value.samples.items()), sorted(value.twins.items())]
    if isinstance(value, TableBundle):
        return [value.values, sorted(map(text_of, value.gate_runs))]
    raise TypeError(f"{type(value).__name__} is no column")


def keys(session: Session) -> list[SweepKey]:
    """Return the keys of all sweeps."""
    found = session.execute(select(SweepRow.started_at, SweepRow.digest))
    return [(started, digest) for started, digest in found]


def read(session: Session, key: SweepKey) -> Bundle:
    """Read a sweep that `keys` named; of two with one key the newest."""
    started_at, digest = key
    query = select(SweepRow).where(SweepRow.digest == digest, SweepRow.started_at == started_at)
    row = session.scalars(query.order_by(SweepRow.id.desc())).first()
    assert row is not None
    parents = {name: _values(getattr(row, name)) for name in _PARENTS}
    bundle = Bundle(_values(row, *(f"{name}_id" for name in _PARENTS)), parents)
    _read_trials(session, row.id, bundle)
    for found in session.scalars(select(ConditionsRow).where(ConditionsRow.sweep_id == row.id)):
        bundle.conditions[found.num_tokens, found.batch, found.round] = _values(found, "sweep_id")
    for floor in row.floors:
        bundle.floors[floor.num_tokens] = _values(floor, "sweep_id")
    for table in session.scalars(select(DispatchTableRow).where(DispatchTableRow.sweep_id == row.id)):
        runs = session.scalars(select(GateRunRow).where(GateRunRow.table_id == table.id))
        verdicts = tuple(_values(run, "table_id") for run in runs)
        bundle.tables[table.created_at, table.digest] = TableBundle(_values(table, "sweep_id"), verdicts)
    return bundle


def _read_trials(session: Session, sweep_id: int, bundle: Bundle) -> None:
    timed: dict[int, tuple[dict[Round, Values], dict[Round, Values]]] = {}
    for place, model in enumerate((SampleRow, TwinRow)):
        of_sweep = select(model).join(TrialRow, TrialRow.id == model.trial_id)
        for taken in session.scalars(of_sweep.where(TrialRow.sweep_id == sweep_id)):
            of_trial = timed.setdefault(taken.trial_id, ({}, {}))
            of_trial[place][taken.batch, taken.round] = _values(taken, "trial_id")
    query = select(TrialRow, CandidateRow.arm, CandidateRow.config)
    query = query.join(CandidateRow, CandidateRow.id == TrialRow.candidate_id)
    for row, arm, config in session.execute(query.where(TrialRow.sweep_id == sweep_id)):
        samples, twins = timed.get(row.id, ({}, {}))
        values = _values(row, "sweep_id", "candidate_id")
        bundle.trials[row.num_tokens, arm, config] = TrialBundle(values, samples, twins)


def _values(row: Base, *without: str) -> Values:
    columns = inspect(row).mapper.column_attrs.keys()
    return {name: getattr(row, name) for name in columns if name != "id" and name not in without}


def write(session: Session, bundles: Iterable[Bundle]) -> None:
    """Write bundles into an empty database; the same bundles get the same numbers, in whatever order given.

    Sweeps and tables are numbered by age, so that the newest table stays the one that is served.
    """
    tables: list[tuple[tuple[datetime, str], int, TableBundle]] = []
    for bundle in sorted(bundles, key=lambda bundle: bundle.key):
        sweep_id = _write_sweep(session, bundle)
        tables += [(key, sweep_id, table) for key, table in bundle.tables.items()]
    for _, sweep_id, table in sorted(tables, key=lambda each: each[:2]):
        row = DispatchTableRow(sweep_id=sweep_id, **table.values)
        session.add(row)
        session.flush()
        content = DispatchTable.from_dict(json.loads(row.content), f"table {row.digest[:12]}")
        session.execute(insert(BandRow), rows.band_values(row.id, content))
        for run in sorted(table.gate_runs, key=lambda run: (run["created_at"], text_of(run))):
            session.add(GateRunRow(table_id=row.id, **run))
            session.flush()


def _write_sweep(session: Session, bundle: Bundle) -> int:
    parents = {
        f"{name}_id": intern(session, model, dict(bundle.parents[name])) for name, model in _PARENTS.items()
    }
    source = {"seam": bundle.parents["problem"]["seam"], "target": bundle.sweep["target"]}
    for arm, source_hash in sorted(json.loads(bundle.sweep["sources"]).items()):
        intern(session, KernelSourceRow, {**source, "arm": arm, "source_hash": source_hash})
    sweep = SweepRow(**bundle.sweep, **parents)
    session.add(sweep)
    session.flush()
    for key in sorted(bundle.trials, key=lambda key: (bundle.trials[key].values["created_at"], key)):
        trial = bundle.trials[key]
        candidate_id = intern(session, CandidateRow, {"arm": key[1], "config": key[2]})
        row = TrialRow(sweep_id=sweep.id, candidate_id=candidate_id, **trial.values)
        session.add(row)
        session.flush()
        for model, timed in ((SampleRow, trial.samples), (TwinRow, trial.twins)):
            if timed:
                session.execute(insert(model), [{"trial_id": row.id, **timed[at]} for at in sorted(timed)])
    if bundle.conditions:
        kept = [{"sweep_id": sweep.id, **bundle.conditions[at]} for at in sorted(bundle.conditions)]
        session.execute(insert(ConditionsRow), kept)
    if bundle.floors:
        floors = [{"sweep_id": sweep.id, **bundle.floors[count]} for count in sorted(bundle.floors)]
        session.execute(insert(FloorRow), floors)
    return sweep.id
