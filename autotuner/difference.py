"""The difference of two tables: moved edges, changed choices inside or outside the noise, new variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from mhctune.autotuner.records import Measurement, Trial
from mhctune.autotuner.stats import CONFIDENCE, noise_floor, paired_ratios, pairs_needed, regret
from mhctune.autotuner.words import token_range
from mhctune.kernels.dispatch import Choice, DispatchTable
from mhctune.kernels.space import Candidate


class Noise(StrEnum):
    """Whether samples tell two choices apart; unknown where none are at hand that could."""

    INSIDE = "inside"
    OUTSIDE = "outside"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Side:
    """A table and the trials of its sweep; an exported file brings none."""

    table: DispatchTable
    trials: Sequence[Trial] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """A token range that is served otherwise; `last` is None where it is open above."""

    first: int
    last: int | None
    before: Choice
    after: Choice
    noise: Noise


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge between the same two choices that is elsewhere: the last token count of the lower one."""

    before: int
    after: int
    lower: Choice
    upper: Choice


@dataclass(frozen=True)
class Difference:
    """What two tables of one kind differ by. Both say the same where `same` is true."""

    changes: tuple[Change, ...]
    moved: tuple[Edge, ...]
    new_variants: tuple[str, ...]
    gone_variants: tuple[str, ...]
    ends: tuple[int, int]
    """The last token count inside a band of either."""
    grounds: Mapping[str, tuple[Any, Any]]
    """What else they stand on differs by: fields of the fingerprint and the sweep's digest."""

    @property
    def same(self) -> bool:
        """Whether every token count is answered alike and inside the bands of both or neither."""
        return not self.changes and self.ends[0] == self.ends[1]


def difference(before: Side, after: Side) -> Difference:
    """Return what changed from one table to another of the same seam, problem and device."""
    a, b = before.table, after.table
    variants = [set(table.evidence.get("variants") or ()) for table in (a, b)]
    grounds: dict[str, tuple[Any, Any]] = dict(a.fingerprint.differences(b.fingerprint))
    sweeps = tuple(table.evidence.get("sweep_digest") for table in (a, b))
    if sweeps[0] != sweeps[1]:
        grounds["sweep_digest"] = (sweeps[0], sweeps[1])
    return Difference(
        changes=tuple(_changes(before, after)),
        moved=tuple(_moved(a, b)),
        new_variants=tuple(sorted(variants[1] - variants[0])),
        gone_variants=tuple(sorted(variants[0] - variants[1])),
        ends=(a.max_tokens, b.max_tokens),
        grounds=grounds,
    )


def changed_ranges(a: DispatchTable, b: DispatchTable) -> list[tuple[int, int | None, Choice, Choice]]:
    """Return the token ranges where two tables choose differently, with both choices."""
    starts = sorted({band.first for t in (a, b) for band in t.bands} | {t.max_tokens + 1 for t in (a, b)})
    found = []
    for first, after in zip(starts, (*starts[1:], None), strict=True):
        mine, theirs = a.lookup(first).choice, b.lookup(first).choice
        if mine != theirs:
            found.append((first, None if after is None else after - 1, mine, theirs))
    return found


def _changes(before: Side, after: Side) -> list[Change]:
    found: list[Change] = []
    for first, last, mine, theirs in changed_ranges(before.table, after.table):
        if found and found[-1].last == first - 1 and (found[-1].before, found[-1].after) == (mine, theirs):
            first = found.pop().first
        noise = noise_of(first, last, mine, theirs, (before, after))
        found.append(Change(first, last, mine, theirs, noise))
    return found


def noise_of(first: int, last: int | None, a: Choice, b: Choice, sides: Sequence[Side]) -> Noise:
    """Say whether samples of either sweep tell two choices apart at token counts that speak for a range.

    Those are the measured ones in it, or else the next above. Told apart is what the 95 % limits of the
    median ratio exclude 1 for, by more than the noise floor.
    """
    judged = False
    for side in sides:
        floor = noise_floor(side.trials)
        for ratio in _told(first, last, a, b, side.trials, floor.width if floor else 0.0):
            if ratio:
                return Noise.OUTSIDE
            judged = True
    return Noise.INSIDE if judged else Noise.UNKNOWN


def _told(
    first: int, last: int | None, a: Choice, b: Choice, trials: Sequence[Trial], floor: float
) -> list[bool]:
    samples = {
        (t.cell.num_tokens, t.candidate): t.outcome.samples
        for t in trials
        if isinstance(t.outcome, Measurement)
    }
    counts = sorted({count for count, _ in samples})
    inside = [n for n in counts if n >= first and (last is None or n <= last)]
    told = []
    for count in inside or [n for n in counts if n >= first][:1]:
        pair = [samples.get((count, Candidate(c.arm, c.config))) for c in (a, b)]
        if pair[0] is None or pair[1] is None:
            continue
        if len(paired_ratios(pair[0], pair[1])) < pairs_needed(CONFIDENCE):
            continue
        found = regret(pair[0], pair[1])
        told.append((found.lower > 0 or found.upper < 0) and abs(found.point) > floor)
    return told


def _moved(a: DispatchTable, b: DispatchTable) -> list[Edge]:
    """Return the edges that both tables have, between the same two choices, at other token counts."""
    edges = [
        {(lower.choice, upper.choice): lower.last for lower, upper in pairwise(table.bands)}
        for table in (a, b)
    ]
    both = [pair for pair in edges[0] if pair in edges[1] and edges[0][pair] != edges[1][pair]]
    return [Edge(edges[0][pair], edges[1][pair], *pair) for pair in both]


def sentences(found: Difference) -> list[str]:
    """Return the difference as lines for people, the changes first; empty where nothing differs at all."""
    lines = [
        f"{token_range(c.first, c.last)}: {c.before} -> {c.after} ({c.noise} the noise)"
        if c.noise is not Noise.UNKNOWN
        else f"{token_range(c.first, c.last)}: {c.before} -> {c.after} (no samples of both to tell)"
        for c in found.changes
    ]
    lines += [f"edge {e.lower} | {e.upper}: {e.before} -> {e.after}" for e in found.moved]
    if found.ends[0] != found.ends[1]:
        lines.append(f"the bands end at {found.ends[1]}, ended at {found.ends[0]}")
    lines += [f"new variant: {name}" for name in found.new_variants]
    lines += [f"gone variant: {name}" for name in found.gone_variants]
    return lines + [f"{name}: {a!r} -> {b!r}" for name, (a, b) in found.grounds.items()]
