"""Timers: what a replay costs, in microseconds per launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from mhctune.autotuner.records import Cell
from mhctune.kernels.space import Candidate


@dataclass(frozen=True, slots=True)
class Slot:
    """Which sample is being taken: it addresses recorded samples, and nothing else depends on it."""

    cell: Cell
    candidate: Candidate
    batch: int
    round: int


class Timer(Protocol):
    """Times one replay."""

    def time(self, slot: Slot, run: Callable[[], None], launches: int) -> float:
        """Run `launches` launches and return microseconds per launch."""


class HostTimer:
    """A replay on the CPU: n launches in a loop, by the monotonic clock. Capture does not apply."""

    def time(self, slot: Slot, run: Callable[[], None], launches: int) -> float:
        """Run `launches` launches and return microseconds per launch."""
        begin = time.perf_counter_ns()
        for _ in range(launches):
            run()
        return (time.perf_counter_ns() - begin) / 1e3 / launches


class ReplayTimer:
    """Answers with recorded samples, so that whatever follows from them can be repeated exactly."""

    def __init__(self, recorded: Mapping[tuple[int, Candidate, int], float]) -> None:
        """Take samples in microseconds by (token count, candidate, round)."""
        self._recorded = recorded

    def time(self, slot: Slot, run: Callable[[], None], launches: int) -> float:
        """Return the recorded sample; the candidate still runs once."""
        run()
        return self._recorded[slot.cell.num_tokens, slot.candidate, slot.round]
