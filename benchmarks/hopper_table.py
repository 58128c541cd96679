"""The arithmetic of the target table: who is compared, ratios, their spread and verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopper_baselines import SPLITS, Described, is_unfused
from hopper_yardstick import Yardstick

from mhctune.autotuner.records import Measurement, Trial
from mhctune.autotuner.stats import steady
from mhctune.kernels.space import Candidate

TARGETS = ((1, 8, 2.0), (16, 32, 1.8), (64, 128, 1.6), (512, 512, 1.5), (2048, 4096, 1.5))
"""First and last token count of a column, and how many times faster than as shipped its counts must be."""
EMPTY_KERNELS = (1, 1, 4.5)
"""At most so many empty kernels of the same run."""
COPIES = (2048, 4096, 1.5)
"""At most so many times a copy kernel of the same run that moves `COPIED` x H bytes a token."""
RECORDED_ON = "NVIDIA H200"
"""The GPU of what was recorded as shipped."""
NEAR = 1.10
"""A reproduction counts up to this multiple of the recorded time; a slower one is no baseline."""


@dataclass(frozen=True, slots=True)
class Run:
    """One sweep: by token count the microseconds of each candidate, and who came to the confirming rounds."""

    sweep: int
    seed: int
    latencies: Mapping[int, Mapping[Candidate, float]]
    confirmed: Mapping[int, frozenset[Candidate]]
    yardstick: Yardstick | None = None


def run_of(sweep: int, seed: int, trials: Iterable[Trial], yardstick: Yardstick | None = None) -> Run:
    """Return a run from the trials of its sweep; latencies are medians without the drift of the rounds."""
    measured: dict[int, dict[Candidate, Measurement]] = {}
    for trial in trials:
        if isinstance(trial.outcome, Measurement):
            measured.setdefault(trial.cell.num_tokens, {})[trial.candidate] = trial.outcome
    latencies, confirmed = {}, {}
    for count, found in measured.items():
        plain = {candidate: outcome.latency_us for candidate, outcome in found.items()}
        latencies[count] = plain | steady({c: outcome.samples for c, outcome in found.items()})
        confirmed[count] = frozenset(c for c, o in found.items() if any(s.placement for s in o.samples))
    return Run(sweep, seed, latencies, confirmed, yardstick)


@dataclass(frozen=True, slots=True)
class Timed:
    """One candidate over the runs: its microseconds in each, in their order."""

    candidate: Candidate
    each_us: tuple[float, ...]

    @property
    def us(self) -> float:
        """The median over the runs."""
        return statistics.median(self.each_us)


@dataclass(frozen=True, slots=True)
class Reproduced:
    """What ships as described, over the runs: which kernels were the fastest in each, and microseconds."""

    who: tuple[str, ...]
    each_us: tuple[float, ...]

    @property
    def us(self) -> float:
        """The median over the runs."""
        return statistics.median(self.each_us)


@dataclass(frozen=True, slots=True)
class Row:
    """One token count of the table.

    Attributes:
        ours: The fastest candidate.
        shipped_us: (a), recorded as shipped; None where nothing was recorded for the device.
        reproduced: (b), what ships as described, its epilogue too; None where a run has no such yardstick.
        structure: (b'), the fastest of the described structure with our epilogue.
        counts: Whether (b) is a baseline: near (a), or faster. None without (a). Of (b') where it stands in.
        own: (c), the fastest of the unfused route, whatever its splits.
        ratios: In each run the faster of (a) and a (b) that counts, over ours; without (a) it is (b).
        structure_ratios: The same with (b') instead of (b).
        target: How many times faster it must be; None outside the columns.
        note: Where the reproduction had to differ from what ships.
    """

    num_tokens: int
    ours: Timed
    shipped_us: float | None
    reproduced: Reproduced | None
    structure: Timed | None
    counts: bool | None
    own: Timed | None
    ratios: tuple[float, ...]
    structure_ratios: tuple[float, ...]
    target: float | None
    note: str

    @property
    def stands_in(self) -> bool:
        """Whether (b') is taken as (b), which was not measured in every run."""
        return self.reproduced is None and self.structure is not None

    @property
    def ratio(self) -> float | None:
        """The median ratio."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def structure_ratio(self) -> float | None:
        """The median ratio with (b') instead of (b)."""
        return statistics.median(self.structure_ratios) if self.structure_ratios else None

    @property
    def verdict(self) -> str:
        """Whether the target is met, beyond the spread of the runs."""
        return self._verdict(self.ratios)

    @property
    def structure_verdict(self) -> str:
        """The same with (b') instead of (b)."""
        return self._verdict(self.structure_ratios)

    def _verdict(self, ratios: Sequence[float]) -> str:
        if self.target is None:
            return ""
        return "no record" if self.shipped_us is None else verdict(ratios, self.target)


@dataclass(frozen=True, slots=True)
class AtMost:
    """A limit in multiples of a yardstick of the same run."""

    num_tokens: int
    what: str
    yardstick_us: float
    multiples: tuple[float, ...]
    target: float

    @property
    def verdict(self) -> str:
        """Whether the limit is kept, beyond the spread of the runs."""
        return verdict([-each for each in self.multiples], -self.target)


def verdict(values: Sequence[float], target: float) -> str:
    """Say whether values reach a target: all of them, none of them, or some; one run has no spread."""
    if len(values) < 2:
        return "one run"
    if min(values) >= target:
        return "met"
    return "missed" if max(values) < target else "inside the spread"


def target_of(num_tokens: int) -> float | None:
    """Return how many times faster than as shipped a token count must be; None outside the columns."""
    return next((target for first, last, target in TARGETS if first <= num_tokens <= last), None)


def best(runs: Sequence[Run], num_tokens: int, among: Callable[[Candidate], bool]) -> Timed | None:
    """Return who has the lowest median over the runs, of those that every run measured.

    One candidate for all runs: whoever is picked anew in each looks faster than it is. Those that came to the
    confirming rounds of some run are asked first: the others were timed at one place only, and left.
    """
    each = [run.latencies.get(num_tokens, {}) for run in runs]
    everywhere = [c for c in each[0] if among(c) and all(c in found for found in each)] if each else []
    confirmed = {c for run in runs for c in run.confirmed.get(num_tokens, ())}
    timed = [Timed(c, tuple(found[c] for found in each)) for c in everywhere]
    timed = [t for t in timed if t.candidate in confirmed] or timed
    return min(timed, key=lambda t: (t.us, t.candidate), default=None)


def row_of(runs: Sequence[Run], num_tokens: int, shipped_us: float | None, ships: Described) -> Row | None:
    """Return the row of a token count; None where no candidate was measured in every run."""
    ours = best(runs, num_tokens, lambda c: True)
    if ours is None:
        return None
    structure = best(runs, num_tokens, set(ships.candidates).__contains__)
    reproduced = reproduced_of(runs, num_tokens)
    baseline = reproduced or structure
    return Row(
        num_tokens, ours, shipped_us, reproduced, structure, _counts(shipped_us, baseline),
        best(runs, num_tokens, is_unfused), _ratios(ours, shipped_us, baseline),
        _ratios(ours, shipped_us, structure), target_of(num_tokens), ships.note,
    )  # fmt: skip


def reproduced_of(runs: Sequence[Run], num_tokens: int) -> Reproduced | None:
    """Return what ships as described, where each run has timed it.

    The fastest in each run, not one for all: it may look faster than it is, which is to our disadvantage.
    """
    yards = [run.yardstick for run in runs if run.yardstick and num_tokens in run.yardstick.described_us]
    if not runs or len(yards) < len(runs):
        return None
    who = tuple(yard.described_who.get(num_tokens, "") for yard in yards)
    return Reproduced(who, tuple(yard.described_us[num_tokens] for yard in yards))


def _counts(shipped_us: float | None, baseline: Reproduced | Timed | None) -> bool | None:
    if shipped_us is None:
        return None
    return baseline is not None and baseline.us <= NEAR * shipped_us


def _ratios(ours: Timed, shipped_us: float | None, baseline: Reproduced | Timed | None) -> tuple[float, ...]:
    """Return, run by run, the faster of what was recorded and a reproduction that counts, over ours."""
    if shipped_us is None and baseline is None:
        return ()
    theirs = baseline.each_us if baseline and _counts(shipped_us, baseline) is not False else None
    return tuple(
        _baseline(shipped_us, theirs[at] if theirs else None) / us for at, us in enumerate(ours.each_us)
    )


def _baseline(*candidates_us: float | None) -> float:
    return min(us for us in candidates_us if us is not None)


def limits_of(runs: Sequence[Run], rows: Iterable[Row]) -> list[AtMost]:
    """Return the limits in empty kernels and in copies, where each run has the yardstick."""
    found = []
    for row in rows:
        count = row.num_tokens
        for what, (first, last, target) in (("empty kernels", EMPTY_KERNELS), ("copies", COPIES)):
            yards = [_yard(run.yardstick, what, count) for run in runs]
            known = [us for us in yards if us]
            if first <= count <= last and len(known) == len(runs):
                multiples = tuple(us / yard for us, yard in zip(row.ours.each_us, known, strict=True))
                found.append(AtMost(count, what, statistics.median(known), multiples, target))
    return found


def _yard(yardstick: Yardstick | None, what: str, num_tokens: int) -> float | None:
    if yardstick is None:
        return None
    return yardstick.empty_us if what == "empty kernels" else yardstick.copy_us.get(num_tokens)


HEADER = (
    f"{'tokens':>6} {'ours us':>8} {'(a) us':>8} {'(b) us':>8} {'counts':>6} "
    f" (b') us {'(c) us':>8} "
    f"{'ratio':>6} {'spread':>11} {'target':>6} {'verdict':<17} ratio' verdict'"
)
LEGEND = (
    "(a) recorded as shipped; (b) as described, its epilogue too, timed alone before the races of a run: it "
    f"counts up to {NEAR - 1:.0%} above (a);\n"
    "(b') the described structure with our epilogue, in the races: where a run has no (b) it stands in, and "
    "counts is marked ';\n"
    f"(c) the unfused route with the best of the rule's splits and {', '.join(map(str, SPLITS))};\n"
    "ratio: the faster of (a) and a (b) that counts, over ours, median of the runs, which the verdict is of; "
    "spread: least to most;\n"
    "ratio', verdict': the same with (b') in place of (b): harder, as our epilogue is of what is tested"
)


def lines(rows: Sequence[Row], limits: Sequence[AtMost]) -> Iterator[str]:
    """Yield the table of one hidden size."""
    yield HEADER
    for row in rows:
        counts = {True: "yes", False: "no", None: "-"}[row.counts] + "'" * row.stands_in
        target = f"{row.target:.2f}" if row.target else "-"
        yield (
            f"{row.num_tokens:6} {row.ours.us:8.2f} {_us(row.shipped_us)} {_us(row.reproduced)} {counts:>6} "
            f"{_us(row.structure)} {_us(row.own)} {_number(row.ratio)} {_spread(row.ratios)} "
            f"{target:>6} {row.verdict:<17} {_number(row.structure_ratio)} {row.structure_verdict}".rstrip()
        )
    if absent := ", ".join(str(row.num_tokens) for row in rows if row.stands_in):
        yield f"at {absent} tokens not every run has timed (b): (b') stands in for it"
    for limit in limits:
        yield (
            f"{limit.num_tokens:6} tokens: {statistics.median(limit.multiples):.2f} {limit.what} of "
            f"{limit.yardstick_us:.2f} us ({_spread(limit.multiples).strip()}), at most {limit.target}: "
            f"{limit.verdict}"
        )
    yield "who:"
    for row in rows:
        named = (
            ("ours", row.ours and [row.ours.candidate]), ("(b)", row.reproduced and row.reproduced.who),
            ("(b')", row.structure and [row.structure.candidate]), ("(c)", row.own and [row.own.candidate]),
        )  # fmt: skip
        texts = [f"{name} {', '.join(dict.fromkeys(map(str, who)))}" for name, who in named if who]
        yield f"{row.num_tokens:6} {' | '.join(texts)}{f'  [{row.note}]' if row.note else ''}"


def to_data(row: Row) -> dict[str, Any]:
    """Return a row as JSON-able data."""
    timed = {"ours": row.ours, "structure": row.structure, "own": row.own}
    return {
        "num_tokens": row.num_tokens, "shipped_us": row.shipped_us, "counts": row.counts,
        "ratios": row.ratios, "structure_ratios": row.structure_ratios, "target": row.target,
        "verdict": row.verdict, "structure_verdict": row.structure_verdict,
        "note": row.note, "stands_in": row.stands_in,
        "reproduced": row.reproduced and {"who": row.reproduced.who, "each_us": row.reproduced.each_us},
        **{name: _timed(each) for name, each in timed.items()},
    }  # fmt: skip


def _timed(timed: Timed | None) -> dict[str, Any] | None:
    if timed is None:
        return None
    return {"arm": timed.candidate.arm, "config": timed.candidate.config, "each_us": timed.each_us}


def _us(value: Timed | Reproduced | float | None) -> str:
    us = value.us if isinstance(value, Timed | Reproduced) else value
    return f"{'-':>8}" if us is None else f"{us:8.2f}"


def _number(value: float | None) -> str:
    return f"{'-':>6}" if value is None else f"{value:6.2f}"


def _spread(values: Sequence[float]) -> str:
    return f"{f'{min(values):.2f}-{max(values):.2f}' if values else '-':>11}"
