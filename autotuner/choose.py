"""Choosing bands on terms: how many variants at most, one numerics class, weighted by traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mhctune.autotuner.bands import BandDeriver, Derivation, NoBands, Option
from mhctune.autotuner.front import Point, bound_for, pareto, smallest_bound
from mhctune.autotuner.terms import Terms, numerics_of
from mhctune.autotuner.words import counted, percent
from mhctune.kernels.space import Candidate


@dataclass(frozen=True)
class Chosen:
    """Bands on terms, the options they were chosen from, and what the terms cost.

    `free` is what could be had without them, where there are any that restrict.
    """

    counts: tuple[int, ...]
    options: Sequence[Option]
    derivation: Derivation
    numerics: str
    weights: Sequence[float]
    max_regret: float
    free: Point | None = None

    @property
    def point(self) -> Point:
        """What the bands cost."""
        return Point.of(self.derivation, self.derivation.worst_upper)

    def front(self) -> list[Point]:
        """Return the Pareto front of the options that were allowed; some 0.1 s for 140 candidates."""
        return pareto(self.counts, self.options, self.weights)


def choose(
    counts: Sequence[int],
    options: Sequence[Option],
    max_regret: float,
    served: Mapping[int, Candidate],
    terms: Terms,
) -> Chosen:
    """Return the best bands under a bound, on terms.

    Batch-invariant: each numerics class by itself, and of those within the bound the one with the fewest
    variants, then bands, then the lowest mean regret, then its name.

    Raises:
        NoBands: as `BandDeriver.derive`; no class is within the bound; or the variants do not suffice.
    """
    weights = terms.weights(counts) if terms.traffic is not None else None

    def derive(allowed: Sequence[Option]) -> Derivation:
        bound = max_regret
        if terms.max_variants is not None:
            bound = bound_for(counts, allowed, terms.max_variants, max_regret)
        return BandDeriver(bound).derive(counts, allowed, served, weights)

    def chosen(allowed: Sequence[Option], numerics: str, free: Point | None) -> Chosen:
        shares = weights or [1 / len(counts)] * len(counts)
        return Chosen(tuple(counts), allowed, derive(allowed), numerics, shares, max_regret, free)

    if not terms.batch_invariant:
        return chosen(options, "rounded", None)
    free = BandDeriver(max_regret).derive(counts, options, served, weights)
    point = Point.of(free, max_regret)
    found: list[Chosen] = []
    needed: dict[str, float] = {}
    for numerics in sorted({numerics_of(option.candidate) for option in options}):
        allowed = [option for option in options if numerics_of(option.candidate) == numerics]
        bound = smallest_bound(counts, allowed, terms.max_variants or len(options) * len(counts))
        if bound is not None and bound <= max_regret:
            found.append(chosen(allowed, numerics, point))
        elif bound is not None:
            needed[numerics] = bound
    if found:
        return min(found, key=_rank)
    if not needed:
        raise NoBands("no numerics class was measured at every token count; sweep more n_splits")
    nearest = min(needed, key=lambda numerics: (needed[numerics], numerics))
    raise NoBands(
        f"no numerics class is within {percent(max_regret)} at every token count; the nearest, {nearest}, "
        f"needs {percent(needed[nearest])}: raise --max-regret"
    )


def _rank(chosen: Chosen) -> tuple[int, int, float, str]:
    derivation = chosen.derivation
    bands, mean = len(derivation.segments), derivation.mean_regret
    return len(derivation.variants), bands, mean, chosen.numerics


def price(chosen: Chosen) -> str:
    """Say what one numerics class costs; empty where nothing was restricted."""
    if chosen.free is None:
        return ""
    mine, free = chosen.point, chosen.free
    return f"batch-invariant: only {chosen.numerics}; {_costs(mine)}. Without: {_costs(free)}"


def _costs(point: Point) -> str:
    return (
        f"{counted(point.variants, 'kernel')}, {counted(point.bands, 'band')}, worst limit "
        f"{percent(point.worst_upper)}, mean regret {percent(point.mean_regret)}"
    )
