"""Reports are data: what they say is tested here, and that they fit a terminal of 80 columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from mhctune.autotuner import report
from mhctune.autotuner.derive import Derived, derive
from mhctune.autotuner.explanation import explain
from mhctune.autotuner.planner import forecast, plan_sweep
from mhctune.autotuner.records import (
    Cell,
    Failure,
    FailureKind,
    Footprint,
    Measurement,
    Sample,
    SweepState,
    Trial,
)
from mhctune.autotuner.report import Sheet
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.words import size_text
from mhctune.configs.loader import load_gpu
from mhctune.kernels.dispatch import DispatchTable
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

PROBLEM = Problem(hidden_size=5120)
CONFIG = {"tile_n": 24, "n_splits": 5, "block_h": 256, "block_m": 8}
FUSED, UNFUSED = Candidate.of("fused", CONFIG), Candidate.of("unfused", CONFIG)
FAILED = Candidate.of("unfused", {**CONFIG, "tile_n": 12})
SPACE = {
    "fused": {name: [value] for name, value in CONFIG.items()},
    "unfused": {**{name: [value] for name, value in CONFIG.items()}, "tile_n": [24, 12]},
}
VARIANTS = {
    FUSED: ("c:post_pre()", "c:epilogue()"),
    UNFUSED: ("c:post()", "c:projection()", "c:epilogue()"),
    FAILED: ("c:post()", "c:projection(tile_n=12)", "c:epilogue()"),
}
WRONG = Failure(FailureKind.MISMATCH, "layer_input: 3 elements not written")


def trials() -> list[Trial]:
    found = []
    for count, latencies in {1: (10.0, 12.5), 4: (20.0, 20.1), 16: (1234.5, 617.25)}.items():
        cell = Cell("post_pre_delayed", PROBLEM, count)
        for candidate, latency in zip((FUSED, UNFUSED), latencies, strict=True):
            samples = tuple(Sample(0, n, 0, 20, latency) for n in range(9))
            found.append(Trial(cell, candidate, Footprint(1000, 200, 30), Measurement(samples), samples))
        found.append(Trial(cell, FAILED, Footprint(1000, 200, 30), WRONG))
    return found


@pytest.fixture
def record(make_sweep: Callable[..., SweepRecord]) -> SweepRecord:
    return make_sweep(target="c", token_counts=(1, 4, 16), space=SPACE, variants=VARIANTS, problem=PROBLEM)


@pytest.fixture
def derived(record: SweepRecord) -> Derived:
    return derive(record, 7, trials(), 0.05)


def width(sheet: Sheet) -> int:
    """Columns of a terminal that the sheet takes: two blanks between its columns, one after the last."""
    cells = [sheet.columns, *sheet.rows]
    return sum(max(len(str(row[i])) for row in cells) + 2 for i in range(len(sheet.columns))) - 1


def test_the_bands_say_choice_regret_and_limit(derived: Derived) -> None:
    sheet = report.bands_sheet(derived.table)
    config = "block_h=256 block_m=8 n_splits=5 tile_n=24"
    assert sheet.columns == ("tokens", "arm", "config", "regret", "limit")
    assert sheet.rows == (
        ("1-4", "fused", config, "best", ""),
        ("5-16", "unfused", config, "best", ""),
    )


def test_a_regret_within_the_bound_is_shown(record: SweepRecord) -> None:
    derived = derive(record, 7, trials(), 0.25)
    assert [row[3:] for row in report.bands_sheet(derived.table).rows] == [("25.0%", "25.0%")]


def test_a_band_of_one_count_is_one_number(record: SweepRecord) -> None:
    derived = derive(record, 7, [t for t in trials() if t.cell.num_tokens == 1], 0.05)
    assert report.bands_sheet(derived.table).rows[0][0] == "1"


def test_the_notes_of_the_bands_name_default_cost_device_and_table(derived: Derived) -> None:
    default, cost, limit, floor, timed, origin = report.bands_sheet(derived.table).notes
    assert default == f"above 16: {UNFUSED} (default, not measured)"
    assert cost == "2 bands, 4 compiled kernels; mean regret 0.0 %, worst limit 0.0 % (bound 5.0 %)"
    assert limit == "limit: upper 95 % limit of the regret from 9 rounds, each token count on its own"
    assert floor == "noise floor: unknown, no candidate was timed against itself in enough rounds"
    assert timed == "timed to the end of the last launch"
    assert origin == f"NVIDIA H200, sweep 7, table {derived.table.digest[:12]}"


def with_twins(ratio: float) -> list[Trial]:
    """The same trials; at every token count the first candidate's twin is slower by a ratio."""
    found = trials()
    for place in range(0, len(found), 3):
        twins = tuple(replace(s, latency_us=s.latency_us * ratio) for s in found[place].samples)
        found[place] = replace(found[place], twins=twins)
    return found


def test_bands_and_explanations_say_the_noise_floor_and_a_smaller_difference_is_none(
    record: SweepRecord,
) -> None:
    measured = with_twins(1.0078125)
    derived = derive(record, 7, measured, 0.05)
    floor = "noise floor: 0.78%; the best against their twins +0.78% to +0.78%, from 27 rounds"
    assert report.bands_sheet(derived.table).notes[3] == floor
    why = explain(derived, measured, 4)  # 20.0 us and 20.1 us
    notes = why.sheet(limit=2).notes
    assert notes[1].endswith(
        "2 tied with the best: their lower 95 % limit is not above 0, or their regret not above the noise "
        "floor, 0.78%"
    )
    assert notes[2] == floor
    assert why.to_dict(2)["noise_floor"] == {"lower": 0.0078125, "upper": 0.0078125, "n": 27}


def test_bands_under_a_wider_bound_than_the_races_say_that_losers_left_early(record: SweepRecord) -> None:
    wider, same = (report.bands_sheet(derive(record, 7, trials(), b).table).notes for b in (0.25, 0.05))
    assert wider[4].startswith("raced under a bound of 5.0 %: who was slower by more left early")
    assert len(wider) == len(same) + 1


def test_a_table_without_evidence_is_shown_too(make_table: Callable[..., DispatchTable]) -> None:
    sheet = report.bands_sheet(make_table(evidence={}))
    assert [row[:2] for row in sheet.rows] == [("1", "fused"), ("2-17", "unfused"), ("18-64", "fused")]
    assert sheet.notes[1:-1] == ("timed to the end of the last launch",)


def test_the_arms_stand_side_by_side_with_what_is_served(derived: Derived) -> None:
    sheet = report.arms_sheet(derived)
    assert sheet.columns == ("tokens", "fused", "unfused", "served", "regret", "served arm", "tied")
    assert sheet.rows == (
        (1, 10.0, 12.5, 10.0, "0.0 %", "fused", 1), (4, 20.0, 20.1, 20.0, "0.0 %", "fused", 1),
        (16, 1234.5, 617.2, 617.2, "0.0 %", "unfused", 1),
    )  # fmt: skip


def test_a_cut_over_that_the_noise_does_not_decide_says_so(record: SweepRecord) -> None:
    cell = Cell("post_pre_delayed", PROBLEM, 1)

    def measured(candidate: Candidate, *latencies: float) -> Trial:
        samples = tuple(Sample(0, i, 0, 1, latency) for i, latency in enumerate(latencies))
        return Trial(cell, candidate, Footprint(1, 1, 1), Measurement(samples), samples)

    close = [measured(FUSED, *[10.0, 10.2] * 5), measured(UNFUSED, *[10.11, 10.11] * 5)]
    others = [t for t in trials() if t.cell.num_tokens != 1 or t.candidate == FAILED]
    rows = report.arms_sheet(derive(record, 7, [*close, *others], 0.05)).rows
    # One arm for all counts is one kernel less, and within the bound.
    assert rows[0][-2:] == ("unfused (arms tied)", 2)
    assert rows[2][-2:] == ("unfused", 1)


def test_an_arm_that_was_not_measured_somewhere_is_a_dash(record: SweepRecord) -> None:
    cut = [t for t in trials() if (t.cell.num_tokens, t.candidate) != (4, UNFUSED)]
    cell = Cell("post_pre_delayed", PROBLEM, 4)
    derived = derive(record, 7, [*cut, Trial(cell, UNFUSED, Footprint(1, 1, 1), WRONG)], 0.05)
    assert report.arms_sheet(derived).rows[1][:3] == (4, 20.0, "-")


def test_an_explanation_shows_candidates_bytes_and_failures(derived: Derived) -> None:
    sheet = explain(derived, trials(), 4).sheet(limit=1)
    assert sheet.title == f"4 tokens: {FUSED}, for 1-4"
    assert sheet.rows == (
        ("fused", "block_h=256 block_m=8 n_splits=5 tile_n=24", 20.0, "0.0 %", "0.0 %", "0.0 %", "served"),
    )
    assert sheet.notes == (
        "served: the best here",
        "2 candidates measured at 4 tokens, 1 tied with the best: their lower 95 % limit is not above 0",
        "noise floor: unknown, no candidate was timed against itself in enough rounds",
        "timed to the end of the last launch",
        f"winner of this token count by itself, by the rule for ties: {FUSED}",
        "bytes there: inputs 1,000, outputs 200, scratch 30, graph 0",
        f"NVIDIA H200, sweep 7, table {derived.table.digest[:12]}; evidence dddddddddddd@4",
        "would change it: a bound of 25.0 %: 3 kernels would do",
        f"failed: {FAILED}: mismatch: layer_input: 3 elements not written",
    )


@pytest.mark.parametrize(
    ("tokens", "measured_at", "arm"),
    [(1, 1, "fused"), (2, 4, "fused"), (5, 16, "unfused"), (99, 16, "unfused")],
)
def test_the_next_measured_count_speaks_for_one_between_and_the_last_for_all_above(
    derived: Derived, tokens: int, measured_at: int, arm: str
) -> None:
    why = explain(derived, trials(), tokens)
    assert (why.measured_at, why.answer.choice.arm) == (measured_at, arm)
    assert why.footprint == Footprint(1000, 200, 30)


def test_an_explanation_marks_what_is_served_though_others_are_faster(record: SweepRecord) -> None:
    derived = derive(record, 7, trials(), 0.25)
    sheet = explain(derived, trials(), 2).sheet(limit=1)
    assert sheet.title.endswith("for 1-16; measured at 4")
    assert [row[-1] for row in sheet.rows] == ["tied", "served"]
    assert sheet.notes[0].startswith("served: 2 of 2 here, chosen so that all bands together need the fewest")


def test_an_explanation_is_json_with_regrets_and_failures(derived: Derived) -> None:
    data = json.loads(json.dumps(explain(derived, trials(), 1).to_dict(limit=5)))
    assert data["choice"] == str(FUSED)
    assert data["bytes"]["output_bytes"] == 200
    assert [(c["candidate"], c["tied"]) for c in data["candidates"]] == [
        (str(FUSED), True),
        (str(UNFUSED), False),
    ]
    assert data["candidates"][1]["point"] == pytest.approx(0.25)
    assert data["failures"] == [{"candidate": str(FAILED), "kind": "mismatch", "detail": WRONG.detail}]


def test_sweeps_show_how_far_they_have_come(record: SweepRecord) -> None:
    started = datetime(2026, 11, 29, 13, 5, tzinfo=UTC)
    kinds = {FailureKind.MISMATCH: 2, FailureKind.COMPILE: 1}
    line = report.SweepLine(3, SweepState.INTERRUPTED, started, record, 4, kinds)
    sheet = report.sweeps_sheet([line], "mhctune.db")
    begun = "2026-11-29 13:05"
    assert sheet.rows == ((3, "interrupted", "post_pre_delayed", "hidden 5120", "7/12", begun),)
    came = "4 trials measured, 3 failed (mismatch 2, compile 1)"
    assert sheet.notes == (f"sweep 3: NVIDIA H200, timed to the end; {came}",)
    early = replace(line, record=replace(record, protocol={**record.protocol, "until": "layer_input"}))
    assert [each.to_dict()["until"] for each in (line, early)] == ["end", "layer_input"]
    notes = report.sweeps_sheet([early], "mhctune.db").notes
    assert notes == (f"sweep 3: NVIDIA H200, timed to the layer input; {came}",)
    assert width(sheet) <= 80


def test_sweeps_show_what_their_rounds_were_like(record: SweepRecord) -> None:
    started = datetime(2026, 11, 29, 13, 5, tzinfo=UTC)
    line = report.SweepLine(3, SweepState.COMPLETE, started, record, 4, {}, "90 rounds, 2 throttled")
    assert report.sweeps_sheet([line], "mhctune.db").notes[1] == "sweep 3: 90 rounds, 2 throttled"


def test_no_sweep_yet_says_what_to_run() -> None:
    assert report.sweeps_sheet([], "a.db").notes == ("none yet: run `mhctune sweep`",)


def test_an_answer_is_a_line_for_people_and_a_dict_for_machines(derived: Derived) -> None:
    table = derived.table
    inside, above = table.lookup(4), table.lookup(17)
    assert (
        report.answer_text(table, inside) == f"{FUSED}  tokens 1-4  status exact  table {table.digest[:12]}"
    )
    assert "tokens 17 and up  status out_of_range (the table is exact)" in report.answer_text(table, above)
    expected: dict[str, Any] = {"arm": "fused", "config": CONFIG, "first": 1, "last": 4, "status": "exact"}
    expected |= {"table_status": "exact", "until": "end"}
    assert report.answer_dict(table, inside) == {**expected, "table": table.digest}
    assert report.answer_dict(table, above)["last"] is None


def test_a_forecast_shows_kernels_bytes_and_seconds() -> None:
    plan = plan_sweep(load_gpu("cpu"), "quick")
    sheet = report.forecast_sheet(forecast(plan, 2, None), 2)
    assert [row[0] for row in sheet.rows] == ["fused", "unfused"]
    text = " ".join(sheet.notes)
    assert f"{len(plan.variants)} kernels to compile" in text
    assert f"{plan.grid} trials" in text
    assert "MiB" in text
    assert "to start and compile with 2 cores" in text


@pytest.mark.parametrize("make", [lambda d: report.bands_sheet(d.table), report.arms_sheet])
def test_the_tables_of_a_sweep_fit_eighty_columns(derived: Derived, make: Callable[[Derived], Sheet]) -> None:
    assert width(make(derived)) <= 80


def test_the_phases_of_a_sweep_add_up() -> None:
    seconds = {
        "start": 9.0,
        "compile_all": 40.04,
        "prepare": 20.0,
        "sample": 30.0,
        "enter": 1.0,
        "leave": 0.5,
    }
    assert report.phases(seconds) == (
        "worker seconds: start 9.0, compile 40.0, check and capture 20.0, time 30.0, the rest 1.5"
    )


def test_a_problem_without_a_hidden_size_says_k_and_ranks() -> None:
    assert size_text(Problem(5120).to_dict()) == "hidden 5120"
    assert size_text(Problem(1, top_k=2048, ranks=8).to_dict()) == "top 2048 of 8 ranks"
    assert size_text({"top_k": 512}) == "top 512 of 1 rank"
    assert size_text({}) == "hidden ?"
