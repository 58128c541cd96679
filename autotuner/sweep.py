"""The sweep: every candidate of every cell, remembered as it goes."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mhctune.autotuner.bench import Bench, BenchLost
from mhctune.autotuner.budget import BudgetError, VramBudget
from mhctune.autotuner.conditions import Reader, not_applicable
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.race import Race, Stopped
from mhctune.autotuner.records import (
    UNMEASURED,
    Cell,
    Failure,
    Measurement,
    SweepState,
    Trial,
)
from mhctune.autotuner.store import Store, SweepRecord
from mhctune.autotuner.words import counted
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.seam import Problem, Seam, Variant
from mhctune.kernels.space import Candidate, SearchSpace


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep sets out to measure."""

    seam: Seam
    problem: Problem
    target: str
    token_counts: tuple[int, ...]
    spaces: Mapping[str, SearchSpace]
    protocol: Protocol
    fingerprint: Fingerprint
    max_regret: float
    """Bound of the bands; also who is surely slower by more leaves a race early."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The legal points of every arm, in arm order."""
        return tuple(c for space in self.spaces.values() for c in space.candidates())

    @property
    def race_order(self) -> tuple[Candidate, ...]:
        """The candidates as they are raced, shuffled by the seed: who is alike is not timed side by side."""
        order = list(self.candidates)
        random.Random(self.protocol.seed).shuffle(order)
        return tuple(order)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """One a token count."""
        return tuple(Cell(self.seam.name, self.problem, count) for count in self.token_counts)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The distinct kernels to compile."""
        return tuple(dict.fromkeys(v for c in self.candidates for v in self.variants_of(c)))

    def variants_of(self, candidate: Candidate) -> tuple[Variant, ...]:
        """Return the kernels of one candidate."""
        return self.seam.arm(self.target, candidate.arm).variants(self.problem, candidate.config)

    @property
    def grid(self) -> int:
        """Number of trials."""
        return len(self.candidates) * len(self.token_counts)

    def record(self) -> SweepRecord:
        """Return what the store keeps; the digest covers fingerprint, space, cells and protocol."""
        space = {
            arm: {tunable.name: list(tunable.values) for tunable in space.tunables}
            for arm, space in self.spaces.items()
        }
        identity: dict[str, Any] = {
            "fingerprint": self.fingerprint.digest,
            "space": space,
            "candidates": [[c.arm, c.key] for c in self.candidates],
            "seam": self.seam.name,
            "problem": self.problem.digest,
            "token_counts": self.token_counts,
            "protocol": self.protocol.to_dict(),
        }
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return SweepRecord(
            digest=hashlib.sha256(text.encode()).hexdigest(),
            seam=self.seam.name,
            problem=self.problem,
            target=self.target,
            token_counts=self.token_counts,
            grid=self.grid,
            space=space,
            variants={c: tuple(map(str, self.variants_of(c))) for c in self.candidates},
            protocol=self.protocol.to_dict(),
            fingerprint=self.fingerprint,
            sources={arm: self.seam.arm(self.target, arm).source_hash for arm in self.spaces},
            bound=self.max_regret,
        )


@dataclass
class Watcher:
    """Hears how a sweep goes on; does nothing by itself."""

    def begun(self, sweep_id: int, finished: int, grid: int) -> None:
        """Hear that a sweep began, with this many trials done before."""

    def compiled(self, done: int, total: int) -> None:
        """Hear how many variants are compiled."""

    def entered(self, cell: Cell, index: int, total: int) -> None:
        """Hear that a cell is raced."""

    def told(self, cell: Cell, candidate: Candidate, outcome: float | Failure) -> None:
        """Hear of a trial's outcome: microseconds per launch, or a failure."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """How a sweep ended."""

    sweep_id: int
    state: SweepState
    missing: tuple[str, ...]
    """What was not measured, a sentence each."""


class Sweep:
    """Runs a plan: compile, then race cell after cell. Owns neither store nor bench."""

    def __init__(
        self,
        plan: SweepPlan,
        store: Store,
        bench: Bench,
        budget: VramBudget,
        compile_all: Callable[[tuple[Variant, ...], Callable[[int, int], None]], None],
        stop: Callable[[], bool] = lambda: False,
        watcher: Watcher | None = None,
        read: Reader = not_applicable,
    ) -> None:
        """Prepare; `compile_all` returns once every variant is compiled or has failed, and tells of each.

        `read` tells the conditions of the device, which are kept with every round.
        """
        self._read = read
        self._plan, self._store, self._bench, self._budget = plan, store, bench, budget
        self._compile_all, self._stop, self._watcher = compile_all, stop, watcher or Watcher()

    def run(self, *, new: bool = False) -> SweepResult:
        """Measure what is not measured yet; `new` starts over instead of resuming."""
        plan, store = self._plan, self._store
        sweep_id = store.begin(plan.record(), new=new)
        known = store.trials(sweep_id)
        finished = {(t.cell.num_tokens, t.candidate) for t in known if t.settled}
        self._watcher.begun(sweep_id, len(finished), plan.grid)
        pending = [c for c in plan.candidates if any((n, c) not in finished for n in plan.token_counts)]
        lost = ""
        try:
            variants = tuple(dict.fromkeys(v for c in pending for v in plan.variants_of(c)))
            self._compile_all(variants, self._compiled)
            order = plan.race_order
            for index, cell in enumerate(plan.cells):
                self._watcher.entered(cell, index, len(plan.cells))
                found = [t for t in known if t.cell.num_tokens == cell.num_tokens]
                self._race(sweep_id, cell).run(order, found)
        except Stopped:
            store.end(sweep_id, SweepState.INTERRUPTED)
            return SweepResult(sweep_id, SweepState.INTERRUPTED, ())
        except BenchLost as error:
            lost = f"the bench was lost for good: {error}"
        missing = unmeasured(plan.token_counts, plan.candidates, store.trials(sweep_id))
        state = SweepState.INCOMPLETE if missing or lost else SweepState.COMPLETE
        store.end(sweep_id, state)
        return SweepResult(sweep_id, state, tuple(filter(None, (lost, *missing.values()))))

    def _compiled(self, done: int, total: int) -> None:
        self._watcher.compiled(done, total)
        if self._stop():
            raise Stopped

    def _race(self, sweep_id: int, cell: Cell) -> Race:
        def tell(candidate: Candidate, outcome: float | Failure) -> None:
            self._watcher.told(cell, candidate, outcome)

        plan = self._plan
        return Race(
            sweep_id, cell, self._store, self._bench, self._budget, plan.protocol, self._stop, tell,
            max_regret=plan.max_regret, read=self._read,
        )  # fmt: skip


def require_room(plan: SweepPlan, bench: Bench, budget: VramBudget) -> None:
    """Refuse a budget that holds no candidate of the smallest cell, before anything is written.

    Raises:
        BudgetError: with the bytes that the smallest candidate needs.
    """
    smallest = plan.cells[0]
    where = counted(smallest.num_tokens, "token")
    entered = bench.enter(smallest, plan.protocol.seed)
    if isinstance(entered, Failure):
        raise BudgetError(f"the inputs at {where} find no memory: {entered.detail}")
    footprints = [bench.forecast(candidate) for candidate in plan.candidates]
    bench.leave()
    if not any(budget.fits(entered, [footprint]) for footprint in footprints):
        least = min(footprints, key=lambda f: f.forecast_bytes)
        raise BudgetError(f"at {where} {budget.shortfall(entered, least)}")


def unmeasured(
    token_counts: Sequence[int], candidates: Sequence[Candidate], trials: Iterable[Trial]
) -> dict[int, str]:
    """Return, by token count, why that part of the grid may carry no band; empty when all was measured."""
    by_count: dict[int, list[Trial]] = {count: [] for count in token_counts}
    for trial in trials:
        by_count[trial.cell.num_tokens].append(trial)
    missing: dict[int, str] = {}
    for count, found in by_count.items():
        measured = sum(isinstance(t.outcome, Measurement) for t in found)
        skipped = [t for t in found if isinstance(t.outcome, Failure) and t.outcome.kind in UNMEASURED]
        absent = len(candidates) - sum(t.outcome is not None for t in found)
        if measured == 0 or skipped or absent > 0:
            missing[count] = (
                f"{counted(count, 'token')}: {measured} of {len(candidates)} candidates measured, "
                f"{len(skipped)} found no memory, {absent} not run"
            )
    return missing
