"""The race: all candidates of a cell, timed in interleaved rounds, batch by batch under the budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from mhctune.autotuner.bench import Bench
from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.conditions import Conditions, Reader, not_applicable
from mhctune.autotuner.field import Field, boundaries, counted, field_after, marks_of
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import (
    PLACEMENT_ROUNDS,
    UNMEASURED,
    Cell,
    Failure,
    FailureKind,
    Footprint,
    Measurement,
    Sample,
    Trial,
)
from mhctune.autotuner.runner import Runner, sampled
from mhctune.autotuner.store import Store
from mhctune.autotuner.twin import Twin
from mhctune.kernels.space import Candidate


class Stopped(Exception):
    """The sweep was asked to stop; everything measured so far is committed."""


class Race:
    """Races the candidates of one cell and tells the store after every round.

    Rounds run forward and back in turn, so that a drift of the machine favours nobody. Who takes part in the
    next one follows from the samples of the batch (`mhctune.autotuner.field`): losers leave at the looks and
    free their room; finalists are confirmed beside a twin of the best, which shows the noise, at several
    addresses in turn, as far as the budget has room for a second set of the one that moves. Who is not told
    from the leader there goes on to further ones, without a twin. A race that was stopped is taken up at the
    first round it lacks; a batch that had begun ends among those who began it.
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
        *,
        max_regret: float = 0.05,
        keep: Collection[Candidate] = (),
        read: Reader = not_applicable,
    ) -> None:
        """Prepare a race.

        `stop` is asked before each candidate and round, `tell` hears of each outcome. Who is surely slower
        than the best by more than `max_regret` leaves early, unless it is in `keep`: those are confirmed
        like finalists. `read` tells the conditions after each round.
        """
        self._sweep_id, self._cell = sweep_id, cell
        self._store, self._bench, self._budget, self._protocol = store, bench, budget, protocol
        self._stop, self._tell, self._max_regret, self._read = stop, tell, max_regret, read
        self._keep = keep
        self._input_bytes, self._limit, self._floor_us = 0, 0, 0.0
        self._done: list[Runner] = []
        self._all: list[Runner] = []

    def run(self, candidates: Sequence[Candidate], known: Iterable[Trial], after: int = -1) -> None:
        """Race what is not settled yet; `known` are the trials of the cell that may take part.

        Batches are numbered on from `after`, the last one of trials that may not.

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
            self._floor_us = self._bench.floor_us()
            if self._floor_us > 0:
                self._store.keep_floor(self._sweep_id, self._cell, self._floor_us)
            settled = [self._runner(t.candidate, t) for t in trials.values() if t.settled]
            self._done = [runner for runner in settled if runner.finished]
            runners = [self._runner(c, trials.get(c)) for c in unsettled]
            self._all = [*settled, *runners]
            self._batches(runners, after)
        finally:
            self._bench.leave()

    def refuse(self, candidates: Sequence[Candidate], failure: Failure) -> None:
        """Record one failure for all: what is wrong is the cell's, not theirs."""
        for candidate in candidates:
            self._store.fail_trial(self._sweep_id, self._cell, candidate, Footprint(0, 0, 0), failure)
            self._tell(candidate, failure)

    def _runner(self, candidate: Candidate, trial: Trial | None) -> Runner:
        runner = Runner(candidate, self._bench.forecast(candidate))
        if trial is not None:
            runner.trial_id = trial.id
            runner.samples = {(s.batch, s.round): s for s in trial.samples}
            runner.finished = isinstance(trial.outcome, Measurement)
            runner.failed = trial.settled and not runner.finished
        return runner

    def _batches(self, runners: list[Runner], after: int) -> None:
        batch = max(after, *(runner.last_batch for runner in (*runners, *self._done)))
        begun = [r for r in runners if r.last_batch == batch >= 0]
        waiting = deque(r for r in runners if r not in begun)
        self._limit = len(runners)
        if begun:
            waiting.extendleft(reversed(self._resume(batch, begun)))
        while waiting:
            champion = min(self._done, key=lambda runner: runner.latency_us, default=None)
            batch += self._batch(batch + 1, champion, waiting)

    def _resume(self, batch: int, begun: Sequence[Runner]) -> list[Runner]:
        """End a batch among those who began it; return who found no room and has to wait."""
        field = self._field(batch, ())
        champion = next((r for r in self._done if r.candidate in field.racing), None)
        queue = deque(r for r in begun if r.candidate in field.racing)
        absent = [r for r in begun if r.candidate not in field.done and r not in queue]
        if field.racing:
            self._batch(batch, champion, queue)
        for runner in begun:
            if runner.candidate in field.done:
                self._finish(runner)
        return [*queue, *absent]

    def _batch(self, batch: int, champion: Runner | None, queue: deque[Runner]) -> bool:
        """Race the champion and as many of the queue as fit; return whether there was somebody to race."""
        ready = self._admit(champion, queue)
        field = self._field(batch, ready)
        new = field.twin is not None or any(not runner.finished for runner in ready)
        if new:
            field = self._rounds(batch, ready, field)
        crowded = [runner for runner in ready if runner.crowded]
        for runner in ready:
            if runner.candidate in field.done and not runner.crowded:
                self._finish(runner)
            else:
                self._bench.release(runner.candidate)
        if crowded:
            # Memory ran out while they were timed: half as many at a time, and they wait for their turn.
            self._limit = max(1, (len(ready) - len(crowded)) // 2)
            for runner in crowded:
                runner.crowded = False
            queue.extendleft(reversed([runner for runner in crowded if not runner.finished]))
        return new

    def _field(self, batch: int, ready: Sequence[Runner]) -> Field:
        """Return who takes part in the next round of a batch, of its samples' owners and who is ready."""
        samples = {r.candidate: r.of_batch(batch) for r in self._all}
        beginning = {runner.candidate for runner in ready}
        taking_part = {c: taken for c, taken in samples.items() if taken or c in beginning}
        return field_after(taking_part, self._protocol, self._max_regret, self._keep)

    def _admit(self, champion: Runner | None, queue: deque[Runner]) -> list[Runner]:
        """Make resident the champion, so that comparisons are head to head, and who fits beside it."""
        ready: list[Runner] = []
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

    def _admit_alone(self, champion: Runner, runner: Runner) -> list[Runner]:
        """Give the champion's room to one candidate; nothing links its times to the others' then."""
        self._bench.release(champion.candidate)
        failure = self._prepare(runner, [])
        if failure is not None:
            self._fail(runner, failure)
        return [] if failure else [runner]

    def _prepare(self, runner: Runner, beside: Sequence[Runner]) -> Failure | None:
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

    def _rounds(self, batch: int, runners: list[Runner], field: Field) -> Field:
        """Run the rounds that a batch lacks among those who are resident; return the field at its end."""
        launches = self._launches(batch, runners)
        marks = marks_of(s for runner in self._all for s in runner.of_batch(batch))
        twin: Runner | None = None
        placement = 0  # of a batch that is taken up again, too: who was prepared for it moves at once
        before = self._read()
        while racing := [r for r in runners if r.candidate in field.racing and not (r.failed or r.crowded)]:
            for runner in runners:
                if runner.candidate in field.done:
                    self._bench.release(runner.candidate)
            original = next((runner for runner in racing if runner.candidate == field.twin), None)
            if original is None and all(runner.finished for runner in racing):
                break  # nobody new is left to be compared
            self._check_stop()
            if original is not None and twin is None:
                twin = self._admit_twin(original, batch, racing)
            if original is not None and original.failed:
                continue
            timed = racing if original is None or twin is None or twin.failed else [*racing, twin]
            if twin is not None and field.twin is None:
                self._bench.release(twin.candidate)
                twin = None
            if placement != field.placement:
                placement = field.placement
                self._move(timed, placement, runners)
                continue
            number = max(max(marks, default=-1) + 1, placement * PLACEMENT_ROUNDS)
            before = self._round(batch, number, timed, runners, launches, before, marks)
            if len(counted(marks, self._protocol.repeats)) in boundaries(self._protocol):
                field = self._field(batch, runners)
        if twin is not None:
            self._bench.release(twin.candidate)
        return field

    def _round(
        self,
        batch: int,
        round: int,
        timed: Sequence[Runner],
        runners: Sequence[Runner],
        launches: int,
        before: Conditions,
        marks: dict[int, bool],
    ) -> Conditions:
        """Take and commit one round; return the conditions after it."""
        latencies: list[tuple[Runner, float]] = []
        order = timed if round % 2 == 0 else timed[::-1]
        last = order[-1]  # whose samples are thrown away: nobody is timed right behind itself
        for _ in range(self._protocol.discarded):
            thrown = self._bench.sample(last.candidate, batch, round, launches)
            if isinstance(thrown, Failure):
                self._drop(last, thrown, runners)
                break
        for runner in order:
            if runner.failed or runner.crowded:
                continue  # in this round: by what was thrown away, or an original with its twin
            latency = sampled(self._bench, runner.candidate, batch, round, launches, self._floor_us)
            if isinstance(latency, Failure):
                self._drop(runner, latency, runners)
            else:
                latencies.append((runner, latency))
        after = self._read()
        during = after.since(before)
        marks[round] = during.throttled
        taken: list[tuple[int, Sample]] = []
        twins: list[tuple[int, Sample]] = []
        for position, (runner, latency) in enumerate(latencies):
            clock, throttled = during.sm_clock_mhz, during.throttled
            sample = Sample(batch, round, position, launches, latency, clock, throttled)
            runner.samples[batch, round] = sample
            (taken if runner.original is None else twins).append((runner.trial_id, sample))
        if taken:
            self._store.add_samples(taken, twins, during)
        return after

    def _move(self, timed: Sequence[Runner], placement: int, runners: Sequence[Runner]) -> None:
        """Move who is timed; whoever finds no room for a second set stays."""
        for runner in timed:
            beside = [r.footprint for r in timed if not (r.failed or r.crowded)]
            if runner.failed or not self._budget.fits(self._input_bytes, [*beside, runner.footprint]):
                continue
            failure = self._bench.move(runner.candidate, placement)
            if failure is not None and failure.kind not in UNMEASURED:
                self._drop(runner, failure, runners)

    def _admit_twin(self, original: Runner, batch: int, beside: Sequence[Runner]) -> Runner:
        """Make a copy of the best resident; without memory for it the noise floor stays unknown."""
        twin = Runner(Twin.to(original.candidate), original.footprint, original.trial_id, finished=True)
        twin.original = original
        failure = self._prepare(twin, beside)
        if failure is None:
            primed = self._bench.sample(twin.candidate, batch, 0, 1)
            failure = primed if isinstance(primed, Failure) else None
        if failure is not None:
            self._drop(twin, failure, beside)
        return twin

    def _launches(self, batch: int, runners: list[Runner]) -> int:
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

    def _drop(self, runner: Runner, failure: Failure, runners: Sequence[Runner]) -> None:
        """Take out of the batch who failed; out of memory beside other newcomers is no failure of its own.

        What a twin fails by is its original's: the same kernels were right once and are not again.
        """
        newcomers = sum(not (r.finished or r.failed or r.crowded) for r in runners)
        if runner.original is not None:
            runner.failed = True
            self._bench.release(runner.candidate)
            if failure.kind not in UNMEASURED:
                self._fail(runner.original, failure)
        elif failure.kind is FailureKind.OUT_OF_MEMORY and (newcomers > 1 or runner.finished):
            runner.crowded = True
            self._bench.release(runner.candidate)
        else:
            self._fail(runner, failure)

    def _finish(self, runner: Runner) -> None:
        self._bench.release(runner.candidate)
        if not runner.failed and not runner.finished:
            self._store.finish_trial(runner.trial_id)
            runner.finished = True
            self._done.append(runner)
            self._tell(runner.candidate, runner.latency_us)

    def _fail(self, runner: Runner, failure: Failure) -> None:
        runner.failed = True
        if runner in self._done:
            self._done.remove(runner)
        self._bench.release(runner.candidate)
        self._store.fail_trial(self._sweep_id, self._cell, runner.candidate, runner.footprint, failure)
        self._tell(runner.candidate, failure)

    def _check_stop(self) -> None:
        if self._stop():
            raise Stopped
