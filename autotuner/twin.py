"""The twin: a candidate a second time, so that a bench can time it against itself."""

from __future__ import annotations

from dataclasses import dataclass

from mhctune.kernels.space import Candidate


@dataclass(frozen=True, slots=True)
class Twin(Candidate):
    """The same arm and config as a candidate, and equal to no candidate.

    A bench holds it beside its original as it holds any other: with buffers, and a graph, of its own.
    """

    @classmethod
    def to(cls, candidate: Candidate) -> Twin:
        """Return the twin of a candidate."""
        return cls(candidate.arm, candidate.items)

    def __str__(self) -> str:
        """Return a label for people."""
        return f"the twin of {Candidate(self.arm, self.items)}"
