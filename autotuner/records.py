"""What a trial is about and what came of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import StrEnum

from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

PLACEMENT_ROUNDS = 1000
"""The rounds of placement p of a batch are numbered from 1000 p."""


class FailureKind(StrEnum):
    """Why a trial gave no latency."""

    COMPILE = "compile"
    LAUNCH = "launch"
    MISMATCH = "mismatch"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    OVER_BUDGET = "over_budget"
    IMPLAUSIBLE = "implausible"
    CRASHED = "crashed"


# A failure of these kinds says nothing of the candidate: there was no room for it.
UNMEASURED = frozenset({FailureKind.OVER_BUDGET, FailureKind.OUT_OF_MEMORY})


class SweepState(StrEnum):
    """How far a sweep has come; anything but `complete` is resumed by the same command."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    INCOMPLETE = "incomplete"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class Cell:
    """What is raced: a seam, a problem and a token count."""

    seam: str
    problem: Problem
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one trial: forecast before it was built, measured after.

    `graph_bytes` is what capture added; zero where there is no capture.
    """

    input_bytes: int
    output_bytes: int
    scratch_bytes: int
    graph_bytes: int = 0
    measured_bytes: int = 0

    @property
    def forecast_bytes(self) -> int:
        """What the candidate keeps resident: outputs, scratch and graph; inputs are shared by the cell."""
        return self.output_bytes + self.scratch_bytes + self.graph_bytes


LATENCY_DIGITS = 4
"""Decimals of a sample in microseconds: 0.1 ns, far below what a timer resolves. A recording holds as many,
so that a table derived from it is the table of the database to the byte."""


def kept_us(latency: float) -> float:
    """Return a latency in microseconds as a sample keeps it."""
    return round(latency, LATENCY_DIGITS)


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed replay: microseconds per launch, and where in the race it was taken.

    `batch` counts the races of a cell (a champion is carried into the next one), `round` the rounds of a
    batch, `position` the place in the round's order; `launches` were averaged. A batch begins where its
    candidates were prepared, placement 0; finalists are then moved to other addresses, again and again.
    `sm_clock_mhz` is the clock right after the round, where there is one to read; a `throttled` sample is
    of a round in which the device held its clocks back: it is kept and no verdict reads it.
    """

    batch: int
    round: int
    position: int
    launches: int
    latency_us: float
    sm_clock_mhz: int | None = None
    throttled: bool = False

    @property
    def placement(self) -> int:
        """Which placement of its batch the sample was taken in: what shares one shares where buffers lie."""
        return self.round // PLACEMENT_ROUNDS


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one trial measured."""

    samples: tuple[Sample, ...]

    @property
    def latency_us(self) -> float:
        """The median, in microseconds per launch, without throttled samples unless there are no others."""
        sound = [sample.latency_us for sample in self.samples if not sample.throttled]
        return statistics.median(sound or [sample.latency_us for sample in self.samples])


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a trial gave no latency, in a sentence a person can act on."""

    kind: FailureKind
    detail: str


Outcome = Measurement | Failure


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate in one cell, as the store holds it; `outcome` is None while it is being raced.

    `twins` are samples of the same candidate with buffers of their own, taken in rounds in which it was the
    champion: what the two differ by is noise.
    """

    cell: Cell
    candidate: Candidate
    footprint: Footprint
    outcome: Outcome | None
    samples: tuple[Sample, ...] = ()
    id: int = 0
    twins: tuple[Sample, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether it came to something that another run would not change."""
        return self.outcome is not None and not (
            isinstance(self.outcome, Failure) and self.outcome.kind in UNMEASURED
        )
