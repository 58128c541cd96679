"""The target table: who is compared with whom, the ratios of several runs, and what a verdict needs."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mhctune.autotuner.planner import plan_sweep
from mhctune.autotuner.records import PLACEMENT_ROUNDS, Cell, Footprint, Measurement, Sample, Trial
from mhctune.configs.loader import load_gpu, load_sweep
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SEAM = find_seam("post_pre_delayed")
HIDDEN = (4096, 5120, 7168)
FAST, SLOW = Candidate.of("fused", {"tile_n": 2}), Candidate.of("fused", {"tile_n": 4})
LIKE, OWN = Candidate.of("unfused", {"n_splits": 16}), Candidate.of("unfused", {"n_splits": 64})


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module


@pytest.fixture(scope="module")
def table(load: Callable[[str], Any]) -> ModuleType:
    return load("hopper_table")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def compared(load: Callable[[str], Any]) -> ModuleType:
    return load("hopper_baselines")  # type: ignore[no-any-return]


def a_run(table: ModuleType, times: dict[Candidate, float], count: int = 1, **changes: Any) -> Any:
    values = {"sweep": 1, "seed": 1, "latencies": {count: times}, "confirmed": {}, **changes}
    return table.Run(**values)


def ships(compared: ModuleType, *candidates: Candidate, note: str = "") -> Any:
    return compared.Described(None, candidates, note)


def test_the_columns_have_the_targets_that_were_set(table: ModuleType) -> None:
    counts = (1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    targets = [2.0] * 4 + [1.8] * 3 + [1.6] * 2 + [None, 1.5, None, 1.5, 1.5]
    assert list(map(table.target_of, counts)) == targets


def test_a_target_counts_only_beyond_the_spread(table: ModuleType) -> None:
    assert table.verdict([2.0, 2.1, 2.3], 2.0) == "met"
    assert table.verdict([1.99, 2.1, 2.3], 2.0) == "inside the spread"
    assert table.verdict([1.8, 1.9, 1.99], 2.0) == "missed"
    assert table.verdict([3.0], 2.0) == "one run"


def test_ours_is_one_candidate_over_all_runs_and_its_ratios_are_of_one_run(
    table: ModuleType, compared: ModuleType
) -> None:
    runs = [
        a_run(table, {FAST: 4.0, SLOW: 4.4, LIKE: 8.4, OWN: 9.0}),
        a_run(table, {FAST: 4.2, SLOW: 3.9, LIKE: 8.8, OWN: 9.2}),  # another winner, by luck
        a_run(table, {FAST: 4.1, SLOW: 4.4, LIKE: 8.0, OWN: 7.0}),
    ]
    row = table.row_of(runs, 1, 8.2, ships(compared, LIKE))
    assert (row.ours.candidate, row.ours.us) == (FAST, 4.1)
    assert (row.structure.candidate, row.structure.us, row.counts) == (LIKE, 8.4, True)
    # The faster of (a), which is 8.2 in each run, and (b) of that run.
    assert row.ratios == pytest.approx((8.2 / 4.0, 8.2 / 4.2, 8.0 / 4.1))
    assert row.ratio == pytest.approx(8.2 / 4.2)
    assert (row.own.candidate, row.own.us) == (LIKE, 8.4)
    assert (row.target, row.verdict) == (2.0, "inside the spread")


def a_yard(table: ModuleType, count: int = 1, us: float | None = None, who: str = "vec 1") -> Any:
    described = {} if us is None else {count: us}
    return table.Yardstick(0.9, {}, 2**31, 500.0, described, dict.fromkeys(described, who))


def test_what_ships_as_described_with_its_epilogue_is_the_baseline_where_each_run_has_timed_it(
    table: ModuleType, compared: ModuleType
) -> None:
    times = {FAST: 4.0, LIKE: 6.0}
    yards = [a_yard(table, us=8.0), a_yard(table, us=7.6, who="vec 2")]
    runs = [a_run(table, times, yardstick=yard) for yard in yards]
    row = table.row_of(runs, 1, 7.8, ships(compared, LIKE))
    assert (row.reproduced.each_us, row.reproduced.who) == ((8.0, 7.6), ("vec 1", "vec 2"))
    assert row.reproduced.us == pytest.approx(7.8)
    assert (row.counts, row.stands_in) == (True, False)
    assert row.ratios == pytest.approx((7.8 / 4, 7.6 / 4))  # the faster of (a) and (b) of each run
    assert row.structure_ratios == pytest.approx((6.0 / 4, 6.0 / 4))
    assert row.structure_ratio == pytest.approx(1.5)
    assert row.structure_verdict == "missed"
    assert row.structure.candidate == LIKE
    # Without a record it is (b) alone.
    row = table.row_of(runs, 1, None, ships(compared, LIKE))
    assert (row.counts, row.ratios) == (None, pytest.approx((2.0, 1.9)))
    # Slower than what was recorded by more than a tenth, it is no baseline; (b') is none for that.
    row = table.row_of(runs, 1, 7.0, ships(compared, LIKE))
    assert (row.counts, row.ratios) == (False, pytest.approx((1.75, 1.75)))
    assert row.structure_ratios == pytest.approx((1.5, 1.5))


@pytest.mark.parametrize("missing", ["no yardsticks", "another count", "an older file"])
def test_the_structure_with_our_epilogue_stands_in_where_a_run_has_not_timed_what_ships(
    table: ModuleType, compared: ModuleType, missing: str
) -> None:
    yard = {
        "no yardsticks": None,
        "another count": a_yard(table, 2, 8.0),
        "an older file": table.Yardstick.of(
            {"empty_us": 0.9, "copy_us": {"1": 2.0}, "ceiling_bytes": 2**31, "ceiling_us": 500.0}
        ),
    }[missing]
    times = {FAST: 4.0, LIKE: 6.0}
    runs = [a_run(table, times, yardstick=each) for each in (a_yard(table, us=8.0), yard)]
    row = table.row_of(runs, 1, 7.8, ships(compared, LIKE))
    assert (row.reproduced, row.stands_in, row.counts) == (None, True, True)
    assert row.ratios == row.structure_ratios == pytest.approx((1.5, 1.5))
    _, line, said, *_ = table.lines([row], [])
    assert line.split()[:6] == ["1", "4.00", "7.80", "-", "yes'", "6.00"]
    assert said == "at 1 tokens not every run has timed (b): (b') stands in for it"
    nothing = table.row_of(runs, 1, 7.8, ships(compared))
    assert (nothing.stands_in, nothing.counts, nothing.ratios) == (False, False, (1.95, 1.95))


@pytest.mark.parametrize(
    ("took_us", "counts", "ratio"), [(9.0, True, 2.05), (9.1, False, 2.05), (6.0, True, 1.5)]
)
def test_a_reproduction_counts_to_ten_percent_above_what_was_recorded(
    table: ModuleType, compared: ModuleType, took_us: float, counts: bool, ratio: float
) -> None:
    row = table.row_of([a_run(table, {FAST: 4.0, LIKE: took_us})] * 2, 1, 8.2, ships(compared, LIKE))
    assert row.counts is counts
    assert row.ratios == pytest.approx((ratio, ratio))


def test_without_a_record_the_reproduction_is_shown_and_nothing_is_judged(
    table: ModuleType, compared: ModuleType
) -> None:
    row = table.row_of([a_run(table, {FAST: 4.0, LIKE: 8.0})] * 2, 1, None, ships(compared, LIKE))
    assert (row.counts, row.ratios, row.verdict) == (None, (2.0, 2.0), "no record")
    alone = table.row_of([a_run(table, {FAST: 4.0})] * 2, 1, None, ships(compared, LIKE))
    assert (alone.structure, alone.ratios, alone.ratio) == (None, (), None)
    recorded = table.row_of([a_run(table, {FAST: 4.0})] * 2, 1, 9.0, ships(compared, LIKE))
    assert (recorded.counts, recorded.ratios, recorded.verdict) == (False, (2.25, 2.25), "met")


def test_who_was_not_measured_in_every_run_or_not_confirmed_is_not_ours(
    table: ModuleType, compared: ModuleType
) -> None:
    runs = [a_run(table, {FAST: 4.0, SLOW: 5.0}), a_run(table, {SLOW: 5.2})]
    assert table.row_of(runs, 1, 10.0, ships(compared)).ours.candidate == SLOW
    confirmed = {"confirmed": {1: frozenset([SLOW])}}
    runs = [a_run(table, {FAST: 4.0, SLOW: 4.1}, **confirmed)] * 2
    assert table.row_of(runs, 1, 10.0, ships(compared)).ours.candidate == SLOW
    # A baseline left early and is compared all the same.
    assert table.row_of(runs, 1, 10.0, ships(compared, FAST)).structure.candidate == FAST
    assert table.row_of([a_run(table, {FAST: 4.0}), a_run(table, {})], 1, 1.0, ships(compared)) is None


def test_the_limits_are_multiples_of_the_yardsticks_of_each_run(
    table: ModuleType, compared: ModuleType
) -> None:
    yards = [table.Yardstick(us, {2048: 50.0, 4096: 100.0}, 2**31, 500.0) for us in (1.0, 0.8)]
    times = {1: {FAST: 4.2}, 2: {FAST: 4.2}, 2048: {FAST: 70.0}, 4096: {FAST: 160.0}}
    runs = [table.Run(n, n, times, {}, yard) for n, yard in enumerate(yards)]
    rows = [table.row_of(runs, n, 9.0, ships(compared)) for n in times]
    found = {(each.num_tokens, each.what): each for each in table.limits_of(runs, rows)}
    assert set(found) == {(1, "empty kernels"), (2048, "copies"), (4096, "copies")}
    assert found[1, "empty kernels"].multiples == pytest.approx((4.2, 5.25))
    assert found[1, "empty kernels"].verdict == "inside the spread"
    assert (found[2048, "copies"].verdict, found[4096, "copies"].verdict) == ("met", "missed")
    assert found[4096, "copies"].multiples == pytest.approx((1.6, 1.6))
    without = [*runs[:1], table.Run(2, 2, times, {}, None)]
    assert table.limits_of(without, rows) == []
    assert yards[0].ceiling_tb_s == pytest.approx(2**31 / 500e-6 / 1e12)
    for yard in (yards[0], a_yard(table, 64, 14.4)):
        assert table.Yardstick.of(json.loads(json.dumps(yard.to_data()))) == yard


def test_a_run_takes_the_drift_of_the_rounds_out_and_knows_who_was_confirmed(table: ModuleType) -> None:
    def trial(candidate: Candidate, us: float, rounds: list[int]) -> Trial:
        # The machine is a tenth slower from round 3 on, and nobody who left before saw that.
        taken = tuple(Sample(0, n, 0, 20, us * (1.1 if n >= 3 else 1.0)) for n in rounds)
        cell = Cell(SEAM.name, Problem(5120), 8)
        return Trial(cell, candidate, Footprint(0, 1, 0), Measurement(taken), taken)

    long = [*range(7), PLACEMENT_ROUNDS + 7, PLACEMENT_ROUNDS + 8]
    run = table.run_of(3, 4, [trial(FAST, 5.0, long), trial(SLOW, 5.2, [0, 1, 2])])
    assert run.latencies[8][SLOW] / run.latencies[8][FAST] == pytest.approx(1.04, rel=0.01)
    assert run.confirmed == {8: frozenset([FAST])}


def test_the_printed_table_names_everything(table: ModuleType, compared: ModuleType) -> None:
    yard = table.Yardstick(0.94, {}, 2**31, 500.0, {1: 8.2}, {1: "vec 1"})
    times = {1: {FAST: 4.0, LIKE: 6.0}, 256: {FAST: 15.0}}
    runs = [table.Run(n, n, times, {}, yard) for n in (1, 2)]
    rows = [
        table.row_of(runs, 1, 7.99, ships(compared, LIKE, note="16 splits are illegal here: 14 taken")),
        table.row_of(runs, 256, 16.91, ships(compared)),
    ]
    header, one, many, limit, who, *names = table.lines(rows, table.limits_of(runs, rows))
    assert header.split() == [
        "tokens", "ours", "us", "(a)", "us", "(b)", "us", "counts", "(b')", "us", "(c)", "us", "ratio",
        "spread", "target", "verdict", "ratio'", "verdict'",
    ]  # fmt: skip
    assert one.split() == [
        "1", "4.00", "7.99", "8.20", "yes", "6.00", "6.00", "2.00", "2.00-2.00", "2.00", "missed", "1.50",
        "missed",
    ]  # fmt: skip
    assert many.split() == ["256", "15.00", "16.91", "-", "no", "-", "-", "1.13", "1.13-1.13", "-", "1.13"]
    assert len(header) < 120
    assert header.index("ratio'") + len("ratio'") == one.index("1.50") + len("1.50")
    assert limit.strip() == "1 tokens: 4.26 empty kernels of 0.94 us (4.26-4.26), at most 4.5: met"
    assert who == "who:"
    assert names[0].endswith(
        f"ours {FAST} | (b) vec 1 | (b') {LIKE} | (c) {LIKE}  [16 splits are illegal here: 14 taken]"
    )
    data = json.loads(json.dumps([table.to_data(row) for row in rows]))
    assert data[0]["ours"] == {"arm": "fused", "config": {"tile_n": 2}, "each_us": [4.0, 4.0]}
    assert (data[0]["verdict"], data[1]["structure"]) == ("missed", None)
    assert data[0]["reproduced"] == {"who": ["vec 1", "vec 1"], "each_us": [8.2, 8.2]}
    assert (data[0]["structure"]["each_us"], data[0]["structure_ratios"]) == ([6.0, 6.0], [1.5, 1.5])
    assert (data[1]["reproduced"], data[1]["stands_in"]) == (None, False)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_what_ships_can_be_launched_as_described_at_each_hidden_size(
    compared: ModuleType, hidden: int
) -> None:
    problem = Problem(hidden)
    for count in load_sweep(BENCHMARKS / "hopper.toml").token_counts:
        found = compared.described(SEAM, problem, "cuda", 132, count)
        wanted: dict[str, int] = {"tile_n": 2 if count < 16 else 6, "n_splits": 8, "n_thr": 128}
        if count > 32:
            wanted = {"n_splits": 16 if count <= 1024 else 4}
        assert found.choice.config == wanted
        assert found.note == ""
        for candidate in found.candidates:
            assert wanted.items() <= candidate.config.items()
            assert candidate.config["collapse"] == 0  # the shipped epilogue collapses
            assert SEAM.arm("cuda", candidate.arm).space(problem).refusals(candidate.config) == ()
        arms = {c.arm for c in found.candidates}
        assert arms == ({"fused"} if count <= 32 else {"unfused", "unfused_mma"})


def test_an_illegal_split_gives_way_to_the_nearest_and_says_so(compared: ModuleType) -> None:
    problem = Problem(7 * 256)  # 28 blocks of 64 elements on the CPU
    odd = compared.described(SEAM, problem, "c", 132, 64)
    assert odd.choice.config == {"n_splits": 16}
    assert {c.config["n_splits"] for c in odd.candidates} == {14}
    assert odd.note == "16 splits are illegal here: 14 taken"
    assert compared.described(SEAM, Problem(5120), "c", 132, 64).note == ""
    with pytest.raises(ValueError, match="seam collapse: nothing with tunables is shipped"):
        compared.described(find_seam("collapse"), problem, "c", 132, 64)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_the_sweep_races_what_is_meant_at_each_hidden_size(compared: ModuleType, hidden: int) -> None:
    plan = plan_sweep(load_gpu("h200"), str(BENCHMARKS / "hopper.toml"), hidden_size=hidden, here=False)
    assert plan.problem == Problem(hidden)
    numbers = {arm: len(legal) for arm, legal in plan.legal.items()}
    assert (numbers["fused"], numbers["fused_mma"], numbers["unfused_mma"]) == (3, 9, 1)
    assert numbers["fused_ws"] == (20 if hidden == 7168 else 16)  # 28 splits are legal at 7168 alone
    whole = [c for c in plan.candidates if c.arm == "fused_mma" and c.config["block_h"] == 64]
    assert hidden // 64 in {c.config["n_splits"] for c in whole}  # a block of H a program
    others = compared.baselines(SEAM, plan.problem, "cuda", 132, plan.token_counts)
    assert len(others) == len(set(others)) <= 40
    assert not set(others) & set(plan.candidates)


@pytest.fixture(scope="module")
def early(load: Callable[[str], Any]) -> ModuleType:
    return load("hopper_early")  # type: ignore[no-any-return]


def test_the_layer_input_is_held_against_the_whole_time_as_shipped(
    table: ModuleType, early: ModuleType
) -> None:
    runs = [a_run(table, {FAST: 2.0, SLOW: 5.0}, 8), a_run(table, {FAST: 2.5, SLOW: 1.0}, 8)]
    row = early.early_row_of(runs, 8, 6.0)
    assert row.ours.candidate == FAST  # one candidate for both runs, by its median
    assert row.ratios == (3.0, pytest.approx(2.4))
    assert (row.target, row.verdict) == (2.5, "inside the spread")
    head, line, legend = early.early_lines([row])
    assert line.split()[:6] == ["8", "2.25", "6.00", "2.70", "2.40-3.00", "2.50"]
    assert line.endswith(f"inside the spread {FAST}")
    assert "ours: time to the layer input; shipped: the recorded whole time" in legend
    assert len(head) < 110


def test_without_a_record_or_outside_its_counts_there_is_no_verdict_on_the_layer_input(
    table: ModuleType, early: ModuleType
) -> None:
    runs = [a_run(table, {FAST: 2.0}, 16), a_run(table, {FAST: 2.0}, 16)]
    assert early.early_row_of(runs, 16, None).verdict == "no record"
    assert early.early_row_of(runs, 16, 5.2).verdict == "met"
    assert early.early_row_of(runs, 16, 4.9).verdict == "missed"
    far = [a_run(table, {FAST: 2.0}, 24)] * 2
    assert (early.early_row_of(far, 24, 9.0).target, early.early_row_of(far, 24, 9.0).verdict) == (None, "")
    assert early.early_row_of(runs, 2, 5.0) is None


def test_what_was_recorded_as_shipped_covers_the_target_of_the_layer_input(
    load: Callable[[str], Any], early: ModuleType
) -> None:
    known = load("shipped").shipped(5120)
    first, last, _ = early.TARGET
    assert {1, 2, 4, 8, 16} <= {count for count in known if first <= count <= last}
