"""A runner: a candidate on its way through the race, and how one sample of it is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mhctune.autotuner.bench import Bench
from mhctune.autotuner.records import Failure, FailureKind, Footprint, Measurement, Sample, kept_us
from mhctune.kernels.space import Candidate

FLOOR = 0.8
"""Share of the time of a copy of the same bytes below which nothing that moves them can be."""

LAUNCH_US = 1.0
"""What of that time is no bytes: an empty kernel takes 0.94 us in a graph on an H200. A kernel
that begins before the one ahead has ended does not pay it: `collapse` took 0.55 us once, a copy 1.16."""


def sampled(
    bench: Bench, candidate: Candidate, batch: int, round: int, launches: int, floor_us: float = 0.0
) -> float | Failure:
    """Return a plausible time as a sample keeps it; an implausible one is taken once more and then a failure.

    Implausible is what is not finite, or kept as nothing or less (see `kept_us`), or faster than `FLOOR`
    times what a copy, `floor_us`, takes beyond its launch.
    """
    latency: float | Failure = 0.0
    least = FLOOR * max(0.0, floor_us - LAUNCH_US)
    for _ in range(2):
        latency = bench.sample(candidate, batch, round, launches)
        if isinstance(latency, Failure):
            return latency
        if math.isfinite(latency) and 0 < (kept := kept_us(latency)) >= least:
            return kept
    detail = f"{latency} us per launch, twice in a row"
    if isinstance(latency, float) and math.isfinite(latency) and kept_us(latency) > 0:
        detail += (
            f": below {FLOOR:g} of the {floor_us - LAUNCH_US:.2f} us that a copy of the cell's fewest "
            "bytes takes beyond its launch"
        )
    return Failure(FailureKind.IMPLAUSIBLE, detail)


@dataclass(eq=False)
class Runner:
    """A candidate on its way through the race."""

    candidate: Candidate
    footprint: Footprint
    trial_id: int = 0
    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)
    finished: bool = False
    failed: bool = False
    crowded: bool = False
    """Out of memory while it was timed beside others: it is timed again in a smaller batch."""
    original: Runner | None = None
    """Of a twin."""

    @property
    def latency_us(self) -> float:
        """The median so far."""
        return Measurement(tuple(self.samples.values())).latency_us

    @property
    def last_batch(self) -> int:
        """The last batch that it has samples of; -1 before the first."""
        return max((batch for batch, _ in self.samples), default=-1)

    def of_batch(self, batch: int) -> list[Sample]:
        """Return the samples of one batch."""
        return [sample for (taken_in, _), sample in self.samples.items() if taken_in == batch]
