"""Cut-overs from published medians: where one route leads another, and what says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mhctune.configs.recorded import Recorded

TIE = 0.005
"""Medians of one run that differ by less are called equal: published with three digits, of a timer that steps
by 0.2 us of 13, they hold no more."""

Medians = Mapping[int, float]
"""Microseconds by token count."""
Route = tuple[str, str]
"""Arm and label, such as `("unfused", "splits64")`."""


@dataclass(frozen=True)
class Cutover:
    """How two routes of one set compare, at the token counts that both have.

    Attributes:
        leads: The token counts where the first route is faster by at least `TIE`.
        ties: Those where neither is.
        lags: What the first route loses at the others: time / other's time - 1.
        weak: Those of `leads` and `lags` that differ by less than the floor: another run may say otherwise.
    """

    leads: tuple[int, ...]
    ties: tuple[int, ...]
    lags: Mapping[int, float]
    weak: tuple[int, ...]

    @property
    def last(self) -> int:
        """The last token count up to which the first route leads without a gap; 0: it does not lead first."""
        last = 0
        for count in sorted({*self.leads, *self.ties, *self.lags}):
            if count not in self.leads:
                break
            last = count
        return last


def sets_of(recorded: Recorded) -> dict[str, dict[Route, dict[int, float]]]:
    """Return the medians of each published set by route; sets are runs of their own and never mixed."""
    found: dict[str, dict[Route, dict[int, float]]] = {}
    for row in recorded.rows:
        route = (str(row["arm"]), str(row["label"]))
        medians = found.setdefault(str(row["set"]), {}).setdefault(route, {})
        medians[int(row["num_tokens"])] = float(row["latency_us"])  # type: ignore[arg-type]
    return found


def cutover(first: Medians, second: Medians, floor: float) -> Cutover:
    """Compare two routes of one set; `floor` is what one configuration differs by from run to run."""
    leads, ties, lags, weak = [], [], {}, []
    for count in sorted(first.keys() & second.keys()):
        change = first[count] / second[count] - 1
        if abs(change) < TIE:
            ties.append(count)
            continue
        if abs(change) < floor:
            weak.append(count)
        if change < 0:
            leads.append(count)
        else:
            lags[count] = change
    return Cutover(tuple(leads), tuple(ties), lags, tuple(weak))


def spread(sets: Mapping[str, Mapping[Route, Medians]], route: Route) -> dict[int, float]:
    """Return what one configuration differs by between sets: largest / smallest - 1, by token count."""
    runs = [routes[route] for routes in sets.values() if route in routes]
    if len(runs) < 2:
        return {}
    counts = sorted(set.intersection(*(set(run) for run in runs)))
    return {n: max(run[n] for run in runs) / min(run[n] for run in runs) - 1 for n in counts}
