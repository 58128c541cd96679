"""On a real GPU an illegal access or a spinning kernel costs one failure row."""

from __future__ import annotations

import time
from collections.abc import Callable

import deeds  # type: ignore[import-not-found]
from cuda_configs import BASE  # type: ignore[import-not-found]

from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.race import Race
from mhctune.autotuner.records import Cell, Failure, FailureKind, Measurement
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.worker import Limits, RemoteBench
from mhctune.db.repository import Repository
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate


def test_the_culprit_is_named_and_the_rest_is_measured(
    repository: Repository, make_sweep: Callable[..., SweepRecord]
) -> None:
    good = [Candidate.of("fused", {**BASE, "tile_n": tile_n}) for tile_n in (2, 4, 8)]
    illegal, spin = Candidate.of(deeds.ILLEGAL, {}), Candidate.of(deeds.SPIN, {})
    bench = RemoteBench(deeds.make, Limits(sample_s=10))
    cell = Cell("post_pre_delayed", Problem(4096), 4)
    sweep_id = repository.begin(make_sweep(problem=cell.problem, token_counts=(4,)))
    begin = time.monotonic()
    try:
        Race(sweep_id, cell, repository, bench, VramBudget(2**34, 2**34), Protocol.of("cuda", 5)).run(
            [good[0], illegal, good[1], spin, good[2]], ()
        )
    finally:
        bench.close()
    outcomes = {trial.candidate: trial.outcome for trial in repository.trials(sweep_id)}
    for candidate, outcome in outcomes.items():
        print(f"\n{candidate}: {outcome if isinstance(outcome, Failure) else 'measured'}", end="")
    print(f"\n{time.monotonic() - begin:.0f} s, {bench.respawns} fresh workers")
    assert all(isinstance(outcomes[candidate], Measurement) for candidate in good)
    for candidate, kind in ((illegal, FailureKind.CRASHED), (spin, FailureKind.TIMEOUT)):
        outcome = outcomes[candidate]
        assert isinstance(outcome, Failure)
        assert outcome.kind is kind
    assert "illegal memory access" in outcomes[illegal].detail  # type: ignore[union-attr]
    assert bench.respawns == 2
