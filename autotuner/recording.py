"""Recorded sweeps: the samples of a sweep as JSON lines, and back, so that its bands derive anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from mhctune.autotuner.exploration import Exploration
from mhctune.autotuner.records import (
    LATENCY_DIGITS,
    Cell,
    Failure,
    FailureKind,
    Footprint,
    Measurement,
    Outcome,
    Sample,
    Trial,
)
from mhctune.autotuner.store import SweepRecord, variants_of, variants_to_data
from mhctune.autotuner.words import counted
from mhctune.configs.errors import ConfigError
from mhctune.configs.recorded import Recorded
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

_BYTES = tuple(field.name for field in fields(Footprint))

COLUMNS = ("num_tokens", "candidate", *_BYTES, "failure", "detail", "samples_us", "twins_us")
"""A row a trial. `candidate` is a place in the header's `variants`, from 0: there each config stands once.

`samples_us` holds `batch:round:launches:latency`, separated by blanks; a throttled sample ends in
`:throttled`. What is alone a latency is the next round of the same batch with as many launches. `twins_us`
holds those of its twin, in the same form.

The place of a sample in its round, and the clock, are left out: no derivation reads them.
"""

_SWEEP = ("digest", "seam", "target", "token_counts", "grid", "space", "protocol", "sources", "bound")


class Unfinished(ValueError):
    """A sweep that cannot be recorded: trials of it are still being raced."""


def recording(sweep: SweepRecord, trials: Sequence[Trial], about: str, source: str) -> list[str]:
    """Return the lines of a recorded sweep: the header, then a row a trial, in the order they were opened.

    Raises:
        Unfinished: a trial has no outcome; a row would pass for a measurement of the rounds so far.
    """
    racing = sum(trial.outcome is None for trial in trials)
    if racing:
        raise Unfinished(f"{counted(racing, 'trial')} of {len(trials)} still race; run the sweep to its end")
    kept = {name: getattr(sweep, name) for name in _SWEEP}
    problem, variants = sweep.problem.to_dict(), variants_to_data(sweep.variants)
    if sweep.search is not None:
        kept["search"] = sweep.search.to_data(sweep.candidates)
    if sweep.floors:
        kept["floors"] = [[count, floor_us] for count, floor_us in sorted(sweep.floors.items())]
    header = {
        "about": about,
        "source": source,
        "columns": COLUMNS,
        "fingerprint": sweep.fingerprint.as_dict(),
        "unit": "us",
        "sweep": {**kept, "problem": problem, "variants": variants},
    }
    first = json.dumps(header, sort_keys=True, separators=(",", ":"))
    place = {candidate: at for at, candidate in enumerate(sweep.candidates)}
    rows = (_row(trial, place[trial.candidate]) for trial in trials)
    return [first, *(json.dumps(row, separators=(",", ":")) for row in rows)]


def _row(trial: Trial, place: int) -> list[int | str | None]:
    failed = trial.outcome if isinstance(trial.outcome, Failure) else None
    return [
        trial.cell.num_tokens,
        place,
        *(getattr(trial.footprint, name) for name in _BYTES),
        failed.kind.value if failed else None,
        failed.detail if failed else None,
        _text(trial.samples),
        _text(trial.twins),
    ]


def _text(samples: Sequence[Sample]) -> str:
    words, before = [], None
    for sample in samples:
        at = (sample.batch, sample.round, sample.launches)
        follows = before is not None and at == (before[0], before[1] + 1, before[2])
        words.append(_latency(sample) if follows and not sample.throttled else _word(sample))
        before = at
    return " ".join(words)


def _word(sample: Sample) -> str:
    mark = ":throttled" if sample.throttled else ""
    return f"{sample.batch}:{sample.round}:{sample.launches}:{_latency(sample)}{mark}"


def _latency(sample: Sample) -> str:
    return f"{sample.latency_us:.{LATENCY_DIGITS}f}"


def replay(recorded: Recorded) -> tuple[SweepRecord, list[Trial]]:
    """Return the sweep and the trials of a recording.

    Raises:
        ConfigError: the recording holds single timings and no sweep, or not all of a sweep.
    """
    if recorded.sweep is None:
        raise ConfigError(f"{recorded.about[:60]!r} is a recording of single timings, not of a sweep")
    given: dict[str, Any] = dict(recorded.sweep)
    try:
        given["problem"] = Problem(**given["problem"])
        given["token_counts"] = tuple(given["token_counts"])
        given["variants"] = variants_of(given["variants"])
        given["floors"] = {int(count): float(us) for count, us in given.get("floors", ())}
        if "search" in given:
            given["search"] = Exploration.of(given["search"], tuple(given["variants"]))
        fingerprint = Fingerprint(**recorded.fingerprint)  # type: ignore[arg-type]
        sweep = SweepRecord(fingerprint=fingerprint, **given)
        places = dict(enumerate(sweep.candidates))
        rows: Sequence[dict[str, Any]] = recorded.rows
        trials = [_trial(sweep, places[row["candidate"]], at, row) for at, row in enumerate(rows, start=1)]
        return sweep, trials
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{recorded.about[:60]!r} does not hold what a sweep needs: {error}") from error


def _trial(sweep: SweepRecord, candidate: Candidate, number: int, row: dict[str, Any]) -> Trial:
    cell = Cell(sweep.seam, sweep.problem, row["num_tokens"])
    samples, twins = _samples(row["samples_us"]), _samples(row["twins_us"])
    outcome: Outcome = Measurement(samples)
    if row["failure"] is not None:
        outcome = Failure(FailureKind(row["failure"]), row["detail"])
    footprint = Footprint(*(row[name] for name in _BYTES))
    return Trial(cell, candidate, footprint, outcome, samples, number, twins)


def _samples(text: str) -> tuple[Sample, ...]:
    found: list[Sample] = []
    for word in text.split():
        if ":" in word:
            batch, round, launches, latency, *marks = word.split(":")
            throttled = "throttled" in marks
            sample = Sample(int(batch), int(round), 0, int(launches), float(latency), throttled=throttled)
        else:
            last = found[-1]
            sample = Sample(last.batch, last.round + 1, 0, last.launches, float(word))
        found.append(sample)
    return tuple(found)
