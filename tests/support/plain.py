"""A plain float32 version of every seam, one mistake at a time: what the check of a candidate must catch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mhctune.kernels.forms import Form
from mhctune.kernels.seam import Problem


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


def post_block(inputs: Any, fault: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new streams in float32, unrounded and as the float32 of the stored bf16."""
    old, x = inputs["residual"].float(), inputs["x"].float()
    post_mix, comb_mix, tokens = inputs["post_mix"], inputs["comb_mix"], x.shape[0]
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
    return unrounded, to_bf16(unrounded).float()


def project(
    problem: Problem, inputs: Any, unrounded: torch.Tensor, streams: torch.Tensor, fault: str
) -> torch.Tensor:
    """Return the mixes [T, columns] of streams [T, n, H], n 1 where all are equal."""
    p, hidden, tokens, n = problem, problem.hidden_size, streams.shape[0], streams.shape[1]
    projected = unrounded if fault == "unrounded streams projected" else streams
    projected = projected.flip(1) if fault == "streams flattened in reverse" else projected
    fn = inputs["fn"].float()
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

    # An entry's divisor is H, elsewhere it is 4 H.
    wrong = 4 * hidden if n == 1 else hidden
    divisor = wrong if fault in ("divisor H instead of 4 H", "divisor 4 H instead of H") else n * hidden
    total = squared.flatten(1).square().sum(1, keepdim=True)
    if fault == "rms_eps before the division":
        rms = torch.rsqrt((total + p.rms_eps) / divisor)
    elif fault == "rms_eps outside the rsqrt":
        rms = torch.rsqrt(total / divisor) + p.rms_eps
    else:
        eps = {"rms_eps missing": 0.0, "norm_eps in place of rms_eps": p.norm_eps}.get(fault, p.rms_eps)
        rms = torch.rsqrt(total / divisor + eps)
    return dots * rms


def coefficients(
    problem: Problem, inputs: Any, mixes: torch.Tensor, fault: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pre, post and comb of the mixes."""
    p, scale, base = problem, inputs["scale"], inputs["base"]
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
    return next_pre, next_post, next_comb


def collapse(
    problem: Problem, inputs: Any, next_pre: torch.Tensor, unrounded: torch.Tensor, streams: torch.Tensor,
    fault: str,
) -> torch.Tensor:  # fmt: skip
    """Return the layer input of streams [T, 4, H]: with the carried mix or none (V4.1), or its own (V4)."""
    p, hidden = problem, problem.hidden_size
    old = inputs["residual"].float() if "residual" in inputs else streams
    if not p.delayed or p.carried:
        pre_mix = next_pre
        if p.delayed and fault != "collapse with the new pre-mix":
            pre_mix = inputs["pre_mix"]
        if fault == "pre-mix in bfloat16":
            pre_mix = pre_mix.bfloat16().float()
        source = old if fault == "collapse of the old streams" else streams
        source = unrounded if fault == "collapse of unrounded streams" else source
        collapsed = (pre_mix[:, :, None] * source).sum(1)
    else:
        collapsed = streams.mean(1) if fault == "absent pre-mix takes the mean" else streams[:, 0]
    if fault == "collapse with the wrong streams":
        collapsed = (pre_mix.flip(1)[:, :, None] * streams).sum(1)
    round_out = truncate if fault == "layer input truncated" else torch.Tensor.bfloat16
    if not p.norm:
        return round_out(collapsed)
    else:
        rounded = collapsed.bfloat16().float()
        squares = rounded if p.delayed else collapsed
        if fault in ("norm squares of the unrounded collapse", "norm squares of the rounded collapse"):
            squares = collapsed if p.delayed else rounded
        scaled = collapsed if fault == "norm of the unrounded collapse" else rounded
        width = 4 * hidden if fault == "norm divisor 4 H" else hidden
        mean = squares.square().sum(1, keepdim=True) / width
        eps = {"norm_eps missing": 0.0, "rms_eps in place of norm_eps": p.rms_eps}.get(fault, p.norm_eps)
        if fault == "norm_eps outside the rsqrt":
            rstd = torch.rsqrt(mean) + eps
        else:
            rstd = torch.rsqrt(mean + eps)
        weight = 1.0 if fault == "norm weight missing" else inputs["norm_weight"].float()
        return round_out(scaled * rstd * weight)


def run(form: Form, problem: Problem, inputs: Any, fault: str = "") -> dict[str, torch.Tensor]:
    """Compute a seam in float32, rounding where the kernels round, with one mistake."""
    if form.has_post:
        unrounded, streams = post_block(inputs, fault)
    elif form.broadcast:
        unrounded = streams = inputs["x"].float()[:, None]
    else:
        unrounded = streams = inputs["residual"].float()
    outputs = {}
    if form.has_post or form.broadcast:
        outputs["residual_out"] = streams.bfloat16().expand(-1, 4, -1).contiguous()
    if form.broadcast and fault == "an entry's fourth stream left out":
        outputs["residual_out"][:, 3] = 0
    next_pre = inputs.get("pre_mix")
    if form.weights is not None:
        mixes = project(problem, inputs, unrounded, streams, fault)
        if form.name == "hc_head":
            next_pre = gates(problem, inputs, mixes, fault)
        else:
            next_pre, outputs["next_post_mix"], outputs["next_comb_mix"] = coefficients(
                problem, inputs, mixes, fault
            )
    if "collapsed" in [spec.name for spec in form.writes]:
        own = replace(problem, delayed=False, norm=False)
        outputs["collapsed"] = collapse(own, inputs, next_pre, unrounded, streams, fault)
        return outputs
    if form.weights is not None:
        whole, exact = streams.expand(-1, 4, -1), unrounded.expand(-1, 4, -1)
        outputs["layer_input"] = collapse(problem, inputs, next_pre, exact, whole, fault)
    if any(spec.name == "next_pre_mix" and spec.exists(problem) for spec in form.writes):
        outputs["next_pre_mix"] = next_pre
    if problem.aux:
        outputs["aux"] = aux(inputs, unrounded, streams, fault)
    return outputs


def gates(problem: Problem, inputs: Any, mixes: torch.Tensor, fault: str) -> torch.Tensor:
    """Return the head's weights of the streams."""
    base = torch.zeros_like(inputs["base"]) if fault == "base missing" else inputs["base"]
    eps = 0.0 if fault == "hc_pre_eps missing" else problem.hc_pre_eps
    factor = problem.post_mult if fault == "post_mult on pre as well" else 1.0
    return (torch.sigmoid(mixes * inputs["scale"] + base) + eps) * factor


def aux(inputs: Any, unrounded: torch.Tensor, streams: torch.Tensor, fault: str) -> torch.Tensor:
    """Return the mean over the new streams."""
    if fault == "aux of the unrounded streams":
        return unrounded.mean(1).bfloat16()
    if fault == "aux of the old streams":
        return inputs["residual"].mean(1)
    if fault == "aux summed in bfloat16":
        stored = streams.bfloat16()
        return (stored[:, 0] + stored[:, 1] + stored[:, 2] + stored[:, 3]) / 4
    if fault == "aux summed and not divided":
        return streams.sum(1).bfloat16()
    return streams.mean(1).bfloat16()
