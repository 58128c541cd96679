"""Other times: what the same candidates took until another moment, in a sweep of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mhctune.autotuner.records import Measurement, Trial
from mhctune.autotuner.stats import steady
from mhctune.kernels.space import Candidate


@dataclass(frozen=True)
class OtherTimes:
    """Microseconds per launch by token count and candidate, from the sweep that timed `until` then.

    The two sweeps ran apart: the numbers stand side by side, and no ratio of them is taken.
    """

    sweep: int
    until: str
    latencies: Mapping[int, Mapping[Candidate, float]]

    @classmethod
    def of(cls, sweep: int, until: str, trials: Iterable[Trial]) -> OtherTimes:
        """Take the medians of a sweep's trials, without the drift of the rounds as everywhere else."""
        found: dict[int, dict[Candidate, Measurement]] = {}
        for trial in trials:
            if isinstance(trial.outcome, Measurement):
                found.setdefault(trial.cell.num_tokens, {})[trial.candidate] = trial.outcome
        latencies = {
            count: {c: outcome.latency_us for c, outcome in here.items()}
            | steady({c: outcome.samples for c, outcome in here.items()})
            for count, here in found.items()
        }
        return cls(sweep, until, latencies)

    def at(self, num_tokens: int) -> Mapping[Candidate, float]:
        """Return what was measured at a token count, by candidate; empty where nothing was."""
        return self.latencies.get(num_tokens, {})
