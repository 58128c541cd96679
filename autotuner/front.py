"""The Pareto front of bands: worst regret, mean regret and number of variants, none better in all three."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from mhctune.autotuner.bands import BandDeriver, Derivation, NoBands, Option
from mhctune.autotuner.words import counted, percent


@dataclass(frozen=True, slots=True)
class Point:
    """What one set of bands costs; `bound` is the smallest that gives it."""

    variants: int
    bands: int
    worst_upper: float
    mean_regret: float
    bound: float

    @classmethod
    def of(cls, derivation: Derivation, bound: float) -> Point:
        """Return the costs of bands."""
        costs = derivation.worst_upper, derivation.mean_regret
        return cls(len(derivation.variants), len(derivation.segments), *costs, bound)

    def dominates(self, other: Point) -> bool:
        """Say whether it is no worse in all three costs and better in one."""
        mine, theirs = ((p.variants, p.worst_upper, p.mean_regret) for p in (self, other))
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def smallest_bound(counts: Sequence[int], options: Sequence[Option], max_variants: int) -> float | None:
    """Return the smallest bound under which so many variants do; None: no bound is large enough."""
    uppers = sorted({upper for option in options for upper in option.upper if upper is not None})
    least = max(
        min((u for option in options if (u := option.upper[place]) is not None), default=float("inf"))
        for place in range(len(counts))
    )
    bounds = [upper for upper in uppers if upper >= least]

    def suffice(bound: float) -> bool:
        return BandDeriver(bound).fewest_variants(counts, options) <= max_variants

    place = bisect_left(bounds, True, key=suffice)
    return bounds[place] if place < len(bounds) else None


def pareto(
    counts: Sequence[int], options: Sequence[Option], weights: Sequence[float] | None = None
) -> list[Point]:
    """Return, by number of variants, the bands whose worst regret is least; dominated ones are left out.

    Exact in variants and worst regret; the mean is that of the chosen bands, which minimise it last.
    """
    points: list[Point] = []
    most = None
    for number in range(1, 1 + len({name for option in options for name in option.variants})):
        bound = smallest_bound(counts, options, number)
        if bound is None or (most is not None and bound >= most):
            continue
        most = bound
        points.append(Point.of(BandDeriver(bound).derive(counts, options, weights=weights), bound))
        if bound == smallest_bound(counts, options, 10**9):
            break
    return [p for p in points if not any(other.dominates(p) for other in points)]


def bound_for(
    counts: Sequence[int], options: Sequence[Option], max_variants: int, max_regret: float
) -> float:
    """Return the smallest bound under which at most `max_variants` do.

    Raises:
        NoBands: it is larger than `max_regret`, or there is none.
    """
    bound, what = smallest_bound(counts, options, max_variants), counted(max_variants, "variant")
    if bound is None:
        raise NoBands(f"no choice of {what} serves every token count; allow more with --max-variants")
    if bound > max_regret:
        raise NoBands(
            f"no choice of {what} is within {percent(max_regret)}, the least has {percent(bound)}: raise "
            "--max-regret, or allow more with --max-variants"
        )
    return bound
