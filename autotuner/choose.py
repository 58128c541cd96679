"""Choosing bands on terms: how many variants at most, one numerics class, weighted by traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mhctune.autotuner.bands import BandDeriver, Derivation, NoBands, Option, derivation_of
from mhctune.autotuner.front import Point, bound_for, pareto, smallest_bound
from mhctune.autotuner.hold import Held, stands, with_margins
from mhctune.autotuner.terms import Terms, numerics_of
from mhctune.autotuner.words import counted, percent
from mhctune.kernels.space import Candidate


@dataclass(frozen=True)
class Chosen:
    """Bands on terms, the options they were chosen from, and what the terms cost.

    `free` is what could be had without them, where there are any that restrict; `held` is what the sweep
    alone would have given where that costs less, but not enough to take the incumbent's place.
    """

    counts: tuple[int, ...]
    options: Sequence[Option]
    derivation: Derivation
    numerics: str
    weights: Sequence[float]
    max_regret: float
    free: Point | None = None
    held: Held | None = None

    @property
    def candidates(self) -> list[Candidate]:
        """Who is chosen, by token count."""
        return [self.options[g].candidate for g in self.derivation.choices]

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
    hold: float = 0.0,
) -> Chosen:
    """Return the best bands under a bound, on terms; an incumbent within the bound everywhere is held.

    Then whoever takes the place of an incumbent's choice must be within the bound by `hold` of its spreads:
    bands that a repeated sweep could take back replace nothing. An incumbent that breaks the bound anywhere,
    was not measured everywhere or does not meet the terms has no such privilege.

    Raises:
        NoBands: as `BandDeriver.derive`; no numerics class is within the bound; or the variants do not
            suffice.
    """
    alone = _best(counts, options, max_regret, served, terms)
    if not hold or not stands(counts, options, max_regret, served, terms):
        return alone
    dearer = with_margins(counts, options, served, hold)
    best = _best(counts, dearer, max_regret, served, terms, held=True)
    if best.candidates == alone.candidates:
        return alone
    as_measured = {option.candidate: option for option in options}
    allowed = [as_measured[option.candidate] for option in best.options]
    derivation = derivation_of(counts, allowed, best.derivation.choices, best.weights)
    places = {option.candidate: place for place, option in enumerate(dearer)}
    again = derivation_of(counts, dearer, tuple(places[c] for c in alone.candidates), alone.weights)
    whole = all(served[count] == c for count, c in zip(counts, best.candidates, strict=True))
    lower = terms.max_variants is not None and alone.derivation.worst_upper < derivation.worst_upper
    held = Held.of(alone.derivation, again, whole) if lower or _costs_of(alone) < _costs_of(best) else None
    return replace(best, options=allowed, derivation=derivation, free=alone.free, held=held)


def _best(
    counts: Sequence[int],
    options: Sequence[Option],
    max_regret: float,
    served: Mapping[int, Candidate],
    terms: Terms,
    *,
    held: bool = False,
) -> Chosen:
    """Return the best bands by the options' limits as they are given.

    Batch-invariant: each numerics class by itself, and of those within the bound the one with the fewest
    variants, then bands, then the incumbent's if it is held, then the lowest mean regret, then its name.
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
        kept = {numerics_of(candidate) for candidate in served.values()} if held else set()
        return min(found, key=lambda each: (*_costs_of(each), each.numerics not in kept, *_rank(each)))
    if not needed:
        raise NoBands("no numerics class was measured at every token count; sweep more n_splits")
    nearest = min(needed, key=lambda numerics: (needed[numerics], numerics))
    raise NoBands(
        f"no numerics class is within {percent(max_regret)} at every token count; the nearest, {nearest}, "
        f"needs {percent(needed[nearest])}: raise --max-regret"
    )


def _costs_of(chosen: Chosen) -> tuple[int, int]:
    return len(chosen.derivation.variants), len(chosen.derivation.segments)


def _rank(chosen: Chosen) -> tuple[float, str]:
    return chosen.derivation.mean_regret, chosen.numerics


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
