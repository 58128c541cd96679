"""Checking the arguments of an op: what a tensor must be, and one sentence for what it is instead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mhctune.kernels.buffers import torch_dtype
from mhctune.kernels.seam import Problem
from mhctune.kernels.tensors import TensorSpec

ALIGNMENT = 16
"""Bytes that the kernels move at a time; torch's allocators give more."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a tensor must be; `written` for outputs and scratch."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    written: bool = False
    strided: bool = False

    @classmethod
    def of(cls, spec: TensorSpec, problem: Problem, num_tokens: int, written: bool = False) -> Expected:
        """Return what a seam's tensor must be for a token count."""
        shape, dtype = spec.shape(problem, num_tokens), torch_dtype(spec.dtype)
        return cls(spec.name, shape, dtype, math.prod(shape) * dtype.itemsize, written, spec.strided)

    def span(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor with gaps between its rows; -1 if the kernels cannot read it."""
        # Whole rows that may lie apart: each contiguous, and over before the next begins.
        row, distance = self.nbytes // self.shape[0], tensor.stride(0) * tensor.itemsize
        readable = self.strided and tensor[0].is_contiguous() and distance >= row
        return distance * (self.shape[0] - 1) + row if readable else -1

    def misfit(self, tensor: Tensor, device: torch.device, first: str) -> str:
        """Return what is wrong with a tensor and what is expected; `first` names the tensor on `device`."""
        if tensor.dtype != self.dtype:
            return f"is {tensor.dtype}, expected {self.dtype}; convert it before the call"
        if tensor.shape != self.shape:
            return f"has shape {tuple(tensor.shape)}, expected {self.shape}"
        if tensor.device != device:
            return f"is on {tensor.device}, {first} on {device}; move it there"
        wanted = "whole rows that do not overlap" if self.strided else "contiguous"
        return f"has strides {tensor.stride()}, expected {wanted}; call .contiguous()"


def check(op: str, expected: Sequence[Expected], tensors: Mapping[str, Tensor], first: str) -> None:
    """Refuse tensors that the kernels would misread, and written ones that share memory with others.

    Raises:
        ValueError: the dtype, shape, device, layout, alignment or memory of a tensor; the message says which.
    """
    device = tensors[first].device
    ranges: list[tuple[int, int, str, bool]] = []
    for each in expected:
        tensor = tensors[each.name]
        if (
            tensor.dtype != each.dtype
            or tensor.shape != each.shape
            or tensor.device != device
            or (span := each.nbytes if tensor.is_contiguous() else each.span(tensor)) < 0
        ):
            raise ValueError(f"{op}: {each.name} {each.misfit(tensor, device, first)}")
        if each.nbytes:
            begin = tensor.data_ptr()
            if begin % ALIGNMENT:
                remedy = "slice at a multiple" if each.written else "slice at a multiple, or call .clone()"
                raise ValueError(
                    f"{op}: {each.name} begins {begin % ALIGNMENT} bytes past a multiple of {ALIGNMENT}; the "
                    f"kernels move {ALIGNMENT} bytes at a time: {remedy}"
                )
            ranges.append((begin, begin + span, each.name, each.written))
    _check_apart(op, ranges)


def _check_apart(op: str, ranges: list[tuple[int, int, str, bool]]) -> None:
    # Other programs still read the old streams while the first ones write the new. Two tensors share memory
    # if their address ranges meet; inputs may share with each other.
    ranges.sort()
    read_until = written_until = 0
    reader = writer = ""
    for begin, end, name, written in ranges:
        if begin < written_until or (written and begin < read_until):
            other = reader if written and begin < read_until else writer
            raise ValueError(f"{op}: {name} shares memory with {other}; give each output its own")
        if written:
            written_until, writer = end, name
        elif end > read_until:
            read_until, reader = end, name


def tokens_and_hidden(op: str, spec: TensorSpec, tensor: Tensor, devices: Sequence[str]) -> tuple[int, int]:
    """Return the extents of an op's first tensor, which the others are held to.

    Raises:
        ValueError: its rank or its device.
    """
    if tensor.dim() != len(spec.axes):
        axes = ", ".join({"T": "tokens", "H": "hidden"}.get(str(axis), str(axis)) for axis in spec.axes)
        raise ValueError(f"{op}: {spec.name} has shape {tuple(tensor.shape)}, expected [{axes}]")
    if tensor.device.type not in devices:
        raise ValueError(f"{op}: {spec.name} is on {tensor.device}; this op runs on {' and '.join(devices)}")
    return tensor.shape[0], tensor.shape[-1]


def check_devices(op: str, names: Sequence[str], values: Sequence[object]) -> None:
    """Refuse tensors of several devices: one on meta makes torch run the fake, which computes nothing.

    Raises:
        ValueError: which tensor is on which device.
    """
    first = values[0]
    assert isinstance(first, Tensor)
    for name, value in zip(names, values, strict=False):
        if isinstance(value, Tensor) and value.device != first.device:
            raise ValueError(
                f"{op}: {name} is on {value.device}, {names[0]} on {first.device}; move it there"
            )
