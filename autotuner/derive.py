"""From the trials of a sweep to a dispatch table with its evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mhctune.autotuner.bands import Derivation, NoBands, Option, Segment
from mhctune.autotuner.choose import Chosen, choose
from mhctune.autotuner.edges import Edge, edges_of
from mhctune.autotuner.evidence import Evidence
from mhctune.autotuner.incumbent import Incumbent
from mhctune.autotuner.records import Trial
from mhctune.autotuner.standings import Standing, standings, winner
from mhctune.autotuner.stats import NoiseFloor, noise_floor
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.sweep import unmeasured
from mhctune.autotuner.terms import Terms
from mhctune.kernels.dispatch import Band, Choice, DispatchTable, Fingerprint
from mhctune.kernels.space import Candidate


@dataclass(frozen=True)
class Derived:
    """A table, how it was chosen, and which token counts it leaves out and why."""

    table: DispatchTable
    derivation: Derivation
    cells: Mapping[int, Sequence[Standing]]
    missing: Mapping[int, str]
    floor: NoiseFloor | None
    wins: Mapping[int, Candidate]
    """Who wins each cell by itself, ties broken."""
    chosen: Chosen
    incumbent: Incumbent | None = None
    edges: tuple[Edge, ...] = ()
    floors: Mapping[int, float] = field(default_factory=dict)
    """By token count the microseconds of a copy of the fewest bytes, where it was timed."""


def derive(
    sweep: SweepRecord,
    sweep_id: int,
    trials: Sequence[Trial],
    max_regret: float,
    incumbent: Incumbent | None = None,
    terms: Terms | None = None,
) -> Derived:
    """Derive the bands of a sweep, from what was kept alone: its arms may have changed since.

    Trials at other token counts than the sweep's are probes: they say where an edge lies, and nothing else.

    A band covers no token count whose part of the grid was not measured: the table ends before the first.

    Raises:
        NoBands: the smallest token count was not measured, no candidate is within the bound somewhere, or
            the terms cannot be met under it.
        TooFewSamples: see `standings`.
    """
    every, trials = trials, sweep.without_probes(trials)
    missing = unmeasured(sweep, trials)
    counts = [n for n in sweep.token_counts if not missing or n < min(missing)]
    if not counts:
        raise NoBands(
            f"sweep {sweep_id} has nothing to derive bands from: {missing[min(missing)]}; run the sweep again"
        )
    floor = noise_floor(trials)
    width = floor.width if floor else 0.0
    cells = {n: standings([t for t in trials if t.cell.num_tokens == n], width) for n in counts}
    options, terms = options_of(sweep, trials, cells), terms or Terms()
    served = _served(incumbent, counts)
    chosen = choose(counts, options, max_regret, served, terms, incumbent.hold if incumbent else 0.0)
    allowed = chosen.options
    edges = edges_of(chosen.derivation.segments, [o.candidate for o in allowed], every, width, incumbent)
    derivation = replace(chosen.derivation, segments=_moved(chosen.derivation.segments, edges))
    bytes_of = {option.candidate: option.memory_bytes for option in options}
    wins = {n: winner(rows, sweep.variants, bytes_of, served.get(n)) for n, rows in cells.items()}
    evidence = Evidence(sweep, sweep_id, trials, cells, wins, floor, chosen, terms, incumbent, edges)
    table = _table(sweep, derivation.segments, evidence)
    return Derived(table, derivation, cells, missing, floor, wins, chosen, incumbent, edges, sweep.floors)


def _table(sweep: SweepRecord, segments: Sequence[Segment], evidence: Evidence) -> DispatchTable:
    """Return the table of the segments: a band each, with what speaks for it."""
    chosen = evidence.chosen
    bands = tuple(
        Band(segment.first, segment.last, _choice(chosen.options, segment), evidence.of_band(segment))
        for segment in segments
    )
    return DispatchTable(
        seam=sweep.seam,
        problem=sweep.problem.to_dict(),
        target=sweep.target,
        numerics=chosen.numerics,
        fingerprint=sweep.fingerprint,
        bands=bands,
        # The kernels of the last band are legal for every larger count: no constraint reads the count.
        default=bands[-1].choice,
        evidence=evidence.of_table(bands),
    )


def _moved(segments: Sequence[Segment], edges: Sequence[Edge]) -> tuple[Segment, ...]:
    """Return the segments with the edges that were probed."""
    firsts = [segments[0].first, *(edge.last + 1 for edge in edges)]
    lasts = [*(edge.last for edge in edges), segments[-1].last]
    return tuple(
        replace(segment, first=first, last=last)
        for segment, first, last in zip(segments, firsts, lasts, strict=True)
    )


def options_of(
    sweep: SweepRecord, trials: Sequence[Trial], cells: Mapping[int, Sequence[Standing]]
) -> list[Option]:
    """Return the candidates as the deriver sees them: a regret below the noise floor is none."""
    found = {(n, s.candidate): s for n, rows in cells.items() for s in rows}
    bytes_of: Counter[Candidate] = Counter()
    for trial in trials:
        bytes_of[trial.candidate] = max(bytes_of[trial.candidate], trial.footprint.forecast_bytes)
    options = []
    for candidate, variants in sweep.variants.items():
        rows = [found.get((n, candidate)) for n in cells]
        options.append(
            Option(
                candidate,
                frozenset(variants),
                bytes_of[candidate],
                tuple(_beyond_noise(s) if s else None for s in rows),
                tuple(s.regret.upper if s else None for s in rows),
                tuple(max(s.regret.upper - s.regret.point, s.floor) if s else None for s in rows),
            )
        )
    return options


def _beyond_noise(standing: Standing) -> float:
    return standing.regret.point if standing.regret.point > standing.floor else 0.0


def _choice(options: Sequence[Option], segment: Segment) -> Choice:
    candidate = options[segment.option].candidate
    return Choice.of(candidate.arm, candidate.config)


def _served(incumbent: Incumbent | None, counts: Sequence[int]) -> dict[int, Candidate]:
    found = {n: incumbent.candidate(n) for n in counts} if incumbent else {}
    return {n: candidate for n, candidate in found.items() if candidate is not None}


def incumbent_for(fingerprint: Fingerprint, tables: Sequence[DispatchTable]) -> DispatchTable | None:
    """Return the newest table measured under a fingerprint, given the newest first."""
    return next((t for t in tables if t.fingerprint == fingerprint), None)
