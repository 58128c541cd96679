"""Tuning without a terminal: plans race into one database; who hears what, and what is kept."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fake_bench import LATENCIES, PROBLEM, SEAM, VALUES, FakeBench

from mhctune.autotuner.bands import NoBands
from mhctune.autotuner.budget import BudgetError, VramBudget
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.progress import Bar
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.race import Stopped
from mhctune.autotuner.ranks import Ranks
from mhctune.autotuner.records import Failure, FailureKind, Footprint, SweepState
from mhctune.autotuner.sweep import Watcher
from mhctune.configs.errors import ConfigError
from mhctune.db.engine import DatabaseError
from mhctune.db.group_tuning import tune
from mhctune.db.repository import Repository
from mhctune.db.tuning import Incomplete, Racing, Tuned, Tuning
from mhctune.kernels.dispatch import DispatchTable, Fingerprint
from mhctune.kernels.space import Candidate

AMPLE = VramBudget(10**9, 10**9)
LOST = Failure(FailureKind.OUT_OF_MEMORY, "no room")


@dataclass
class Witness:
    """Hears everything that a tuning says, in order; asks to stop after so many questions."""

    heard: list[str] = field(default_factory=list)
    told: list[Tuned] = field(default_factory=list)
    questions: int = 10**9
    published: list[DispatchTable] = field(default_factory=list)

    def tell(self, tuned: Tuned) -> None:
        self.told.append(tuned)
        self.heard.append(f"told {tuned.result.state}")

    def note(self, text: str) -> None:
        if text:
            self.heard.append(text)

    def publish(self, table: DispatchTable) -> None:
        self.published.append(table)
        self.heard.append("published")

    @contextmanager
    def listen(self) -> Iterator[Callable[[], bool]]:
        def stop() -> bool:
            self.questions -= 1
            return self.questions < 0

        yield stop


@pytest.fixture
def witness() -> Witness:
    return Witness()


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "tuned.db")


@pytest.fixture
def tuning(db: str, witness: Witness) -> Tuning:
    return Tuning(db, witness.listen, lambda: nullcontext(Watcher()), witness.note, witness.tell)


@pytest.fixture
def plans(make_fingerprint: Callable[..., Fingerprint]) -> tuple[SweepPlan, ...]:
    """Two plans, which only differ in hidden size."""
    return tuple(
        SweepPlan(
            SEAM,
            problem,
            "c",
            (1, 4),
            {arm.name: arm.space(problem).restricted(VALUES) for arm in SEAM.arms("c")[:2]},
            Protocol(5),
            make_fingerprint(),
            0.05,
        )
        for problem in (PROBLEM, replace(PROBLEM, hidden_size=512))
    )


class ShortBench(FakeBench):
    """Without room above one token."""

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        return LOST if self.tokens > 1 else super().prepare(candidate)


def racing(witness: Witness, *benches: FakeBench) -> Racing:
    """Race each plan on its bench; the worker adds a second to each."""
    left, seconds = list(benches), {}

    def bench_of(plan: SweepPlan) -> Any:
        seconds["sample"] = 1.0
        bench = left.pop(0) if len(left) > 1 else left[0]
        return bench, bench.compile_all

    return Racing(bench_of, AMPLE, seconds, witness.publish)


def refusing(plan: SweepPlan, kind: FailureKind = FailureKind.OUT_OF_MEMORY) -> FakeBench:
    """A bench that refuses every candidate."""
    return FakeBench(refused=dict.fromkeys(plan.candidates, Failure(kind, "no room")))


def test_the_bands_of_a_sweep_are_kept_published_and_told(
    tuning: Tuning, plans: tuple[SweepPlan, ...], witness: Witness, db: str
) -> None:
    found = racing(witness, FakeBench())
    tuning.run(plans[:1], found)
    (tuned,) = witness.told
    assert witness.heard == ["published", "told complete"]
    assert (tuned.counts.measured, tuned.seconds, tuned.where) == (4, {"sample": 1.0}, db)
    assert found.seconds == {}
    with Repository.open(db, readonly=True) as store:
        assert [stored.table for stored in store.tables()] == [tuned.derived.table] == witness.published
    data = tuned.to_dict()
    assert (data["state"], data["missing"], data["table"]["digest"]) == (
        "complete", (), tuned.derived.table.digest,
    )  # fmt: skip


def test_what_is_complete_is_left_out_until_all_is_or_unless_it_is_new(
    tuning: Tuning, plans: tuple[SweepPlan, ...], witness: Witness
) -> None:
    tuning.run(plans[:1], racing(witness, FakeBench()))
    tuning.run(plans, racing(witness, FakeBench()))
    assert "1 of 2 seams are complete; --new sweeps them again" in witness.heard
    assert [tuned.result.sweep_id for tuned in witness.told] == [1, 2]
    tuning.run(plans, racing(witness, FakeBench()))
    tuning.run(plans, racing(witness, FakeBench()), new=True)
    assert len(witness.told) == 6
    assert sum("are complete" in text for text in witness.heard) == 1


def test_a_second_pass_that_was_stopped_goes_on_with_the_seam_it_was_stopped_in(
    tuning: Tuning, plans: tuple[SweepPlan, ...], witness: Witness
) -> None:
    tuning.run(plans, racing(witness, FakeBench()))
    witness.questions = 3
    with pytest.raises(Stopped):
        tuning.run(plans, racing(witness, FakeBench()))
    witness.questions = 10**9
    tuning.run(plans, racing(witness, FakeBench()))
    assert [tuned.result.sweep_id for tuned in witness.told] == [1, 2, 3]


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (FailureKind.OUT_OF_MEMORY, Incomplete, "post_pre_delayed: the sweep is incomplete: sweep 1 has"),
        (FailureKind.MISMATCH, (Incomplete, NoBands), "post_pre_delayed"),
    ],
)
def test_a_seam_without_bands_does_not_keep_the_next_one_from_its_own(
    tuning: Tuning, plans: tuple[SweepPlan, ...], witness: Witness, kind: FailureKind, error: Any, said: str
) -> None:
    with pytest.raises(error, match="sweep 1 has nothing to derive bands from"):
        tuning.run(plans, racing(witness, refusing(plans[0], kind), FakeBench()))
    kept, note, *rest = witness.heard
    assert kept.startswith("the measurements are kept in /")
    assert said in note
    assert note.endswith("; the seams after it go on")
    assert rest == ["published", "told complete"]
    assert [tuned.result.sweep_id for tuned in witness.told] == [2]


def test_an_incomplete_sweep_tells_its_bands_before_what_is_missing_and_publishes_none(
    tuning: Tuning, plans: tuple[SweepPlan, ...], witness: Witness
) -> None:
    with pytest.raises(Incomplete, match="run it again; no band covers 4 tokens: 0 of 2 candidates measured"):
        tuning.run(plans[:1], racing(witness, ShortBench()))
    assert witness.heard == ["told incomplete"]
    assert witness.published == []


def test_a_stop_ends_the_run_and_the_next_one_goes_on(
    tuning: Tuning, plans: tuple[SweepPlan, ...], witness: Witness, db: str
) -> None:
    witness.questions = 3
    with pytest.raises(Stopped):
        tuning.run(plans, racing(witness, FakeBench()))
    assert witness.heard == []
    with Repository.open(db, readonly=True) as store:
        assert [sweep.state for sweep in store.sweeps()] == [SweepState.INTERRUPTED]
    witness.questions = 10**9
    tuning.run(plans, racing(witness, FakeBench()))
    assert [tuned.result.sweep_id for tuned in witness.told] == [1, 2]


def test_a_database_is_held_while_it_is_raced_into(
    tuning: Tuning, plans: tuple[SweepPlan, ...], witness: Witness
) -> None:
    def again(table: DispatchTable) -> None:
        tuning.run(plans, racing(witness, FakeBench()))

    with pytest.raises(DatabaseError, match="another sweep is writing to"):
        tuning.run(plans[:1], replace(racing(witness, FakeBench()), publish=again))


@pytest.mark.parametrize("probe", [None, True])
def test_edges_are_probed_on_a_processor_only_when_asked(
    tuning: Tuning, plans: tuple[SweepPlan, ...], witness: Witness, probe: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for tokens in range(2, 16):
        monkeypatch.setitem(LATENCIES, tokens, (10.0, 20.0))
    plan, bench = replace(plans[0], token_counts=(1, 16)), FakeBench()
    tuning.run([plan], racing(witness, bench), probe=probe)
    between = {tokens for tokens, _ in bench.entered} - {1, 16}
    assert bool(between) == (probe is True)
    assert len(witness.told[0].derived.edges) == 1


def test_a_budget_without_room_is_refused_before_a_file_is_made(
    plans: tuple[SweepPlan, ...], db: str
) -> None:
    with pytest.raises(BudgetError, match="at 1 token inputs of"):
        Racing.alone(plans, FakeBench(), VramBudget(50, 10**9))  # type: ignore[arg-type]
    assert not Path(db).exists()


def test_a_group_tunes_one_seam(tuning: Tuning, plans: tuple[SweepPlan, ...]) -> None:
    with pytest.raises(ConfigError, match="2 ranks tune one seam together, not 2; add --seam with one of"):
        tune(tuning, plans, FakeBench(), 10**9, "60%", ranks=Ranks(size=2))  # type: ignore[arg-type]


def test_in_a_group_rank_0_remembers_and_speaks_and_the_others_follow(
    tuning: Tuning, plans: tuple[SweepPlan, ...], witness: Witness, db: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    other = Witness()
    silent = Tuning(
        str(tmp_path / "none.db"), other.listen, lambda: nullcontext(Watcher()), other.note, other.tell
    )
    benches = FakeBench(), FakeBench(pace=2.0)

    def rank(number: int, tuning: Tuning) -> None:
        here = Ranks(number, 2, number, "127.0.0.1", port)
        tune(tuning, plans[:1], benches[number], 10**9, "60%", ranks=here)  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(rank, number, each) for number, each in enumerate((tuning, silent))]:
            done.result(60)
    assert witness.heard == ["told complete"]
    assert other.heard == []
    assert not (tmp_path / "none.db").exists()
    assert benches[0].entered == benches[1].entered
    with Repository.open(db, readonly=True) as store:
        (best, *_) = sorted(trial.outcome.latency_us for trial in store.trials(1))
    assert best == pytest.approx(20.0, rel=0.2)  # the slower rank's: 2 x 10


@dataclass
class Lines:
    """A display that keeps what is written on it."""

    lines: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add_task(self, description: str, **first: Any) -> int:
        self.lines[len(self.lines)] = {"name": description, **first, "done": 0}
        return len(self.lines) - 1

    def update(
        self, task_id: int, *, completed: float | None = None, advance: float = 0, **rest: Any
    ) -> None:
        line = self.lines[task_id]
        line |= {**rest, "done": (line["done"] if completed is None else completed) + advance}


def test_progress_counts_trials_and_names_the_best(plans: tuple[SweepPlan, ...]) -> None:
    display, (first, second), cell = Lines(), plans[0].candidates, plans[0].cells[1]
    bar = Bar(display)
    bar.begun(3, 2, 9)
    assert display.lines[1]["note"] == "sweep 3, resumed at 2 of 9 trials"
    bar.compiled(1, 4)
    bar.entered(cell, 1, 2)
    assert display.lines[1]["note"] == "cell 2/2: 4 tokens"
    for candidate, outcome in ((first, LOST), (first, 7.0), (second, 9.0)):
        bar.told(cell, candidate, outcome)
    compiled, raced = display.lines.values()
    assert (compiled["done"], compiled["total"], raced["done"], raced["total"]) == (1, 4, 5, 9)
    assert raced["note"].startswith(f"4 tokens, best 7.0 us: {first.arm} ")


def test_a_database_that_cannot_be_tuned_into_is_refused_before_a_worker_starts(
    tuning: Tuning, tmp_path: Path, db: str
) -> None:
    tuning.check()
    assert not Path(db).exists()
    Path(db).write_text("no database")
    with pytest.raises(DatabaseError, match="is no SQLite database"):
        tuning.check()
    with pytest.raises(DatabaseError, match="no folder"):
        replace(tuning, db=str(tmp_path / "none" / "tuned.db")).check()
