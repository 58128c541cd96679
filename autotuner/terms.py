"""Terms: what bands are asked for beside the bound."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mhctune.kernels.space import Candidate


@dataclass(frozen=True)
class Terms:
    """What bands are asked for beside the bound.

    Attributes:
        max_variants: At most so many compiled kernels; of such choices the one whose worst regret is least.
        batch_invariant: One numerics class over the whole range: a band edge would be a numerics edge.
        traffic: Calls by token count; the mean regret is weighted by them.
    """

    max_variants: int | None = None
    batch_invariant: bool = False
    traffic: Mapping[int, int] | None = None

    def weights(self, counts: Sequence[int]) -> list[float]:
        """Return the share of the calls that each measured count speaks for: those above the one before it.

        Without traffic each has the same. Calls above the last count are left out, see `beyond`; if there
        are no others, each has the same, too.
        """
        if self.traffic is None:
            return [1 / len(counts)] * len(counts)
        calls = [0] * len(counts)
        for tokens, number in self.traffic.items():
            if (place := bisect_left(counts, tokens)) < len(counts):
                calls[place] += number
        inside = sum(calls)
        return [number / inside if inside else 1 / len(counts) for number in calls]

    def beyond(self, last: int) -> float:
        """Return the share of the calls above a token count."""
        if self.traffic is None:
            return 0.0
        return sum(n for tokens, n in self.traffic.items() if tokens > last) / sum(self.traffic.values())

    def to_evidence(self) -> dict[str, Any]:
        """Return what was asked for, as evidence of a table; nothing is left out that a replay needs."""
        found: dict[str, Any] = {}
        if self.max_variants is not None:
            found["max_variants"] = self.max_variants
        if self.batch_invariant:
            found["batch_invariant"] = True
        if self.traffic is not None:
            found["traffic"] = [[tokens, calls] for tokens, calls in sorted(self.traffic.items())]
        return found

    @classmethod
    def of_evidence(cls, evidence: Mapping[str, Any]) -> Terms:
        """Read what `to_evidence` returned."""
        traffic = evidence.get("traffic")
        return cls(
            evidence.get("max_variants"),
            evidence.get("batch_invariant", False),
            None if traffic is None else {int(tokens): int(calls) for tokens, calls in traffic},
        )


def numerics_of(candidate: Candidate) -> str:
    """Return a candidate's numerics class: where it rounds, and into how many sums it splits.

    Every arm reads the streams as stored (`rounded`). A class does not promise equal bits: arms, and thread
    shapes of one arm, may still add in another order inside a split.
    """
    return f"rounded/{candidate.config.get('n_splits', 1)}"
