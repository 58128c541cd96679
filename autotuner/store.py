"""What a sweep tells while it runs; the database fulfils it, tests use a list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mhctune.autotuner.conditions import Conditions
from mhctune.autotuner.exploration import Exploration
from mhctune.autotuner.records import Cell, Failure, Footprint, Sample, SweepState, Trial
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate


@dataclass(frozen=True, slots=True)
class SweepRecord:
    """What identifies a sweep and what it set out to measure.

    Attributes:
        digest: Over fingerprint, space, cells and protocol: the same command gives the same digest.
        target: `c` or `cuda`.
        grid: Number of (cell, candidate) pairs; a forecast until a search has ended.
        space: Per arm the tunables and their values, as JSON-able data.
        variants: The candidates in the order ties are broken, each with the names of its compiled kernels:
            the enumerated ones, then those that a search proposed. Kept, because later arms may give other
            ones; not part of the digest by itself.
        protocol: How it was measured, as JSON-able data.
        bound: Regret bound of the bands (0.05 is 5 %); not part of the digest.
    """

    digest: str
    seam: str
    problem: Problem
    target: str
    token_counts: tuple[int, ...]
    grid: int
    space: Mapping[str, Any]
    variants: Mapping[Candidate, tuple[str, ...]]
    protocol: Mapping[str, Any]
    fingerprint: Fingerprint
    sources: Mapping[str, str]
    """Source hash by arm."""
    bound: float
    search: Exploration | None = None
    """What is searched; None where every arm is enumerated."""
    floors: Mapping[int, float] = field(default_factory=dict)
    """By token count the microseconds of a copy of the fewest bytes, where it was timed; not identity."""

    def without_probes(self, trials: Iterable[Trial]) -> list[Trial]:
        """Return the trials of its own token counts: a probe races two candidates, too few to choose from."""
        return [trial for trial in trials if trial.cell.num_tokens in self.token_counts]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """What was raced anywhere, in the order ties are broken."""
        return tuple(self.variants)

    def expected(self, num_tokens: int) -> tuple[Candidate, ...]:
        """Return what is to be raced at a token count, as far as that is known."""
        if self.search is None:
            return self.candidates
        enumerated = (candidate for candidate in self.variants if candidate.arm not in self.search.legal)
        return (*enumerated, *self.search.expected(num_tokens))

    @property
    def raced(self) -> int:
        """Number of (cell, candidate) pairs that are known by now."""
        return sum(len(self.expected(count)) for count in self.token_counts)


def variants_to_data(variants: Mapping[Candidate, tuple[str, ...]]) -> list[list[Any]]:
    """Return candidates and the names of their kernels as JSON-able data that keeps their order."""
    return [[candidate.arm, candidate.config, list(names)] for candidate, names in variants.items()]


def variants_of(data: Sequence[Sequence[Any]]) -> dict[Candidate, tuple[str, ...]]:
    """Read what `variants_to_data` returned."""
    return {Candidate.of(arm, config): tuple(names) for arm, config, names in data}


class Store(Protocol):
    """Keeps sweeps, trials and samples; every method is one committed transaction."""

    def begin(self, sweep: SweepRecord, *, new: bool = False) -> int:
        """Return the id of the newest unfinished sweep of this digest, or of a new one.

        With `new` always a new one. A complete sweep of the same digest is not resumed: a new one begins.
        """

    def record(self, sweep_id: int) -> SweepRecord:
        """Return the record of a sweep as it was begun, with what a search has proposed since."""

    def propose(self, sweep_id: int, record: SweepRecord) -> None:
        """Keep what a search proposes before it is raced: the record's search, candidates and grid."""

    def trials(self, sweep_id: int, num_tokens: int | None = None) -> Sequence[Trial]:
        """Return the trials of a sweep, or of one cell, with their samples, in the order they were opened."""

    def keep_floor(self, sweep_id: int, cell: Cell, floor_us: float) -> None:
        """Keep the microseconds of a copy of the cell's fewest bytes, unless one was kept before."""

    def open_trial(self, sweep_id: int, cell: Cell, candidate: Candidate, footprint: Footprint) -> int:
        """Record that a candidate passed its check and will be raced; return the trial's id."""

    def add_samples(
        self,
        samples: Sequence[tuple[int, Sample]],
        twins: Sequence[tuple[int, Sample]] = (),
        conditions: Conditions | None = None,
    ) -> None:
        """Keep the samples (trial id, sample) of one round, its twins' and what the device was like."""

    def finish_trial(self, trial_id: int) -> None:
        """Record that a trial has all its samples: it is a measurement now."""

    def fail_trial(
        self, sweep_id: int, cell: Cell, candidate: Candidate, footprint: Footprint, failure: Failure
    ) -> int:
        """Record a failure, for a trial that was opened before or not; return the trial's id."""

    def end(self, sweep_id: int, state: SweepState) -> None:
        """Record how the sweep ended."""
