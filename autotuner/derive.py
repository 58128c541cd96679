"""From the trials of a sweep to a dispatch table with its evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mhctune.autotuner.bands import BandDeriver, Derivation, NoBands, Option, Segment
from mhctune.autotuner.records import Failure, Measurement, Trial
from mhctune.autotuner.stats import RegretInterval, TooFewSamples, paired_ratios, pairs_needed, regret
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.sweep import unmeasured
from mhctune.autotuner.words import counted
from mhctune.kernels.dispatch import Band, Choice, DispatchTable, Fingerprint
from mhctune.kernels.space import Candidate

CONFIDENCE = 0.95
"""Of each limit of a regret."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How one candidate stands in one cell: its latency, and its regret against the cell's best."""

    candidate: Candidate
    latency_us: float
    regret: RegretInterval

    @property
    def tied(self) -> bool:
        """Whether the samples do not tell it from the best: its interval reaches zero."""
        return self.regret.lower <= 0


def standings(trials: Sequence[Trial]) -> list[Standing]:
    """Return the measured candidates of one cell, best first.

    The best is the lowest median; each other is compared with it round by round. In a cell that was raced
    in several batches a candidate may share too few rounds with the best: then the comparison goes over a
    bridge, a candidate that is placed already and shares enough rounds (the champion that was carried).
    Regrets a over the bridge and b of the bridge make (1 + a)(1 + b) - 1, point and limits alike; of
    several bridges the one with the smallest upper limit counts. Where one limit holds at confidence c,
    one over a bridge holds at least at 2 c - 1 (90 % for 95 %), and every further bridge takes 1 - c more.
    A regret is never negative.

    Raises:
        TooFewSamples: a candidate shares enough rounds with nobody that leads to the best.
    """
    measured = {t.candidate: t.outcome for t in trials if isinstance(t.outcome, Measurement)}
    order = sorted(measured, key=lambda candidate: (measured[candidate].latency_us, candidate))
    if not order:
        return []
    best = order[0]
    placed = {best: regret(measured[best].samples, measured[best].samples)}
    while len(placed) < len(order):
        bridges = dict(placed)
        for candidate in order:
            if candidate not in placed and (found := _placed(candidate, best, bridges, measured)):
                placed[candidate] = found
        if len(placed) == len(bridges):
            stray = next(candidate for candidate in order if candidate not in placed)
            raise TooFewSamples(
                f"{stray} and the best, {best}, share fewer than {pairs_needed(CONFIDENCE)} rounds at "
                f"{counted(trials[0].cell.num_tokens, 'token')}, and no third candidate links them. "
                "Give the sweep a larger --vram-budget, or more --samples."
            )
    return [Standing(c, measured[c].latency_us, _floored(placed[c])) for c in order]


def _floored(interval: RegretInterval) -> RegretInterval:
    """Return the interval with neither point nor upper limit below 0.

    Round by round a candidate can be ahead of the lowest median: then the noise does not tell the two
    apart, and nothing is lost by it, but nothing is gained by calling the other one best.
    """
    return replace(interval, point=max(interval.point, 0.0), upper=max(interval.upper, 0.0))


def _placed(
    candidate: Candidate,
    best: Candidate,
    bridges: Mapping[Candidate, RegretInterval],
    measured: Mapping[Candidate, Measurement],
) -> RegretInterval | None:
    found = []
    for bridge, onward in bridges.items():
        mine, others = measured[candidate].samples, measured[bridge].samples
        if len(paired_ratios(mine, others)) >= pairs_needed(CONFIDENCE):
            over = regret(mine, others, CONFIDENCE)
            found.append(over if bridge == best else _product(over, onward))
    return min(found, key=lambda interval: interval.upper, default=None)


def _product(a: RegretInterval, b: RegretInterval) -> RegretInterval:
    return RegretInterval(
        (1 + a.point) * (1 + b.point) - 1,
        (1 + a.lower) * (1 + b.lower) - 1,
        (1 + a.upper) * (1 + b.upper) - 1,
        min(a.n, b.n),
    )


@dataclass(frozen=True)
class Derived:
    """A table, how it was chosen, and which token counts it leaves out and why."""

    table: DispatchTable
    derivation: Derivation
    cells: Mapping[int, Sequence[Standing]]
    missing: Mapping[int, str]


def derive(
    sweep: SweepRecord,
    sweep_id: int,
    trials: Sequence[Trial],
    max_regret: float,
    incumbent: DispatchTable | None = None,
) -> Derived:
    """Derive the bands of a sweep, from what was kept alone: its arms may have changed since.

    A band covers no token count whose part of the grid was not measured: the table ends before the first.

    Raises:
        NoBands: the smallest token count was not measured, or no candidate is within the bound somewhere.
        TooFewSamples: see `standings`.
    """
    missing = unmeasured(sweep.token_counts, sweep.candidates, trials)
    counts = [n for n in sweep.token_counts if not missing or n < min(missing)]
    if not counts:
        raise NoBands(
            f"sweep {sweep_id} has nothing to derive bands from: {missing[min(missing)]}; run the sweep again"
        )
    cells = {n: standings([t for t in trials if t.cell.num_tokens == n]) for n in counts}
    options = _options(sweep, trials, cells)
    served = {n: _served(incumbent, n) for n in counts} if incumbent is not None else {}
    derivation = BandDeriver(max_regret).derive(counts, options, served)
    bands = tuple(
        Band(segment.first, segment.last, _choice(options, segment), _evidence(segment, options, cells))
        for segment in derivation.segments
    )
    table = DispatchTable(
        seam=sweep.seam,
        problem=sweep.problem.to_dict(),
        target=sweep.target,
        numerics="rounded",
        fingerprint=sweep.fingerprint,
        bands=bands,
        # The kernels of the last band are legal for every larger count: no constraint reads the count.
        default=bands[-1].choice,
        evidence={
            "sweep": sweep_id,
            "sweep_digest": sweep.digest,
            "max_regret": max_regret,
            "worst_upper": round(derivation.worst_upper, 6),
            "mean_regret": round(derivation.mean_regret, 6),
            "variants": sorted(derivation.variants),
            "candidates": len(sweep.variants),
            "protocol": dict(sweep.protocol),
            "sources": dict(sweep.sources),
            "failures": _failures(trials),
        },
    )
    return Derived(table, derivation, cells, missing)


def _options(
    sweep: SweepRecord, trials: Sequence[Trial], cells: Mapping[int, Sequence[Standing]]
) -> list[Option]:
    found = {(n, s.candidate): s.regret for n, rows in cells.items() for s in rows}
    bytes_of: Counter[Candidate] = Counter()
    for trial in trials:
        bytes_of[trial.candidate] = max(bytes_of[trial.candidate], trial.footprint.forecast_bytes)
    options = []
    for candidate, variants in sweep.variants.items():
        intervals = [found.get((n, candidate)) for n in cells]
        options.append(
            Option(
                candidate,
                frozenset(variants),
                bytes_of[candidate],
                tuple(i.point if i else None for i in intervals),
                tuple(i.upper if i else None for i in intervals),
            )
        )
    return options


def _choice(options: Sequence[Option], segment: Segment) -> Choice:
    candidate = options[segment.option].candidate
    return Choice.of(candidate.arm, candidate.config)


def _served(table: DispatchTable | None, num_tokens: int) -> Candidate:
    assert table is not None
    choice = table.lookup(num_tokens).choice
    return Candidate(choice.arm, choice.config)


def _evidence(
    segment: Segment, options: Sequence[Option], cells: Mapping[int, Sequence[Standing]]
) -> dict[str, Any]:
    """Return, for each measured token count of a band, what the choice costs and who else is as good."""
    rows: list[dict[str, Any]] = []
    for count in segment.token_counts:
        standing = next(s for s in cells[count] if s.candidate == options[segment.option].candidate)
        best = cells[count][0]
        rows.append(
            {
                "num_tokens": count,
                "latency_us": round(standing.latency_us, 4),
                "regret": round(standing.regret.point, 6),
                "upper": round(standing.regret.upper, 6),
                "rounds": standing.regret.n,
                "best": str(best.candidate),
                "best_us": round(best.latency_us, 4),
                "tie_set": sum(s.tied for s in cells[count]),
            }
        )
    return {"measured": rows, "worst_upper": max(row["upper"] for row in rows)}


def _failures(trials: Sequence[Trial]) -> dict[str, int]:
    kinds = Counter(t.outcome.kind.value for t in trials if isinstance(t.outcome, Failure))
    return dict(sorted(kinds.items()))


def incumbent_for(fingerprint: Fingerprint, tables: Sequence[DispatchTable]) -> DispatchTable | None:
    """Return the newest table measured under a fingerprint, given the newest first."""
    return next((t for t in tables if t.fingerprint == fingerprint), None)
