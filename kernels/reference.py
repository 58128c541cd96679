"""The staged float64 reference: each stage is computed from what the kernel stored in the one before.

A direct comparison with an end-to-end float64 result flakes at 1e-3, because a stream that rounds the
other way moves every coefficient; a tolerance wide enough for that hides real faults. Staging holds the
streams to one bf16 step and everything after them to fp32 error. Formulas: mHC of DeepSeek-V4 and V4.1 as
served by vLLM (`vllm/model_executor/kernels/mhc/torch.py`), restated here in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mhctune.kernels.seam import Problem

# Unit roundoff of fp32. A sum of n products costs at most n roundings of the running magnitude, so its
# error is below n * UNIT * sum |terms| (Higham, Accuracy and Stability, section 3.1).
UNIT = 2.0**-24
# The norm's square sum is added in H / 16 steps per lane or thread at worst (448 at H = 7168) and rsqrt
# halves a relative error: (448 / 2 + 16) * 2^-24 = 1.4e-5.
NORM_SLACK = 1.5e-5


def post(
    residual: torch.Tensor, x: torch.Tensor, post_mix: torch.Tensor, comb_mix: torch.Tensor
) -> torch.Tensor:
    """Return the new streams [T, 4, H] in float64: post_j * x + sum_i comb[i, j] * R_i."""
    mixed = torch.einsum("tij,tih->tjh", comb_mix.double(), residual.double())
    return mixed + post_mix.double()[:, :, None] * x.double()[:, None, :]


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Normalise [..., 4, 4] logits: softmax + eps, a column step, then iterations - 1 row-column pairs."""
    comb = torch.softmax(logits.double(), dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What the projection of the streams gives, in float64."""

    pre: torch.Tensor
    """[T, 4]"""
    post: torch.Tensor
    """[T, 4]"""
    comb: torch.Tensor
    """[T, 4, 4], rows are old streams"""


def mixes_of(streams: torch.Tensor, fn: torch.Tensor, rms_eps: float) -> torch.Tensor:
    """Project [T, n, H] streams (n 4, or 1 where all are equal) with [m, n, H] weights to [T, m] mixes.

    mixes = (a . fn^T) * rsqrt(sum(a^2) / (n H) + rms_eps), in float64.
    """
    flat = streams.double().flatten(1)
    mean_square = flat.square().sum(1, keepdim=True) / flat.shape[1]
    return flat @ fn.double().flatten(1).T * torch.rsqrt(mean_square + rms_eps)


def gates(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, problem: Problem
) -> torch.Tensor:
    """Return the head's weights of the streams [T, 4]: sigmoid(mixes * scale + base) + hc_pre_eps."""
    mixes = mixes_of(streams, fn, problem.rms_eps)
    return torch.sigmoid(mixes * scale.double() + base.double()) + problem.hc_pre_eps


def coefficients(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, problem: Problem
) -> Coefficients:
    """Project [T, n, H] streams and turn the 24 mixes into coefficients: 0-3 pre, 4-7 post, 8-23 comb."""
    mixes = mixes_of(streams, fn, problem.rms_eps)
    scale, base = scale.double(), base.double()
    logits = (mixes[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4)
    return Coefficients(
        pre=torch.sigmoid(mixes[:, :4] * scale[0] + base[:4]) + problem.hc_pre_eps,
        post=torch.sigmoid(mixes[:, 4:8] * scale[1] + base[4:8]) * problem.post_mult,
        comb=sinkhorn(logits, problem.sinkhorn_iters, problem.sinkhorn_eps),
    )


def collapse(streams: torch.Tensor, pre_mix: torch.Tensor | None) -> torch.Tensor:
    """Return the weighted sum of the streams [T, H] in float64; without a pre-mix, stream 0."""
    if pre_mix is None:
        return streams[:, 0].double()
    return (pre_mix.double()[:, :, None] * streams.double()).sum(1)


def step_of(value: torch.Tensor) -> torch.Tensor:
    """Return the distance between neighbouring bf16 numbers at each |value| (float64)."""
    # bf16 has 8 significant bits; the smallest normal exponent is -126.
    # frexp gives zero the exponent of 0.5, whose step would let a row of zeros be anything up to 2e-3.
    exponent = torch.frexp(value.abs().double())[1].masked_fill(value == 0, -125).clamp(min=-125)
    return torch.ldexp(torch.ones_like(value, dtype=torch.float64), exponent - 8)


def rounding_use(stored: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor) -> torch.Tensor:
    """Return how much of what rounding allows each stored bf16 value uses; more than 1 is wrong.

    Allowed is half a bf16 step and `slack`, the absolute error of the fp32 arithmetic before the rounding:
    off a tie that is the one correct value, at a tie either neighbour. NaN or infinity where the exact
    value is finite counts as infinite.
    """
    stored = stored.double()
    use = (stored - exact).abs() / (step_of(exact) / 2 + slack)
    use = torch.where(exact.isfinite() & ~stored.isfinite(), torch.inf, use)
    same = (exact.isnan() & stored.isnan()) | (stored == exact)
    return torch.where(same, 0.0, use)


def post_slack(
    residual: torch.Tensor, x: torch.Tensor, post_mix: torch.Tensor, comb_mix: torch.Tensor
) -> torch.Tensor:
    """Return the fp32 error bound of `post`, element by element: five products in a row."""
    return 5 * UNIT * post(residual.abs(), x.abs(), post_mix.abs(), comb_mix.abs())


def layer_input_use(
    stored: torch.Tensor,
    streams: torch.Tensor,
    pre_mix: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    pre_slack: float = 0.0,
    squares_rounded: bool = True,
) -> torch.Tensor:
    """Return how much of what rounding allows the stored layer input [T, H] uses; more than 1 is wrong.

    `pre_slack` is the absolute error of a pre-mix that the kernel computed itself. The norm's squares are of
    the collapse rounded to bf16 (V4.1), or of the unrounded one (V4); what is scaled is rounded in both.

    With a norm (`weight` given) two roundings follow each other. What was normalised is the rounding of some
    value within the collapse's fp32 error: one bf16 number; near a tie either neighbour; and where the sum
    cancels, so that its error spans several bf16 steps, any number between. The best of them counts. A large
    element near a tie also moves its row's norm (by 7e-5 at H = 768), which widens the bound of that row.
    """
    exact = collapse(streams, pre_mix)
    magnitude = collapse(streams.abs(), None if pre_mix is None else pre_mix.abs())
    slack = 4 * UNIT * magnitude if pre_mix is not None else torch.zeros_like(exact)
    slack = slack + pre_slack * streams.double().abs().sum(1)
    if weight is None:
        return rounding_use(stored, exact, slack)

    def mean_square(collapsed: torch.Tensor) -> torch.Tensor:
        squared = collapsed.bfloat16().double() if squares_rounded else collapsed
        return squared.square().mean(1, keepdim=True)

    least, most = mean_square((exact.abs() - slack).clamp(min=0)), mean_square(exact.abs() + slack)
    norm_slack = NORM_SLACK + (most - least) / (2 * (least + eps))
    rstd = torch.rsqrt(mean_square(exact) + eps)
    low, high = ((exact + side).bfloat16().double() * rstd * weight.double() for side in (-slack, slack))
    uses = [rounding_use(stored, value, norm_slack * value.abs()) for value in (low, high)]
    # The smallest step within the slack counts: just above a power of two the numbers below lie closer.
    several = 2 * slack > step_of((exact.abs() - slack).clamp(min=0))
    between = (stored.double() - low) * (stored.double() - high) <= 0
    return torch.where(several & between, 0.0, torch.minimum(*uses))
