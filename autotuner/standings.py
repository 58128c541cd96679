"""The standings of a cell: who is best, what the others lose against it, and who is as good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mhctune.autotuner.records import Measurement, Trial
from mhctune.autotuner.stats import (
    CONFIDENCE,
    RegretInterval,
    TooFewSamples,
    paired_ratios,
    pairs_needed,
    regret,
    steady,
)
from mhctune.autotuner.words import counted
from mhctune.kernels.space import Candidate


@dataclass(frozen=True, slots=True)
class Standing:
    """How one candidate stands in one cell: its latency, and its regret against the cell's best.

    `floor` is the width of the sweep's noise floor, 0 where it is not known.
    """

    candidate: Candidate
    latency_us: float
    regret: RegretInterval
    floor: float = 0.0

    @property
    def tied(self) -> bool:
        """Whether nothing tells it from the best: its interval reaches 0, or its regret the noise floor."""
        return self.regret.lower <= 0 or self.regret.point <= self.floor


def standings(trials: Sequence[Trial], floor: float = 0.0) -> list[Standing]:
    """Return the measured candidates of one cell, best first; `floor` is the sweep's (see `noise_floor`).

    The best has the lowest median without drift (see `steady`), which is also the latency that is shown.
    Where finalists were moved to other addresses it is one of them: whoever was timed at one place only is
    surely slower than one of them there, by more than places differ (`mhctune.autotuner.field`). Nor is it
    one who left before the last placement of its batch: others were ahead there. Each other candidate is
    compared with it round by round. In a cell that was raced in several batches it may share too few rounds
    with the best: then the comparison goes over a bridge, a candidate that is placed already and shares
    enough rounds (the champion that was carried). Regrets a over the bridge and b of the bridge make
    (1 + a)(1 + b) - 1, point and limits alike; of several bridges the one with the smallest upper limit
    counts. Where one limit holds at confidence c, one over a bridge holds at least at 2 c - 1 (90 % for 95
    %), and every further bridge takes 1 - c more; so it is with a finalist's, which two looks at the same
    race decide. A regret is never negative.

    Who left early was surely slower by more than the bound of the sweep. Its limits come from the few rounds
    that it ran and are as wide as those say: a larger bound may let it in by them, and by nothing else.

    Raises:
        TooFewSamples: a candidate shares enough rounds with nobody that leads to the best.
    """
    measured = {t.candidate: t.outcome for t in trials if isinstance(t.outcome, Measurement)}
    if not measured:
        return []
    latency = {candidate: outcome.latency_us for candidate, outcome in measured.items()}
    latency |= steady({candidate: outcome.samples for candidate, outcome in measured.items()})
    best = min(_finalists(measured) or measured, key=lambda c: (latency[c], c))
    placed = _linked(best, measured, counted(trials[0].cell.num_tokens, "token"))
    found = [Standing(c, latency[c], _floored(interval), floor) for c, interval in placed.items()]
    return sorted(found, key=lambda s: (s.candidate != best, s.regret.point, s.latency_us, s.candidate))


def _finalists(measured: Mapping[Candidate, Measurement]) -> set[Candidate]:
    """Return who was moved as far as anybody in the last batch that it was moved in."""
    reached: dict[Candidate, tuple[int, int]] = {}
    farthest: dict[int, int] = {}
    for candidate, outcome in measured.items():
        moved = [(s.batch, s.placement) for s in outcome.samples if s.placement]
        if moved:
            batch, placement = reached[candidate] = max(moved)
            farthest[batch] = max(placement, farthest.get(batch, 0))
    return {c for c, (batch, placement) in reached.items() if placement == farthest[batch]}


def _linked(
    best: Candidate, measured: Mapping[Candidate, Measurement], where: str
) -> dict[Candidate, RegretInterval]:
    """Return what each is slower than `best` by, straight or over bridges."""
    order = sorted(measured)
    if len(paired_ratios(measured[best].samples, measured[best].samples)) < pairs_needed(CONFIDENCE):
        raise TooFewSamples(_short(best, measured[best], where))
    placed = {best: regret(measured[best].samples, measured[best].samples)}
    while len(placed) < len(order):
        bridges = dict(placed)
        for candidate in order:
            if candidate not in placed and (found := _placed(candidate, best, bridges, measured)):
                placed[candidate] = found
        if len(placed) == len(bridges):
            stray = next(candidate for candidate in order if candidate not in placed)
            raise TooFewSamples(_stray(stray, best, measured, where))
    return placed


def _short(best: Candidate, outcome: Measurement, where: str) -> str:
    rounds = sum(not s.throttled for s in outcome.samples)
    return (
        f"{best} has {counted(rounds, 'round')} at {where}{_without(outcome)}; a limit needs "
        f"{pairs_needed(CONFIDENCE)}. Measure more rounds"
    )


def _stray(stray: Candidate, best: Candidate, measured: Mapping[Candidate, Measurement], where: str) -> str:
    return (
        f"{stray} and the best, {best}, share fewer than {pairs_needed(CONFIDENCE)} rounds at {where}"
        f"{_without(measured[stray])}, and no third candidate links them. "
        "Give the sweep a larger --vram-budget, or more --samples."
    )


def _without(outcome: Measurement) -> str:
    throttled = sum(s.throttled for s in outcome.samples)
    return f" ({counted(throttled, 'throttled round')} left out)" if throttled else ""


def winner(
    rows: Sequence[Standing],
    variants: Mapping[Candidate, Sequence[str]],
    bytes_of: Mapping[Candidate, int],
    incumbent: Candidate | None = None,
) -> Candidate:
    """Return who wins a cell by itself, of those tied with the best.

    That is the incumbent, or else whoever launches the fewest kernels, then takes the least memory, then
    comes first in `variants`, which names each candidate's kernels in the order of the sweep.
    """
    order = {candidate: place for place, candidate in enumerate(variants)}

    def rank(candidate: Candidate) -> tuple[bool, int, int, int]:
        kernels = len(set(variants[candidate]))
        return candidate != incumbent, kernels, bytes_of[candidate], order[candidate]

    return min((s.candidate for s in rows if s.tied), key=rank)


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
