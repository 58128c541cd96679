"""The torch ops that dispatch: `mhctune::post_pre_delayed` and its `_out` form.

`table` is the digest of a served table, or empty for the built-in choice. The allocating form is for eager
use and tests; the `_out` form writes its arguments, allocates nothing and is what graphs capture.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhctune.kernels import serving
from mhctune.kernels.buffers import torch_dtype
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Problem

_SEAM = "post_pre_delayed"
_TARGETS = {"cpu": "c", "cuda": "cuda"}
_ALIGNMENT = 16
"""Bytes that the kernels move at a time; torch's allocators give more."""

Tensors = dict[str, Tensor]


@lru_cache(maxsize=256)
def _problem(
    hidden_size: int, carried: bool, norm: bool, sinkhorn_iters: int,
    rms_eps: float, hc_pre_eps: float, sinkhorn_eps: float, post_mult: float, norm_eps: float,
) -> Problem:  # fmt: skip
    return Problem(
        hidden_size, carried, norm, sinkhorn_iters, rms_eps, hc_pre_eps, sinkhorn_eps, post_mult, norm_eps
    )


class _Expected(NamedTuple):
    """What a tensor must be; `written` for outputs and scratch."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    written: bool = False


@lru_cache(maxsize=1024)
def _expected(problem: Problem, tokens: int) -> tuple[tuple[_Expected, ...], tuple[_Expected, ...]]:
    """Return what the inputs and the outputs of a call must be."""
    hidden = problem.hidden_size
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "x": ((tokens, hidden), torch.bfloat16),
        "residual": ((tokens, 4, hidden), torch.bfloat16),
        "post_mix": ((tokens, 4), torch.float32),
        "comb_mix": ((tokens, 4, 4), torch.float32),
        "fn": ((24, 4, hidden), torch.float32),
        "scale": ((3,), torch.float32),
        "base": ((24,), torch.float32),
    }
    if problem.carried:
        shapes["pre_mix"] = ((tokens, 4), torch.float32)
    if problem.norm:
        shapes["norm_weight"] = ((hidden,), torch.bfloat16)
    inputs = tuple(
        _Expected(name, shape, dtype, math.prod(shape) * dtype.itemsize)
        for name, (shape, dtype) in shapes.items()
    )
    outputs = tuple(
        _Expected(spec.name, spec.shape, torch_dtype(spec.dtype), spec.bytes, True)
        for spec in find_seam(_SEAM).outputs(problem, tokens)
    )
    return inputs, outputs


def _tokens_and_hidden(op: str, x: Tensor) -> tuple[int, int]:
    """Return the extents of x, which the other tensors are held to."""
    if x.dim() != 2:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, expected [tokens, hidden]")
    if x.device.type not in _TARGETS:
        raise ValueError(f"{op}: x is on {x.device}; this op runs on cpu and cuda")
    tokens, hidden = x.shape
    return tokens, hidden


def _check(op: str, expected: tuple[_Expected, ...], inputs: Tensors, outputs: Tensors) -> None:
    """Refuse tensors that the kernels would misread, and written ones that share memory with others.

    Raises:
        ValueError: the dtype, shape, device, layout, alignment or memory of a tensor; the message says which.
    """
    device = inputs["x"].device
    ranges: list[tuple[int, int, str, bool]] = []
    for name, shape, dtype, nbytes, written in expected:
        tensor = (outputs if written else inputs)[name]
        if (
            tensor.dtype != dtype
            or tensor.shape != shape
            or tensor.device != device
            or not tensor.is_contiguous()
        ):
            raise ValueError(f"{op}: {name} {_misfit(tensor, shape, dtype, device)}")
        if nbytes:
            first = tensor.data_ptr()
            if first % _ALIGNMENT:
                remedy = "slice at a multiple" if written else "slice at a multiple, or call .clone()"
                raise ValueError(
                    f"{op}: {name} begins {first % _ALIGNMENT} bytes past a multiple of {_ALIGNMENT}; the "
                    f"kernels move {_ALIGNMENT} bytes at a time: {remedy}"
                )
            ranges.append((first, first + nbytes, name, written))
    # Other programs still read the old streams while the first ones write the new. All are contiguous, so
    # two share memory exactly if their address ranges meet; inputs may share with each other.
    ranges.sort()
    read_until = written_until = 0
    reader = writer = ""
    for first, end, name, written in ranges:
        if first < written_until or (written and first < read_until):
            other = reader if written and first < read_until else writer
            raise ValueError(f"{op}: {name} shares memory with {other}; give each output its own")
        if written:
            written_until, writer = end, name
        elif end > read_until:
            read_until, reader = end, name


def _misfit(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    if tensor.dtype != dtype:
        return f"is {tensor.dtype}, expected {dtype}; convert it before the call"
    if tensor.shape != shape:
        return f"has shape {tuple(tensor.shape)}, expected {shape}"
    if tensor.device != device:
        return f"is on {tensor.device}, x on {device}; move it there"
    return f"has strides {tensor.stride()}, expected contiguous; call .contiguous()"


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
    op: str, table: str, problem: Problem, tokens: int, inputs: Tensors, outputs: Tensors, scratch: Tensor
) -> None:
    target = _TARGETS[scratch.device.type]
    found = serving.dispatch(table, _SEAM, problem, target, tokens)
    if scratch.numel() < found.scratch.numel:
        raise ValueError(
            f"{op}: scratch has {scratch.numel()} elements, {tokens} tokens need {found.scratch.numel}; size "
            "it once with serving.scratch_numel(table, seam, problem, target, max_tokens)"
        )
    # Arms take every input; one that a problem leaves out is never read, its slot gets a view of its shape.
    if not problem.carried:
        inputs["pre_mix"] = outputs["next_pre_mix"]
    if not problem.norm:
        inputs["norm_weight"] = outputs["layer_input"][0]
    outputs.update(found.scratch.views(scratch))
    found.launch(inputs, outputs)


def _inputs(
    x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, fn: Tensor, scale: Tensor, base: Tensor,
    pre_mix: Tensor | None, norm_weight: Tensor | None,
) -> Tensors:  # fmt: skip
    tensors = {
        "x": x, "residual": residual, "post_mix": post_mix, "comb_mix": comb_mix, "fn": fn, "scale": scale,
        "base": base, "pre_mix": pre_mix, "norm_weight": norm_weight,
    }  # fmt: skip
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _post_pre_delayed_out(
    x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, fn: Tensor, scale: Tensor, base: Tensor,
    pre_mix: Tensor | None, norm_weight: Tensor | None,
    residual_out: Tensor, next_post_mix: Tensor, next_comb_mix: Tensor, layer_input: Tensor,
    next_pre_mix: Tensor, scratch: Tensor,
    rms_eps: float, hc_pre_eps: float, sinkhorn_eps: float, post_mult: float, norm_eps: float,
    sinkhorn_iters: int, table: str = "",
) -> None:  # fmt: skip
    """Run the seam into the caller's tensors, each contiguous and aligned to 16 bytes.

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
        ValueError: a tensor of the wrong dtype, shape, device, layout or alignment, an output that shares
            memory, or too little scratch.
        LookupError: the table is not served in this process.
    """
    op = "mhctune::post_pre_delayed_out"
    inputs = _inputs(x, residual, post_mix, comb_mix, fn, scale, base, pre_mix, norm_weight)
    tokens, hidden = _tokens_and_hidden(op, x)
    problem = _problem(
        hidden, pre_mix is not None, norm_weight is not None, sinkhorn_iters,
        rms_eps, hc_pre_eps, sinkhorn_eps, post_mult, norm_eps,
    )  # fmt: skip
    outputs = {
        "residual_out": residual_out, "next_post_mix": next_post_mix, "next_comb_mix": next_comb_mix,
        "layer_input": layer_input, "next_pre_mix": next_pre_mix,
    }  # fmt: skip
    size = scratch.numel()
    expected_inputs, expected_outputs = _expected(problem, tokens)
    flat = _Expected("scratch", (size,), torch.float32, 4 * size, True)
    _check(op, (*expected_inputs, *expected_outputs, flat), inputs, {**outputs, "scratch": scratch})
    if tokens:
        _run(op, table, problem, tokens, inputs, outputs, scratch)


def _fake_out(x: Tensor, *args: object, **kwargs: object) -> None:
    _check_devices("mhctune::post_pre_delayed_out", x, args)


# Not `torch.library.custom_op`: the wrapper that it puts around an op of six mutated arguments takes longer
# than all checks together. What it adds serves autograd, and this op has no gradient in either form.
_WRITTEN = (
    "residual_out", "next_post_mix", "next_comb_mix", "layer_input", "next_pre_mix", "scratch",
)  # fmt: skip
_schema = torch.library.infer_schema(_post_pre_delayed_out, mutates_args=_WRITTEN)
_library: Any = torch.library.Library("mhctune", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"post_pre_delayed_out{_schema}")
_library.impl("post_pre_delayed_out", _post_pre_delayed_out, "CompositeExplicitAutograd")
torch.library.register_fake("mhctune::post_pre_delayed_out", _fake_out, lib=_library)
post_pre_delayed_out = torch.ops.mhctune.post_pre_delayed_out.default


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
    tokens, hidden = _tokens_and_hidden(op, x)
    problem = _problem(
        hidden, pre_mix is not None, norm_weight is not None, sinkhorn_iters,
        rms_eps, hc_pre_eps, sinkhorn_eps, post_mult, norm_eps,
    )  # fmt: skip
    expected_inputs, expected_outputs = _expected(problem, tokens)
    _check(op, expected_inputs, inputs, {})
    outputs = _empty(x)
    if tokens:
        numel = serving.scratch_numel(table, _SEAM, problem, _TARGETS[x.device.type], tokens)
        scratch = x.new_empty(numel, dtype=torch.float32)
        named = dict(zip((each.name for each in expected_outputs), outputs, strict=True))
        _run(op, table, problem, tokens, inputs, named, scratch)
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
