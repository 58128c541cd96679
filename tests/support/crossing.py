"""Two arms that cross at a known token count, and a sweep of them that may probe its edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fake_bench import PROBLEM, SEAM, VALUES, FakeBench  # type: ignore[import-not-found]

from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.derive import Derived
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.planner import spaces_of
from mhctune.autotuner.prober import Prober
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import PLACEMENT_ROUNDS, Cell, Failure, Footprint, Measurement, Sample, Trial
from mhctune.autotuner.sweep import Sweep, SweepResult
from mhctune.db.derivation import derive_stored
from mhctune.db.repository import Repository
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.space import Candidate

A, B = Candidate.of("fused", {"n": 1}), Candidate.of("unfused", {"n": 1})
CELL = Cell("post_pre_delayed", PROBLEM, 1)
AMPLE = VramBudget(2**34, 2**34)
FUSED_US, UNFUSED_US = 2.0, 41.0
"""Fused costs 2 us a token and unfused always 41 us: they cross between 20 and 21 tokens."""


class Crossing(FakeBench):
    """Fused is as fast as unfused at 20.5 tokens; a bench may refuse a candidate at one token count."""

    noise: float = 0.0
    slope: float = FUSED_US
    refused_at: Mapping[tuple[int, Candidate], Failure] = {}

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        failure = self.refused_at.get((self.tokens, Candidate(candidate.arm, candidate.items)))
        return failure or super().prepare(candidate)

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        self.launched.append(launches)
        fused = candidate.arm == "fused"
        latency = self.slope * self.tokens if fused else UNFUSED_US
        turn = round // PLACEMENT_ROUNDS or round  # what shares a placement shares its luck
        sign = 1 if (turn % 2 == 0) == fused else -1
        return latency * (1 + 0.001 * (round % 9)) * (1 + sign * self.noise)


def plan_of(fingerprint: Fingerprint) -> SweepPlan:
    """Both arms at 1, 16 and 64 tokens."""
    limits = {"fused": VALUES, "unfused": VALUES}
    return SweepPlan(
        seam=SEAM, problem=PROBLEM, target="c", token_counts=(1, 16, 64),
        spaces=spaces_of(SEAM, "c", PROBLEM, limits), protocol=Protocol.of("c", 9),
        fingerprint=fingerprint, max_regret=0.05,
    )  # fmt: skip


def sweep(
    plan: SweepPlan, store: Repository, bench: FakeBench, stop: Callable[[], bool] = lambda: False,
    probes: bool = True,
) -> SweepResult:  # fmt: skip
    how = (store, bench, AMPLE, bench.compile_all)

    def probe(sweep_id: int) -> None:
        def derived() -> Derived:
            return derive_stored(store, store.sweep(sweep_id))

        Prober(store.record(sweep_id), *how, derived, stop).run(sweep_id)

    return Sweep(plan, *how, stop).run(probe=probe if probes else None)


def trial(count: int, of: Candidate, outcome: float | Failure, noise: float = 0.0) -> Trial:
    cell = replace(CELL, num_tokens=count)
    if isinstance(outcome, Failure):
        return Trial(cell, of, Footprint(1, 1, 1), outcome)
    signs = [noise if (n % 2 == 0) == (of == A) else -noise for n in range(9)]
    samples = tuple(Sample(0, n, 0, 20, outcome * (1 + sign)) for n, sign in enumerate(signs))
    return Trial(cell, of, Footprint(1, 1, 1), Measurement(samples), samples)
