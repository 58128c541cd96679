"""The race: all candidates of a cell, timed in interleaved rounds, batch by batch under the budget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from mhctune.autotuner.bench import Bench
from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import (
    UNMEASURED,
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


@dataclass(eq=False)
class _Runner:
    """A candidate on its way through the race."""

    candidate: Candidate
    footprint: Footprint
    trial_id: int = 0
    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)
    finished: bool = False
    failed: bool = False
    crowded: bool = False
    """Out of memory while it was timed beside others: it is timed again in a smaller batch."""

    @property
    def latency_us(self) -> float:
        return Measurement(tuple(self.samples.values())).latency_us

    @property
    def last_batch(self) -> int:
        return max((batch for batch, _ in self.samples), default=-1)


def sampled(bench: Bench, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
    """Return a plausible time of one sample; an implausible one is taken once more before it is a failure."""
    latency: float | Failure = 0.0
    for _ in range(2):
        latency = bench.sample(candidate, batch, round, launches)
        if isinstance(latency, Failure) or (math.isfinite(latency) and latency > 0):
            return latency
    return Failure(FailureKind.IMPLAUSIBLE, f"{latency} us per launch, twice in a row")


class Race:
    """Races the candidates of one cell and tells the store after every round.

    Rounds run forward and back in turn, so that a drift of the machine favours nobody. A race that was
    stopped is taken up at the first sample it lacks; a batch that had begun ends among those who began it.
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
        """Prepare a race; `stop` is asked before each candidate and round, `tell` hears of each outcome."""
        self._sweep_id, self._cell = sweep_id, cell
        self._store, self._bench, self._budget, self._protocol = store, bench, budget, protocol
        self._stop, self._tell = stop, tell
        self._input_bytes, self._limit = 0, 0
        self._done: list[_Runner] = []

    def run(self, candidates: Sequence[Candidate], known: Iterable[Trial]) -> None:
        """Race what is not settled yet; `known` are the cell's trials in the store.

        Raises:
            Stopped: `stop` answered yes; the samples taken so far are committed.
        """
        trials = {trial.candidate: trial for trial in known}
        unsettled = [c for c in candidates if c not in trials or not trials[c].settled]
        if not unsettled:
            return
        needed = Footprint(self._bench.input_bytes(self._cell), 0, 0)
        if not self._budget.fits(needed.input_bytes, ()):
            detail = self._budget.shortfall(needed.input_bytes, needed)
            self.refuse(unsettled, Failure(FailureKind.OVER_BUDGET, detail))
            return
        entered = self._bench.enter(self._cell, self._protocol.seed + self._cell.num_tokens)
        if isinstance(entered, Failure):
            self.refuse(unsettled, entered)
            return
        self._input_bytes = entered
        try:
            measured = [t for t in trials.values() if isinstance(t.outcome, Measurement)]
            self._done = [self._runner(t.candidate, t) for t in measured]
            self._batches([self._runner(c, trials.get(c)) for c in unsettled])
        finally:
            self._bench.leave()

    def refuse(self, candidates: Sequence[Candidate], failure: Failure) -> None:
        """Record one failure for all: what is wrong is the cell's, not theirs."""
        for candidate in candidates:
            self._store.fail_trial(self._sweep_id, self._cell, candidate, Footprint(0, 0, 0), failure)
            self._tell(candidate, failure)

    def _runner(self, candidate: Candidate, trial: Trial | None) -> _Runner:
        runner = _Runner(candidate, self._bench.forecast(candidate))
        if trial is not None:
            runner.trial_id = trial.id
            runner.samples = {(s.batch, s.round): s for s in trial.samples}
            runner.finished = isinstance(trial.outcome, Measurement)
        return runner

    def _batches(self, runners: list[_Runner]) -> None:
        batch = max(runner.last_batch for runner in (*runners, *self._done))
        begun = deque(r for r in runners if r.last_batch == batch >= 0)
        waiting = deque(r for r in runners if r not in begun)
        self._limit = len(runners)
        if begun:
            self._batch(batch, next((r for r in self._done if r.last_batch == batch), None), begun)
        waiting.extendleft(reversed(begun))
        while waiting:
            champion = min(self._done, key=lambda runner: runner.latency_us, default=None)
            batch += self._batch(batch + 1, champion, waiting)

    def _batch(self, batch: int, champion: _Runner | None, queue: deque[_Runner]) -> bool:
        """Race the champion and as many of the queue as fit; return whether anybody new was timed."""
        ready = self._admit(champion, queue)
        new = any(not runner.finished for runner in ready)
        if new:
            self._rounds(batch, ready)
        crowded = [runner for runner in ready if runner.crowded]
        for runner in ready:
            if not runner.crowded:
                self._finish(runner)
        if crowded:
            # Memory ran out while they were timed: half as many at a time, and they wait for their turn.
            self._limit = max(1, (len(ready) - len(crowded)) // 2)
            for runner in crowded:
                runner.crowded = False
            queue.extendleft(reversed([runner for runner in crowded if not runner.finished]))
        return new

    def _admit(self, champion: _Runner | None, queue: deque[_Runner]) -> list[_Runner]:
        """Make resident the champion, so that comparisons are head to head, and who fits beside it."""
        ready: list[_Runner] = []
        if champion is not None:
            failure = self._prepare(champion, ready)
            if failure is None:
                ready.append(champion)
            elif failure.kind not in UNMEASURED:
                self._fail(champion, failure)
                return []
        carried = len(ready)
        while queue and len(ready) < carried + self._limit:
            failure = self._prepare(queue[0], ready)
            if failure is None:
                ready.append(queue.popleft())
            elif not ready or failure.kind not in UNMEASURED:
                self._fail(queue.popleft(), failure)  # its place is the next one's
            else:
                if failure.kind is FailureKind.OUT_OF_MEMORY:
                    self._limit = max(1, (len(ready) + 1) // 2)
                return ready if len(ready) > carried else self._admit_alone(ready[0], queue.popleft())
        return ready

    def _admit_alone(self, champion: _Runner, runner: _Runner) -> list[_Runner]:
        """Give the champion's room to one candidate; nothing links its times to the others' then."""
        self._bench.release(champion.candidate)
        failure = self._prepare(runner, [])
        if failure is not None:
            self._fail(runner, failure)
        return [] if failure else [runner]

    def _prepare(self, runner: _Runner, beside: Sequence[_Runner]) -> Failure | None:
        """Make a runner resident beside others, or return why it is not."""
        self._check_stop()
        if not self._budget.fits(self._input_bytes, [r.footprint for r in (*beside, runner)]):
            detail = self._budget.shortfall(self._input_bytes, runner.footprint)
            return Failure(FailureKind.OVER_BUDGET, detail)
        outcome = self._bench.prepare(runner.candidate)
        if isinstance(outcome, Failure):
            return outcome
        runner.footprint = outcome
        if not runner.finished:
            opened = self._store.open_trial(self._sweep_id, self._cell, runner.candidate, outcome)
            runner.trial_id = opened
        return None

    def _rounds(self, batch: int, runners: list[_Runner]) -> None:
        launches = self._launches(batch, runners)
        for round in range(self._protocol.samples):
            self._check_stop()
            taken: list[tuple[int, Sample]] = []
            for runner in runners if round % 2 == 0 else runners[::-1]:
                if runner.failed or runner.crowded or (batch, round) in runner.samples:
                    continue
                latency = sampled(self._bench, runner.candidate, batch, round, launches)
                if isinstance(latency, Failure):
                    self._drop(runner, latency, runners)
                    continue
                sample = Sample(batch, round, len(taken), launches, latency)
                runner.samples[batch, round] = sample
                taken.append((runner.trial_id, sample))
            if taken:
                self._store.add_samples(taken)

    def _launches(self, batch: int, runners: list[_Runner]) -> int:
        """Prime every candidate with one launch; the fastest sets how many make a sample of this batch."""
        rough: list[float] = []
        for runner in runners:
            latency = self._bench.sample(runner.candidate, batch, 0, 1)
            if isinstance(latency, Failure):
                self._drop(runner, latency, runners)
            else:
                rough.append(latency)
        begun = {s.launches for r in runners for s in r.samples.values() if s.batch == batch}
        fastest = min((latency for latency in rough if latency > 0), default=1.0)
        return max(begun, default=self._protocol.launches(fastest))

    def _drop(self, runner: _Runner, failure: Failure, runners: Sequence[_Runner]) -> None:
        """Take out of the batch who failed; out of memory beside other newcomers is no failure of its own."""
        newcomers = sum(not (r.finished or r.failed or r.crowded) for r in runners)
        if failure.kind is FailureKind.OUT_OF_MEMORY and (newcomers > 1 or runner.finished):
            runner.crowded = True
            self._bench.release(runner.candidate)
        else:
            self._fail(runner, failure)

    def _finish(self, runner: _Runner) -> None:
        self._bench.release(runner.candidate)
        if not runner.failed and not runner.finished:
            self._store.finish_trial(runner.trial_id)
            runner.finished = True
            self._done.append(runner)
            self._tell(runner.candidate, runner.latency_us)

    def _fail(self, runner: _Runner, failure: Failure) -> None:
        runner.failed = True
        if runner in self._done:
            self._done.remove(runner)
        self._bench.release(runner.candidate)
        self._store.fail_trial(self._sweep_id, self._cell, runner.candidate, runner.footprint, failure)
        self._tell(runner.candidate, failure)

    def _check_stop(self) -> None:
        if self._stop():
            raise Stopped
