"""Planted faults: a plain float32 version of the seam, one mistake at a time, and the inputs that catch it.

Ordinary inputs hide mistakes, so every fault names the regime and the problem that show it. The check is
the one that every candidate of a sweep passes, so what it misses here it would miss there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Deviation, Problem

SEAM = find_seam("post_pre_delayed")
HIDDEN, TOKENS = 256, 16


def truncate(value: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16 toward zero."""
    return (value.view(torch.int32) & -65536).view(torch.float32).bfloat16()


def half_away(value: torch.Tensor) -> torch.Tensor:
    """Round to the nearest bfloat16, ties away from zero."""
    return ((value.view(torch.int32) + 0x8000) & -65536).view(torch.float32).bfloat16()


def tf32(value: torch.Tensor) -> torch.Tensor:
    """Keep the 10 bits of a TF32 operand."""
    return ((value.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float, fault: str) -> torch.Tensor:
    in_rows = 0.0 if fault == "row denominators without eps" else eps
    in_columns = 0.0 if fault == "column denominators without eps" else eps
    iterations += {"one iteration more": 1, "one iteration less": -1}.get(fault, 0)

    def row_step(comb: torch.Tensor) -> torch.Tensor:
        return comb / (comb.sum(2, keepdim=True) + in_rows)

    def column_step(comb: torch.Tensor) -> torch.Tensor:
        return comb / (comb.sum(1, keepdim=True) + in_columns)

    comb = torch.softmax(logits, dim=1 if fault == "softmax over columns" else 2)
    if fault == "eps inside the softmax's denominator":
        comb = comb / (1 + eps)
    elif fault != "softmax without eps":
        comb = comb + eps
    if fault != "first column step missing":
        comb = column_step(comb)
    for _ in range(iterations - 1):
        comb = column_step(row_step(comb))
    return row_step(comb) if fault == "last step a row step" else comb


def run(problem: Problem, inputs: Any, fault: str = "") -> dict[str, torch.Tensor]:
    """Compute the seam in float32, rounding where the kernels round, with one mistake."""
    p, hidden, tokens = problem, problem.hidden_size, inputs["x"].shape[0]
    old, x = inputs["residual"].float(), inputs["x"].float()
    post_mix, comb_mix, scale, base = (inputs[k] for k in ("post_mix", "comb_mix", "scale", "base"))

    # The post block.
    comb = comb_mix.transpose(1, 2) if fault == "comb transposed in the post block" else comb_mix
    if fault == "comb of the post block in bfloat16":
        comb = comb.bfloat16().float()
    elif fault == "comb of the post block in TF32":
        comb = tf32(comb)
    if fault == "x left out of the post block":
        post_mix = torch.zeros_like(post_mix)
    unrounded = post_mix[:, :, None] * x[:, None] + sum(
        comb[:, i, :, None] * old[:, i, None] for i in range(4)
    )
    if fault == "a row's streams from its neighbour":
        unrounded[tokens // 2] = unrounded[tokens // 2 - 1]
    to_bf16 = {"streams truncated": truncate, "streams rounded half away": half_away}.get(
        fault, torch.Tensor.bfloat16
    )
    stored = to_bf16(unrounded)
    streams = stored.float()

    # The projection.
    projected = unrounded if fault == "unrounded streams projected" else streams
    projected = projected.flip(1) if fault == "streams flattened in reverse" else projected
    fn = inputs["fn"]
    if fault == "weights in bfloat16":
        fn = fn.bfloat16().float()
    elif fault == "operands in TF32":
        fn = tf32(fn)
    summed, squared = (
        projected.clone(),
        (
            unrounded if fault in ("unrounded streams projected", "unrounded streams squared") else streams
        ).clone(),
    )
    if fault == "last eighth of H not projected":
        summed[:, :, -hidden // 8 :] = 0
    if fault == "last eighth of H not squared":
        squared[:, :, -hidden // 8 :] = 0
    if fault == "one stream not projected":
        summed[:, 3] = 0
    dots = summed.flatten(1) @ fn.flatten(1).T
    if fault == "last column tile dropped":
        dots[:, -6:] = 0
    if fault == "a row's partial sums from its neighbour":
        dots[tokens // 2] = dots[tokens // 2 - 1]
    if fault == "second row of a block holds the sum of both":
        dots[1] = dots[0] + dots[1]

    # The mixes.
    divisor = hidden if fault == "divisor H instead of 4 H" else 4 * hidden
    total = squared.flatten(1).square().sum(1, keepdim=True)
    if fault == "rms_eps before the division":
        rms = torch.rsqrt((total + p.rms_eps) / divisor)
    elif fault == "rms_eps outside the rsqrt":
        rms = torch.rsqrt(total / divisor) + p.rms_eps
    else:
        eps = {"rms_eps missing": 0.0, "norm_eps in place of rms_eps": p.norm_eps}.get(fault, p.rms_eps)
        rms = torch.rsqrt(total / divisor + eps)
    mixes = dots * rms
    if fault == "base missing":
        base = torch.zeros_like(base)
    s_pre, s_post, s_comb = scale[0], scale[1], scale[2]
    if fault == "scale[1] for comb":
        s_comb = scale[1]
    elif fault == "scale[0] for post":
        s_post = scale[0]
    of_pre, of_post = slice(0, 4), slice(4, 8)
    if fault == "pre and post columns swapped":
        of_pre, of_post = of_post, of_pre
    pre_logits = mixes[:, of_pre] * s_pre + base[of_pre]
    pre_eps = 0.0 if fault in ("hc_pre_eps missing", "hc_pre_eps inside the sigmoid") else p.hc_pre_eps
    if fault == "sinkhorn_eps in place of hc_pre_eps":
        pre_eps = p.sinkhorn_eps
    if fault == "hc_pre_eps inside the sigmoid":
        pre_logits = pre_logits + p.hc_pre_eps
    next_pre = torch.sigmoid(pre_logits) + pre_eps
    next_post = torch.sigmoid(mixes[:, of_post] * s_post + base[of_post])
    if fault == "post_mult on pre as well":
        next_pre = next_pre * p.post_mult
    if fault == "hc_pre_eps on post as well":
        next_post = next_post + p.hc_pre_eps
    if fault != "post_mult missing":
        next_post = next_post * p.post_mult
    logits = (mixes[:, 8:] * s_comb + base[8:]).unflatten(1, (4, 4))
    next_comb = sinkhorn(logits, p.sinkhorn_iters, p.sinkhorn_eps, fault)
    if fault == "comb stored transposed":
        next_comb = next_comb.transpose(1, 2).contiguous()

    # The collapse and its norm.
    if p.carried:
        pre_mix = next_pre if fault == "collapse with the new pre-mix" else inputs["pre_mix"]
        source = old if fault == "collapse of the old streams" else streams
        source = unrounded if fault == "collapse of unrounded streams" else source
        collapsed = (pre_mix[:, :, None] * source).sum(1)
    else:
        collapsed = streams.mean(1) if fault == "absent pre-mix takes the mean" else streams[:, 0]
    round_out = truncate if fault == "layer input truncated" else torch.Tensor.bfloat16
    if not p.norm:
        layer_input = round_out(collapsed)
    else:
        rounded = collapsed.bfloat16().float()
        squares = collapsed if fault == "norm squares of the unrounded collapse" else rounded
        scaled = collapsed if fault == "norm of the unrounded collapse" else rounded
        width = 4 * hidden if fault == "norm divisor 4 H" else hidden
        mean = squares.square().sum(1, keepdim=True) / width
        eps = {"norm_eps missing": 0.0, "rms_eps in place of norm_eps": p.rms_eps}.get(fault, p.norm_eps)
        if fault == "norm_eps outside the rsqrt":
            rstd = torch.rsqrt(mean) + eps
        else:
            rstd = torch.rsqrt(mean + eps)
        weight = 1.0 if fault == "norm weight missing" else inputs["norm_weight"].float()
        layer_input = round_out(scaled * rstd * weight)
    return {
        "residual_out": stored,
        "next_post_mix": next_post,
        "next_comb_mix": next_comb,
        "layer_input": layer_input,
        "next_pre_mix": next_pre,
    }


@dataclass(frozen=True)
class Catch:
    """Where a fault shows: the regime, what differs from the usual problem, and the output that tells."""

    fault: str
    output: str
    regime: str = "served"
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The inputs for people."""
        return ", ".join([self.regime, *(f"{name}={value:g}" for name, value in self.changes.items())])


POST, COMB, PRE, STREAMS, INPUT = (
    "next_post_mix", "next_comb_mix", "next_pre_mix", "residual_out", "layer_input",
)  # fmt: skip
CATCHES = (
    # Sinkhorn
    Catch("one iteration more", COMB, "sharp"),
    Catch("one iteration less", COMB, "sharp"),
    Catch("one iteration more", COMB, "mild", {"sinkhorn_iters": 1}),
    Catch("last step a row step", COMB, "sharp"),
    Catch("first column step missing", COMB, "sharp"),
    Catch("softmax over columns", COMB, "sharp"),
    Catch("softmax without eps", COMB),
    Catch("eps inside the softmax's denominator", COMB),
    Catch("row denominators without eps", COMB, "sharp", {"sinkhorn_eps": 0.01}),
    Catch("column denominators without eps", COMB, "served", {"sinkhorn_eps": 0.01}),
    Catch("comb stored transposed", COMB),
    # The root mean square
    Catch("divisor H instead of 4 H", PRE),
    Catch("rms_eps missing", PRE, "zero_row"),
    Catch("rms_eps missing", PRE, "tiny", {"rms_eps": 1e-10}),
    Catch("rms_eps outside the rsqrt", PRE, "zero_row"),
    Catch("rms_eps outside the rsqrt", PRE, "served", {"rms_eps": 0.5}),
    Catch("rms_eps before the division", PRE, "served", {"rms_eps": 0.5}),
    Catch("norm_eps in place of rms_eps", PRE, "served", {"norm_eps": 0.5}),
    Catch("unrounded streams squared", COMB),
    Catch("last eighth of H not squared", PRE),
    # The mixes
    Catch("hc_pre_eps missing", PRE, "served", {"hc_pre_eps": 0.25}),
    Catch("hc_pre_eps inside the sigmoid", PRE, "served", {"hc_pre_eps": 0.25}),
    Catch("hc_pre_eps on post as well", POST, "served", {"hc_pre_eps": 0.25}),
    Catch("sinkhorn_eps in place of hc_pre_eps", PRE, "served", {"hc_pre_eps": 0.25}),
    Catch("post_mult missing", POST),
    Catch("post_mult on pre as well", PRE),
    Catch("pre and post columns swapped", PRE),
    Catch("pre and post columns swapped", POST),
    Catch("scale[1] for comb", COMB),
    Catch("scale[0] for post", POST),
    Catch("base missing", PRE),
    # The projection
    Catch("last column tile dropped", COMB),
    Catch("last eighth of H not projected", PRE),
    Catch("one stream not projected", PRE),
    Catch("unrounded streams projected", PRE),
    Catch("streams flattened in reverse", PRE),
    Catch("a row's partial sums from its neighbour", PRE),
    Catch("second row of a block holds the sum of both", PRE),
    Catch("weights in bfloat16", PRE),
    Catch("operands in TF32", PRE),
    # The post block
    Catch("comb transposed in the post block", STREAMS),
    Catch("comb of the post block in bfloat16", STREAMS),
    Catch("comb of the post block in TF32", STREAMS),
    Catch("x left out of the post block", STREAMS),
    Catch("a row's streams from its neighbour", STREAMS),
    Catch("streams truncated", STREAMS),
    # The collapse and its norm
    Catch("collapse with the new pre-mix", INPUT),
    Catch("collapse with the new pre-mix", INPUT, "served", {"norm": False}),
    Catch("collapse of the old streams", INPUT),
    Catch("collapse of unrounded streams", INPUT),
    Catch("absent pre-mix takes the mean", INPUT, "served", {"carried": False}),
    Catch("layer input truncated", INPUT),
    Catch("layer input truncated", INPUT, "large", {"norm": False}),
    Catch("norm weight missing", INPUT),
    Catch("norm squares of the unrounded collapse", INPUT),
    Catch("norm squares of the unrounded collapse", INPUT, "served", {"hidden_size": 5120}),
    Catch("norm of the unrounded collapse", INPUT),
    Catch("norm divisor 4 H", INPUT),
    Catch("norm_eps missing", INPUT, "zero_row"),
    Catch("norm_eps missing", INPUT, "served", {"norm_eps": 0.5}),
    Catch("norm_eps outside the rsqrt", INPUT, "zero_row"),
    Catch("norm_eps outside the rsqrt", INPUT, "served", {"norm_eps": 0.5}),
    Catch("rms_eps in place of norm_eps", INPUT, "served", {"rms_eps": 0.5}),
)


def deviations(problem: Problem, regime: str, seed: int, fault: str = "") -> dict[str, Deviation]:
    inputs = SEAM.inputs(problem, TOKENS, seed, "cpu", regime)
    return {d.output: d for d in SEAM.check(problem, inputs, run(problem, inputs, fault))}


@pytest.mark.parametrize("catch", CATCHES, ids=lambda c: f"{c.fault} ({c.label}; {c.output})")
def test_a_planted_fault_is_caught(
    catch: Catch, seed: int, record_property: Callable[[str, object], None]
) -> None:
    problem = replace(Problem(HIDDEN), **catch.changes)
    assert all(d.ok for d in deviations(problem, catch.regime, seed).values()), "wrong without the fault"
    found = deviations(problem, catch.regime, seed, catch.fault)[catch.output]
    times = found.error / found.bound
    record_property("fault", (catch.fault, catch.label, catch.output, f"{times:.3g} x bound"))
    assert not found.ok, str(found)


def test_every_fault_of_the_plain_version_is_on_the_list() -> None:
    """A name misspelt on either side would be a fault that is never planted."""
    problem = Problem(HIDDEN)
    for catch in CATCHES:
        problem = replace(Problem(HIDDEN), **catch.changes)
        inputs = SEAM.inputs(problem, TOKENS, 1, "cpu", catch.regime)
        right, wrong = run(problem, inputs), run(problem, inputs, catch.fault)
        assert not torch.equal(right[catch.output], wrong[catch.output]), catch.fault


PROBLEMS = {
    "usual": {},
    "absent": {"carried": False},
    "plain": {"norm": False},
    "absent and plain": {"carried": False, "norm": False},
    "one iteration": {"sinkhorn_iters": 1},
    "large eps": {
        "rms_eps": 0.5,
        "hc_pre_eps": 0.25,
        "sinkhorn_eps": 0.01,
        "norm_eps": 0.5,
        "post_mult": 1.5,
    },
    "V4 eps": {"rms_eps": 1e-6, "norm_eps": 1e-6},
    "hidden 320": {"hidden_size": 320},
    "hidden 5120": {"hidden_size": 5120},
}


@pytest.mark.parametrize("regime", SEAM.regimes)
@pytest.mark.parametrize("changes", PROBLEMS.values(), ids=list(PROBLEMS))
def test_the_plain_version_without_a_fault_passes(changes: dict[str, Any], regime: str, seed: int) -> None:
    for offset in range(1 if "hidden_size" in changes else 3):
        found = deviations(replace(Problem(HIDDEN), **changes), regime, seed + offset)
        assert all(d.ok for d in found.values()), "; ".join(str(d) for d in found.values() if not d.ok)


@pytest.mark.parametrize("fault", ["one iteration more", "one iteration less"])
def test_an_iteration_more_or_less_hides_in_the_mild_regime(fault: str, seed: int) -> None:
    assert deviations(Problem(HIDDEN), "mild", seed, fault)["next_comb_mix"].ok
    caught = [r for r in ("served", "sharp") if not deviations(Problem(HIDDEN), r, seed, fault)[COMB].ok]
    assert caught


# What the check cannot see, and why that is no hole.
SURVIVORS = {
    # V4.1's eps of 1e-6 moves a coefficient by at most 2e-6, a fifth of the fp32 error that the bound allows.
    # The same faults are caught above with an exaggerated eps: it is a run-time scalar of the same kernels,
    # so an eps in its right place there is in its right place here.
    "hc_pre_eps missing": PRE,
    "hc_pre_eps inside the sigmoid": PRE,
    "hc_pre_eps on post as well": POST,
    "row denominators without eps": COMB,
    # rms_eps of 1e-20 vanishes beside the mean square of ordinary rows, and four times nothing is nothing in
    # a row of zeros.
    "rms_eps before the division": PRE,
    # At a tie the check takes either neighbour, because fp32 error before the rounding decides there.
    # test_post_pre_delayed.py gives the kernels inputs whose ties are exact.
    "streams rounded half away": STREAMS,
}


@pytest.mark.parametrize("fault", SURVIVORS)
def test_a_known_survivor_survives_in_every_regime_of_the_usual_problem(fault: str, seed: int) -> None:
    for regime in SEAM.regimes:
        found = deviations(Problem(HIDDEN), regime, seed, fault)[SURVIVORS[fault]]
        assert found.ok, f"{regime}: {found}"


def test_rounding_half_away_differs_only_where_the_exact_value_is_a_tie(seed: int) -> None:
    """The survivor is no empty fault: on inputs made of ties it changes bits."""
    problem = Problem(HIDDEN)
    inputs = SEAM.inputs(problem, TOKENS, seed, "cpu")
    inputs["post_mix"].fill_(1.0)
    inputs["comb_mix"].copy_(torch.eye(4).expand(TOKENS, 4, 4))
    inputs["residual"].fill_(1.0)
    inputs["x"].fill_(2.0**-8)  # 1 + 2^-8 lies between 1 and 1 + 2^-7
    right, away = run(problem, inputs), run(problem, inputs, "streams rounded half away")
    assert not torch.equal(right["residual_out"], away["residual_out"])
    found = {d.output: d for d in SEAM.check(problem, inputs, away)}
    assert found["residual_out"].ok
