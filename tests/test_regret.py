"""The long measurement behind a regret: who is raced, that it resumes, and what is printed."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fake_bench import FUSED, PROBLEM, SEAM, UNFUSED, FakeBench  # type: ignore[import-not-found]

from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.derive import derive
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import Cell, Footprint, Measurement, Sample, Trial
from mhctune.autotuner.store import SweepRecord
from mhctune.db.repository import Repository
from mhctune.kernels.space import Candidate

ROOT = Path(__file__).resolve().parents[1]
SLOW = Candidate.of("unfused", {**UNFUSED.config, "tile_n": 12})
TIMES = {FUSED: 10.0, UNFUSED: 10.4, SLOW: 12.0}
COUNTS = (1, 4)


@pytest.fixture(scope="module")
def regret() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "regret.py"))


@pytest.fixture
def quick(make_sweep: Callable[..., SweepRecord]) -> SweepRecord:
    names = {c: (str(c),) for c in TIMES}
    protocol = Protocol.of("c", 9).to_dict()
    return make_sweep(
        problem=PROBLEM, target="c", token_counts=COUNTS, variants=names, protocol=protocol, grid=6
    )


def trials(times: dict[Candidate, float]) -> list[Trial]:
    """Nine rounds of each candidate at each token count, 0.1 % apart."""
    taken = {c: tuple(Sample(0, n, 0, 1, us * (1 + n / 1000)) for n in range(9)) for c, us in times.items()}
    return [
        Trial(Cell(SEAM.name, PROBLEM, count), c, Footprint(0, 1, 0), Measurement(samples), samples)
        for count in COUNTS
        for c, samples in taken.items()
    ]


@dataclass
class Steady(FakeBench):  # type: ignore[misc]
    """Takes the truth, which is not what the quick sweep found: the other one is faster by 2 %."""

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float:
        self.launched.append(launches)
        plain = Candidate(candidate.arm, candidate.items)
        return {FUSED: 10.2, UNFUSED: 10.0, SLOW: 12.0}[plain] * (1 + round % 7 / 10000)


def test_who_came_near_is_raced_at_each_token_count(regret: dict[str, Any]) -> None:
    assert regret["near"](trials(TIMES), 0.15) == dict.fromkeys(COUNTS, (FUSED, UNFUSED))
    assert regret["near"](trials(TIMES), 0.0) == dict.fromkeys(COUNTS, (FUSED,))


def test_the_long_race_is_kept_resumed_and_tells_what_the_winner_loses(
    regret: dict[str, Any], quick: SweepRecord, repository: Repository
) -> None:
    raced = regret["near"](trials(TIMES), 0.15)
    record, protocol = regret["long_record"](quick, raced, quick.fingerprint)
    assert set(record.variants) == {FUSED, UNFUSED}
    assert (protocol.confirmation, protocol.placements) == (60, 20)
    bench = Steady()
    regret["measure"](record, protocol, raced, repository, bench, VramBudget(10**6, 10**6), 0.15)
    assert sum(n > 1 for n in bench.launched) == len(COUNTS) * (2 * (9 + 60) + 60)
    found = repository.trials(1)
    assert {len({s.placement for s in t.samples}) for t in found} == {21}
    derived = derive(quick, 1, trials(TIMES), 0.05, None, None)
    printed = list(regret["lines"](derived, found, COUNTS))
    assert " 1     2     2    10.00    2.00% (+2.00%..+2.00%)" in printed[1]
    assert printed[3].startswith("worst")
    assert "2.00% (+2.00%..+2.00%)" in printed[3]
    assert not any("left out" in line for line in printed)
    cut = [t if t.cell.num_tokens == 1 else replace(t, outcome=None) for t in found]
    assert list(regret["lines"](derived, cut, COUNTS))[-1].startswith("not finished, left out: 4 tokens")


def test_a_choice_that_was_not_raced_says_so(regret: dict[str, Any], quick: SweepRecord) -> None:
    derived = derive(quick, 1, trials(TIMES), 0.05, None, None)
    only = [t for t in trials(TIMES) if t.candidate != FUSED]
    assert "not measured" in list(regret["lines"](derived, only, COUNTS))[1]


def test_a_long_race_that_was_cut_goes_on(
    regret: dict[str, Any], quick: SweepRecord, repository: Repository
) -> None:
    raced = regret["near"](trials(TIMES), 0.15)
    record, protocol = regret["long_record"](quick, raced, quick.fingerprint)
    benches, room = (Steady(), Steady()), VramBudget(10**6, 10**6)

    def cut(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regret["measure"](record, protocol, raced, repository, benches[0], room, 0.15, tell=cut)
    regret["measure"](record, protocol, raced, repository, benches[1], room, 0.15)
    assert [sum(n > 1 for n in bench.launched) for bench in benches] == [2 * (9 + 60) + 60] * 2
    assert [sweep.id for sweep in repository.sweeps()] == [1]
