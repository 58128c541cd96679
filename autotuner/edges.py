"""Edges: where between two measured token counts the choice changes, by probes of the two choices there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from mhctune.autotuner.bands import Segment
from mhctune.autotuner.incumbent import Incumbent
from mhctune.autotuner.records import UNMEASURED, Failure, Measurement, Trial
from mhctune.autotuner.stats import RegretInterval, TooFewSamples, regret
from mhctune.kernels.space import Candidate


class Ahead(StrEnum):
    """Which choice of an edge is the faster one at a token count."""

    LOWER = "lower"
    UPPER = "upper"
    TIED = "tied"


class EdgeState(StrEnum):
    """How well an edge is known."""

    EXACT = "exact"
    """Its two neighbours were measured, and told apart."""
    NOISE = "inside the noise"
    """At the edge nothing tells the two choices apart."""
    STAYS = "stays"
    """One choice is ahead on both sides: the other is served for another reason, such as fewer kernels."""
    OPEN = "open"
    """Integers between were not measured."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What the two choices of an edge came to at one token count.

    `change` is the lower choice's latency over the upper one's, less 1, with limits; None where one failed.
    """

    num_tokens: int
    ahead: Ahead
    change: RegretInterval | None

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        found: dict[str, Any] = {"num_tokens": self.num_tokens, "ahead": self.ahead.value}
        if self.change is not None:
            limits = {name: round(getattr(self.change, name), 6) for name in ("point", "lower", "upper")}
            found |= {**limits, "rounds": self.change.n}
        return found


@dataclass(frozen=True, slots=True)
class Edge:
    """Where one choice ends and the next begins.

    Attributes:
        before: The edge by the sweep alone: the last measured token count that the lower choice won.
        above: The next measured token count, where the upper choice is served.
        last: The edge: the last token count of the lower choice.
        probes: In the order in which they were asked for.
        next: What is to be measured next; None where nothing is.
        served: The edge of these two choices that is served today; None where there is none between.
    """

    lower: Candidate
    upper: Candidate
    before: int
    above: int
    last: int
    state: EdgeState
    probes: tuple[Probe, ...] = ()
    next: int | None = None
    served: int | None = None

    @property
    def moved(self) -> bool:
        """Whether it is elsewhere than by the sweep alone."""
        return self.last != self.before

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON-able data, evidence of a table."""
        return {
            "lower": str(self.lower),
            "upper": str(self.upper),
            "before": self.before,
            "above": self.above,
            "last": self.last,
            "state": self.state.value,
            "probed": [probe.to_data() for probe in self.probes],
            **({"served": self.served} if self.served is not None else {}),
        }


Ask = Callable[[int], "Probe | None"]
"""Tells what the two choices came to at a token count, or that it was not measured."""


def edges_of(
    segments: Sequence[Segment],
    candidates: Sequence[Candidate],
    trials: Iterable[Trial],
    floor: float = 0.0,
    incumbent: Incumbent | None = None,
) -> tuple[Edge, ...]:
    """Return the edges between segments, by whatever trials there are between measured token counts.

    `candidates` are the options that the segments name, `floor` is the width of the noise floor. An edge
    that the incumbent has between the same two choices is held, see `edge_of`.
    """
    found = {(trial.cell.num_tokens, trial.candidate): trial for trial in trials}

    def edge(a: Segment, b: Segment) -> Edge:
        pair, between = (candidates[a.option], candidates[b.option]), (a.last, b.token_counts[0])
        return edge_of(*pair, between, found, floor, incumbent.edge(*pair, *between) if incumbent else None)

    return tuple(edge(a, b) for a, b in pairwise(segments))


def edge_of(
    lower: Candidate,
    upper: Candidate,
    between: tuple[int, int],
    trials: Mapping[tuple[int, Candidate], Trial],
    floor: float,
    served: int | None = None,
) -> Edge:
    """Return one edge: the integers between two measured token counts are halved, as far as they are known.

    Where the probe nearest to the middle says that the lower choice is ahead, the edge is above it; where the
    upper one is, below; where neither is, the edge is there, inside the noise. What is decided follows from
    the trials alone, so that probing that was stopped goes on where it was.

    An edge that is `served` is probed there first, at its own count and the next: that is where the wrong
    choice would lose most. It stays unless a probe says that a choice is ahead where the other is served,
    and the halving begins at that probe.
    """
    before, above = between
    counts = {n for n, candidate in trials if before < n < above and candidate in (lower, upper)}
    known = {n: probe for n in sorted(counts) if (probe := compared(n, lower, upper, trials, floor))}
    start, end = (compared(n, lower, upper, trials, floor) for n in between)
    tied = start is not None and start.ahead is Ahead.TIED

    def edge(last: int, state: EdgeState, probes: Sequence[Probe] = (), next: int | None = None) -> Edge:
        return Edge(lower, upper, before, above, last, state, tuple(probes), next, served)

    if tied and served is None:
        return edge(before, EdgeState.NOISE)
    if start is not None and start.ahead is Ahead.UPPER:
        return edge(before, EdgeState.STAYS)
    if end is not None and end.ahead is Ahead.LOWER:
        return edge(before if served is None else served, EdgeState.STAYS)
    low, high, seen = before, above, list[Probe]()
    if served is not None:
        against = _against(served, known.values())
        if against is None:
            return edge(served, *_kept(served, between, known))
        seen.append(against)
        low, high = _halved(low, high, against)
    if tied:
        return edge(before, EdgeState.NOISE, seen)
    while high - low > 1:
        middle = (low + high) // 2
        at = min((n for n in known if low < n < high), key=lambda n: (abs(n - middle), n), default=None)
        if at is None:
            return edge(low, EdgeState.OPEN, seen, middle)
        seen.append(known[at])
        if known[at].ahead is Ahead.TIED:
            return edge(at, EdgeState.NOISE, seen)
        low, high = _halved(low, high, known[at])
    return edge(low, EdgeState.EXACT, seen)


def _halved(low: int, high: int, probe: Probe) -> tuple[int, int]:
    lower = probe.ahead is Ahead.LOWER
    return (probe.num_tokens, high) if lower else (low, probe.num_tokens)


def _against(served: int, probes: Iterable[Probe]) -> Probe | None:
    """Return the first probe that tells a choice ahead where the other one is served."""
    wrong = {True: Ahead.UPPER, False: Ahead.LOWER}
    return next((p for p in probes if p.ahead is wrong[p.num_tokens <= served]), None)


def _kept(
    served: int, between: tuple[int, int], known: Mapping[int, Probe]
) -> tuple[EdgeState, list[Probe], int | None]:
    """Return how well an edge is known that nothing speaks against, by which probes, and what to ask next."""
    beside = [n for n in (served, served + 1) if between[0] < n < between[1]]
    probes = [known[n] for n in beside if n in known]
    if len(probes) < len(beside):
        return EdgeState.OPEN, probes, next(n for n in beside if n not in known)
    told = all(probe.ahead is not Ahead.TIED for probe in probes)
    return EdgeState.EXACT if told else EdgeState.NOISE, probes, None


def compared(
    num_tokens: int,
    lower: Candidate,
    upper: Candidate,
    trials: Mapping[tuple[int, Candidate], Trial],
    floor: float,
) -> Probe | None:
    """Return what two choices came to at a token count; None where samples do not say it.

    One is ahead where the 95 % limits of the median ratio exclude 1 and the ratio lies beyond the noise
    floor; and where the other one failed there.
    """
    outcomes = [t.outcome if (t := trials.get((num_tokens, c))) else None for c in (lower, upper)]
    if any(o is None or (isinstance(o, Failure) and o.kind in UNMEASURED) for o in outcomes):
        return None
    mine, theirs = outcomes
    if isinstance(mine, Measurement) and isinstance(theirs, Measurement):
        try:
            change = regret(mine.samples, theirs.samples)
        except TooFewSamples:
            return None
        told = (change.lower > 0 or change.upper < 0) and abs(change.point) > floor
        side = Ahead.TIED if not told else Ahead.UPPER if change.point > 0 else Ahead.LOWER
        return Probe(num_tokens, side, change)
    if isinstance(mine, Measurement):
        return Probe(num_tokens, Ahead.LOWER, None)
    return Probe(num_tokens, Ahead.UPPER, None) if isinstance(theirs, Measurement) else None


def probed_counts(evidence: Mapping[str, Any]) -> frozenset[int]:
    """Return the probed token counts that a table's evidence names: what it was derived from, and no more."""
    return frozenset(p["num_tokens"] for edge in evidence.get("edges", ()) for p in edge["probed"])


def known_to(evidence: Mapping[str, Any], grid: Iterable[int], trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that a table knew: those of its sweep's grid, and the probes that it names."""
    counts = {*grid, *probed_counts(evidence)}
    return [trial for trial in trials if trial.cell.num_tokens in counts]
