"""The CUDA epilogue's Sinkhorn normalisation, without a GPU: its macro, compiled by gcc.

What the loop computes is the same on both targets: float32 sums, products and fused multiply-adds, and an
integer operation on bits. The reciprocals before and behind it are divisions here and `rcp.approx` there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tilelang
import tilelang.language as T
import torch

from mhctune.kernels import reference
from mhctune.kernels.c.bf16 import fma
from mhctune.kernels.compiler import _options
from mhctune.kernels.cuda.mixes import lane_groups
from mhctune.kernels.cuda.sinkhorn import sinkhorn
from mhctune.kernels.draw import REGIMES

MATRICES = 512
Normalise = Callable[[torch.Tensor, float], torch.Tensor]


def _divide(value: Any) -> Any:
    return T.float32(1) / value


@cache
def compiled(iterations: int) -> Normalise:
    """Return the macro as a function of logits [MATRICES, 4, 4] and eps."""

    @T.prim_func
    def normalise(  # noqa: ANN202
        logits: T.Tensor((MATRICES, 4, 4), "float32"),
        comb: T.Tensor((MATRICES, 4, 4), "float32"),
        eps: T.float32,
    ):
        with T.Kernel(MATRICES) as at:
            matrix = T.alloc_local((4, 4), "float32")
            rows = T.alloc_local((4,), "float32")
            columns = T.alloc_local((4,), "float32")
            level = T.alloc_local((1,), "float32")
            for i in T.serial(4):
                level[0] = T.max(
                    T.max(logits[at, i, 0], logits[at, i, 1]), T.max(logits[at, i, 2], logits[at, i, 3])
                )
                for j in T.serial(4):
                    matrix[i, j] = T.exp(logits[at, i, j] - level[0])
            sinkhorn(matrix, rows, columns, level, iterations, eps, _divide, fma)
            for i, j in T.grid(4, 4):
                comb[at, i, j] = matrix[i, j] * rows[i] * columns[j] / level[0]

    kernel = tilelang.compile(normalise, **_options("c", None))

    def run(logits: torch.Tensor, eps: float) -> torch.Tensor:
        comb = torch.full_like(logits, float("nan"))
        kernel(logits, comb, eps)
        return comb

    return run


def drawn(scale: float, seed: int) -> torch.Tensor:
    """Return logits as the seams draw them: mixes of scale 1, times about `scale`, and a base."""
    generator = torch.Generator().manual_seed(seed)
    mixes, base = (torch.randn(MATRICES, 4, 4, generator=generator) for _ in range(2))
    factors = scale * (1 + 0.1 * torch.randn(MATRICES, 1, 1, generator=generator))
    return mixes * factors + 0.5 * base


def worst(logits: torch.Tensor, iterations: int, eps: float) -> float:
    exact = reference.sinkhorn(logits, iterations, float(torch.tensor(eps)))
    return float((compiled(iterations)(logits, eps).double() - exact).abs().max())


@pytest.mark.parametrize("eps", [1e-6, 0.01, 1.0, 1e-30])
@pytest.mark.parametrize("scale", sorted({regime.logit_scale for regime in REGIMES.values()} | {30.0}))
def test_any_logits_and_eps_are_normalised_to_a_few_roundings(scale: float, eps: float, seed: int) -> None:
    # The larger the logits, the more of the error is their own: exp turns half a step of 100 into 4e-6.
    assert worst(drawn(scale, seed), 20, eps) < 1e-6 + 6e-8 * scale


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_any_iteration_count_is_that_many_column_steps(iterations: int, seed: int) -> None:
    logits = drawn(4.0, seed)
    assert worst(logits, iterations, 1e-6) < 1e-6
    off = reference.sinkhorn(logits, iterations + 1, 1e-6)
    assert (compiled(iterations)(logits, 1e-6).double() - off).abs().max() > 1e-5


@pytest.mark.parametrize("hot", ["one column", "a diagonal", "a staircase", "equal"])
def test_extreme_matrices_keep_the_level_in_range(hot: str) -> None:
    step = torch.arange(4.0)
    shape = {
        "one column": (step == 0).float().expand(4, 4),
        "a diagonal": torch.eye(4),
        "a staircase": (step[:, None] >= step).float(),
        "equal": torch.zeros(4, 4),
    }[hot]
    heights = torch.linspace(0, 80, MATRICES)[:, None, None]
    for eps in (1e-6, 1e-30):
        assert worst((heights * shape).contiguous(), 20, eps) < 1e-5


def test_a_lane_group_never_has_more_lanes_than_splits() -> None:
    assert [lane_groups(n) for n in (1, 7, 8, 15, 16, 31, 32, 160)] == [1, 1, 2, 2, 4, 4, 8, 8]
