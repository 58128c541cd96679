"""What the published GB300 medians say, set by set; without samples, small differences say nothing."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from mhctune.autotuner.cutover import Medians, Route, cutover, sets_of, spread
from mhctune.configs.recorded import load_recorded

ROOT = Path(__file__).resolve().parents[1]
TOTAL_US = 914.84  # of the published file
FUSED, INHERITED = ("fused", "tuned"), ("fused", "inherited")
CONFIGURED, TUNED_SPLIT, MEGA = ("unfused", "splits16"), ("unfused", "splits64"), ("mega", "mega")


@pytest.fixture(scope="module")
def sets() -> dict[str, dict[Route, dict[int, float]]]:
    return sets_of(load_recorded("gb300_published"))


@pytest.fixture(scope="module")
def floor(sets: dict[str, dict[Route, dict[int, float]]]) -> float:
    return max(spread(sets, CONFIGURED).values())


Sets = dict[str, dict[Route, dict[int, float]]]


def test_the_copy_is_whole() -> None:
    recorded = load_recorded("gb300_published")
    assert len(recorded.rows) == 79
    assert round(sum(float(row["latency_us"] or 0) for row in recorded.rows), 2) == TOTAL_US
    assert recorded.rows[13] == {
        "set": "A", "hidden_size": 5120, "arm": "fused", "label": "tuned", "num_tokens": 16,
        "tile_n": 6, "n_splits": 8, "n_thr": 128, "latency_us": 9.85,
    }  # fmt: skip


def test_sets_are_kept_apart(sets: Sets) -> None:
    assert {name: sorted(routes) for name, routes in sets.items()} == {
        "A": [INHERITED, FUSED, CONFIGURED],
        "B": [FUSED, CONFIGURED, TUNED_SPLIT],
        "C": [FUSED, MEGA, CONFIGURED],
    }
    assert [sets[name][FUSED][1] for name in "ABC"] == [8.02, 8.44, 8.43]


def test_the_floor_is_the_spread_of_the_configuration_common_to_all(sets: Sets, floor: float) -> None:
    common = spread(sets, CONFIGURED)
    assert sorted(common) == [1, 2, 4, 8, 16, 24, 32, 48]
    assert round(floor, 3) == 0.048
    assert max(common, key=lambda n: common[n]) == 8
    assert spread(sets, TUNED_SPLIT) == {}


def test_b_against_the_tuned_split(sets: Sets, floor: float) -> None:
    found = cutover(sets["B"][FUSED], sets["B"][TUNED_SPLIT], floor)
    assert found.last == 32
    assert {n: round(loss, 3) for n, loss in found.lags.items()} == {48: 0.156}
    assert found.weak == (32,)
    # The same pair as a share of the slower time: what its makers call a loss of 14 %.
    assert round(1 - sets["B"][TUNED_SPLIT][48] / sets["B"][FUSED][48], 3) == 0.135


def test_b_against_the_configured_split(sets: Sets, floor: float) -> None:
    found = cutover(sets["B"][FUSED], sets["B"][CONFIGURED], floor)
    assert found.last == 32
    assert list(found.lags) == [48]
    assert found.weak == (48,)


def test_c_against_the_configured_split(sets: Sets, floor: float) -> None:
    found = cutover(sets["C"][FUSED], sets["C"][CONFIGURED], floor)
    assert (found.last, found.ties, found.lags) == (48, (64, 128), {})


def test_c_against_mega(sets: Sets, floor: float) -> None:
    found = cutover(sets["C"][FUSED], sets["C"][MEGA], floor)
    assert (found.last, found.ties, list(found.lags)) == (16, (24,), [32, 48, 64, 128])


def test_at_4_tokens_the_tuned_band_is_worse_than_the_inherited_config(sets: Sets, floor: float) -> None:
    found = cutover(sets["A"][FUSED], sets["A"][INHERITED], floor)
    assert round(found.lags[4], 3) == 0.049
    assert 4 not in found.weak


def test_the_report_says_all_of_it() -> None:
    lines = runpy.run_path(str(ROOT / "benchmarks" / "gb300.py"))["report"]()
    text = "\n".join(lines)
    assert "floor: 4.8%" in text
    assert "lags at 4 (4.9%)" in text
    assert (
        "cut-over: 32 against the tuned split; 48 against the configured one, which costs 15.6% there" in text
    )


@pytest.mark.parametrize(
    ("first", "second", "last", "ties"),
    [
        ({1: 1.0, 2: 1.0}, {1: 2.0, 2: 1.001}, 1, (2,)),
        ({1: 3.0, 2: 1.0}, {1: 2.0, 2: 2.0}, 0, ()),
        ({1: 1.0, 2: 1.0, 4: 1.0}, {1: 2.0, 4: 2.0}, 4, ()),
        ({1: 1.0}, {2: 2.0}, 0, ()),
    ],
)
def test_a_lead_ends_where_it_is_lost_or_tied(
    first: Medians, second: Medians, last: int, ties: tuple[int, ...]
) -> None:
    found = cutover(first, second, 0.05)
    assert (found.last, found.ties) == (last, ties)
