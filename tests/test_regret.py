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
CHOSEN = dict.fromkeys(COUNTS, (FUSED, FUSED))


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
    assert regret["near"](trials(TIMES), 0.15, CHOSEN) == dict.fromkeys(COUNTS, (FUSED, UNFUSED))
    assert regret["near"](trials(TIMES), 0.0, CHOSEN) == dict.fromkeys(COUNTS, (FUSED,))
    # A choice is raced though it was not near, and token counts that nobody asked for are not.
    assert regret["near"](trials(TIMES), 0.0, {4: (FUSED, SLOW)}) == {4: (FUSED, SLOW)}


def test_what_is_judged_are_the_winner_and_the_served_choice(
    regret: dict[str, Any], quick: SweepRecord
) -> None:
    derived = derive(quick, 1, trials(TIMES), 0.05, None, None)
    served = {n: derived.table.lookup(n).choice.arm for n in COUNTS}
    assert regret["choices"](derived, [4]) == {4: (FUSED, FUSED if served[4] == "fused" else UNFUSED)}


def test_the_long_race_is_kept_resumed_and_tells_what_the_winner_loses(
    regret: dict[str, Any], quick: SweepRecord, repository: Repository
) -> None:
    raced = regret["near"](trials(TIMES), 0.15, CHOSEN)
    record, protocol = regret["long_record"](quick, raced, CHOSEN, quick.fingerprint)
    assert set(record.variants) == {FUSED, UNFUSED}
    assert (protocol.confirmation, protocol.placements) == (60, 20)
    bench = Steady()
    regret["measure"](record, protocol, raced, CHOSEN, repository, bench, VramBudget(10**6, 10**6), 0.15)
    assert sum(n > 1 for n in bench.launched) == len(COUNTS) * (2 * (9 + 60) + 60)
    found = repository.trials(1)
    assert {len({s.placement for s in t.samples}) for t in found} == {21}
    printed = list(regret["lines"](trials(TIMES), found, CHOSEN))
    assert " 1     2     2    10.00    2.00% (+2.00%..+2.00%)" in printed[2]
    best, winner = (line.split() for line in printed[3:5])
    assert best == ["best", "10.44", "10.00", "9+60", *str(UNFUSED).split()]
    assert winner == ["winner,", "served", "10.04", "10.20", "9+60", *str(FUSED).split()]
    assert printed[8].startswith("worst")
    assert "2.00% (+2.00%..+2.00%)" in printed[8]
    assert not any("left out" in line for line in printed)
    cut = [t if t.cell.num_tokens == 1 else replace(t, outcome=None) for t in found]
    assert list(regret["lines"](trials(TIMES), cut, CHOSEN))[-1].startswith(
        "not finished, left out: 4 tokens"
    )


def test_a_choice_that_was_not_raced_says_so(regret: dict[str, Any]) -> None:
    only = [t for t in trials(TIMES) if t.candidate != FUSED]
    printed = list(regret["lines"](trials(TIMES), only, CHOSEN))
    assert "not measured" in printed[2]
    assert printed[4].split() == ["winner,", "served", "10.04", "-", "-", *str(FUSED).split()]


def test_a_choice_moves_with_the_finalists_however_slow_its_first_rounds_are(
    regret: dict[str, Any], quick: SweepRecord, repository: Repository
) -> None:
    chosen = {1: (FUSED, SLOW)}  # surely 20 % slower: by its rounds it would leave at the first look
    raced = regret["near"](trials(TIMES), 0.15, chosen)
    record, protocol = regret["long_record"](quick, raced, chosen, quick.fingerprint)
    regret["measure"](record, protocol, raced, chosen, repository, Steady(), VramBudget(10**6, 10**6), 0.15)
    found = {t.candidate: {s.placement for s in t.samples} for t in repository.trials(1)}
    assert found == {c: set(range(21)) for c in (FUSED, UNFUSED, SLOW)}
    others = regret["long_record"](quick, raced, CHOSEN, quick.fingerprint)[0]
    assert others.digest != record.digest  # other choices are another race, and do not resume this one


def test_a_long_race_that_was_cut_goes_on(
    regret: dict[str, Any], quick: SweepRecord, repository: Repository
) -> None:
    raced = regret["near"](trials(TIMES), 0.15, CHOSEN)
    record, protocol = regret["long_record"](quick, raced, CHOSEN, quick.fingerprint)
    benches, room = (Steady(), Steady()), VramBudget(10**6, 10**6)

    def cut(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regret["measure"](record, protocol, raced, CHOSEN, repository, benches[0], room, 0.15, tell=cut)
    regret["measure"](record, protocol, raced, CHOSEN, repository, benches[1], room, 0.15)
    assert [sum(n > 1 for n in bench.launched) for bench in benches] == [2 * (9 + 60) + 60] * 2
    assert [sweep.id for sweep in repository.sweeps()] == [1]
