"""What a run is held against, as it is asked for and kept; `yardsticks.py` measures it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mhctune.kernels.seam import Problem

COPIED = 20
"""Bytes a token and element of H: x and four streams read, four streams and a layer input written, bf16."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the yardsticks of a sweep are measured for.

    Attributes:
        seam: Its name.
        problem: Its problem.
        token_counts: Its token counts.
        sm_count: SMs of the GPU: what ships splits by them.
        seed: Of the inputs.
    """

    seam: str
    problem: Problem
    token_counts: tuple[int, ...]
    sm_count: int
    seed: int


class NoReproduction(RuntimeError):
    """What was built as described computes something else than the seam."""


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What a run is held against; `empty_us` is None without a GPU.

    Attributes:
        empty_us: Microseconds of a kernel that does nothing, of the shape of the seam's first one, in a graph
            where each waits for the whole one ahead of it (no programmatic dependent launch).
        copy_us: By token count those of a copy kernel that moves `COPIED` x H bytes a token.
        ceiling_bytes: What a copy of more than 1 GiB moved, half read and half written.
        ceiling_us: Its microseconds.
        described_us: By token count those of what ships as described, its epilogue included: the fastest of
            what the description leaves open. Empty without a GPU, and where it was kept before there was one.
        described_who: By token count the kernels that were the fastest.
    """

    empty_us: float | None
    copy_us: Mapping[int, float]
    ceiling_bytes: int
    ceiling_us: float
    described_us: Mapping[int, float] = field(default_factory=dict)
    described_who: Mapping[int, str] = field(default_factory=dict)

    @property
    def ceiling_tb_s(self) -> float:
        """The bandwidth ceiling in 1e12 bytes a second."""
        return self.ceiling_bytes / self.ceiling_us / 1e6

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return {
            "empty_us": self.empty_us, "copy_us": _texts(self.copy_us), "ceiling_bytes": self.ceiling_bytes,
            "ceiling_us": self.ceiling_us, "described_us": _texts(self.described_us),
            "described_who": _texts(self.described_who),
        }  # fmt: skip

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Yardstick:
        """Read what `to_data` returned."""
        return cls(
            data["empty_us"], _counts(data["copy_us"]), data["ceiling_bytes"], data["ceiling_us"],
            _counts(data.get("described_us", {})), _counts(data.get("described_who", {})),
        )  # fmt: skip


def _texts(by_count: Mapping[int, Any]) -> dict[str, Any]:
    return {str(count): value for count, value in by_count.items()}


def _counts(by_text: Mapping[str, Any]) -> dict[int, Any]:
    return {int(count): value for count, value in by_text.items()}
