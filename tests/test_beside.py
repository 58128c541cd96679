"""As shipped beside tuned: a runtime's constants as candidates of ours, raced with the rest of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mhctune.autotuner.beside import beside, beside_sheet
from mhctune.autotuner.derive import Derived, derive
from mhctune.autotuner.explanation import explain
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.planner import plan_sweeps
from mhctune.autotuner.records import Cell, Footprint, Measurement, Sample, Trial
from mhctune.autotuner.shipped import shipped, shipped_candidates
from mhctune.configs.loader import baseline_of, load_baseline, load_gpu, names
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

H200, SMS = load_gpu("h200"), 132
FUSED = {"ahead": 0, "block_m": 1, "collapse": 0, "epilogue_thr": 128, "n_thr": 128, "vec": 1}


def of(seam: str, tokens: int, hidden: int = 5120, delayed: bool = True) -> Any:
    problem = SEAMS[seam].canonical(Problem(hidden, delayed=delayed))
    return shipped(SEAMS[seam], problem, "cuda", SMS, tokens)


@pytest.mark.parametrize(
    ("seam", "tokens", "expected"),
    [
        ("post_pre_delayed", 8, Candidate.of("fused", {**FUSED, "tile_n": 2, "n_splits": 8})),
        ("post_pre_delayed", 32, Candidate.of("fused", {**FUSED, "tile_n": 6, "n_splits": 8})),
        ("pre", 1, Candidate.of("unfused_mma", {"n_splits": 80, "block_k": 64, "epilogue_thr": 128})),
        ("pre", 1024, Candidate.of("unfused_mma", {"n_splits": 8, "block_k": 64, "epilogue_thr": 128})),
        # One stream is projected: K is 5120, of which the estimate makes 20 and the bucket 16.
        (
            "pre_broadcast", 1,
            Candidate.of("unfused_mma", {"n_splits": 16, "block_k": 64, "epilogue_thr": 128}),
        ),
    ],
)  # fmt: skip
def test_a_shipped_choice_is_a_candidate_of_ours(seam: str, tokens: int, expected: Candidate) -> None:
    assert of(seam, tokens).candidate == expected


def test_a_shipped_choice_that_our_kernels_refuse_says_why() -> None:
    found = of("pre", 128)
    assert found.candidate is None
    assert "K 20480 is not a multiple of n_splits 66 x block_k 64" in found.reason


@pytest.mark.parametrize("seam", ["post", "hc_head", "collapse"])
def test_where_nothing_shipped_is_tunable_there_is_no_baseline(seam: str) -> None:
    assert baseline_of(seam) is None
    assert of(seam, 1) is None


def test_the_target_c_has_no_baseline() -> None:
    assert shipped(SEAMS["pre"], Problem(5120), "c", SMS, 1) is None


def test_a_seam_has_one_baseline_and_every_one_names_known_seams() -> None:
    served = [seam for name in names("baseline") for seam in load_baseline(name).seams]
    assert len(served) == len(set(served))
    assert set(served) <= set(SEAMS)


# The family.


@pytest.fixture(scope="module")
def family() -> dict[str, SweepPlan]:
    return {plan.seam.name: plan for plan in plan_sweeps(H200, "seams", here=False)}


def test_the_family_tunes_every_cuda_seam_at_one_hidden_size(family: dict[str, SweepPlan]) -> None:
    without_hidden_size = {"topk_merge"}
    assert set(family) == {n for n, seam in SEAMS.items() if seam.arms("cuda")} - without_hidden_size
    for plan in family.values():
        assert plan.problem.hidden_size == 5120
        assert {c.arm for c in plan.candidates} == {arm.name for arm in plan.seam.arms("cuda")}
        assert plan.token_counts == (1, 8, 32, 128, 1024)
        assert len(plan.candidates) <= 48
    # 173 kernels at 0.17 s and 945 trials at 13 ms, as they took on an H200 host of 16 cores: 42 s.
    assert len({v for plan in family.values() for v in plan.variants}) <= 180
    assert sum(plan.grid for plan in family.values()) <= 1000


def test_what_is_shipped_is_raced_though_the_space_does_not_hold_it(family: dict[str, SweepPlan]) -> None:
    plan = family["post_pre_delayed"]
    found = {*plan.shipped}
    assert found == {
        *shipped_candidates(plan.seam, plan.problem, "cuda", SMS, (1, 32)),
        Candidate.of("unfused_mma", {"n_splits": 16, "block_k": 64, "epilogue_thr": 128, "collapse": 0}),
    }
    assert found <= {*plan.candidates}
    assert not found & {c for space in plan.spaces.values() for c in space.candidates()}
    record = plan.record()
    assert found <= {*record.variants}
    assert record.digest != replace(plan, shipped=()).record().digest
    assert set(record.sources) == set(plan.spaces)


def test_a_seam_of_the_family_is_picked_by_name() -> None:
    (plan,) = plan_sweeps(H200, "seams", seam="pre", here=False)
    assert (plan.seam.name, plan.problem.hidden_size, plan.problem.delayed) == ("pre", 5120, False)


# The report.


def trials_of(plan: SweepPlan, latency: Callable[[Candidate], float]) -> list[Trial]:
    """Rounds with a drift that all share."""
    found = []
    for cell in plan.cells:
        for candidate in plan.candidates:
            taken = tuple(Sample(0, n, 0, 20, latency(candidate) * (1 + 0.1 * (n % 3))) for n in range(9))
            here = Cell(cell.seam, cell.problem, cell.num_tokens)
            found.append(Trial(here, candidate, Footprint(1, 1, 0), Measurement(taken), taken))
    return found


@pytest.fixture(scope="module")
def measured(family: dict[str, SweepPlan]) -> tuple[Derived, list[Trial]]:
    plan = family["pre"]
    found = trials_of(plan, lambda c: 12.0 if c in plan.shipped else 8.0 if c.arm == "unfused" else 9.0)
    return derive(plan.record(), 1, found, 0.05), found


def test_each_token_count_shows_shipped_beside_tuned(measured: tuple[Derived, list[Trial]]) -> None:
    rows = {row.num_tokens: row for row in beside(measured[0])}
    assert [rows[n].status for n in (1, 8, 32, 1024)] == ["slower"] * 4
    assert rows[1].ratio == pytest.approx(1.5)
    assert rows[128].ratio is None
    assert rows[128].status.startswith("illegal here: unfused_mma: K 20480")
    sheet = beside_sheet(measured[0])
    assert sheet is not None
    assert "split-raw" in sheet.title
    assert [row[3] for row in sheet.rows] == ["1.50", "1.50", "1.50", "-", "1.50"]


@pytest.mark.parametrize(("shipped_us", "status"), [(10.2, "faster"), (10.4, "tied"), (10.9, "slower")])
def test_what_is_shipped_is_judged_against_what_is_served(
    family: dict[str, SweepPlan], shipped_us: float, status: str
) -> None:
    """One kernel within the bound serves all token counts: at 8 tokens it is not the best."""
    plan = family["pre"]
    served = next(c for c in plan.candidates if c not in plan.shipped)

    def latency(candidate: Candidate, count: int) -> float:
        if count != 8:
            return 8.0 if candidate == served else 20.0
        return 10.4 if candidate == served else shipped_us if candidate in plan.shipped else 20.0

    found = []
    for trial in trials_of(plan, lambda c: 1.0):
        us = latency(trial.candidate, trial.cell.num_tokens)
        taken = tuple(replace(s, latency_us=us * s.latency_us) for s in trial.samples)
        found.append(replace(trial, outcome=Measurement(taken), samples=taken))
    (row,) = [row for row in beside(derive(plan.record(), 1, found, 0.05)) if row.num_tokens == 8]
    assert row.tuned.candidate == served
    assert row.ratio == pytest.approx(shipped_us / 10.4)
    assert row.status == status


def test_explain_marks_what_is_shipped_and_always_shows_it(measured: tuple[Derived, list[Trial]]) -> None:
    sheet = explain(*measured, 8).sheet(limit=1)
    assert [row[-1] for row in sheet.rows] == ["served", " shipped"]
    (shipped_row,) = [row for row in explain(*measured, 8).to_dict(1)["candidates"] if row.get("shipped")]
    assert shipped_row["point"] == pytest.approx(0.5)


def test_without_a_shipped_candidate_there_is_nothing_to_show(family: dict[str, SweepPlan]) -> None:
    plan = family["collapse"]
    derived = derive(plan.record(), 1, trials_of(plan, lambda c: 3.0), 0.05)
    assert beside_sheet(derived) is None
    assert {row.status for row in beside(derived)} == {"no baseline"}
