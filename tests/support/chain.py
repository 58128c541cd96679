"""Whole models in small, V4 and V4.1: eight layers through the ops alone, and a float64 chain beside them.

The reference rounds nothing. Ours rounds the streams, the collapse and the layer input of every sublayer to
bf16: at most 2^-9 of a value each, 1.1e-3 in the root mean square. Seventeen seams of three such roundings
that are independent add up to sqrt(51) * 1.1e-3 = 8e-3; the sublayers are contractions and pass on less than
they get. The bound is 1e-2 of the root mean square.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mhctune.kernels import ops, reference, serving
from mhctune.kernels.dispatch import Band, Choice, DispatchTable
from mhctune.kernels.engram import DelayedSeam
from mhctune.kernels.forms import FORMS, SCALARS
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Arm, Problem
from mhctune.kernels.space import Config

HIDDEN, LAYERS, BOUND = 768, 8, 1e-2
EPS = {"V4": 1e-6, "V4.1": 1e-20}
ENGRAM_LAYER, AUX_LAYER = 3, 5
Tensor = torch.Tensor
OF_FORM = {form.name: form for form in FORMS}
SEAMS_OF = {
    "V4.1": ("post_pre_delayed", "post_pre_delayed/aux", "pre_delayed", "pre_broadcast", "post", "collapse"),
    "V4": ("post_pre", "post_pre/aux", "post_pre_bf16", "pre_broadcast", "post", "hc_head"),
}
"""What a chain runs, as keys of its tables: a seam, and `/aux` where the mean is asked for."""


@dataclass
class Weights:
    """What one seam and the sublayer after it need."""

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm_weight: Tensor
    sublayer: Tensor

    def sublayer_of(self, layer_input: Tensor) -> Tensor:
        """Return the sublayer's output in the precision of its input."""
        return torch.tanh(layer_input @ self.sublayer.to(layer_input.dtype))


@dataclass
class Model:
    """Random weights: an entry, 2 * LAYERS - 1 seams, a head."""

    seams: list[Weights]
    embedding: Tensor
    head_fn: Tensor
    head_scale: Tensor
    head_base: Tensor
    engram: Tensor


def model_of(tokens: int, seed: int, hidden: int = HIDDEN, device: str = "cpu") -> Model:
    """Return random weights, the same on every device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    seams = [
        Weights(
            normal(24, 4, hidden) / (4 * hidden) ** 0.5, 1 + 0.1 * normal(3), 0.5 * normal(24),
            (1 + 0.1 * normal(hidden)).bfloat16(), normal(hidden, hidden) / (2 * hidden**0.5),
        )
        for _ in range(2 * LAYERS)
    ]  # fmt: skip
    head = normal(4, 4, hidden) / (4 * hidden) ** 0.5
    engram = (0.5 * normal(tokens, 4, hidden)).bfloat16()
    return Model(seams, normal(tokens, hidden).bfloat16(), head, 1 + 0.1 * normal(1), normal(4), engram)


def problem_of(version: str, hidden: int = HIDDEN, aux: bool = False) -> Problem:
    """Return the problem of a version's seams."""
    eps = EPS[version]
    later = version == "V4.1"
    return Problem(hidden, rms_eps=eps, norm_eps=eps, delayed=later, carried=later, aux=aux)


# --- The reference: float64, nothing rounded --------------------------------------------------------------


def normed(collapsed: Tensor, weights: Weights, problem: Problem) -> Tensor:
    rstd = torch.rsqrt(collapsed.square().mean(1, keepdim=True) + problem.norm_eps)
    return collapsed * rstd * weights.norm_weight.double()


def exact_chain(version: str, model: Model) -> tuple[Tensor, Tensor]:
    """Return the head's output, and the mean over the streams at `AUX_LAYER`, in float64."""
    problem, delayed = problem_of(version), version == "V4.1"
    streams = model.embedding.double()[:, None].expand(-1, 4, -1)
    carried, mixes, aux = None, None, torch.empty(0)
    for index, weights in enumerate(model.seams):
        if mixes is not None:
            streams = reference.post(streams, output, mixes.post, mixes.comb)  # noqa: F821
            if index == 2 * AUX_LAYER:
                aux = streams.mean(1)
            if delayed and index == 2 * ENGRAM_LAYER:
                streams = streams + model.engram.double()
        mixes = reference.coefficients(streams, weights.fn, weights.scale, weights.base, problem)
        used = carried if delayed else mixes.pre
        output = weights.sublayer_of(normed(reference.collapse(streams, used), weights, problem))
        carried = mixes.pre
    assert mixes is not None
    streams = reference.post(streams, output, mixes.post, mixes.comb)
    if delayed:
        return reference.collapse(streams, carried), aux
    gates = reference.gates(streams, model.head_fn, model.head_scale, model.head_base, problem)
    return reference.collapse(streams, gates), aux


# --- Ours: ops alone --------------------------------------------------------------------------------------


def scalars_of(name: str, problem: Problem) -> list[Any]:
    return [getattr(problem, s) for s in (*SCALARS, "sinkhorn_iters") if s in OF_FORM[name].free]


def v4_chain(model: Model, tables: dict[str, str], bf16_from: int = 2 * LAYERS) -> tuple[Tensor, Tensor]:
    """Return head and aux through pre_broadcast, post_pre, post and hc_head, in bf16 from a seam on."""
    problem, aux = problem_of("V4"), torch.empty(0)
    first, *rest = model.seams
    streams, post, comb, layer_input = ops.pre_broadcast(
        model.embedding, first.fn.sum(1, keepdim=True), first.scale, first.base, first.norm_weight,
        *scalars_of("pre_broadcast", problem), tables.get("pre_broadcast", ""), False,
    )  # fmt: skip
    output = first.sublayer_of(layer_input.float()).bfloat16()
    for index, weights in enumerate(rest, start=1):
        name = "post_pre" if index < bf16_from else "post_pre_bf16"
        op, wanted = getattr(ops, name), index == 2 * AUX_LAYER
        fn = weights.fn if index < bf16_from else weights.fn.bfloat16()
        streams, post, comb, layer_input, *mean = op(
            output, streams, post, comb, fn, weights.scale, weights.base, weights.norm_weight,
            *scalars_of(name, problem), tables.get(f"{name}/aux" if wanted else name, ""), wanted,
        )  # fmt: skip
        aux = mean[0] if wanted else aux
        output = weights.sublayer_of(layer_input.float()).bfloat16()
    (streams,) = ops.post(output, streams, post, comb, tables.get("post", ""))
    head = (model.head_fn, model.head_scale, model.head_base)
    (collapsed,) = ops.hc_head(streams, *head, *scalars_of("hc_head", problem), tables.get("hc_head", ""))
    return collapsed, aux


def v41_chain(model: Model, tables: dict[str, str], stale: bool = False) -> tuple[Tensor, Tensor]:
    """Return head and aux through pre_broadcast, the delayed seam with one Engram, post and collapse.

    `stale` hands the entry's pre-mix on for ever: the fault that the bound must see.
    """
    problem, aux = problem_of("V4.1"), torch.empty(0)
    first, *rest = model.seams
    streams, post, comb, layer_input, pre = ops.pre_broadcast(
        model.embedding, first.fn.sum(1, keepdim=True), first.scale, first.base, first.norm_weight,
        *scalars_of("pre_broadcast", problem), tables.get("pre_broadcast", ""), True,
    )  # fmt: skip
    output = first.sublayer_of(layer_input.float()).bfloat16()
    for index, weights in enumerate(rest, start=1):
        wanted = index == 2 * AUX_LAYER
        seam = DelayedSeam(problem, weights.fn, weights.scale, weights.base, weights.norm_weight, tables)
        inject = (lambda streams: streams + model.engram) if index == 2 * ENGRAM_LAYER else None
        found = seam(output, streams, post, comb, pre, inject, wanted)
        streams, post, comb = found.residual, found.post_mix, found.comb_mix
        pre = pre if stale else found.pre_mix
        aux = found.aux if found.aux is not None else aux
        output = weights.sublayer_of(found.layer_input.float()).bfloat16()
    (streams,) = ops.post(output, streams, post, comb, tables.get("post", ""))
    (collapsed,) = ops.collapse(streams, pre, tables.get("collapse", ""))
    return collapsed, aux


def apart(ours: Tensor, exact: Tensor) -> float:
    """Return the root mean square of the difference, relative to that of the exact values."""
    return float((ours.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def legal(arm: Arm, problem: Problem, config: Config | None = None) -> Choice:
    """Return a config of an arm (without one, the preferred) where it is legal, else its first legal one."""
    space, wanted = arm.space(problem), config or arm.preferred
    return Choice.of(arm.name, next(space.legal()).config if space.refusals(wanted) else wanted)


def served_tables(
    version: str,
    target: str,
    hidden: int,
    make_table: Callable[..., DispatchTable],
    choose: Callable[[tuple[Arm, ...], Problem], tuple[Choice, Choice]],
) -> dict[str, str]:
    """Serve a table for every seam of a chain; return their digests by key.

    `choose` picks from a seam's arms what is served to 4 tokens, and above.
    """  # fmt: skip
    digests: dict[str, str] = {}
    for key in SEAMS_OF[version]:
        name, _, aux = key.partition("/")
        seam = SEAMS[name]
        problem = seam.canonical(problem_of(version, hidden, bool(aux)))
        few, many = choose(seam.arms(target), problem)
        table = make_table(
            seam=name, problem=problem.to_dict(), target=target, bands=(Band(1, 4, few), Band(5, 16, many)),
            default=many,
        )  # fmt: skip
        digests[key] = serving.serve(table)
    return digests


def chain_of(version: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the chain of a version."""
    return v41_chain if version == "V4.1" else v4_chain
