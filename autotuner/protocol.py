"""The measuring protocol: how a sample is taken. Its version is part of every fingerprint."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

PROTOCOL_VERSION = 1
"""Raise it when the same machine would give other numbers for the same candidate."""

UNROLL = 20
"""Launches in a CUDA graph: a replay costs a few microseconds by itself, and events step by half a one."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """How the samples of a sweep are taken.

    Attributes:
        samples: Rounds; each candidate gives one sample a round.
        replay_us: A sample repeats replays until it is at least this long: the step of the clock and the
            noise around a replay are a few tenths of a microsecond. On a CPU 5 ms also average out the
            short interruptions that 2 ms do not (three sweeps each: 6-15 against 5-12 ties at 1 token).
        unroll: Launches of one replay: a loop of one on the CPU, a CUDA graph of 20 on a GPU, where a graph
            without nodes is replayed as often and subtracted.
        l2: `warm` (the same buffers every launch) or `cold`.
        pdl: Whether kernels may begin before the one ahead of them has ended (programmatic dependent
            launch); the epilogue's does on a GPU, as served.
        seed: Of the inputs; cell by cell the token count is added.
    """

    samples: int
    replay_us: float = 5000.0
    unroll: int = 1
    l2: str = "warm"
    pdl: bool = False
    seed: int = 20261129
    version: int = PROTOCOL_VERSION

    @classmethod
    def of(cls, target: str, samples: int) -> Protocol:
        """Return the protocol of a target."""
        if target == "cuda":
            return cls(samples, replay_us=200.0, unroll=UNROLL, pdl=True)
        return cls(samples)

    def to_dict(self) -> dict[str, int | float | str]:
        """Return the fields by name."""
        return asdict(self)

    def launches(self, fastest_us: float) -> int:
        """Return the launches of a sample, whole replays, the same for all candidates of a race."""
        replay_us = max(fastest_us, 1e-3) * self.unroll
        return self.unroll * max(1, math.ceil(self.replay_us / replay_us))
