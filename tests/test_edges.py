from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crossing import AMPLE, UNFUSED_US, A, B, Crossing, plan_of, sweep, trial  # type: ignore[import-not-found]
from fake_bench import FUSED, PROBLEM, SEAM, UNFUSED, VALUES  # type: ignore[import-not-found]

from mhctune.autotuner import recording, report
from mhctune.autotuner.derive import Derived, derive
from mhctune.autotuner.edges import Ahead, Edge, EdgeState, edge_of
from mhctune.autotuner.explanation import explain
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.planner import spaces_of
from mhctune.autotuner.prober import Prober
from mhctune.autotuner.race import Stopped
from mhctune.autotuner.records import (
    Failure,
    FailureKind,
    Trial,
)
from mhctune.configs.recorded import load_recorded
from mhctune.db.checks import check_tables
from mhctune.db.derivation import derive_again, derive_stored, keep
from mhctune.db.merge import merge
from mhctune.db.replay import replay_database, replay_recording
from mhctune.db.repository import Repository
from mhctune.db.status import sweep_lines


@pytest.fixture
def plan(make_fingerprint: Callable[..., Any]) -> SweepPlan:
    return plan_of(make_fingerprint())


def found(rows: Mapping[int, tuple[float | Failure, float | Failure]], **how: float) -> Edge:
    trials = [trial(n, c, o) for n, pair in rows.items() for c, o in zip((A, B), pair, strict=True)]
    known = {(t.cell.num_tokens, t.candidate): t for t in trials}
    return edge_of(A, B, (16, 64), known, how.get("floor", 0.0))


ENDS = {16: (1.0, 2.0), 64: (2.0, 1.0)}


def test_without_probes_the_edge_stays_and_the_middle_is_asked_for() -> None:
    edge = found(ENDS)
    assert (edge.last, edge.state, edge.next, edge.probes) == (16, EdgeState.OPEN, 40, ())


def test_a_probe_moves_the_edge_to_the_side_that_it_speaks_for() -> None:
    assert [found({**ENDS, 40: pair}).last for pair in ((1.0, 2.0), (2.0, 1.0))] == [40, 16]
    assert [found({**ENDS, 40: pair}).next for pair in ((1.0, 2.0), (2.0, 1.0))] == [52, 28]


@pytest.mark.parametrize("crossing", range(16, 64))
def test_halving_finds_every_crossing_in_at_most_six_probes(crossing: int) -> None:
    rows = dict(ENDS)
    while (edge := found(rows)).next is not None:
        rows[edge.next] = (1.0, 2.0) if edge.next <= crossing else (2.0, 1.0)
    assert (edge.last, edge.state) == (crossing, EdgeState.EXACT)
    assert len(edge.probes) <= 6


def test_a_tie_is_the_edge_and_ends_the_search() -> None:
    edge = found({**ENDS, 40: (1.0, 1.0)})
    assert (edge.last, edge.state, edge.next) == (40, EdgeState.NOISE, None)


def test_a_difference_below_the_noise_floor_is_a_tie() -> None:
    rows = {**ENDS, 40: (1.0, 1.01)}
    assert found(rows).probes[0].ahead is Ahead.LOWER
    assert found(rows, floor=0.02).state is EdgeState.NOISE


def test_where_one_failed_the_other_is_ahead_and_without_memory_nothing_is_known() -> None:
    wrong, full = (Failure(kind, "") for kind in (FailureKind.MISMATCH, FailureKind.OVER_BUDGET))
    assert found({**ENDS, 40: (wrong, 1.0)}).last == 16
    assert found({**ENDS, 40: (1.0, wrong)}).last == 40
    assert found({**ENDS, 40: (wrong, wrong)}).next == 40
    assert found({**ENDS, 40: (full, 1.0)}).next == 40


def test_where_the_upper_choice_is_ahead_or_tied_at_the_edge_already_nothing_is_probed() -> None:
    assert found({16: (2.0, 1.0), 64: (2.0, 1.0)}).state is EdgeState.STAYS
    tied = found({16: (1.0, 1.0), 64: (2.0, 1.0)})
    assert (tied.state, tied.last, tied.next) == (EdgeState.NOISE, 16, None)


def test_where_the_lower_choice_is_ahead_above_too_nothing_is_probed() -> None:
    edge = found({16: (1.0, 2.0), 64: (1.0, 1.1)})
    assert (edge.state, edge.last, edge.next, edge.probes) == (EdgeState.STAYS, 16, None, ())


def test_a_probe_that_is_not_the_middle_counts_too() -> None:
    edge = found({**ENDS, 30: (2.0, 1.0)})
    assert (edge.last, [p.num_tokens for p in edge.probes], edge.next) == (16, [30], 23)


def test_a_sweep_finds_the_known_crossing(plan: SweepPlan, repository: Repository) -> None:
    bench = Crossing()
    assert sweep(plan, repository, bench).state == "complete"
    derived = derive_stored(repository, repository.sweep(1))
    assert [(b.first, b.last, b.choice.arm) for b in derived.table.bands] == [
        (1, 20, "fused"),
        (21, 64, "unfused"),
    ]
    (edge,) = derived.edges
    assert (edge.before, edge.last, edge.state) == (16, 20, EdgeState.EXACT)
    assert [p.num_tokens for p in edge.probes] == [40, 28, 22, 19, 20, 21]
    assert [n for n, _ in bench.entered] == [1, 16, 64, 40, 28, 22, 19, 20, 21]
    trials = [t for t in repository.trials(1) if t.cell.num_tokens not in plan.token_counts]
    assert {t.candidate for t in trials} == {FUSED, UNFUSED}
    assert all(len(t.samples) >= 6 for t in trials)


def test_bands_are_chosen_as_without_probes_and_only_edges_move(
    plan: SweepPlan, repository: Repository, tmp_path: Path
) -> None:
    sweep(plan, repository, Crossing())
    with Repository.open(tmp_path / "plain.db") as other:
        sweep(plan, other, Crossing(), probes=False)
        plain = derive_stored(other, other.sweep(1))
    probed = derive_stored(repository, repository.sweep(1))
    assert probed.cells == plain.cells
    assert probed.floor == plain.floor
    assert [b.evidence for b in probed.table.bands] == [b.evidence for b in plain.table.bands]
    evidence = dict(probed.table.evidence)
    (edge,) = evidence.pop("edges")
    assert (edge["before"], edge["last"], len(edge["probed"])) == (16, 20, 6)
    assert evidence == plain.table.evidence
    assert [b.last for b in plain.table.bands] == [16, 64]


def test_another_pair_may_be_probed_where_one_was(plan: SweepPlan, repository: Repository) -> None:
    """Under another bound other choices meet: their rounds are numbered on, for conditions are by round."""
    limits = {"fused": {**VALUES, "tile_n": [12, 24]}, "unfused": VALUES}
    wide = replace(plan, spaces=spaces_of(SEAM, "c", PROBLEM, limits))
    other = next(c for c in wide.candidates if c.arm == "fused" and c != FUSED)
    bench = Crossing()
    result = sweep(wide, repository, bench)
    probed = {t.cell.num_tokens for t in repository.trials(1)} - set(plan.token_counts)
    (before,) = derive_stored(repository, repository.sweep(1)).edges
    lower = other if before.lower != other else FUSED
    again = replace(before, lower=lower, probes=(), next=40)
    assert 40 in probed

    class Wider:
        edges, floor = (again,), None

    Prober(repository.record(1), repository, bench, AMPLE, bench.compile_all, lambda: Wider()).run(1)  # type: ignore[arg-type,return-value]
    batches = {s.batch for t in repository.trials(1, 40) if t.candidate == again.lower for s in t.samples}
    assert result.state == "complete"
    assert batches == {1}


def test_an_edge_inside_the_noise_is_left_there(plan: SweepPlan, repository: Repository) -> None:
    bench = Crossing()
    bench.noise, bench.slope = 0.06, UNFUSED_US / 40  # equal at 40 tokens, the first probe
    sweep(plan, repository, bench)
    (edge,) = derive_stored(repository, repository.sweep(1)).edges
    assert (edge.last, edge.state, len(edge.probes)) == (40, EdgeState.NOISE, 1)


def test_a_token_count_where_both_fail_leaves_the_edge_open(plan: SweepPlan, repository: Repository) -> None:
    bench, wrong = Crossing(), Failure(FailureKind.MISMATCH, "wrong")
    bench.refused_at = {(40, FUSED): wrong, (40, UNFUSED): wrong}
    assert sweep(plan, repository, bench).state == "complete"
    (edge,) = derive_stored(repository, repository.sweep(1)).edges
    assert (edge.last, edge.state, edge.probes) == (16, EdgeState.OPEN, ())
    assert [n for n, _ in bench.entered].count(40) == 1


def test_probing_that_was_stopped_goes_on_and_ends_as_if_it_was_not(
    plan: SweepPlan, repository: Repository, tmp_path: Path
) -> None:
    whole = Crossing()
    with Repository.open(tmp_path / "whole.db") as other:
        sweep(plan, other, whole)
        expected = derive_stored(other, other.sweep(1)).table
    total = len(whole.launched)
    launched = 0
    for _ in range(60):
        bench = Crossing()
        state = sweep(plan, repository, bench, lambda b=bench: len(b.launched) >= 23).state  # type: ignore[misc]
        launched += len(bench.launched)
        if state == "complete":
            break
        assert state == "interrupted"
    assert len(repository.sweeps()) == 1
    again = derive_stored(repository, repository.sweep(1)).table
    assert again.to_dict() == expected.to_dict()
    assert launched < 2 * total  # what was measured is primed again, not measured again


def test_status_counts_probes_apart_from_the_grid(plan: SweepPlan, repository: Repository) -> None:
    sweep(plan, repository, Crossing())
    (line,) = sweep_lines(repository)
    assert (line.measured, line.record.grid, line.probes) == (6, 6, 12)
    assert "12 trials more at probed token counts" in " ".join(report.sweeps_sheet([line], "x").notes)


def test_explain_says_that_only_two_configs_were_measured_between(
    plan: SweepPlan, repository: Repository
) -> None:
    sweep(plan, repository, Crossing())
    derived = derive_stored(repository, repository.sweep(1))
    why = explain(derived, repository.trials(1), 20)
    assert (why.answer.choice.arm, why.measured_at) == ("fused", 16)
    text = " ".join(why.sheet(4).notes)
    assert "edge at 20 (16 by the sweep alone), exact" in text
    assert "only these two were measured" in text
    assert "probed at 21 tokens: upper ahead, the lower one's latency +2.44%" in text
    assert explain(derived, repository.trials(1), 21).measured_at == 64
    assert explain(derived, repository.trials(1), 16).edge is None
    (row,) = report.edges_sheet(derived).rows
    assert row[2:] == (16, 20, "exact")


def test_a_kept_table_replays_to_the_byte_from_database_recording_and_merge(
    plan: SweepPlan, repository: Repository, tmp_path: Path
) -> None:
    sweep(plan, repository, Crossing())
    table = derive_stored(repository, repository.sweep(1)).table
    keep(repository, table)
    (checked,) = check_tables(repository)
    assert all(finding.ok for finding in checked.findings if finding.what in ("replay", "grid"))
    found = [each.finding for each in replay_database(repository)]
    record, trials = repository.record(1), repository.trials(1)
    path = tmp_path / "recorded.jsonl"
    path.write_text("\n".join(recording.recording(record, trials, "about", "source")) + "\n")
    again = recording.replay(load_recorded(path))
    assert derive(again[0], 1, again[1], 0.05).table.bands == table.bands
    found.append(replay_recording(path, table).finding)
    assert repository.place.path is not None
    merged = merge(tmp_path / "merged.db", [repository.place.path])
    assert not merged.conflicts
    with Repository.open(tmp_path / "merged.db", readonly=True) as store:
        found += [each.finding for each in replay_database(store)]
    assert [f.verdict for f in found if f] == ["passed"] * 3


def test_a_table_from_before_the_probes_replays_without_them(plan: SweepPlan, repository: Repository) -> None:
    sweep(plan, repository, Crossing(), probes=False)
    keep(repository, derive_stored(repository, repository.sweep(1)).table)
    bench, record = Crossing(), repository.record(1)

    def derived() -> Derived:
        return derive_stored(repository, repository.sweep(1))

    edges = Prober(record, repository, bench, AMPLE, bench.compile_all, derived).run(1)
    assert [edge.last for edge in edges] == [20]
    (stored,) = repository.tables()
    assert derive_again(repository, stored).table.to_dict() == stored.table.to_dict()
    assert [b.last for b in derived().table.bands] == [20, 64]


def test_a_stop_is_heard_between_rounds(plan: SweepPlan, repository: Repository) -> None:
    sweep(plan, repository, Crossing(), probes=False)
    bench = Crossing()

    def derived() -> Derived:
        return derive_stored(repository, repository.sweep(1))

    prober = Prober(
        repository.record(1), repository, bench, AMPLE, bench.compile_all, derived,
        lambda: len(bench.launched) > 7,
    )  # fmt: skip
    with pytest.raises(Stopped):
        prober.run(1)
    taken: Sequence[Trial] = repository.trials(1, 40)
    assert {t.outcome for t in taken} == {None}
    assert all(t.samples for t in taken)
