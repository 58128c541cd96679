"""The torch ops that dispatch: `mhctune::post_pre_delayed` and its `_out` form.

`table` is the digest of a served table, or empty for the built-in choice. The allocating form is for eager
use and tests; the `_out` form writes its arguments, allocates nothing and is what graphs capture.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mhctune.kernels import serving
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Problem

_SEAM = "post_pre_delayed"
_TARGETS = {"cpu": "c", "cuda": "cuda"}


@lru_cache(maxsize=256)
def _problem(
    hidden_size: int, carried: bool, norm: bool, sinkhorn_iters: int,
    rms_eps: float, hc_pre_eps: float, sinkhorn_eps: float, post_mult: float, norm_eps: float,
) -> Problem:  # fmt: skip
    return Problem(
        hidden_size, carried, norm, sinkhorn_iters, rms_eps, hc_pre_eps, sinkhorn_eps, post_mult, norm_eps
    )


def expect(
    op: str, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor
) -> None:
    """Refuse a tensor that the kernels would misread.

    Raises:
        ValueError: the shape, dtype, device or layout is not the expected one; the message says which.
    """
    if tensor.dtype != dtype:
        raise ValueError(f"{op}: {name} is {tensor.dtype}, expected {dtype}; convert it before the call")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {shape}")
    if tensor.device != like.device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, x on {like.device}; move it there")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op}: {name} has strides {tensor.stride()}, expected contiguous; call .contiguous()"
        )


def _check_inputs(op: str, tensors: dict[str, Tensor]) -> None:
    x = tensors["x"]
    if x.dim() != 2:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, expected [tokens, hidden]")
    if x.device.type not in _TARGETS:
        raise ValueError(f"{op}: x is on {x.device}; this op runs on cpu and cuda")
    tokens, hidden = x.shape
    shapes = {
        "x": ((tokens, hidden), torch.bfloat16),
        "residual": ((tokens, 4, hidden), torch.bfloat16),
        "post_mix": ((tokens, 4), torch.float32),
        "comb_mix": ((tokens, 4, 4), torch.float32),
        "fn": ((24, 4, hidden), torch.float32),
        "scale": ((3,), torch.float32),
        "base": ((24,), torch.float32),
        "pre_mix": ((tokens, 4), torch.float32),
        "norm_weight": ((hidden,), torch.bfloat16),
    }
    for name, tensor in tensors.items():
        expect(op, name, tensor, *shapes[name], like=x)


def _check_outputs(
    op: str, problem: Problem, inputs: dict[str, Tensor], outputs: dict[str, Tensor], scratch: Tensor
) -> None:
    x = inputs["x"]
    for spec in find_seam(_SEAM).outputs(problem, x.shape[0]):
        expect(op, spec.name, outputs[spec.name], spec.shape, getattr(torch, spec.dtype), like=x)
    expect(op, "scratch", scratch, (scratch.numel(),), torch.float32, like=x)
    # Other programs still read the old streams while the first ones write the new. All are contiguous, so
    # two share memory exactly if their address ranges meet; inputs may share with each other.
    named = [(t, name, name not in inputs) for name, t in (*inputs.items(), *outputs.items())]
    ranges = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name, written)
        for t, name, written in (*named, (scratch, "scratch", True))
        if t.numel()
    )
    reads = writes = (0, "")
    for first, end, name, written in ranges:
        for until, other in (reads, writes) if written else (writes,):
            if first < until:
                raise ValueError(f"{op}: {name} shares memory with {other}; give each output its own")
        if written:
            writes = max(writes, (end, name))
        else:
            reads = max(reads, (end, name))


_ARGUMENTS = (
    "residual", "post_mix", "comb_mix", "fn", "scale", "base", "pre_mix", "norm_weight", "residual_out",
    "next_post_mix", "next_comb_mix", "layer_input", "next_pre_mix", "scratch",
)  # fmt: skip


def _check_devices(op: str, x: Tensor, others: tuple[object, ...]) -> None:
    """Refuse tensors of several devices: one on meta makes torch run the fake, which computes nothing."""
    for index, other in enumerate(others):
        if isinstance(other, Tensor) and other.device != x.device:
            raise ValueError(
                f"{op}: {_ARGUMENTS[index]} is on {other.device}, x on {x.device}; move it there"
            )


def _run(
    op: str,
    table: str,
    problem: Problem,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    scratch: Tensor,
) -> None:
    x = inputs["x"]
    tokens = x.shape[0]
    if tokens == 0:
        return
    found = serving.dispatch(table, _SEAM, problem, _TARGETS[x.device.type], tokens)
    config = dict(found.answer.choice.config)
    need = found.arm.scratch_numel(problem, config, tokens)
    if scratch.numel() < need:
        raise ValueError(
            f"{op}: scratch has {scratch.numel()} elements, {tokens} tokens need {need}; size it once with "
            "serving.scratch_numel(table, seam, problem, target, max_tokens)"
        )
    # Arms take every input; one that a problem leaves out is never read, its slot gets a view of its shape.
    given = {"pre_mix": outputs["next_pre_mix"], "norm_weight": outputs["layer_input"][0], **inputs}
    found.launch(given, {**outputs, **found.arm.scratch_views(problem, config, tokens, scratch)})


def _inputs(
    x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, fn: Tensor, scale: Tensor, base: Tensor,
    pre_mix: Tensor | None, norm_weight: Tensor | None,
) -> dict[str, Tensor]:  # fmt: skip
    tensors = {
        "x": x, "residual": residual, "post_mix": post_mix, "comb_mix": comb_mix, "fn": fn, "scale": scale,
        "base": base, "pre_mix": pre_mix, "norm_weight": norm_weight,
    }  # fmt: skip
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@torch.library.custom_op(
    "mhctune::post_pre_delayed_out",
    mutates_args=("residual_out", "next_post_mix", "next_comb_mix", "layer_input", "next_pre_mix", "scratch"),
)
def post_pre_delayed_out(
    x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, fn: Tensor, scale: Tensor, base: Tensor,
    pre_mix: Tensor | None, norm_weight: Tensor | None,
    residual_out: Tensor, next_post_mix: Tensor, next_comb_mix: Tensor, layer_input: Tensor,
    next_pre_mix: Tensor, scratch: Tensor,
    rms_eps: float, hc_pre_eps: float, sinkhorn_eps: float, post_mult: float, norm_eps: float,
    sinkhorn_iters: int, table: str = "",
) -> None:  # fmt: skip
    """Run the seam into the caller's tensors.

    Args:
        x: Sublayer output [T, H] bf16.
        residual: Streams [T, 4, H] bf16.
        post_mix: [T, 4] fp32, of the pre block before this sublayer.
        comb_mix: [T, 4, 4] fp32, rows are old streams.
        fn: Projection weights [24, 4, H] fp32.
        scale: [3] fp32, for pre, post and comb.
        base: [24] fp32.
        pre_mix: Carried pre-mix [T, 4] fp32, or None at the model's entry (stream 0 is taken).
        norm_weight: RMSNorm weight [H] bf16, or None for no norm.
        residual_out: New streams [T, 4, H] bf16.
        next_post_mix: [T, 4] fp32.
        next_comb_mix: [T, 4, 4] fp32.
        layer_input: [T, H] bf16.
        next_pre_mix: [T, 4] fp32.
        scratch: At least `serving.scratch_numel(...)` elements fp32.
        rms_eps: Inside the projection's rsqrt.
        hc_pre_eps: Added to the pre-mix.
        sinkhorn_eps: In Sinkhorn's quotient and denominators.
        post_mult: Factor of the post-mix.
        norm_eps: Inside the RMSNorm's rsqrt.
        sinkhorn_iters: Column steps.
        table: Digest of a served table; empty for the built-in choice.

    Raises:
        ValueError: a tensor of the wrong dtype, shape, device or layout, or too little scratch.
        LookupError: the table is not served in this process.
    """
    op = "mhctune::post_pre_delayed_out"
    inputs = _inputs(x, residual, post_mix, comb_mix, fn, scale, base, pre_mix, norm_weight)
    _check_inputs(op, inputs)
    problem = _problem(
        x.shape[1], pre_mix is not None, norm_weight is not None, sinkhorn_iters,
        rms_eps, hc_pre_eps, sinkhorn_eps, post_mult, norm_eps,
    )  # fmt: skip
    outputs = {
        "residual_out": residual_out, "next_post_mix": next_post_mix, "next_comb_mix": next_comb_mix,
        "layer_input": layer_input, "next_pre_mix": next_pre_mix,
    }  # fmt: skip
    _check_outputs(op, problem, inputs, outputs, scratch)
    _run(op, table, problem, inputs, outputs, scratch)


@post_pre_delayed_out.register_fake
def _(x: Tensor, *args: object, **kwargs: object) -> None:
    _check_devices("mhctune::post_pre_delayed_out", x, args)


@torch.library.custom_op("mhctune::post_pre_delayed", mutates_args=())
def post_pre_delayed(
    x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, fn: Tensor, scale: Tensor, base: Tensor,
    pre_mix: Tensor | None, norm_weight: Tensor | None,
    rms_eps: float, hc_pre_eps: float, sinkhorn_eps: float, post_mult: float, norm_eps: float,
    sinkhorn_iters: int, table: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the seam into new tensors; arguments and errors as `post_pre_delayed_out`.

    Returns:
        New streams [T, 4, H] bf16, next post-mix [T, 4], next comb-mix [T, 4, 4], layer input [T, H] bf16
        and next pre-mix [T, 4].
    """
    op = "mhctune::post_pre_delayed"
    inputs = _inputs(x, residual, post_mix, comb_mix, fn, scale, base, pre_mix, norm_weight)
    _check_inputs(op, inputs)
    problem = _problem(
        x.shape[1], pre_mix is not None, norm_weight is not None, sinkhorn_iters,
        rms_eps, hc_pre_eps, sinkhorn_eps, post_mult, norm_eps,
    )  # fmt: skip
    outputs = _empty(x)
    names = [spec.name for spec in find_seam(_SEAM).outputs(problem, x.shape[0])]
    target = _TARGETS[x.device.type]
    numel = serving.scratch_numel(table, _SEAM, problem, target, x.shape[0])
    scratch = x.new_empty(numel, dtype=torch.float32)
    _run(op, table, problem, inputs, dict(zip(names, outputs, strict=True)), scratch)
    return outputs


def _empty(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, hidden = x.shape
    return (
        x.new_empty((tokens, 4, hidden)),
        x.new_empty((tokens, 4), dtype=torch.float32),
        x.new_empty((tokens, 4, 4), dtype=torch.float32),
        x.new_empty((tokens, hidden)),
        x.new_empty((tokens, 4), dtype=torch.float32),
    )


@post_pre_delayed.register_fake
def _(x: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check_devices("mhctune::post_pre_delayed", x, args)
    return _empty(x)
