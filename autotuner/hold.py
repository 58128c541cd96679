"""Hold: what is served stays where other bands would do only by what a repeated sweep may take back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mhctune.autotuner.bands import Derivation, Option
from mhctune.autotuner.terms import Terms, numerics_of
from mhctune.autotuner.words import counted, percent
from mhctune.kernels.space import Candidate


@dataclass(frozen=True, slots=True)
class Held:
    """The bands that this sweep alone would give, and that do not take the incumbent's place.

    Attributes:
        variants: Their compiled kernels.
        bands: Their number.
        worst_upper: Their worst upper limit in this sweep.
        again: What a repeated sweep may make of that: the largest limit with its margin.
        whole: Whether every token count keeps its choice; else some change, surely.
    """

    variants: int
    bands: int
    worst_upper: float
    again: float
    whole: bool

    @classmethod
    def of(cls, alone: Derivation, again: Derivation, whole: bool) -> Held:
        """Return it of the bands by this sweep alone, with their limits as they are and with margins."""
        uppers = round(alone.worst_upper, 6), round(again.worst_upper, 6)
        return cls(len(alone.variants), len(alone.segments), *uppers, whole)

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON-able data, evidence of a table."""
        return asdict(self)


def stands(
    counts: Sequence[int],
    options: Sequence[Option],
    max_regret: float,
    served: Mapping[int, Candidate],
    terms: Terms,
) -> bool:
    """Say whether the incumbent can be kept: measured and within the bound everywhere, and on the terms."""
    by_candidate = {option.candidate: option for option in options}
    kept = [by_candidate.get(served[count]) if count in served else None for count in counts]
    variants: frozenset[str] = frozenset()
    for place, option in enumerate(kept):
        upper = option.upper[place] if option else None
        if option is None or upper is None or upper > max_regret:
            return False
        variants |= option.variants
    if terms.max_variants is not None and len(variants) > terms.max_variants:
        return False
    return not terms.batch_invariant or len({numerics_of(o.candidate) for o in kept if o}) == 1


def with_margins(
    counts: Sequence[int], options: Sequence[Option], served: Mapping[int, Candidate], hold: float
) -> list[Option]:
    """Return the options with a margin on every limit but those of the incumbent, `hold` spreads wide.

    So whoever takes a place is within the bound by a margin, and whoever has it need only be within it.
    """

    def limits(option: Option) -> Iterator[float | None]:
        for count, upper, spread in zip(counts, option.upper, option.spread, strict=True):
            keeps = served.get(count) == option.candidate
            yield upper if keeps or upper is None else upper + hold * (spread or 0.0)

    return [replace(option, upper=tuple(limits(option))) for option in options]


def held_note(evidence: Mapping[str, Any]) -> str:
    """Say of a table's evidence what was not taken over, and why; empty where bands were not held."""
    held = evidence.get("held")
    if not held:
        return ""
    kept = "bands kept" if held["whole"] else "bands kept in part"
    kernels, bands = counted(held["variants"], "kernel"), counted(held["bands"], "band")
    bound, worst = evidence["max_regret"], evidence["worst_upper"]
    # At most so many kernels are asked for the least limit, and not for the fewest under the bound.
    against = f"bound {percent(bound)}" if held["again"] > bound else f"kept: {percent(worst)}"
    again = f"a repeated sweep may find to be {percent(held['again'])} ({against})"
    return (
        f"{kept}, of {evidence['incumbent']['name']}: {kernels} in {bands} would do at a limit of "
        f"{percent(held['worst_upper'])}, which {again}"
    )
