"""The gate finds what became slower and leaves alone what did not, over runs drawn from recorded noise."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mhctune.autotuner.check import Check, Finding, Verdict
from mhctune.autotuner.check_files import junit, markdown
from mhctune.autotuner.gate import (
    ALPHA,
    Change,
    alpha_of,
    judge,
    paired_change,
    rounds_needed,
    unpaired_change,
)

ROOT = Path(__file__).resolve().parents[1]
RUNS = 50


@pytest.fixture(scope="module")
def simulation() -> dict[str, Any]:
    """The benchmark's functions: README's numbers come from them."""
    return runpy.run_path(str(ROOT / "benchmarks/gate.py"))


def test_a_planted_regression_of_5_percent_is_found_and_a_wobble_of_1_percent_is_not(
    simulation: dict[str, Any], seed: int
) -> None:
    """5 % at one token count of ten; 1 % at all of them."""
    ratios = simulation["recorded_ratios"]()
    assert len(ratios) == 10
    found, raised = simulation["tally"](ratios, RUNS, random.Random(seed))
    assert found >= 0.95 * RUNS, f"{found} of {RUNS} found"
    assert raised <= 0.01 * RUNS, f"{raised} of {RUNS} raised"


def test_equal_things_are_called_regressed_as_seldom_as_promised(seed: int) -> None:
    draw, runs, spots = random.Random(seed), 400, 5
    raised = 0
    for _ in range(runs):
        came = [
            judge(paired_change([draw.lognormvariate(0, 0.1) for _ in range(15)]), 0.0, alpha_of(spots))
            for _ in range(spots)
        ]
        raised += Verdict.REGRESSED in came
    assert raised <= runs * ALPHA + 4 * (runs * ALPHA) ** 0.5


@pytest.mark.parametrize("comparisons", [1, 3, 10, 40])
def test_the_rounds_that_are_needed_can_tell_and_one_fewer_cannot(comparisons: int) -> None:
    alpha, n = alpha_of(comparisons), rounds_needed(comparisons)
    assert judge(paired_change([1.5] * n), 0.1, alpha) is Verdict.REGRESSED
    assert judge(paired_change([0.5] * n), 0.1, alpha) is Verdict.IMPROVED
    assert judge(paired_change([1.5] * (n - 1)), 0.1, alpha) is Verdict.CANNOT_TELL


@pytest.mark.parametrize(
    ("point", "slower_p", "faster_p", "verdict"),
    [
        (0.2, 0.001, 1.0, Verdict.REGRESSED),
        (0.2, 0.2, 0.8, Verdict.CANNOT_TELL),
        (0.05, 0.001, 1.0, Verdict.PASSED),  # significant, within the tolerance
        (0.0, 1.0, 1.0, Verdict.PASSED),
        (-0.2, 1.0, 0.001, Verdict.IMPROVED),
        (-0.2, 0.8, 0.2, Verdict.PASSED),
        (-0.05, 1.0, 0.001, Verdict.PASSED),
    ],
)
def test_a_verdict_needs_size_and_significance(
    point: float, slower_p: float, faster_p: float, verdict: Verdict
) -> None:
    assert judge(Change(point, slower_p, faster_p, 1e-6, 20), 0.1, 0.01) is verdict
    assert judge(Change(point, slower_p, faster_p, 0.02, 5), 0.1, 0.01) is Verdict.CANNOT_TELL


def test_nothing_tells_nothing() -> None:
    for change in (paired_change([]), unpaired_change([1.0], []), unpaired_change([], [1.0])):
        assert judge(change, 0.0, 0.01) is Verdict.CANNOT_TELL


# The files.

FINDINGS = [
    Finding("pre, hidden <1>", "legal", Verdict.PASSED, "fine"),
    Finding("pre, hidden <1>", "speed, 1 token", Verdict.REGRESSED, "fused|x & 'y' \x1b[31m 5 % slower"),
    Finding("pre, hidden <1>", "speed, 4 tokens", Verdict.IMPROVED, "faster"),
    Finding("post", "grid", Verdict.MISSING, "2 of 3"),
    Finding("post", "replay", Verdict.CANNOT_TELL, "too few"),
]


def test_junit_counts_failures_and_errors_a_suite_a_table() -> None:
    root = ElementTree.fromstring(junit(Check(FINDINGS)))
    suites = {suite.get("name"): suite for suite in root}
    counts = {name: tuple(s.get(k) for k in ("tests", "failures", "errors")) for name, s in suites.items()}
    assert counts == {"pre, hidden <1>": ("3", "1", "0"), "post": ("2", "0", "2")}
    (failure,) = root.iter("failure")
    assert failure.get("type") == "regressed"
    assert failure.get("message") == "fused|x & 'y' [31m 5 % slower"
    assert [error.get("type") for error in root.iter("error")] == ["missing", "cannot_tell"]


def test_junit_of_nothing_compared_is_an_error() -> None:
    root = ElementTree.fromstring(junit(Check([])))
    (error,) = root.iter("error")
    assert error.get("type") == "missing"


def test_markdown_shows_the_verdict_first_and_keeps_cells_whole() -> None:
    text = markdown(Check(FINDINGS, ["not measured again: no device"]))
    lines = text.splitlines()
    assert lines[0] == "## mhctune check: regressed"
    (row,) = [line for line in lines if "regressed" in line and line.startswith("|")]
    assert row.replace("\x1b", "") == r"| speed, 1 token | **regressed** | fused\|x & 'y' \[31m 5 % slower |"
    rows = [line for line in lines if line.startswith("| ") and "---" not in line and "compared" not in line]
    assert len(rows) == len(FINDINGS)
    assert "not measured again: no device" in text
    assert markdown(Check([])).startswith("## mhctune check: missing")
