"""An edge that is served moves only where probes tell that a choice is ahead of the one served there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crossing import UNFUSED_US, A, B, Crossing, plan_of, sweep, trial  # type: ignore[import-not-found]

from mhctune.autotuner.edges import Edge, EdgeState, edge_of
from mhctune.autotuner.explanation import explain
from mhctune.autotuner.incumbent import Incumbent
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.recording import recording
from mhctune.autotuner.report import edges_sheet
from mhctune.db.derivation import derive_again, derive_stored, keep
from mhctune.db.replay import replay_database, replay_recording
from mhctune.db.repository import Repository
from mhctune.kernels.dispatch import Choice

LOW, TIE, HIGH = (1.0, 2.0), (1.0, 1.0), (2.0, 1.0)
ENDS = {16: LOW, 64: HIGH}


def found(rows: Mapping[int, tuple[float, float]], served: int | None) -> Edge:
    trials = [trial(n, c, o) for n, pair in rows.items() for c, o in zip((A, B), pair, strict=True)]
    return edge_of(A, B, (16, 64), {(t.cell.num_tokens, t.candidate): t for t in trials}, 0.0, served)


def probed(truth: Callable[[int], tuple[float, float]], served: int | None) -> Edge:
    rows = dict(ENDS)
    while (edge := found(rows, served)).next is not None:
        rows[edge.next] = truth(edge.next)
    return edge


def test_what_is_served_is_probed_first_and_kept_until_then() -> None:
    assert [(e.last, e.next, e.state) for e in (found(ENDS, 30), found({**ENDS, 30: TIE}, 30))] == [
        (30, 30, EdgeState.OPEN),
        (30, 31, EdgeState.OPEN),
    ]
    kept = found({**ENDS, 30: TIE, 31: TIE}, 30)
    assert (kept.last, kept.next, kept.state) == (30, None, EdgeState.NOISE)
    assert found({**ENDS, 30: LOW, 31: HIGH}, 30).state is EdgeState.EXACT


@pytest.mark.parametrize("crossing", range(16, 64))
def test_an_edge_that_is_surely_elsewhere_moves_there_whatever_is_served(crossing: int) -> None:
    for served in range(16, 64):
        edge = probed(lambda n: LOW if n <= crossing else HIGH, served)
        assert (edge.last, edge.state) == (crossing, EdgeState.EXACT)
        assert len(edge.probes) <= (2 if served == crossing else 8)


@pytest.mark.parametrize("first_tie", range(17, 60, 3))
def test_inside_the_noise_what_is_served_stays_and_no_choice_is_surely_wrong(first_tie: int) -> None:
    """Counts from the first tie on, five of them, tell nobody ahead."""
    ties = range(first_tie, min(first_tie + 5, 64))

    def truth(n: int) -> tuple[float, float]:
        return TIE if n in ties else LOW if n < first_tie else HIGH

    for served in range(16, 64):
        edge = probed(truth, served)
        assert first_tie - 1 <= edge.last <= ties[-1]
        if first_tie - 1 <= served <= ties[-1]:
            assert edge.last == served


def test_probes_of_before_count_that_tell_against_what_is_served() -> None:
    """As when a sweep that was probed already is derived again beside another incumbent."""
    edge = found({**ENDS, 28: HIGH, 22: LOW, 25: LOW, 26: LOW, 27: LOW}, 40)
    assert (edge.last, edge.state, edge.probes[0].num_tokens) == (27, EdgeState.EXACT, 28)


def test_where_a_choice_is_ahead_on_both_sides_the_edge_goes_to_it_or_stays() -> None:
    assert found({16: HIGH, 64: HIGH}, 30).last == 16
    assert found({16: LOW, 64: LOW}, 30).last == 30
    tied = {16: TIE, 64: HIGH}
    assert found(tied, 30).next == 30
    assert found({**tied, 30: TIE, 31: HIGH}, 30).last == 30
    assert (found({**tied, 30: HIGH}, 30).last, found({**tied, 30: HIGH}, 30).next) == (16, None)


def test_an_incumbent_tells_its_edge_only_where_the_same_two_meet() -> None:
    a, b = (Choice.of(c.arm, c.config) for c in (A, B))
    incumbent = Incumbent("x", ((1, 20, a), (21, None, b)))
    assert incumbent.edge(A, B, 16, 64) == 20
    assert incumbent.edge(A, B, 20, 64) == 20
    assert [incumbent.edge(*pair, *at) for pair, at in (((B, A), (16, 64)), ((A, B), (1, 20)))] == [None] * 2
    for moves in (replace(incumbent, hold=0.0), replace(incumbent, holds_edges=False)):
        assert moves.edge(A, B, 16, 64) is None
    gap = Incumbent("x", ((1, 20, a), (30, None, b)))
    assert gap.edge(A, B, 16, 64) is None


# Sweeps of one database, one after the other.


@pytest.fixture
def swept(make_fingerprint: Callable[..., Any], repository: Repository) -> Callable[..., Crossing]:
    """Sweep with another seed, probe, and keep the table."""

    def run(crossing: float, noise: float = 0.0, probes: bool = True) -> Crossing:
        plan: SweepPlan = plan_of(make_fingerprint())
        number = len(repository.sweeps())
        plan = replace(plan, protocol=replace(plan.protocol, seed=number))
        bench = Crossing()
        bench.slope, bench.noise = UNFUSED_US / crossing, noise
        assert sweep(plan, repository, bench, probes=probes).state == "complete"
        keep(repository, derive_stored(repository, repository.sweep(number + 1)).table)
        return bench

    return run


def lasts(store: Repository) -> list[int]:
    """Where the first band of each kept table ends, the oldest first."""
    return [stored.table.bands[0].last for stored in reversed(store.tables())]


def test_a_sweep_after_another_keeps_its_edge_inside_the_noise_and_moves_it_beyond(
    swept: Callable[..., Crossing], repository: Repository
) -> None:
    swept(20.5)
    assert [n for n, _ in swept(20.5).entered] == [1, 16, 64, 20, 21]  # two probes instead of six
    noisy = swept(22.0, 0.06)
    alone = derive_stored(
        repository, repository.sweep(3), incumbent=replace(_incumbent(repository, 2), holds_edges=False)
    )
    assert [n for n, _ in noisy.entered] == [1, 16, 64, 20, 21]
    assert alone.table.bands[0].last == 21  # the tie nearest to the middle
    swept(30.5)
    assert lasts(repository) == [20, 20, 20, 30]


def _incumbent(store: Repository, sweep_id: int) -> Incumbent:
    return Incumbent.of(next(t.table for t in store.tables() if t.sweep_id == sweep_id))


def test_without_probes_what_is_served_stays(swept: Callable[..., Crossing], repository: Repository) -> None:
    swept(20.5)
    swept(20.5, probes=False)
    assert lasts(repository) == [20, 20]
    derived = derive_stored(repository, repository.sweep(2))
    (row,) = edges_sheet(derived).rows
    assert row[2:] == (16, 20, "open, as served")
    notes = explain(derived, repository.trials(2), 18).sheet(4).notes
    (line,) = (note for note in notes if note.startswith("edge at"))
    assert line.startswith("edge at 20 (16 by the sweep alone), as served, open: ")


def test_held_edges_replay_to_the_byte_from_database_and_recording(
    swept: Callable[..., Crossing], repository: Repository, tmp_path: Path
) -> None:
    for how in ({"crossing": 20.5}, {"crossing": 22.0, "noise": 0.06}, {"crossing": 20.5, "probes": False}):
        swept(**how)
    for stored in repository.tables():
        assert derive_again(repository, stored).table.to_dict() == stored.table.to_dict()
        record, trials = repository.record(stored.sweep_id), repository.trials(stored.sweep_id)
        path = tmp_path / f"{stored.id}.jsonl"
        path.write_text("\n".join(recording(record, trials, "about", "source")) + "\n")
        finding = replay_recording(path, stored.table).finding
        assert finding is not None
        assert "to the byte" in finding.sentence
    assert [each.finding.verdict for each in replay_database(repository) if each.finding] == ["passed"]


def test_a_table_kept_before_edges_were_held_replays_as_it_was(
    swept: Callable[..., Crossing], repository: Repository
) -> None:
    swept(20.5)
    swept(20.5, probes=False)
    moving = replace(_incumbent(repository, 1), holds_edges=False)
    assert "holds_edges" not in moving.to_data()  # as it was written
    table = derive_stored(repository, repository.sweep(2), incumbent=moving).table
    assert table.bands[0].last == 16
    keep(repository, table)
    (replayed,) = replay_database(repository)
    assert replayed.finding is not None
    assert "to the byte" in replayed.finding.sentence
