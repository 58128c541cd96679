"""The explorer: what is proposed next, from what a sweep has measured so far."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING

from mhctune.autotuner.records import Measurement, Trial
from mhctune.autotuner.store import SweepRecord
from mhctune.kernels.space import Candidate

if TYPE_CHECKING:
    from mhctune.autotuner.plan import SweepPlan
    from mhctune.autotuner.search import Search

_CARRIED = 2
"""Best points of each other anchor that a generation begins with: neighbours in token counts are alike."""

Latencies = Mapping[int, Mapping[Candidate, float | None]]
"""By token count, in the order of proposal: microseconds a launch, None where there is none."""


class Explorer:
    """Extends the record of a sweep by what is to be raced next.

    Everything follows from the plan, the record and the trials, so that a sweep that was killed proposes what
    it would have proposed.
    """

    def __init__(self, plan: SweepPlan) -> None:
        """Explore the searched arms of a plan."""
        self._plan = plan
        self._search = cache(self._made)

    def _made(self, arm: str) -> Search:
        from mhctune.autotuner.search import Search  # Optuna's import need not be waited for without a search

        return Search(self._plan.legal[arm], self._plan.spaces[arm].tunables)

    def extend(self, record: SweepRecord, trials: Sequence[Trial]) -> SweepRecord:
        """Return the record with the next generation for every anchor or, after the last, the shortlist.

        `trials` hold an outcome for everything that was proposed; who has none counts as failed.
        """
        search = record.search
        assert search is not None
        measured = {count: _latencies(record, trials, count) for count in search.anchors}
        if search.begun < search.generations:
            arms = list(search.legal)
            proposed = {
                count: [c for arm in arms for c in self._proposed(arm, count, search.begun, measured)]
                for count in search.anchors
            }
            grown = search.with_generation(proposed)
        else:
            listed = [c for arm in search.legal for c in self._listed(arm, measured)]
            grown = replace(search, shortlist=tuple(listed))
        fresh = [c for p in grown.proposals for c in p.candidates if c not in record.variants]
        named = {c: tuple(map(str, self._plan.variants_of(c))) for c in fresh}
        found = replace(record, search=grown, variants={**record.variants, **named})
        return replace(found, grid=found.raced if grown.finished else record.grid)

    def _proposed(self, arm: str, count: int, generation: int, measured: Latencies) -> tuple[Candidate, ...]:
        """Return the points of one arm that are new at an anchor: first what is good elsewhere."""
        known = {c: latency for c, latency in measured[count].items() if c.arm == arm}
        plan = self._plan
        first = [Candidate.of(arm, plan.seam.arm(plan.target, arm).preferred)]
        for other in (found for at, found in measured.items() if at != count):
            first += _best({c: latency for c, latency in other.items() if c.arm == arm})[:_CARRIED]
        text = f"{plan.protocol.seed} {arm} {count} {generation}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        return self._search(arm).propose(known, plan.search.proposals, seed, first)

    def _listed(self, arm: str, measured: Latencies) -> list[Candidate]:
        """Return who is raced everywhere: the best at each anchor, then the second best, and so on.

        Also those that lose more than the bound there: between anchors they may be the best. On the recorded
        prototype that halves the mean loss (0.6 % instead of 1.5 %, a shortlist of 24, 8 seeds).
        """
        ranks = [_best({c: us for c, us in found.items() if c.arm == arm}) for found in measured.values()]
        turns = (c for row in zip_longest(*ranks) for c in row if c is not None)
        return list(dict.fromkeys(turns))[: self._plan.search.shortlist]


def _latencies(record: SweepRecord, trials: Sequence[Trial], count: int) -> dict[Candidate, float | None]:
    found: dict[Candidate, float | None] = dict.fromkeys(record.expected(count))
    for trial in trials:
        if trial.cell.num_tokens == count and isinstance(trial.outcome, Measurement):
            found[trial.candidate] = trial.outcome.latency_us
    return found


def _best(latencies: Mapping[Candidate, float | None]) -> list[Candidate]:
    """Return the measured ones, the fastest first."""
    times = {c: us for c, us in latencies.items() if us is not None}
    return sorted(times, key=lambda c: (times[c], c))
