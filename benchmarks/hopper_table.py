"""The arithmetic of the target table: who is compared, ratios, their spread and verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopper_baselines import Described, is_unfused

from mhctune.autotuner.records import Measurement, Trial
from mhctune.autotuner.stats import steady
from mhctune.kernels.space import Candidate

TARGETS = ((1, 8, 2.0), (16, 32, 1.8), (64, 128, 1.6), (512, 512, 1.5), (2048, 4096, 1.5))
"""First and last token count of a column, and how many times faster than as shipped its counts must be."""
EMPTY_KERNELS = (1, 1, 4.5)
"""At most so many empty kernels of the same run."""
COPIES = (2048, 4096, 1.5)
"""At most so many times a copy kernel of the same run that moves `COPIED` x H bytes a token."""
COPIED = 20
"""Bytes a token and element of H: x and four streams read, four streams and a layer input written, bf16."""
RECORDED_ON = "NVIDIA H200"
"""The GPU of what was recorded as shipped."""
NEAR = 1.10
"""A reproduction counts up to this multiple of the recorded time; a slower one is no baseline."""


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What a run is held against; `empty_us` is None without a GPU.

    Attributes:
        empty_us: Microseconds of a kernel that does nothing, in a graph where each waits for the whole one
            ahead of it (no programmatic dependent launch).
        copy_us: By token count those of a copy kernel that moves `COPIED` x H bytes a token.
        ceiling_bytes: What a copy of more than 1 GiB moved, half read and half written.
        ceiling_us: Its microseconds.
    """

    empty_us: float | None
    copy_us: Mapping[int, float]
    ceiling_bytes: int
    ceiling_us: float

    @property
    def ceiling_tb_s(self) -> float:
        """The bandwidth ceiling in 1e12 bytes a second."""
        return self.ceiling_bytes / self.ceiling_us / 1e6

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        copies = {str(count): us for count, us in self.copy_us.items()}
        return {"empty_us": self.empty_us, "copy_us": copies, "ceiling_bytes": self.ceiling_bytes,
                "ceiling_us": self.ceiling_us}  # fmt: skip

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Yardstick:
        """Read what `to_data` returned."""
        copies = {int(count): float(us) for count, us in data["copy_us"].items()}
        return cls(data["empty_us"], copies, data["ceiling_bytes"], data["ceiling_us"])


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
class Row:
    """One token count of the table.

    Attributes:
        ours: The fastest candidate.
        shipped_us: (a), recorded as shipped; None where nothing was recorded for the device.
        described: (b), the fastest reproduction of what ships.
        counts: Whether (b) is a baseline: near (a), or faster. None without (a).
        own: (c), the fastest of the unfused route, whatever its splits.
        ratios: In each run the faster of (a) and a (b) that counts, over ours; without (a) it is (b).
        target: How many times faster it must be; None outside the columns.
        note: Where the reproduction had to differ from what ships.
    """

    num_tokens: int
    ours: Timed
    shipped_us: float | None
    described: Timed | None
    counts: bool | None
    own: Timed | None
    ratios: tuple[float, ...]
    target: float | None
    note: str

    @property
    def ratio(self) -> float | None:
        """The median ratio."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def verdict(self) -> str:
        """Whether the target is met, beyond the spread of the runs."""
        if self.target is None:
            return ""
        if self.shipped_us is None:
            return "no record"
        return verdict(self.ratios, self.target)


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
    mine = best(runs, num_tokens, set(ships.candidates).__contains__)
    counts = None if shipped_us is None else mine is not None and mine.us <= NEAR * shipped_us
    ratios: tuple[float, ...] = ()
    if shipped_us is not None or mine is not None:
        ratios = tuple(
            _baseline(shipped_us, mine.each_us[at] if mine and counts is not False else None) / us
            for at, us in enumerate(ours.each_us)
        )
    own = best(runs, num_tokens, is_unfused)
    return Row(
        num_tokens, ours, shipped_us, mine, counts, own, ratios, target_of(num_tokens), ships.note
    )  # fmt: skip


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
    f"{'tokens':>6} {'ours us':>8} {'(a) us':>8} {'(b) us':>8} {'counts':>6} {'(c) us':>8} {'ratio':>6} "
    f"{'spread':>11} {'target':>6} verdict"
)
LEGEND = (
    "(a) recorded as shipped; (b) the described structure in our kernels, which counts up to "
    f"{NEAR - 1:.0%} above (a); (c) the unfused route with its own best split;\n"
    "ratio: the faster of (a) and a (b) that counts, over ours, median of the runs; spread: least to most"
)


def lines(rows: Sequence[Row], limits: Sequence[AtMost]) -> Iterator[str]:
    """Yield the table of one hidden size."""
    yield HEADER
    for row in rows:
        counts = {True: "yes", False: "no", None: "-"}[row.counts]
        target = f"{row.target:.2f}" if row.target else "-"
        yield (
            f"{row.num_tokens:6} {row.ours.us:8.2f} {_us(row.shipped_us)} {_us(row.described)} {counts:>6} "
            f"{_us(row.own)} {_number(row.ratio)} {_spread(row.ratios)} {target:>6} {row.verdict}".rstrip()
        )
    for limit in limits:
        yield (
            f"{limit.num_tokens:6} tokens: {statistics.median(limit.multiples):.2f} {limit.what} of "
            f"{limit.yardstick_us:.2f} us ({_spread(limit.multiples).strip()}), at most {limit.target}: "
            f"{limit.verdict}"
        )
    yield "who:"
    for row in rows:
        named = (("ours", row.ours), ("(b)", row.described), ("(c)", row.own))
        texts = [f"{name} {timed.candidate}" for name, timed in named if timed]
        yield f"{row.num_tokens:6} {' | '.join(texts)}{f'  [{row.note}]' if row.note else ''}"


def to_data(row: Row) -> dict[str, Any]:
    """Return a row as JSON-able data."""
    timed = {"ours": row.ours, "described": row.described, "own": row.own}
    return {
        "num_tokens": row.num_tokens, "shipped_us": row.shipped_us, "counts": row.counts,
        "ratios": row.ratios, "target": row.target, "verdict": row.verdict, "note": row.note,
        **{name: _timed(each) for name, each in timed.items()},
    }  # fmt: skip


def _timed(timed: Timed | None) -> dict[str, Any] | None:
    if timed is None:
        return None
    return {"arm": timed.candidate.arm, "config": timed.candidate.config, "each_us": timed.each_us}


def _us(value: Timed | float | None) -> str:
    us = value.us if isinstance(value, Timed) else value
    return f"{'-':>8}" if us is None else f"{us:8.2f}"


def _number(value: float | None) -> str:
    return f"{'-':>6}" if value is None else f"{value:6.2f}"


def _spread(values: Sequence[float]) -> str:
    return f"{f'{min(values):.2f}-{max(values):.2f}' if values else '-':>11}"
