"""The race: all candidates of a cell, timed in interleaved rounds, batch by batch under the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from mhctune.autotuner.bench import Bench
from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import (
    Cell,
    Failure,
    FailureKind,
    Footprint,
    Measurement,
    Sample,
    Trial,
)
from mhctune.autotuner.store import Store
from mhctune.kernels.space import Candidate


class Stopped(Exception):
    """The sweep was asked to stop; everything measured so far is committed."""


@dataclass
class _Runner:
    """A candidate on its way through the race."""

    candidate: Candidate
    footprint: Footprint
    trial_id: int = 0
    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)
    finished: bool = False
    failed: bool = False

    @property
    def latency_us(self) -> float:
        return Measurement(tuple(self.samples.values())).latency_us


class Race:
    """Races the candidates of one cell and tells the store after every round.

    Rounds run forward and back in turn, so that a drift of the machine favours nobody. A killed race is
    taken up at the first sample it lacks.
    """

    def __init__(
        self,
        sweep_id: int,
        cell: Cell,
        store: Store,
        bench: Bench,
        budget: VramBudget,
        protocol: Protocol,
        stop: Callable[[], bool] = lambda: False,
        tell: Callable[[Candidate, float | Failure], None] = lambda candidate, outcome: None,
    ) -> None:
        """Prepare a race; `stop` is asked before each round, `tell` hears of each outcome."""
        self._sweep_id, self._cell = sweep_id, cell
        self._store, self._bench, self._budget, self._protocol = store, bench, budget, protocol
        self._stop, self._tell = stop, tell

    def run(self, candidates: Sequence[Candidate], known: Iterable[Trial]) -> None:
        """Race what has no outcome yet; `known` are the cell's trials in the store.

        Raises:
            Stopped: `stop` answered yes; the samples taken so far are committed.
        """
        trials = {trial.candidate: trial for trial in known}
        waiting = [c for c in candidates if c not in trials or trials[c].outcome is None]
        if not waiting:
            return
        input_bytes = self._bench.enter(self._cell, self._protocol.seed + self._cell.num_tokens)
        try:
            self._batches(input_bytes, [self._runner(c, trials.get(c)) for c in waiting], trials)
        finally:
            self._bench.leave()

    def _runner(self, candidate: Candidate, trial: Trial | None) -> _Runner:
        runner = _Runner(candidate, self._bench.forecast(candidate))
        if trial is not None:
            runner.trial_id = trial.id
            runner.samples = {(s.batch, s.round): s for s in trial.samples}
        return runner

    def _batches(self, input_bytes: int, waiting: list[_Runner], trials: dict[Candidate, Trial]) -> None:
        done = [t for t in trials.values() if isinstance(t.outcome, Measurement)]
        champion: _Runner | None = None
        if done:
            best = min(done, key=lambda t: t.outcome.latency_us)  # type: ignore[union-attr]
            champion = self._runner(best.candidate, best)
            champion.finished = True
        batch = max((s.batch for t in trials.values() for s in t.samples), default=-1)
        if not any(r.samples for r in waiting):
            batch += 1  # nothing was under way: a new batch
        batch, limit = max(batch, 0), len(waiting)
        while waiting:
            carried = [champion.footprint] if champion else []
            count = min(limit, self._budget.batch(input_bytes, carried, [r.footprint for r in waiting]))
            if count == 0 and champion and self._budget.fits(input_bytes, [waiting[0].footprint]):
                count, champion = 1, None  # alone it fits; the comparison is by separate rounds then
            if count == 0:
                runner = waiting.pop(0)
                detail = self._budget.shortfall(input_bytes, runner.footprint)
                self._fail(runner, Failure(FailureKind.OVER_BUDGET, detail))
                continue
            racing, waiting = waiting[:count], waiting[count:]
            ready, refused = self._prepare(([champion] if champion else []) + racing)
            if refused:
                # Out of memory: half as many at a time; who alone is too much has failed already.
                waiting, limit = refused + waiting, max(1, count // 2)
            self._rounds(batch, ready)
            champion = self._finish(ready)
            batch += 1

    def _prepare(self, runners: list[_Runner]) -> tuple[list[_Runner], list[_Runner]]:
        """Return who is resident, and who found no memory beside the others."""
        ready: list[_Runner] = []
        for index, runner in enumerate(runners):
            self._check_stop()
            outcome = self._bench.prepare(runner.candidate)
            if isinstance(outcome, Footprint):
                runner.footprint = outcome
                if not runner.trial_id:
                    runner.trial_id = self._store.open_trial(
                        self._sweep_id, self._cell, runner.candidate, outcome
                    )
                ready.append(runner)
            elif outcome.kind is FailureKind.OUT_OF_MEMORY and ready:
                return ready, runners[index:]
            else:
                self._fail(runner, outcome)
        return ready, []

    def _rounds(self, batch: int, runners: list[_Runner]) -> None:
        if not runners:
            return
        launches = self._launches(runners)
        for round in range(self._protocol.samples):
            self._check_stop()
            order = runners if round % 2 == 0 else runners[::-1]
            taken: list[tuple[int, Sample]] = []
            for position, runner in enumerate(order):
                if runner.failed or (batch, round) in runner.samples:
                    continue
                latency = self._sample(runner, batch, round, launches)
                if isinstance(latency, Failure):
                    self._fail(runner, latency)
                    continue
                sample = Sample(batch, round, position, launches, latency)
                runner.samples[batch, round] = sample
                taken.append((runner.trial_id, sample))
            if taken:
                self._store.add_samples(taken)

    def _launches(self, runners: list[_Runner]) -> int:
        """Prime every candidate with one timed launch; the fastest sets how many make a sample."""
        rough = (self._bench.sample(r.candidate, 0, 0, 1) for r in runners)
        fastest = min((r for r in rough if not isinstance(r, Failure) and r > 0), default=1.0)
        return self._protocol.launches(fastest)

    def _sample(self, runner: _Runner, batch: int, round: int, launches: int) -> float | Failure:
        latency: float | Failure = 0.0
        for _ in range(2):  # an implausible time is measured once more before it is a failure
            latency = self._bench.sample(runner.candidate, batch, round, launches)
            if isinstance(latency, Failure) or (math.isfinite(latency) and latency > 0):
                return latency
        return Failure(FailureKind.IMPLAUSIBLE, f"{latency} us per launch, twice in a row")

    def _finish(self, runners: list[_Runner]) -> _Runner | None:
        """Close the trials of a batch and return the fastest, which is carried into the next."""
        for runner in runners:
            self._bench.release(runner.candidate)
            if not runner.failed and not runner.finished:
                self._store.finish_trial(runner.trial_id)
                runner.finished = True
                self._tell(runner.candidate, runner.latency_us)
        alive = [runner for runner in runners if not runner.failed]
        return min(alive, key=lambda runner: runner.latency_us, default=None)

    def _fail(self, runner: _Runner, failure: Failure) -> None:
        runner.failed = True
        self._bench.release(runner.candidate)
        self._store.fail_trial(self._sweep_id, self._cell, runner.candidate, runner.footprint, failure)
        self._tell(runner.candidate, failure)

    def _check_stop(self) -> None:
        if self._stop():
            raise Stopped
