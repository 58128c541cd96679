"""A sweep that searches an arm: anchors first, then a shortlist everywhere; resumed, it goes the same way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from mhctune.autotuner.bands import NoBands
from mhctune.autotuner.bench import BenchLost
from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.exploration import Exploration, SearchSettings
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.planner import forecast, plan_sweep
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.recording import recording, replay
from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint, Measurement, SweepState
from mhctune.autotuner.report import bands_sheet, forecast_sheet, sweeps_sheet
from mhctune.autotuner.sweep import Sweep, SweepResult, Watcher, unmeasured
from mhctune.configs.loader import load_gpu
from mhctune.configs.recorded import load_recorded
from mhctune.db.derivation import derive_stored
from mhctune.db.repository import Repository
from mhctune.db.status import sweep_lines
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.post_pre_delayed import PostPreDelayed
from mhctune.kernels.seam import Problem, Variant
from mhctune.kernels.space import Candidate

SEAM, PROBLEM = PostPreDelayed(), Problem(hidden_size=5120)
SETTINGS = SearchSettings(enumerated=20, anchors=2, generations=3, proposals=4, shortlist=3)
FEW = {"tile_n": [12, 24], "n_splits": [1], "block_h": [64], "block_m": [1]}
COUNTS, ANCHORS = (1, 4, 16), (1, 16)
AMPLE = VramBudget(10**9, 10**9)


@pytest.fixture
def plan(make_fingerprint: Callable[..., Fingerprint]) -> SweepPlan:
    """`fused` has 168 legal points and is searched, `unfused` two and is not."""
    fused, unfused = (SEAM.arm("c", name).space(PROBLEM) for name in ("fused", "unfused"))
    return SweepPlan(
        SEAM, PROBLEM, "c", COUNTS, {"fused": fused, "unfused": unfused.restricted(FEW)}, Protocol(5),
        make_fingerprint(), 0.05, SETTINGS,
    )  # fmt: skip


@dataclass
class Model:
    """A bench without kernels: `tile_n` and `block_h` have a best value, another one at many tokens."""

    refused: Callable[[Candidate], bool] = lambda candidate: False
    big: Callable[[int, Candidate], bool] = lambda tokens, candidate: False
    timed: list[tuple[int, Candidate]] = field(default_factory=list)
    tokens: int = 0

    def input_bytes(self, cell: Cell) -> int:
        return 10

    def enter(self, cell: Cell, seed: int) -> int:
        self.tokens = cell.num_tokens
        return 10

    def floor_us(self) -> float:
        return 0.0

    def forecast(self, candidate: Candidate) -> Footprint:
        return Footprint(10, 10**8 if self.big(self.tokens, candidate) else 100, 0)

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        if self.refused(candidate):
            return Failure(FailureKind.COMPILE, "no")
        return self.forecast(candidate)

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float:
        if launches > 1:
            self.timed.append((self.tokens, candidate))
        config, many = candidate.config, self.tokens > 4
        away = abs(config["tile_n"] - (12 if many else 4)) + abs(config["n_splits"] - (1 if many else 10))
        return 100.0 + 3 * away + round / 100 + (5 if candidate.arm == "unfused" else 0)

    def move(self, candidate: Candidate, placement: int) -> Failure | None:
        """Nothing lies anywhere."""
        return None

    def release(self, candidate: Candidate) -> None:
        """Nothing is held."""

    def leave(self) -> None:
        """Nothing is held."""


def compile_nothing(variants: tuple[Variant, ...], tell: Callable[[int, int], None]) -> None:
    """Every variant is there."""


def run(
    plan: SweepPlan, store: Repository, bench: Model, budget: VramBudget = AMPLE, **more: Any
) -> SweepResult:
    return Sweep(plan, store, bench, budget, compile_nothing, **more).run()


def search_of(store: Repository, result: SweepResult) -> Exploration:
    search = store.record(result.sweep_id).search
    assert search is not None
    return search


# What is raced where.


def test_anchors_are_explored_and_the_shortlist_is_raced_everywhere(
    plan: SweepPlan, repository: Repository
) -> None:
    bench = Model()
    result = run(plan, repository, bench)
    assert (result.state, result.missing) == (SweepState.COMPLETE, ())
    search, record = search_of(repository, result), repository.record(result.sweep_id)
    assert (plan.searched, plan.anchors, search.begun) == (("fused",), ANCHORS, 3)
    assert search.shortlist is not None and len(search.shortlist) == 3
    trials = repository.trials(result.sweep_id)
    raced = {n: [t.candidate for t in trials if t.cell.num_tokens == n] for n in COUNTS}
    assert {n: set(found) for n, found in raced.items()} == {n: set(record.expected(n)) for n in COUNTS}
    assert set(raced[4]) == {*plan.candidates, *search.shortlist}
    for anchor in ANCHORS:
        explored = [c for p in search.proposals if p.num_tokens == anchor for c in p.candidates]
        assert len(explored) == len(set(explored)) == 3 * 4
        assert set(explored) <= set(plan.legal["fused"])
        assert set(raced[anchor]) == {*plan.candidates, *explored, *search.shortlist}
    assert record.grid == record.raced == len(trials) <= plan.grid
    assert all(isinstance(trial.outcome, Measurement) for trial in trials)


def test_the_first_generation_holds_what_the_arm_prefers_and_later_ones_what_is_good_elsewhere(
    plan: SweepPlan, repository: Repository
) -> None:
    result = run(plan, repository, Model())
    search, trials = search_of(repository, result), repository.trials(result.sweep_id)
    preferred = Candidate.of("fused", SEAM.arm("c", "fused").preferred)
    first = [p.candidates for p in search.proposals if p.generation == 0]
    assert all(preferred in candidates for candidates in first)
    latency = {
        (t.cell.num_tokens, t.candidate): t.outcome.latency_us
        for t in trials
        if isinstance(t.outcome, Measurement)
    }
    for anchor, other in (ANCHORS, ANCHORS[::-1]):
        best = min(first[ANCHORS.index(other)], key=lambda c: (latency[other, c], c))
        here = [
            c for p in search.proposals if p.generation < 2 and p.num_tokens == anchor for c in p.candidates
        ]
        assert best in here


def test_failed_candidates_are_rows_and_never_listed(plan: SweepPlan, repository: Repository) -> None:
    def odd(candidate: Candidate) -> bool:
        return candidate.arm == "fused" and candidate.config["block_m"] != 1

    result = run(plan, repository, Model(refused=odd))
    assert result.state is SweepState.COMPLETE
    search = search_of(repository, result)
    assert search.shortlist
    assert not any(map(odd, search.shortlist))
    assert repository.counts(result.sweep_id).failures[FailureKind.COMPILE] > 0


def test_an_arm_that_fails_everywhere_leaves_the_others_their_bands(
    plan: SweepPlan, repository: Repository
) -> None:
    result = run(plan, repository, Model(refused=lambda candidate: candidate.arm == "fused"))
    assert (result.state, search_of(repository, result).shortlist) == (SweepState.COMPLETE, ())
    derived = derive_stored(repository, repository.sweep(result.sweep_id))
    assert {band.choice.arm for band in derived.table.bands} == {"unfused"}


def test_the_bands_say_what_was_searched(plan: SweepPlan, repository: Repository) -> None:
    result = run(plan, repository, Model())
    table = derive_stored(repository, repository.sweep(result.sweep_id)).table
    explored = search_of(repository, result).explored("fused")
    assert table.evidence["search"] == {
        "anchors": [1, 16],
        "arms": {"fused": {"legal": 168, "explored": explored, "listed": 3}},
    }
    assert (
        f"fused was searched, not enumerated: {explored} of 168 legal points raced at 1, 16 tokens, "
        "3 of those at every token count"
    ) in bands_sheet(table).notes


def test_the_status_says_what_was_searched(plan: SweepPlan, repository: Repository) -> None:
    result = run(plan, repository, Model())
    (line,) = sweep_lines(repository)
    explored = search_of(repository, result).explored("fused")
    said = (
        f"sweep 1: fused was searched, not enumerated: {explored} of 168 legal points raced at 1, 16 tokens"
    )
    assert any(note.startswith(said) for note in sweeps_sheet([line], "here").notes)
    data = json.loads(json.dumps(line.to_dict(), default=str))
    assert data["record"]["search"]["arms"] == {"fused": {"legal": 168, "explored": explored, "listed": 3}}


# Identity and resuming.


def test_what_is_searched_is_part_of_the_identity_and_settings_without_a_search_are_not(
    plan: SweepPlan,
) -> None:
    digests = {
        replace(plan, search=settings).record().digest
        for settings in (SETTINGS, replace(SETTINGS, generations=4), replace(SETTINGS, enumerated=200))
    }
    assert len(digests) == 3
    enumerated = [replace(plan, search=SearchSettings(generations=n)) for n in (1, 9)]
    assert enumerated[0].record().digest == enumerated[1].record().digest
    assert enumerated[0].record().search is None


def test_a_search_that_is_cut_anywhere_goes_on_as_one_that_was_not(
    plan: SweepPlan, repository: Repository
) -> None:
    whole = Model()
    first = run(plan, repository, whole)
    expected = search_of(repository, first)
    for cut in (3, 40, 80, 121, len(whole.timed) - 3):
        bench = Model()
        stopped = Sweep(
            plan, repository, bench, AMPLE, compile_nothing, lambda b=bench, n=cut: len(b.timed) >= n
        ).run(new=True)
        assert stopped.state is SweepState.INTERRUPTED
        rest = Model()
        result = run(plan, repository, rest)
        assert (result.sweep_id, result.state) == (stopped.sweep_id, SweepState.COMPLETE)
        assert search_of(repository, result) == expected
        assert len(bench.timed) + len(rest.timed) == len(whole.timed)


def test_a_search_that_was_cut_publishes_nothing(plan: SweepPlan, repository: Repository) -> None:
    class Lost(Model):
        def enter(self, cell: Cell, seed: int) -> int:
            if len(self.timed) > 100:
                raise BenchLost(Failure(FailureKind.CRASHED, "gone"))
            return super().enter(cell, seed)

    result = run(plan, repository, Lost())
    assert result.state is SweepState.INCOMPLETE
    assert len(result.missing) == 1 + len(COUNTS)
    assert all("the search of fused is at generation" in line for line in result.missing[1:])
    with pytest.raises(NoBands, match="the search of fused is at generation"):
        derive_stored(repository, repository.sweep(result.sweep_id))
    assert run(plan, repository, Model()).state is SweepState.COMPLETE


def test_what_found_no_memory_at_an_anchor_is_missing_there_and_raced_by_the_same_command(
    plan: SweepPlan, repository: Repository
) -> None:
    bench = Model(big=lambda tokens, candidate: tokens == 16 and candidate.config["tile_n"] == 24)
    cut = run(plan, repository, bench, VramBudget(10**6, 10**9))
    assert cut.state is SweepState.INCOMPLETE
    assert [line.split(":")[0] for line in cut.missing] == ["16 tokens"]
    result = run(plan, repository, Model())
    assert (result.sweep_id, result.state) == (cut.sweep_id, SweepState.COMPLETE)


def test_what_was_only_explored_is_missing_nowhere_else(plan: SweepPlan, repository: Repository) -> None:
    result = run(plan, repository, Model())
    record, trials = repository.record(result.sweep_id), repository.trials(result.sweep_id)
    assert unmeasured(record, trials) == {}
    at_four = [t for t in trials if t.cell.num_tokens == 4]
    assert set(unmeasured(record, [t for t in trials if t is not at_four[0]])) == {4}
    explored = next(t for t in trials if t.cell.num_tokens == 1 and t.candidate.arm == "fused")
    assert set(unmeasured(record, [t for t in trials if t is not explored])) == {1}


def test_a_watcher_hears_each_generation_and_then_the_number_of_trials(
    plan: SweepPlan, repository: Repository
) -> None:
    heard: list[tuple[int, bool, int]] = []

    class Notes(Watcher):
        def proposed(self, search: Exploration, grid: int) -> None:
            heard.append((search.begun, search.finished, grid))

    result = run(plan, repository, Model(), watcher=Notes())
    most, exact = plan.grid, repository.record(result.sweep_id).raced
    assert heard == [(1, False, most), (2, False, most), (3, False, most), (3, True, exact)]


def test_a_recording_of_a_searched_sweep_comes_back_whole(
    plan: SweepPlan, repository: Repository, tmp_path: Any
) -> None:
    result = run(plan, repository, Model())
    record, trials = repository.record(result.sweep_id), repository.trials(result.sweep_id)
    path = tmp_path / "searched.jsonl"
    path.write_text("\n".join(recording(record, trials, "a test", "here")) + "\n")
    again, found = replay(load_recorded(path))
    assert again == record
    assert len(found) == len(trials)


# The plan.


def test_the_full_sweep_is_usable_on_a_gpu() -> None:
    """24,768 legal points of `fused` alone at hidden 5120, 15 token counts: most of them are never raced."""
    plan = plan_sweep(load_gpu("h200"), "full", here=False)
    assert plan.searched == ("fused", "fused_mma", "fused_ws", "unfused")
    assert {candidate.arm for candidate in plan.candidates} == {"unfused_mma", "released"}
    assert plan.anchors == (1, 48, 4096)
    cost = forecast(plan, 16, 4800.0, 60 * 2**20)
    assert sum(arm.candidates for arm in cost.arms) > 30_000
    assert cost.trials == plan.grid < 12_000
    assert cost.variants < 1500
    assert cost.compile_s + cost.race_s < 1800
    note = forecast_sheet(cost, 16).notes[0]
    searched = "fused, fused_mma, fused_ws, unfused"
    assert note.startswith(f"searched at 1, 48, 4096 tokens: {searched}; every other arm is")


def test_small_spaces_are_enumerated_as_before() -> None:
    plan = plan_sweep(load_gpu("h200"), "decode", here=False)
    assert (plan.searched, plan.anchors) == ((), ())
    assert plan.grid == len(plan.candidates) * len(plan.token_counts)
    assert set(plan.candidates) == {c for space in plan.spaces.values() for c in space.candidates()}
    assert all(arm.raced == arm.candidates for arm in forecast(plan, 16, 4800.0).arms)
