"""The exploration: what of a sweep is searched instead of enumerated, and what was proposed so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from mhctune.kernels.space import Candidate


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How large a space is before it is searched, and how much of it is then raced.

    What the numbers lose on a recorded space is what `benchmarks/search.py` shows.

    Attributes:
        enumerated: Legal points of an arm up to which all of them are raced at every token count.
        anchors: Token counts of the sweep at which a searched arm is explored, spread evenly over their order
            and with the least and the largest among them.
        generations: How often points are proposed for an anchor; each generation is raced before the next.
        proposals: Points of a generation.
        shortlist: Explored points of an arm, at most, that are raced at every token count afterwards.
    """

    enumerated: int = 400
    anchors: int = 3
    generations: int = 6
    proposals: int = 16
    shortlist: int = 32

    def anchors_of(self, token_counts: Sequence[int]) -> tuple[int, ...]:
        """Return the anchors of a sweep: all token counts where there are no more than that."""
        last = len(token_counts) - 1
        steps = max(1, self.anchors - 1)
        return tuple(dict.fromkeys(token_counts[round(at * last / steps)] for at in range(steps + 1)))

    def to_dict(self) -> dict[str, int]:
        """Return the fields by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one generation proposed for one anchor, the points of all searched arms."""

    generation: int
    num_tokens: int
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Exploration:
    """The searched part of a sweep.

    Attributes:
        anchors: Token counts at which points are proposed.
        legal: The searched arms, each with the number of its legal points.
        generations: How many there will be.
        proposals: Those so far, in the order they were made.
        shortlist: Who is raced at every token count; None until the last generation was raced.
    """

    anchors: tuple[int, ...]
    legal: Mapping[str, int]
    generations: int
    proposals: tuple[Proposal, ...] = ()
    shortlist: tuple[Candidate, ...] | None = None

    @property
    def finished(self) -> bool:
        """Whether all was proposed: a sweep that was cut before has no shortlist, and publishes nothing."""
        return self.shortlist is not None

    @property
    def begun(self) -> int:
        """How many generations were proposed."""
        return len({proposal.generation for proposal in self.proposals})

    def expected(self, num_tokens: int) -> tuple[Candidate, ...]:
        """Return who is raced at a token count, as far as that is known, in the order of proposal."""
        there = (c for p in self.proposals if p.num_tokens == num_tokens for c in p.candidates)
        return tuple(dict.fromkeys((*there, *(self.shortlist or ()))))

    def explored(self, arm: str) -> int:
        """Return how many points of an arm were proposed anywhere."""
        return len({c for p in self.proposals for c in p.candidates if c.arm == arm})

    def summary(self) -> dict[str, Any]:
        """Return what was searched as JSON-able data: evidence of a table."""
        listed = self.shortlist or ()
        return {
            "anchors": list(self.anchors),
            "arms": {
                arm: {"legal": n, "explored": self.explored(arm), "listed": sum(c.arm == arm for c in listed)}
                for arm, n in self.legal.items()
            },
        }

    def with_generation(self, proposed: Mapping[int, Sequence[Candidate]]) -> Self:
        """Return the exploration with one more generation, given by anchor."""
        made = [Proposal(self.begun, count, tuple(chosen)) for count, chosen in proposed.items()]
        return replace(self, proposals=(*self.proposals, *made))

    def to_data(self, candidates: Sequence[Candidate]) -> dict[str, Any]:
        """Return it as JSON-able data; candidates become places in `candidates`, which must hold them all."""
        place = {candidate: at for at, candidate in enumerate(candidates)}
        return {
            "anchors": list(self.anchors),
            "legal": [[arm, number] for arm, number in self.legal.items()],
            "generations": self.generations,
            "proposals": [
                [p.generation, p.num_tokens, [place[c] for c in p.candidates]] for p in self.proposals
            ],
            "shortlist": None if self.shortlist is None else [place[c] for c in self.shortlist],
        }

    @classmethod
    def of(cls, data: Mapping[str, Any], candidates: Sequence[Candidate]) -> Exploration:
        """Read what `to_data` returned for the same candidates."""
        listed = data["shortlist"]
        return cls(
            tuple(data["anchors"]),
            dict(data["legal"]),
            data["generations"],
            tuple(
                Proposal(g, n, tuple(candidates[at] for at in places)) for g, n, places in data["proposals"]
            ),
            None if listed is None else tuple(candidates[at] for at in listed),
        )


def search_notes(summary: Mapping[str, Any]) -> list[str]:
    """Say, for each searched arm, how much of it was raced (see `Exploration.summary`)."""
    anchors = _listed(summary["anchors"])
    return [
        f"{arm} was searched, not enumerated: {found['explored']} of {found['legal']:,} legal points raced "
        f"at {anchors} tokens, {found['listed']} of those at every token count"
        for arm, found in summary["arms"].items()
    ]


def forecast_notes(anchors: Sequence[int], arms: Sequence[str]) -> list[str]:
    """Say which arms a sweep will search, and what a forecast of that means; nothing without any."""
    if not arms:
        return []
    return [
        f"searched at {_listed(anchors)} tokens: {', '.join(arms)}; every other arm is enumerated",
        "the trials are the most that a search may take, the kernels those of as many points drawn at random",
    ]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
