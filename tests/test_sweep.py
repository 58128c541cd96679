"""A sweep knows itself again, compiles and measures what is missing, and says what it left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from mhctune.autotuner.bench import BenchLost
from mhctune.autotuner.budget import BudgetError, VramBudget
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import (
    Cell,
    Failure,
    FailureKind,
    Footprint,
    Measurement,
    SweepState,
    Trial,
)
from mhctune.autotuner.sweep import Sweep, SweepResult, Watcher, require_room, unmeasured
from mhctune.db.engine import DatabaseError
from mhctune.db.repository import Repository
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.post_pre_delayed import PostPreDelayed
from mhctune.kernels.seam import Problem, Variant
from mhctune.kernels.space import Candidate, Constraint

SEAM = PostPreDelayed()
PROBLEM = Problem(hidden_size=256)
AMPLE = VramBudget(10**9, 10**9)
VALUES = {"tile_n": [12, 24], "n_splits": [1], "block_h": [64], "block_m": [1]}
ROUNDS = 5


def plan_of(fingerprint: Fingerprint, values: dict[str, list[int]] = VALUES, **changes: Any) -> SweepPlan:
    spaces = {arm.name: arm.space(PROBLEM).restricted(values) for arm in SEAM.arms("c")[:2]}
    given: dict[str, Any] = {
        "seam": SEAM,
        "problem": PROBLEM,
        "target": "c",
        "token_counts": (1, 4),
        "spaces": spaces,
        "protocol": Protocol(ROUNDS),
        "fingerprint": fingerprint,
        "max_regret": 0.05,
    }
    return SweepPlan(**{**given, **changes})


@pytest.fixture
def plan(make_fingerprint: Callable[..., Fingerprint]) -> SweepPlan:
    return plan_of(make_fingerprint())


@dataclass
class FakeBench:
    """Candidates without kernels; `refused` fail, by (token count, candidate), and `big` takes its bytes."""

    refused: dict[tuple[int, Candidate], Failure] = field(default_factory=dict)
    big: dict[tuple[int, Candidate], int] = field(default_factory=dict)
    timed: list[tuple[int, Candidate]] = field(default_factory=list)
    prepared: list[tuple[int, Candidate]] = field(default_factory=list)
    tokens: int = 0

    def input_bytes(self, cell: Cell) -> int:
        return 10

    def enter(self, cell: Cell, seed: int) -> int:
        self.tokens = cell.num_tokens
        return 10

    def floor_us(self) -> float:
        return 0.0

    def forecast(self, candidate: Candidate) -> Footprint:
        return Footprint(10, self.big.get((self.tokens, candidate), 100), 0)

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        self.prepared.append((self.tokens, candidate))
        return self.refused.get((self.tokens, candidate), self.forecast(candidate))

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        if launches > 1:
            self.timed.append((self.tokens, candidate))
        return 100.0 + candidate.config["tile_n"] + round

    def move(self, candidate: Candidate, placement: int) -> Failure | None:
        """Nothing lies anywhere."""
        return None

    def release(self, candidate: Candidate) -> None:
        """Nothing is held."""

    def leave(self) -> None:
        """Nothing is held."""


@dataclass
class Compiling:
    """Compiles nothing and remembers what it was asked for."""

    asked: list[tuple[Variant, ...]] = field(default_factory=list)

    def __call__(self, variants: tuple[Variant, ...], tell: Callable[[int, int], None]) -> None:
        self.asked.append(variants)
        for done in range(len(variants) + 1):
            tell(done, len(variants))


def run(
    plan: SweepPlan,
    store: Repository,
    bench: FakeBench,
    budget: VramBudget = AMPLE,
    *,
    compiling: Compiling | None = None,
    stop: Callable[[], bool] = lambda: False,
    watcher: Watcher | None = None,
    new: bool = False,
) -> SweepResult:
    sweep = Sweep(plan, store, bench, budget, compiling or Compiling(), stop, watcher)
    return sweep.run(new=new)


# Identity.


def test_the_digest_is_the_same_twice(plan: SweepPlan, make_fingerprint: Any) -> None:
    assert plan.record().digest == plan_of(make_fingerprint()).record().digest


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": {"driver": "571"}},
        {"fingerprint": {"source_hash": "6" * 64}},
        {"values": {**VALUES, "tile_n": [24]}},
        {"token_counts": (1, 4, 8)},
        {"protocol": Protocol(ROUNDS + 1)},
        {"protocol": Protocol(ROUNDS, version=99)},
        {"protocol": Protocol(ROUNDS, seed=1)},
        {"problem": Problem(hidden_size=256, sinkhorn_iters=19)},
    ],
    ids=lambda change: " ".join(change),
)
def test_what_changes_a_measurement_makes_another_sweep(
    plan: SweepPlan, make_fingerprint: Any, change: dict[str, Any]
) -> None:
    given = dict(change)
    fingerprint = make_fingerprint(**given.pop("fingerprint", {}))
    other = plan_of(fingerprint, given.pop("values", VALUES), **given)
    assert other.record().digest != plan.record().digest


def test_the_regret_bound_does_not_make_another_sweep(plan: SweepPlan) -> None:
    wider = replace(plan, max_regret=0.2)
    assert wider.record().digest == plan.record().digest
    assert wider.record().bound == 0.2


def test_a_rule_that_removes_points_makes_another_sweep(plan: SweepPlan) -> None:
    only_24 = Constraint("tile_n {tile_n} is refused", lambda config: config["tile_n"] == 24)
    fewer = replace(
        plan, spaces={**plan.spaces, "fused": replace(plan.spaces["fused"], constraints=(only_24,))}
    )
    assert fewer.grid == plan.grid - 2
    assert fewer.record().digest != plan.record().digest


def test_the_record_holds_what_is_needed_to_rebuild_the_plan(plan: SweepPlan) -> None:
    record = plan.record()
    assert record.grid == plan.grid == 8
    assert json.loads(json.dumps(record.space)) == {"fused": VALUES, "unfused": VALUES}
    assert record.protocol["samples"] == ROUNDS
    assert record.sources == {arm.name: arm.source_hash for arm in SEAM.arms("c")[:2]}


def test_shared_kernels_are_one_variant(plan: SweepPlan) -> None:
    assert len(plan.variants) == len(set(plan.variants)) == 2 + 2 + 2  # tiled ones by arm, post, epilogue


# Running.


def test_a_sweep_measures_the_whole_grid_once(plan: SweepPlan, repository: Repository) -> None:
    bench = FakeBench()
    result = run(plan, repository, bench)
    assert (result.state, result.missing) == (SweepState.COMPLETE, ())
    trials = repository.trials(result.sweep_id)
    assert {(t.cell.num_tokens, t.candidate) for t in trials} == {
        (n, c) for n in (1, 4) for c in plan.candidates
    }
    assert len(trials) == plan.grid
    assert len(bench.timed) == plan.grid * ROUNDS
    assert all(isinstance(t.outcome, Measurement) and len(t.samples) == ROUNDS for t in trials)


def stop_after(bench: FakeBench, samples: int) -> Callable[[], bool]:
    return lambda: len(bench.timed) >= samples


def test_the_same_command_resumes_and_nothing_is_measured_twice(
    plan: SweepPlan, repository: Repository
) -> None:
    first, second = FakeBench(), FakeBench()
    cut = run(plan, repository, first, stop=stop_after(first, 2 * 4))
    assert cut.state is SweepState.INTERRUPTED
    assert repository.sweep(cut.sweep_id).state is SweepState.INTERRUPTED
    result = run(plan, repository, second)
    assert (result.sweep_id, result.state) == (cut.sweep_id, SweepState.COMPLETE)
    assert len(first.timed) + len(second.timed) == plan.grid * ROUNDS
    assert all(len(t.samples) == ROUNDS for t in repository.trials(result.sweep_id))


def test_another_bound_resumes_the_same_sweep(plan: SweepPlan, repository: Repository) -> None:
    first = FakeBench()
    cut = run(plan, repository, first, stop=stop_after(first, 4))
    assert run(replace(plan, max_regret=0.5), repository, FakeBench()).sweep_id == cut.sweep_id


def test_new_starts_over_and_leaves_the_old_sweep_alone(plan: SweepPlan, repository: Repository) -> None:
    first, second = FakeBench(), FakeBench()
    cut = run(plan, repository, first, stop=stop_after(first, 4))
    before = repository.trials(cut.sweep_id)
    result = run(plan, repository, second, new=True)
    assert result.sweep_id != cut.sweep_id
    assert len(second.timed) == plan.grid * ROUNDS
    assert repository.trials(cut.sweep_id) == before


def test_a_complete_sweep_is_measured_anew_by_the_same_command(
    plan: SweepPlan, repository: Repository
) -> None:
    first = run(plan, repository, FakeBench())
    bench = FakeBench()
    assert run(plan, repository, bench).sweep_id != first.sweep_id
    assert len(bench.timed) == plan.grid * ROUNDS


def test_everything_is_compiled_before_anything_is_timed(plan: SweepPlan, repository: Repository) -> None:
    bench, compiling = FakeBench(), Compiling()

    def compile_all(variants: tuple[Variant, ...], tell: Callable[[int, int], None]) -> None:
        assert not bench.prepared
        compiling(variants, tell)

    Sweep(plan, repository, bench, AMPLE, compile_all).run()
    assert [set(asked) for asked in compiling.asked] == [set(plan.variants)]


def test_nothing_is_compiled_for_a_candidate_that_is_finished(
    plan: SweepPlan, repository: Repository
) -> None:
    slow = plan.candidates[-1]
    big = {(n, slow): 10**6 for n in plan.token_counts}
    run(plan, repository, FakeBench(big=big), VramBudget(10**5, 10**9))
    compiling = Compiling()
    run(plan, repository, FakeBench(), compiling=compiling)
    assert [set(asked) for asked in compiling.asked] == [set(plan.variants_of(slow))]


def test_a_stop_is_heard_while_kernels_are_compiled(plan: SweepPlan, repository: Repository) -> None:
    bench, heard = FakeBench(), iter([False, False, True])
    result = run(plan, repository, bench, stop=lambda: next(heard))
    assert result.state is SweepState.INTERRUPTED
    assert not bench.prepared


def test_a_compile_failure_is_a_row_in_every_cell_and_the_sweep_is_complete(
    plan: SweepPlan, repository: Repository
) -> None:
    broken, failure = plan.candidates[1], Failure(FailureKind.COMPILE, "c:post_pre(...): gcc said no")
    bench = FakeBench(refused={(n, broken): failure for n in plan.token_counts})
    result = run(plan, repository, bench)
    assert result.state is SweepState.COMPLETE
    rows = [t for t in repository.trials(result.sweep_id) if t.candidate == broken]
    assert [t.outcome for t in rows] == [failure, failure]
    assert repository.counts(result.sweep_id).failures == {FailureKind.COMPILE: 2}
    assert repository.counts(result.sweep_id).measured == plan.grid - 2


def test_what_the_budget_left_out_makes_the_sweep_incomplete_and_is_named(
    plan: SweepPlan, repository: Repository
) -> None:
    bench = FakeBench(big={(4, plan.candidates[0]): 10**6})
    result = run(plan, repository, bench, VramBudget(10**5, 10**9))
    assert result.state is SweepState.INCOMPLETE
    assert result.missing == ("4 tokens: 3 of 4 candidates measured, 1 found no memory, 0 not run",)
    assert repository.sweep(result.sweep_id).state is SweepState.INCOMPLETE


def test_an_incomplete_sweep_is_completed_by_the_same_command_with_more_memory(
    plan: SweepPlan, repository: Repository
) -> None:
    big = {(4, plan.candidates[0]): 10**6}
    cut = run(plan, repository, FakeBench(big=big), VramBudget(10**5, 10**9))
    bench = FakeBench(big=big)
    result = run(plan, repository, bench)
    assert (result.sweep_id, result.state) == (cut.sweep_id, SweepState.COMPLETE)
    assert {key for key in bench.prepared if key[1] == plan.candidates[0]} == {(4, plan.candidates[0])}
    assert {n for n, _ in bench.timed} == {4}
    assert repository.counts(result.sweep_id).measured == plan.grid


def test_a_cell_in_which_everything_failed_makes_the_sweep_incomplete(
    plan: SweepPlan, repository: Repository
) -> None:
    wrong = Failure(FailureKind.MISMATCH, "wrong")
    result = run(plan, repository, FakeBench(refused={(1, c): wrong for c in plan.candidates}))
    assert result.state is SweepState.INCOMPLETE
    assert result.missing[0].startswith("1 token: 0 of 4 candidates measured")


class Notes(Watcher):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def begun(self, sweep_id: int, finished: int, grid: int) -> None:
        self.heard.append(("begun", finished, grid))

    def compiled(self, done: int, total: int) -> None:
        self.heard.append(("compiled", done, total))

    def entered(self, cell: Cell, index: int, total: int) -> None:
        self.heard.append(("entered", cell.num_tokens, index, total))

    def told(self, cell: Cell, candidate: Candidate, outcome: float | Failure) -> None:
        self.heard.append(("told", cell.num_tokens, candidate, outcome))


def test_a_watcher_hears_each_step_and_each_outcome_once(plan: SweepPlan, repository: Repository) -> None:
    wrong, notes = Failure(FailureKind.MISMATCH, "wrong"), Notes()
    run(plan, repository, FakeBench(refused={(1, plan.candidates[0]): wrong}), watcher=notes)
    assert notes.heard[0] == ("begun", 0, 8)
    assert [n for n in notes.heard if n[0] == "compiled"] == [("compiled", n, 6) for n in range(7)]
    assert [n for n in notes.heard if n[0] == "entered"] == [("entered", 1, 0, 2), ("entered", 4, 1, 2)]
    told = {n[1:3]: n[3] for n in notes.heard if n[0] == "told"}
    assert len([n for n in notes.heard if n[0] == "told"]) == len(told) == 8
    assert told[1, plan.candidates[0]] == wrong
    assert told[4, plan.candidates[0]] == 100.0 + 12 + 2  # the median of five rounds


def test_a_watcher_hears_how_much_was_done_before(plan: SweepPlan, repository: Repository) -> None:
    first, notes = FakeBench(), Notes()
    run(plan, repository, first, stop=stop_after(first, 4 * ROUNDS + 4))
    run(plan, repository, FakeBench(), watcher=notes)
    assert notes.heard[0] == ("begun", 4, 8)


# Room, and what was not measured.


def test_a_budget_smaller_than_one_candidate_is_refused_with_the_numbers(plan: SweepPlan) -> None:
    with pytest.raises(BudgetError) as refused:
        require_room(plan, FakeBench(), VramBudget(109, 10**9))
    assert str(refused.value).startswith("at 1 token inputs of 10 bytes and one buffer set of 100 bytes need")
    assert "the budget is 109 B" in str(refused.value)


def test_a_budget_that_holds_one_candidate_is_enough(plan: SweepPlan) -> None:
    big = {(1, c): 10**6 for c in plan.candidates[1:]}
    require_room(plan, FakeBench(big=big), VramBudget(110, 10**9))


def test_what_was_not_measured_is_counted_by_token_count(plan: SweepPlan) -> None:
    cells = {cell.num_tokens: cell for cell in plan.cells}

    def trial(tokens: int, candidate: Candidate, outcome: Measurement | Failure | None) -> Trial:
        return Trial(cells[tokens], candidate, Footprint(1, 1, 1), outcome)

    measured, wrong = Measurement(()), Failure(FailureKind.MISMATCH, "")
    no_memory = Failure(FailureKind.OUT_OF_MEMORY, "")
    a, b, c, d = plan.candidates

    def missing(*trials: Trial) -> Sequence[str]:
        return list(unmeasured(replace(plan, token_counts=(1,)).record(), trials).values())

    assert missing(*(trial(1, x, measured) for x in (a, b, c)), trial(1, d, wrong)) == []
    assert missing(*(trial(1, x, measured) for x in (a, b, c)), trial(1, d, no_memory)) == [
        "1 token: 3 of 4 candidates measured, 1 found no memory, 0 not run"
    ]
    assert missing(trial(1, a, measured), trial(1, b, None)) == [
        "1 token: 1 of 4 candidates measured, 0 found no memory, 3 not run"
    ]
    assert missing() == ["1 token: 0 of 4 candidates measured, 0 found no memory, 4 not run"]
    assert set(unmeasured(plan.record(), [])) == {1, 4}


def test_a_database_that_cannot_be_written_stops_the_sweep_before_anything_is_compiled(
    plan: SweepPlan, database: Path
) -> None:
    Repository.open(database).close()
    compiling = Compiling()
    with Repository.open(database, readonly=True) as store, pytest.raises(DatabaseError, match="readonly"):
        run(plan, store, FakeBench(), compiling=compiling)
    assert compiling.asked == []


def test_a_cell_whose_inputs_exceed_the_budget_is_refused_before_anything_is_allocated(
    plan: SweepPlan, repository: Repository
) -> None:
    class Large(FakeBench):
        def input_bytes(self, cell: Cell) -> int:
            return 10 if cell.num_tokens == plan.token_counts[0] else 10**6

    bench = Large()
    result = Sweep(plan, repository, bench, VramBudget(1000, 10**9), lambda variants, tell: None).run()
    assert result.state is SweepState.INCOMPLETE
    assert bench.tokens == plan.token_counts[0]  # no other cell was entered
    outcomes = [
        t.outcome for t in repository.trials(result.sweep_id) if t.cell.num_tokens != plan.token_counts[0]
    ]
    assert len(outcomes) == len(plan.candidates) * (len(plan.token_counts) - 1)
    assert {o.kind for o in outcomes if isinstance(o, Failure)} == {FailureKind.OVER_BUDGET}


def test_inputs_that_find_no_memory_cost_their_cell_and_no_other(
    plan: SweepPlan, repository: Repository
) -> None:
    class Crowded(FakeBench):
        def enter(self, cell: Cell, seed: int) -> int | Failure:  # type: ignore[override]
            if cell.num_tokens == plan.token_counts[0]:
                return Failure(FailureKind.OUT_OF_MEMORY, "no room for the inputs")
            return super().enter(cell, seed)

    result = Sweep(plan, repository, Crowded(), VramBudget(10**6, 10**9), lambda variants, tell: None).run()
    assert result.state is SweepState.INCOMPLETE
    assert len(result.missing) == 1
    later = [t for t in repository.trials(result.sweep_id) if t.cell.num_tokens != plan.token_counts[0]]
    assert all(isinstance(t.outcome, Measurement) for t in later)


def test_a_bench_that_is_lost_for_good_leaves_an_incomplete_sweep_that_says_so(
    plan: SweepPlan, repository: Repository
) -> None:
    class Lost(FakeBench):
        def enter(self, cell: Cell, seed: int) -> int:
            if cell.num_tokens != plan.token_counts[0]:
                raise BenchLost(Failure(FailureKind.CRASHED, "the worker left with exit code 1 in start"))
            return super().enter(cell, seed)

    result = Sweep(plan, repository, Lost(), VramBudget(10**6, 10**9), lambda variants, tell: None).run()
    assert result.state is SweepState.INCOMPLETE
    assert result.missing[0] == "the bench was lost for good: the worker left with exit code 1 in start"
    assert repository.sweep(result.sweep_id).state is SweepState.INCOMPLETE


def test_the_race_runs_in_an_order_of_the_seed_and_ties_in_the_plans(plan: SweepPlan) -> None:
    def order(seed: int) -> tuple[Candidate, ...]:
        return replace(plan, protocol=replace(plan.protocol, seed=seed)).shuffled(plan.candidates)

    orders = {order(seed) for seed in range(20)}
    assert len(orders) > 5
    assert all(sorted(order) == sorted(plan.candidates) for order in orders)
    assert order(3) == order(3)
    assert tuple(plan.record().variants) == plan.candidates


def test_the_cells_are_raced_in_that_order_and_kernels_compiled_as_the_first_one_needs_them(
    plan: SweepPlan, repository: Repository
) -> None:
    bench, compiling = FakeBench(), Compiling()
    run(plan, repository, bench, compiling=compiling)
    order = plan.shuffled(plan.candidates)
    assert bench.prepared[: len(order)] == [(1, candidate) for candidate in order]
    assert compiling.asked == [tuple(dict.fromkeys(v for c in order for v in plan.variants_of(c)))]
