"""Recorded sweeps: the samples of a sweep as JSON lines, and back, so that its bands derive anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from mhctune.autotuner.records import (
    Cell,
    Failure,
    FailureKind,
    Footprint,
    Measurement,
    Outcome,
    Sample,
    Trial,
)
from mhctune.autotuner.store import SweepRecord
from mhctune.configs.errors import ConfigError
from mhctune.configs.recorded import Recorded
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

COLUMNS = ("num_tokens", "arm", "config", "output_bytes", "scratch_bytes", "failure", "detail", "samples_us")
"""A row a trial. `samples_us` holds `batch:round:launches:latency`, separated by blanks."""

_SWEEP = ("digest", "seam", "target", "token_counts", "grid", "space", "protocol", "sources", "bound")


def recording(sweep: SweepRecord, trials: Sequence[Trial], about: str, source: str) -> Iterator[str]:
    """Yield the lines of a recorded sweep: the header, then a row a trial, in the order they were opened."""
    header = {
        "about": about,
        "source": source,
        "columns": COLUMNS,
        "fingerprint": asdict(sweep.fingerprint),
        "unit": "us",
        "sweep": {**{name: getattr(sweep, name) for name in _SWEEP}, "problem": sweep.problem.to_dict()},
    }
    yield json.dumps(header, sort_keys=True, separators=(",", ":"))
    for trial in trials:
        yield json.dumps(_row(trial), separators=(",", ":"))


def _row(trial: Trial) -> list[int | str | None]:
    failed = trial.outcome if isinstance(trial.outcome, Failure) else None
    footprint = trial.footprint
    return [
        trial.cell.num_tokens,
        trial.candidate.arm,
        trial.candidate.key,
        footprint.output_bytes,
        footprint.scratch_bytes,
        failed.kind.value if failed else None,
        failed.detail if failed else None,
        " ".join(f"{s.batch}:{s.round}:{s.launches}:{s.latency_us:.4f}" for s in trial.samples),
    ]


def replay(recorded: Recorded) -> tuple[SweepRecord, list[Trial]]:
    """Return the sweep and the trials of a recording.

    Raises:
        ConfigError: the recording holds single timings and no sweep.
    """
    if recorded.sweep is None:
        raise ConfigError(f"{recorded.about[:60]!r} is a recording of single timings, not of a sweep")
    fields: dict[str, Any] = dict(recorded.sweep)
    problem = Problem(**fields.pop("problem"))
    fields["token_counts"] = tuple(fields["token_counts"])
    fingerprint = Fingerprint(**recorded.fingerprint)  # type: ignore[arg-type]
    sweep = SweepRecord(problem=problem, fingerprint=fingerprint, **fields)
    return sweep, [_trial(sweep, number, row) for number, row in enumerate(recorded.rows, start=1)]


def _trial(sweep: SweepRecord, number: int, row: dict[str, Any]) -> Trial:
    cell = Cell(sweep.seam, sweep.problem, row["num_tokens"])
    samples = tuple(_sample(text) for text in row["samples_us"].split())
    outcome: Outcome = Measurement(samples)
    if row["failure"] is not None:
        outcome = Failure(FailureKind(row["failure"]), row["detail"])
    candidate = Candidate.of(row["arm"], json.loads(row["config"]))
    return Trial(
        cell, candidate, Footprint(0, row["output_bytes"], row["scratch_bytes"]), outcome, samples, number
    )


def _sample(text: str) -> Sample:
    batch, round, launches, latency = text.split(":")
    return Sample(int(batch), int(round), 0, int(launches), float(latency))
