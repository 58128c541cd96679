"""The sweep: every candidate of every cell, remembered as it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mhctune.autotuner.bench import Bench, BenchLost
from mhctune.autotuner.budget import BudgetError, VramBudget
from mhctune.autotuner.conditions import Reader, not_applicable
from mhctune.autotuner.exploration import Exploration
from mhctune.autotuner.explorer import Explorer
from mhctune.autotuner.plan import SweepPlan
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
from mhctune.kernels.seam import Variant
from mhctune.kernels.space import Candidate

CompileAll = Callable[[tuple[Variant, ...], Callable[[int, int], None]], None]


@dataclass
class Watcher:
    """Hears how a sweep goes on; does nothing by itself."""

    def begun(self, sweep_id: int, finished: int, grid: int) -> None:
        """Hear that a sweep began, with this many trials done before."""

    def proposed(self, search: Exploration, grid: int) -> None:
        """Hear that a search proposed a generation, or at its end the shortlist, and the trials there are."""

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
        compile_all: CompileAll,
        stop: Callable[[], bool] = lambda: False,
        watcher: Watcher | None = None,
        read: Reader = not_applicable,
    ) -> None:
        """Prepare; `compile_all` gets the variants in the order in which they are needed, and tells of each.

        It returns once every one is compiled or has failed, unless the bench waits for them by itself.

        `read` tells the conditions of the device, which are kept with every round.
        """
        self._read = read
        self._plan, self._store, self._bench, self._budget = plan, store, bench, budget
        self._compile_all, self._stop, self._watcher = compile_all, stop, watcher or Watcher()

    def run(self, *, new: bool = False) -> SweepResult:
        """Measure what is not measured yet; `new` starts over instead of resuming."""
        plan, store = self._plan, self._store
        sweep_id = store.begin(plan.record(), new=new)
        record = store.record(sweep_id)
        finished = sum(trial.settled for trial in store.trials(sweep_id))
        self._watcher.begun(sweep_id, finished, record.grid)
        lost = ""
        try:
            record = self._explored(sweep_id, record)
            self._measure(sweep_id, record, plan.token_counts)
        except Stopped:
            store.end(sweep_id, SweepState.INTERRUPTED)
            return SweepResult(sweep_id, SweepState.INTERRUPTED, ())
        except BenchLost as error:
            lost = f"the bench was lost for good: {error}"
        missing = unmeasured(store.record(sweep_id), store.trials(sweep_id))
        state = SweepState.INCOMPLETE if missing or lost else SweepState.COMPLETE
        store.end(sweep_id, state)
        return SweepResult(sweep_id, state, tuple(filter(None, (lost, *missing.values()))))

    def _explored(self, sweep_id: int, record: SweepRecord) -> SweepRecord:
        """Race generation after generation of what is searched; return the record with its shortlist.

        A generation is kept before it is raced: whoever resumes goes on with it.
        """
        explorer = Explorer(self._plan)
        while record.search is not None and not record.search.finished:
            if record.search.begun:
                self._measure(sweep_id, record, record.search.anchors, again=False)
            record = explorer.extend(record, self._store.trials(sweep_id))
            self._store.propose(sweep_id, record)
            assert record.search is not None
            self._watcher.proposed(record.search, record.grid)
        return record

    def _measure(
        self, sweep_id: int, record: SweepRecord, token_counts: Sequence[int], *, again: bool = True
    ) -> None:
        """Compile and race what is not measured yet; `again` also what found no memory before."""
        plan, known = self._plan, self._store.trials(sweep_id)
        done = {(t.cell.num_tokens, t.candidate) for t in known if (t.settled if again else t.outcome)}
        # The order is that of all, so that who resumes races in it, too.
        orders = {
            n: [c for c in plan.shuffled(record.expected(n)) if (n, c) not in done] for n in token_counts
        }
        wanted = dict.fromkeys(c for order in orders.values() for c in order)
        self._compile_all(
            tuple(dict.fromkeys(v for c in wanted for v in plan.variants_of(c))), self._compiled
        )
        for index, (count, order) in enumerate(orders.items()):
            cell = Cell(plan.seam.name, plan.problem, count)
            self._watcher.entered(cell, index, len(token_counts))
            found = [t for t in known if t.cell.num_tokens == count]
            self._race(sweep_id, cell).run(order, found)

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
    footprints = [bench.forecast(candidate) for candidate in (*plan.candidates, *plan.drawn)]
    bench.leave()
    if not any(budget.fits(entered, [footprint]) for footprint in footprints):
        least = min(footprints, key=lambda f: f.forecast_bytes)
        raise BudgetError(f"at {where} {budget.shortfall(entered, least)}")


def unmeasured(sweep: SweepRecord, trials: Iterable[Trial]) -> dict[int, str]:
    """Return, by token count, why that part of the grid may carry no band; empty when all was measured.

    What was only explored at anchors is missing nowhere else. While a search has not ended, every token count
    is missing: nobody knows yet who will be raced there.
    """
    by_count: dict[int, list[Trial]] = {count: [] for count in sweep.token_counts}
    for trial in trials:
        by_count[trial.cell.num_tokens].append(trial)
    missing: dict[int, str] = {}
    for count, found in by_count.items():
        expected = len(sweep.expected(count))
        measured = sum(isinstance(t.outcome, Measurement) for t in found)
        skipped = [t for t in found if isinstance(t.outcome, Failure) and t.outcome.kind in UNMEASURED]
        absent = expected - sum(t.outcome is not None for t in found)
        cut = _cut(sweep.search)
        if measured == 0 or skipped or absent > 0 or cut:
            missing[count] = (
                f"{counted(count, 'token')}: {measured} of {expected} candidates measured, "
                f"{len(skipped)} found no memory, {absent} not run{cut}"
            )
    return missing


def _cut(search: Exploration | None) -> str:
    if search is None or search.finished:
        return ""
    return (
        f"; the search of {', '.join(search.legal)} is at generation {search.begun} of {search.generations}"
    )
