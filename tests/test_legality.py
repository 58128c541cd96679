"""Legality: one judgement and one wording, for serving a table and for checking one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cuda_configs import CONFIGS, HIDDEN, fitting  # type: ignore[import-not-found]

from mhctune.autotuner.check import legal
from mhctune.kernels import serving
from mhctune.kernels.dispatch import Band, Choice, DispatchTable, TableError
from mhctune.kernels.legality import problem_of, refusals
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Problem

VALUES = {"tile_n": 24, "n_splits": 1, "block_h": 64, "block_m": 4}
FUSED, UNFUSED = Choice.of("fused", VALUES), Choice.of("unfused", VALUES)
SEVEN = Choice.of("fused", {**VALUES, "tile_n": 7})
MEGA = Choice.of("mega", {})


@pytest.fixture
def make(make_table: Callable[..., DispatchTable]) -> Callable[..., DispatchTable]:
    """A table that is legal but for the changes."""

    def build(**changes: Any) -> DispatchTable:
        usual = {"problem": {"hidden_size": 768}, "target": "c", "bands": (Band(1, 4, FUSED),)}
        return make_table(**{**usual, "default": UNFUSED, **changes})

    return build


Make = Callable[..., DispatchTable]


def test_a_legal_table_has_no_refusals(make: Make) -> None:
    assert refusals(make()) == {}
    assert problem_of(make()) == Problem(768)


@pytest.mark.parametrize(
    ("changes", "choice", "sentence"),
    [
        ({"seam": "pots"}, None, f"unknown seam 'pots'; known: {', '.join(sorted(SEAMS))}"),
        (
            {"problem": {"hidden_size": 768, "width": 3}}, None,
            "unknown problem fields ['width']; known: hidden_size, carried, norm, sinkhorn_iters, rms_eps, "
            "hc_pre_eps, sinkhorn_eps, post_mult, norm_eps, hc_mult, aux, delayed, top_k, ranks, interleave",
        ),
        ({"problem": {"hidden_size": 0}}, None, "hidden_size 0 must be positive"),
        (
            {"default": MEGA}, MEGA,
            "mega() is illegal: seam post_pre_delayed has no arm 'mega' on target 'c'; it has "
            "fused, unfused, released",
        ),
        (
            {"default": SEVEN}, SEVEN,
            "fused(block_h=64, block_m=4, n_splits=1, tile_n=7) is illegal: 24 columns are not a multiple of "
            "tile_n 7: the last columns would be dropped",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_launched_is_told_alike_by_serving_and_by_the_check(
    changes: dict[str, Any], choice: Choice | None, sentence: str, make: Make
) -> None:
    table = make(**changes)
    assert refusals(table) == {choice: sentence}
    assert legal(table).sentence == sentence
    with pytest.raises(TableError) as caught:
        serving.serve(table)
    assert str(caught.value) == f"table {table.digest[:12]}: {sentence}"


def test_every_illegal_choice_is_told(make: Make) -> None:
    assert list(refusals(make(bands=(Band(1, 1, MEGA), Band(2, 4, FUSED)), default=SEVEN))) == [MEGA, SEVEN]


@pytest.mark.parametrize("problem", [{}, {"norm": True}, {"hidden_size": "768"}])
def test_a_problem_that_cannot_be_built_is_a_table_error(problem: dict[str, Any], make: Make) -> None:
    with pytest.raises(TableError):
        problem_of(make(problem=problem))


@pytest.mark.parametrize("carried", [True, False], ids=["carried", "absent"])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_what_the_gpu_tests_run_is_legal_and_every_arm_is_among_it(hidden: int, carried: bool) -> None:
    problem = Problem(hidden, carried=carried)
    for candidate in fitting(problem):
        arm = find_seam("post_pre_delayed").arm("cuda", candidate.arm)
        assert arm.space(problem).refusals(candidate.config) == (), str(candidate)
    arms = {arm.name for arm in find_seam("post_pre_delayed").arms("cuda")}
    assert {candidate.arm for candidate in CONFIGS} == arms
