"""Caller-owned buffers: what an arm writes, allocated once and poisoned before each check."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

# A NaN with a payload nothing else produces, compared through an integer view: what still holds it was
# not written; any other NaN was computed.
# As an integer it is negative and not -1, which no id and no count is.
POISON = {"bfloat16": 0xFFA5, "float32": 0xFFA5A5A5, "int32": 0xFFA5A5A5, "int64": 0xFFA5A5A5A5A5A5A5}
_INTEGER = {
    "bfloat16": (torch.int16, 1 << 16), "float32": (torch.int32, 1 << 32),
    "int32": (torch.int32, 1 << 32), "int64": (torch.int64, 1 << 64),
}  # fmt: skip
_DTYPES = {
    "bfloat16": torch.bfloat16, "float32": torch.float32, "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip


class Role(StrEnum):
    """Who reads a buffer after the launch."""

    OUTPUT = "output"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A tensor that a launch writes, sized for the largest token count it will see.

    Attributes:
        name: The kernels' name for it.
        shape: Extents, the token axis at its largest.
        dtype: `bfloat16`, `float32`, `int32` or `int64`.
        token_axis: Index of the token axis in `shape`.
        role: An output of the seam, or scratch between its kernels.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    token_axis: int = 0
    role: Role = Role.OUTPUT

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the storage."""
        return self.numel * torch_dtype(self.dtype).itemsize

    def view(self, storage: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return a contiguous view of the flat `storage` for `num_tokens`; allocates nothing."""
        shape = list(self.shape)
        shape[self.token_axis] = num_tokens
        return storage[: math.prod(shape)].view(shape)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a spec's dtype name."""
    return _DTYPES[name]


def total_bytes(specs: Sequence[BufferSpec], role: Role | None = None) -> int:
    """Sum the bytes of the specs, of one role if given."""
    return sum(spec.bytes for spec in specs if role in (None, spec.role))


class OutputBuffers:
    """One output-buffer set: the same storage when checked, primed, captured, timed and replayed."""

    def __init__(
        self, specs: Sequence[BufferSpec], device: str | torch.device, slots: int = 1, offset_bytes: int = 0
    ) -> None:
        """Allocate `slots` copies of every spec, each `offset_bytes` behind where its allocation begins.

        The offset must be a multiple of 256, on which kernels may rely, and is not counted in `bytes`.
        """
        if offset_bytes < 0 or offset_bytes % 256:
            raise ValueError(f"offset_bytes is {offset_bytes}; it must be a multiple of 256, not below 0")
        self.specs = tuple(specs)

        def allocated(spec: BufferSpec) -> torch.Tensor:
            dtype = torch_dtype(spec.dtype)
            before = offset_bytes // dtype.itemsize
            return torch.empty(before + spec.numel, dtype=dtype, device=device)[before:]

        self._slots = [{spec.name: allocated(spec) for spec in self.specs} for _ in range(slots)]

    @property
    def slots(self) -> int:
        """How many copies there are."""
        return len(self._slots)

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * total_bytes(self.specs)

    def bind(self, num_tokens: int, slot: int = 0) -> dict[str, torch.Tensor]:
        """Return views of one slot for `num_tokens`; allocates nothing."""
        return {spec.name: spec.view(self._slots[slot][spec.name], num_tokens) for spec in self.specs}

    def pointers(self) -> tuple[int, ...]:
        """Return the address of every storage, to show that it stays where it is."""
        return tuple(tensor.data_ptr() for slot in self._slots for tensor in slot.values())

    def storages(self) -> tuple[torch.Tensor, ...]:
        """Return every storage as integers, so that NaN compares equal to itself."""
        return tuple(
            slot[spec.name].view(_INTEGER[spec.dtype][0]) for slot in self._slots for spec in self.specs
        )

    def names(self) -> tuple[str, ...]:
        """Return the names of `storages`, slot by slot."""
        return tuple(spec.name for _ in self._slots for spec in self.specs)

    def poison(self) -> None:
        """Fill everything with the poison NaN."""
        for slot in self._slots:
            for spec in self.specs:
                poison(slot[spec.name])


def poison(tensor: torch.Tensor) -> None:
    """Fill a contiguous tensor with the poison NaN of its dtype."""
    name = str(tensor.dtype).removeprefix("torch.")
    integer, modulus = _INTEGER[name]
    tensor.view(integer).fill_(POISON[name] - modulus)


def unwritten(tensor: torch.Tensor) -> int:
    """Count the elements that still hold the poison NaN."""
    name = str(tensor.dtype).removeprefix("torch.")
    integer, modulus = _INTEGER[name]
    return int((tensor.view(integer) == POISON[name] - modulus).sum())


def stray_nans(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Count, by name, NaN elements that are not poison: they were computed."""
    counts = {name: int(t.isnan().sum()) - unwritten(t) for name, t in tensors.items()}
    return {name: count for name, count in counts.items() if count}
