"""The measuring protocol: how a sample is taken. Its version is part of every fingerprint."""

from __future__ import annotations

from dataclasses import asdict, dataclass

PROTOCOL_VERSION = 1
"""Raise it when the same machine would give other numbers for the same candidate."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """How the samples of a sweep are taken.

    Attributes:
        samples: Rounds; each candidate gives one sample a round.
        replay_us: A sample repeats launches until it is at least this long; the clock's step and the
            interpreter's noise are a few tenths of a microsecond.
        l2: `warm` (the same buffers every launch) or `cold`.
        seed: Of the inputs; cell by cell the token count is added.
    """

    samples: int
    replay_us: float = 2000.0
    l2: str = "warm"
    seed: int = 20261129
    version: int = PROTOCOL_VERSION

    def to_dict(self) -> dict[str, int | float | str]:
        """Return the fields by name."""
        return asdict(self)

    def launches(self, fastest_us: float) -> int:
        """Return the launches of a sample, the same for all candidates of a race."""
        return max(1, round(self.replay_us / max(fastest_us, 1e-3) + 0.5))
