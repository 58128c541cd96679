"""Conversions between rows and the dataclasses that the other floors use."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Row

from mhctune.autotuner.conditions import Conditions
from mhctune.autotuner.exploration import Exploration
from mhctune.autotuner.records import (
    Cell,
    Failure,
    FailureKind,
    Footprint,
    Measurement,
    Outcome,
    Sample,
    SweepState,
    Trial,
)
from mhctune.autotuner.store import SweepRecord, variants_of, variants_to_data
from mhctune.db.models import ConditionsRow, GpuRow, SweepRow, ToolchainRow, TrialRow
from mhctune.kernels.dispatch import DispatchTable, Fingerprint, TableError
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

_TOOLCHAIN = ("driver", "cuda", "compiler", "torch", "tilelang", "pass_config", "compile_flags", "protocol")
_FOOTPRINT = tuple(field.name for field in fields(Footprint))
_SAMPLE = tuple(field.name for field in fields(Sample))


@dataclass(frozen=True, slots=True)
class StoredSweep:
    """A sweep as the database holds it."""

    id: int
    record: SweepRecord
    state: SweepState
    started_at: datetime
    ended_at: datetime | None


def canonical(data: Any) -> str:
    """Return the one JSON text of `data`: sorted keys, no blanks.

    Raises:
        ValueError: NaN or an infinity, which JSON does not have.
        TypeError: a value that JSON cannot hold.
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def table_text(table: DispatchTable) -> str:
    """Return the canonical JSON text of a table, from which it can be loaded again.

    Raises:
        TableError: its evidence does not survive JSON (NaN, or keys that are no strings).
    """
    what = f"table of seam {table.seam!r}"
    try:
        text = canonical(table.to_dict())
    except (ValueError, TypeError) as error:
        raise TableError(f"{what}: cannot be written as JSON: {error}") from error
    DispatchTable.from_dict(json.loads(text), what)
    return text


def gpu_values(fingerprint: Fingerprint) -> dict[str, Any]:
    """Return the columns of a GPU."""
    return {
        "name": fingerprint.gpu_name,
        "sm_count": fingerprint.sm_count,
        "memory_gib": fingerprint.memory_gib,
        "mig": fingerprint.mig,
    }


def toolchain_values(fingerprint: Fingerprint) -> dict[str, Any]:
    """Return the columns of a toolchain."""
    return {name: getattr(fingerprint, name) for name in _TOOLCHAIN}


def problem_values(seam: str, problem: Problem) -> dict[str, Any]:
    """Return the columns of a problem."""
    return {"digest": problem.digest, "seam": seam, "problem": canonical(problem.to_dict())}


def sweep_values(record: SweepRecord) -> dict[str, Any]:
    """Return the columns of a sweep that refer to no other table."""
    return {
        "digest": record.digest,
        "source_hash": record.fingerprint.source_hash,
        "sources": canonical(dict(record.sources)),
        "target": record.target,
        "token_counts": canonical(list(record.token_counts)),
        "grid": record.grid,
        "space": canonical(dict(record.space)),
        "variants": canonical(variants_to_data(record.variants)),
        "protocol": canonical(dict(record.protocol)),
        "bound": record.bound,
        "search": canonical(record.search.to_data(record.candidates)) if record.search else None,
    }


def footprint_values(footprint: Footprint) -> dict[str, Any]:
    """Return the byte columns of a trial."""
    return asdict(footprint)


def fingerprint_of(gpu: GpuRow, toolchain: ToolchainRow, source_hash: str) -> Fingerprint:
    """Put a fingerprint together again."""
    return Fingerprint(
        gpu_name=gpu.name,
        sm_count=gpu.sm_count,
        memory_gib=gpu.memory_gib,
        mig=gpu.mig,
        source_hash=source_hash,
        **{name: getattr(toolchain, name) for name in _TOOLCHAIN},
    )


def sweep_of(row: SweepRow) -> StoredSweep:
    """Read a sweep."""
    variants = variants_of(json.loads(row.variants))
    record = SweepRecord(
        digest=row.digest,
        seam=row.problem.seam,
        problem=Problem(**json.loads(row.problem.problem)),
        target=row.target,
        token_counts=tuple(json.loads(row.token_counts)),
        grid=row.grid,
        space=json.loads(row.space),
        variants=variants,
        protocol=json.loads(row.protocol),
        fingerprint=fingerprint_of(row.gpu, row.toolchain, row.source_hash),
        sources=json.loads(row.sources),
        bound=row.bound,
        search=Exploration.of(json.loads(row.search), tuple(variants)) if row.search else None,
        floors={floor.num_tokens: floor.floor_us for floor in row.floors},
    )
    return StoredSweep(row.id, record, SweepState(row.state), row.started_at, row.ended_at)


def sample_of(row: Row[Any]) -> Sample:
    """Read a sample."""
    return Sample(**{name: getattr(row, name) for name in _SAMPLE})


def sample_values(trial_id: int, sample: Sample) -> dict[str, Any]:
    """Return the columns of a sample, or of a twin's."""
    return {"trial_id": trial_id, **asdict(sample)}


def conditions_values(conditions: Conditions) -> dict[str, Any]:
    """Return the columns of a round's conditions that say what they were."""
    return {**asdict(conditions), "reasons": canonical(list(conditions.reasons))}


def conditions_of(row: ConditionsRow) -> Conditions:
    """Read the conditions of a round."""
    reasons = tuple(json.loads(row.reasons))
    return Conditions(row.source, row.sm_clock_mhz, row.temperature_c, reasons, row.other_processes)


def band_values(table_id: int, table: DispatchTable) -> list[dict[str, Any]]:
    """Return the columns of a table's bands."""
    return [
        {
            "table_id": table_id,
            "first": band.first,
            "last": band.last,
            "arm": band.choice.arm,
            "config": canonical(dict(band.choice.config)),
            "evidence": canonical(dict(band.evidence)),
        }
        for band in table.bands
    ]


def trial_of(
    sweep: SweepRecord,
    row: TrialRow,
    arm: str,
    config: str,
    samples: Iterable[Sample],
    twins: Iterable[Sample] = (),
) -> Trial:
    """Read a trial, given its candidate's columns, its samples and its twins'."""
    taken = tuple(samples)
    return Trial(
        cell=Cell(sweep.seam, sweep.problem, row.num_tokens),
        candidate=Candidate.of(arm, json.loads(config)),
        footprint=Footprint(**{name: getattr(row, name) for name in _FOOTPRINT}),
        outcome=_outcome(row, taken),
        samples=taken,
        id=row.id,
        twins=tuple(twins),
    )


def _outcome(row: TrialRow, samples: tuple[Sample, ...]) -> Outcome | None:
    if row.failure_kind is not None:
        return Failure(FailureKind(row.failure_kind), row.failure_detail or "")
    return Measurement(samples) if row.state == "measured" else None
