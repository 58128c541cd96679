"""A bench without a device: it answers with given latencies, and says how it was used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mhctune.autotuner.records import Cell, Failure, Footprint
from mhctune.kernels.registry import seam
from mhctune.kernels.seam import Problem, Variant
from mhctune.kernels.space import Candidate

PROBLEM, SEAM = Problem(hidden_size=256), seam("post_pre_delayed")
VALUES = {"tile_n": [24], "n_splits": [1], "block_h": [64], "block_m": [1]}
FUSED, UNFUSED = (
    Candidate.of(name, {key: only for key, (only,) in VALUES.items()}) for name in ("fused", "unfused")
)
LATENCIES = {1: (10.0, 20.0), 4: (10.0, 20.0), 16: (40.0, 20.0)}


@dataclass
class FakeBench:
    """Answers with the sweep's latencies times `pace`, or with the failure of a candidate."""

    pace: float = 1.0
    refused: dict[Candidate, Failure] = field(default_factory=dict)
    broken: dict[Candidate, Failure | float] = field(default_factory=dict)
    resident: set[Candidate] = field(default_factory=set)
    entered: list[tuple[int, int]] = field(default_factory=list)
    launched: list[int] = field(default_factory=list)
    compiled: tuple[Variant, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    def compile_all(self, variants: Sequence[Variant], tell: Callable[[int, int], None]) -> None:
        self.compiled = tuple(variants)
        tell(len(variants), len(variants))

    def input_bytes(self, cell: Cell) -> int:
        return 0

    def enter(self, cell: Cell, seed: int) -> int:
        self.tokens = cell.num_tokens
        self.entered.append((cell.num_tokens, seed))
        return 10

    def floor_us(self) -> float:
        return 0.0

    def forecast(self, candidate: Candidate) -> Footprint:
        return Footprint(10, 100, 0)

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        if candidate in self.refused:
            return self.refused[candidate]
        self.resident.add(candidate)
        return self.forecast(candidate)

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        assert candidate in self.resident
        self.launched.append(launches)
        if candidate in self.broken and launches > 1:
            return self.broken[candidate]
        return LATENCIES[self.tokens][candidate == UNFUSED] * self.pace * (1 + 0.001 * (round % 9))

    def move(self, candidate: Candidate, placement: int) -> Failure | None:
        return None

    def release(self, candidate: Candidate) -> None:
        self.resident.discard(candidate)

    def leave(self) -> None:
        self.resident.clear()
