"""The plan: what a sweep sets out to measure, and what identifies it."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mhctune.autotuner.exploration import Exploration, SearchSettings
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import Cell
from mhctune.autotuner.store import SweepRecord
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.seam import Problem, Seam, Variant
from mhctune.kernels.space import Candidate, SearchSpace


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep sets out to measure."""

    seam: Seam
    problem: Problem
    target: str
    token_counts: tuple[int, ...]
    spaces: Mapping[str, SearchSpace]
    protocol: Protocol
    fingerprint: Fingerprint
    max_regret: float
    """Bound of the bands; also who is surely slower by more leaves a race early."""
    search: SearchSettings = field(default_factory=SearchSettings)
    shipped: tuple[Candidate, ...] = ()
    """What runtimes ship: raced too, though the spaces are limited to other values."""

    @cached_property
    def legal(self) -> Mapping[str, tuple[Candidate, ...]]:
        """The legal points of every arm; 1.3 s for the 435,456 points of the largest, so it is done once."""
        return {arm: space.candidates() for arm, space in self.spaces.items()}

    @property
    def searched(self) -> tuple[str, ...]:
        """The arms that have too many legal points to race them all."""
        return tuple(arm for arm, legal in self.legal.items() if len(legal) > self.search.enumerated)

    @property
    def anchors(self) -> tuple[int, ...]:
        """The token counts at which searched arms are explored; none without any."""
        return self.search.anchors_of(self.token_counts) if self.searched else ()

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The legal points of every arm that is enumerated, in arm order, then what runtimes ship."""
        searched = self.searched
        enumerated = [c for arm, legal in self.legal.items() if arm not in searched for c in legal]
        return tuple(dict.fromkeys((*enumerated, *self.shipped)))

    @cached_property
    def drawn(self) -> tuple[Candidate, ...]:
        """What stands for a search in forecasts: as many points, drawn at random, as it proposes."""
        number = len(self.anchors) * self.search.generations * self.search.proposals
        rng = random.Random(self.protocol.seed)
        return tuple(
            c for arm in self.searched for c in rng.sample(self.legal[arm], min(number, len(self.legal[arm])))
        )

    def shuffled(self, candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
        """Return candidates as they are raced: by the seed, so that who is alike is not timed in a row."""
        order = list(candidates)
        random.Random(self.protocol.seed).shuffle(order)
        return tuple(order)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """One a token count."""
        return tuple(Cell(self.seam.name, self.problem, count) for count in self.token_counts)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The distinct kernels to compile; of a search those of the points that stand for it."""
        return tuple(dict.fromkeys(v for c in (*self.candidates, *self.drawn) for v in self.variants_of(c)))

    def variants_of(self, candidate: Candidate) -> tuple[Variant, ...]:
        """Return the kernels of one candidate."""
        return self.seam.arm(self.target, candidate.arm).variants(self.problem, candidate.config)

    def raced_at(self, num_tokens: int) -> int:
        """Return the number of trials at a token count; of a search the most that there can be."""
        explored = self.search.generations * self.search.proposals if num_tokens in self.anchors else 0
        return len(self.candidates) + len(self.searched) * (explored + self.search.shortlist)

    @property
    def grid(self) -> int:
        """Number of trials."""
        return sum(map(self.raced_at, self.token_counts))

    def record(self) -> SweepRecord:
        """Return what the store keeps; the digest covers fingerprint, space, cells and protocol."""
        space = {
            arm: {tunable.name: list(tunable.values) for tunable in space.tunables}
            for arm, space in self.spaces.items()
        }
        identity: dict[str, Any] = {
            "fingerprint": self.fingerprint.digest,
            "space": space,
            "candidates": [[c.arm, c.key] for legal in self.legal.values() for c in legal],
            "seam": self.seam.name,
            "problem": self.problem.digest,
            "token_counts": self.token_counts,
            "protocol": self.protocol.to_dict(),
        }
        if self.shipped:
            identity["shipped"] = [[c.arm, c.key] for c in self.shipped]
        if self.searched:
            identity["search"] = [self.searched, self.anchors, self.search.to_dict()]
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return SweepRecord(
            digest=hashlib.sha256(text.encode()).hexdigest(),
            seam=self.seam.name,
            problem=self.problem,
            target=self.target,
            token_counts=self.token_counts,
            grid=self.grid,
            space=space,
            variants={c: tuple(map(str, self.variants_of(c))) for c in self.candidates},
            protocol=self.protocol.to_dict(),
            fingerprint=self.fingerprint,
            sources={arm: self.seam.arm(self.target, arm).source_hash for arm in self._arms},
            bound=self.max_regret,
            search=self._exploration(),
        )

    @property
    def _arms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.spaces, *(c.arm for c in self.shipped))))

    def _exploration(self) -> Exploration | None:
        legal = {arm: len(self.legal[arm]) for arm in self.searched}
        return Exploration(self.anchors, legal, self.search.generations) if legal else None
