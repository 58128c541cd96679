"""Bands: from measurements to the fewest variants under a bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mhctune.autotuner.cover import VariantCover
from mhctune.autotuner.words import counted
from mhctune.kernels.space import Candidate

# Regrets are added as integers of 1e-12, far below any timer: a float sum would depend on the order of its
# terms, and two equally good derivations could swap places.
_REGRET_UNIT = 1e12


class NoBands(ValueError):
    """Bands that cannot be derived: which token count or option is in the way."""


@dataclass(frozen=True, slots=True)
class Option:
    """A candidate as the derivation sees it.

    `regret` (point) and `upper` (upper confidence limit) hold one value a token count; both are None where
    the candidate was not measured or failed. `spread`, one a token count, is how far noise moves a limit: it
    is read where an incumbent is held.
    """

    candidate: Candidate
    variants: frozenset[str]
    memory_bytes: int
    regret: tuple[float | None, ...]
    upper: tuple[float | None, ...]
    spread: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """A closed token range with one option.

    `first` follows the previous segment's `last` (1 for the first segment); `last` is the last measured
    token count that the choice won; `token_counts` are the measured ones.
    """

    first: int
    last: int
    option: int
    token_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Derivation:
    """The best choice of one option (an index) per token count, and what it costs."""

    segments: tuple[Segment, ...]
    choices: tuple[int, ...]
    variants: frozenset[str]
    worst_upper: float
    mean_regret: float


class BandDeriver:
    """Derives bands whose regret, by the upper confidence limit, stays within `max_regret`.

    Among all choices of one option per token count within the bound, the derivation has the fewest
    distinct variants, then the fewest bands, then the most token counts served by the incumbent, then the
    lowest mean regret, then the least memory (bytes added over the token counts), then the smallest
    sequence of option indices. It is exact, and so exponential in the worst case (it contains a set
    cover). An H200 sweep of 264 options at 10 token counts takes 5 ms; 1410 made-up options that share
    variants, at 24 token counts, take about 0.2 s.
    """

    def __init__(self, max_regret: float = 0.05) -> None:
        if not max_regret >= 0:  # also refuses NaN
            raise ValueError(f"max_regret is {max_regret}; it must be 0 or more (0.05 is 5 %)")
        self._max_regret = max_regret

    def derive(
        self,
        token_counts: Sequence[int],
        options: Sequence[Option],
        incumbent: Mapping[int, Candidate] | None = None,
        weights: Sequence[float] | None = None,
    ) -> Derivation:
        """Return the best choice; `incumbent` is what is served today, by token count.

        `weights` are the shares of the mean regret, one a token count, 1 in all; equal where none are given.

        Raises:
            NoBands: token counts that do not rise from 1 or above, malformed options, a token count where
                nothing was measured, or one where no option is within the bound.
        """
        _check_token_counts(token_counts)
        _check_options(options, len(token_counts))
        feasible = [self._feasible(place, count, options) for place, count in enumerate(token_counts)]
        served = [(incumbent or {}).get(count) for count in token_counts]
        # Unscaled where all weigh the same: a share such as 1/3 would round, and equal sums come out unequal.
        choices = _Search(feasible, options, served, weights or [1.0] * len(token_counts)).best()
        equal = [1 / len(token_counts)] * len(token_counts)
        return derivation_of(token_counts, options, choices, weights or equal)

    def fewest_variants(self, token_counts: Sequence[int], options: Sequence[Option]) -> int:
        """Return the fewest variants under the bound.

        Raises:
            NoBands: as `derive`.
        """
        feasible = [self._feasible(place, count, options) for place, count in enumerate(token_counts)]
        return _cover(feasible, options)[1].fewest()

    def _feasible(self, place: int, token_count: int, options: Sequence[Option]) -> list[int]:
        uppers = {g: upper for g, option in enumerate(options) if (upper := option.upper[place]) is not None}
        where = counted(token_count, "token")
        if not uppers:
            raise NoBands(f"nothing was measured at {where}; sweep it or leave it out")
        within = [g for g, upper in uppers.items() if upper <= self._max_regret]
        if not within:
            g = min(uppers, key=lambda g: uppers[g])
            raise NoBands(
                f"no option is within {self._max_regret:.2%} at {where}: the smallest upper "
                f"limit is {uppers[g]:.2%}, of {options[g].candidate}. Measure more rounds or raise the "
                "bound."
            )
        return within


# (variants used, bands, -incumbent, regret, memory, options so far): compared as it stands.
_Label = tuple[int, int, int, int, int, tuple[int, ...]]
# (last option, used variants that an option of a later position launches)
_Key = tuple[int, int]


class _Search:
    """A shortest path over the positions with lexicographic labels.

    What a step adds to a label depends only on the label's key: a variant that no later option launches is
    paid for and cannot be reused. So of the labels with one key only the smallest can become the best, and
    keeping it is exact. The variants (`VariantCover.fewest`) and then the bands are limited from below,
    which cuts labels that cannot finish; the first limit that leaves a path is the optimum.
    """

    def __init__(
        self,
        feasible: list[list[int]],
        options: Sequence[Option],
        served: Sequence[Candidate | None],
        weights: Sequence[float],
    ) -> None:
        self._launches, self._cover = _cover(feasible, options)
        self._bands_after = _bands_after(feasible)
        self._later = _later_variants(feasible, self._launches)
        self._steps = [
            [(g, *_costs(options[g], place, served[place], weights[place])) for g in within]
            for place, within in enumerate(feasible)
        ]

    def best(self) -> tuple[int, ...]:
        """Return the best sequence of options."""
        max_variants = self._cover.fewest()
        # At least the bands that would do if variants were free; at most one a position.
        fewest_bands = 1 + min(self._bands_after[0].values())
        for max_bands in range(fewest_bands, len(self._steps) + 1):
            labels: dict[_Key, _Label] = {(-1, 0): (0, 0, 0, 0, 0, ())}
            for place in range(len(self._steps)):
                labels = self._advance(place, labels, max_variants, max_bands)
            if labels:
                return min(labels.values())[-1]
        raise AssertionError("a cover exists, so one band a position is always a path")

    def _advance(
        self, place: int, labels: Mapping[_Key, _Label], max_variants: int, max_bands: int
    ) -> dict[_Key, _Label]:
        """Return the best label of every key after one more position."""
        ahead = (1 << len(self._steps)) - (2 << place)
        bands_after, later, launches = self._bands_after[place], self._later[place], self._launches
        reached: dict[_Key, _Label] = {}
        missing: dict[int, int] = {}
        for (last, held), (variants, bands, incumbent, regret, memory, path) in labels.items():
            for g, kept, point, size in self._steps[place]:
                now_bands = bands + (g != last)
                if now_bands + bands_after[g] > max_bands:
                    continue
                now_variants = variants + (launches[g] & ~held).bit_count()
                if now_variants > max_variants:
                    continue
                now_held = (held | launches[g]) & later
                if now_held not in missing:
                    missing[now_held] = self._cover.missing(now_held, ahead)
                if now_variants + missing[now_held] > max_variants:
                    continue
                label = (now_variants, now_bands, incumbent - kept, regret + point, memory + size, (*path, g))
                known = reached.get((g, now_held))
                if known is None or label < known:
                    reached[g, now_held] = label
        return reached


def _cover(feasible: list[list[int]], options: Sequence[Option]) -> tuple[list[int], VariantCover]:
    """Return what each option launches, as a bit mask of variants, and the cover of the token counts."""
    names = sorted(frozenset().union(*(option.variants for option in options)))
    bit = {name: 1 << place for place, name in enumerate(names)}
    launches = [sum(bit[name] for name in option.variants) for option in options]
    serves = [0] * len(options)
    for place, g in ((place, g) for place, within in enumerate(feasible) for g in within):
        serves[g] |= 1 << place
    return launches, VariantCover(launches, serves)


def _costs(option: Option, place: int, served: Candidate | None, weight: float) -> tuple[bool, int, int]:
    regret = option.regret[place]
    assert regret is not None  # feasible options are measured
    return option.candidate == served, round(regret * weight * _REGRET_UNIT), option.memory_bytes


def _bands_after(feasible: list[list[int]]) -> list[dict[int, int]]:
    """Return the fewest bands that begin after each position, by the option chosen there."""
    after = [dict.fromkeys(feasible[-1], 0)]
    for within in reversed(feasible[:-1]):
        following = after[-1]
        change = 1 + min(following.values())
        after.append({g: min(change, following.get(g, change)) for g in within})
    return after[::-1]


def _later_variants(feasible: list[list[int]], launches: Sequence[int]) -> list[int]:
    """Return, for each position, the variants that options of later positions launch."""
    later = [0]
    for within in reversed(feasible[1:]):
        mask = later[-1]
        for g in within:
            mask |= launches[g]
        later.append(mask)
    return later[::-1]


def _check_token_counts(token_counts: Sequence[int]) -> None:
    if not token_counts:
        raise NoBands("no token counts are given")
    for before, count in itertools.pairwise((0, *token_counts)):
        if count <= before:
            raise NoBands(f"token counts must rise from 1 or above: {count} follows {before}")


def _check_options(options: Sequence[Option], length: int) -> None:
    seen: set[Candidate] = set()
    for option in options:
        if option.candidate in seen:
            raise NoBands(f"option {option.candidate} is given twice")
        seen.add(option.candidate)
        if len(option.regret) != length or len(option.upper) != length:
            raise NoBands(
                f"option {option.candidate} has {len(option.regret)} regrets and {len(option.upper)} upper "
                f"limits for {length} token counts"
            )
        for regret, upper in zip(option.regret, option.upper, strict=True):
            if (regret is None) != (upper is None):
                raise NoBands(f"option {option.candidate} has regret {regret} with upper limit {upper}")
            if not (math.isfinite(regret or 0) and math.isfinite(upper or 0)):
                raise NoBands(
                    f"option {option.candidate} has regret {regret}, upper limit {upper}: not finite"
                )


def derivation_of(
    token_counts: Sequence[int],
    options: Sequence[Option],
    choices: tuple[int, ...],
    weights: Sequence[float],
) -> Derivation:
    """Return what a choice of one option (an index) per token count costs; each was measured there."""
    segments: list[Segment] = []
    first = 1
    for g, run in itertools.groupby(range(len(choices)), key=choices.__getitem__):
        counts = tuple(token_counts[place] for place in run)
        segments.append(Segment(first, counts[-1], g, counts))
        first = counts[-1] + 1
    chosen = [(options[g].regret[place], options[g].upper[place]) for place, g in enumerate(choices)]
    return Derivation(
        segments=tuple(segments),
        choices=choices,
        variants=frozenset().union(*(options[g].variants for g in choices)),
        worst_upper=max(upper for _, upper in chosen if upper is not None),
        mean_regret=math.fsum(w * r for w, (r, _) in zip(weights, chosen, strict=True) if r is not None),
    )
