"""The simulated races: the same seed gives the same tally, and what is known of the noise comes out."""

from __future__ import annotations

import random
import runpy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mhctune.autotuner.records import Measurement, Trial
from mhctune.kernels.space import Candidate

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def races() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "races.py"))


@pytest.fixture(scope="module")
def recorded(races: dict[str, Any]) -> tuple[str, Any, Sequence[Trial]]:
    (found,) = races["sweeps"](["h200_decode_hidden5120"])
    return found  # type: ignore[no-any-return]


def test_without_noise_the_best_always_wins_and_the_slower_leave_or_are_told_apart(
    races: dict[str, Any],
) -> None:
    silence = races["Noise"]([1.0] * 9, [[1.0] * 9])
    tally = races["simulate"]([silence], 0.02, 9, 5, 1)
    assert (tally.slower_best, tally.told_wrongly, tally.lost, tally.fresh, tally.kept) == (0, 0, 0, 0, 0)
    assert tally.spent == 5 * (8 * 9 + 9 * 9)  # all eight, within 3 %, are confirmed, and a twin
    further = races["simulate"]([silence], 0.02, 9, 5, 1, rule="further")
    assert further.spent == tally.spent  # all are told apart: nobody goes on
    near = races["simulate"]([silence], 0.005, 9, 5, 1, rule="further")
    assert near.spent == tally.spent + 5 * 6 * 33  # six of eight, without a twin
    stayed = races["simulate"]([silence], 0.02, 9, 5, 1, rule="stay")
    assert stayed.spent == 5 * (8 * 9 + 2 * 9)
    tally = races["simulate"]([silence], 0.10, 9, 5, 1)
    assert tally.spent == 5 * (8 * 6 + 3 + 2 * 9)  # seven leave at the look


def test_the_same_seed_gives_the_same_tally(races: dict[str, Any], recorded: Any) -> None:
    noises = [
        noise for rows in races["cells"](recorded[2], 15).values() if (noise := races["Noise"].of(rows))
    ]
    assert len(noises) >= 5
    first, again = (races["simulate"](noises, 0.01, 15, 5, 7) for _ in range(2))
    assert first == again
    assert first.spent >= 5 * (8 * 15 + 2 * 15)


def test_noise_is_that_of_the_rounds_that_all_who_stayed_ran(races: dict[str, Any], recorded: Any) -> None:
    stayed = [t for t in recorded[2] if len(t.samples) == 15]
    count = next(n for n, found in Counter(t.cell.num_tokens for t in stayed).items() if found >= 3)
    here = [t for t in stayed if t.cell.num_tokens == count][:3]
    loser = replace(here[0], samples=here[0].samples[:6])
    again = tuple(replace(s, round=s.round + 15) for s in here[1].samples)
    finalist = replace(here[1], samples=(*here[1].samples, *again))
    rows = races["cells"]([loser, finalist, here[2]], 15)[count]
    assert list(rows) == [here[1].candidate, here[2].candidate]
    assert rows[here[1].candidate] == [s.latency_us for s in here[1].samples]


def test_a_clear_best_keeps_its_place_on_every_draw_and_near_ones_do_not(races: dict[str, Any]) -> None:
    a, b = (Candidate.of("fused", {"n": n}) for n in range(2))
    clear = {a: [10.0, 10.1, 10.2, 10.1, 10.0], b: [11.0, 11.1, 11.2, 11.1, 11.0]}
    assert races["minds"](clear, 50, random.Random(1)) == (50, 0, 0)
    near = {a: [10.0, 10.3, 10.1, 10.4, 10.0, 10.3], b: [10.2, 10.0, 10.3, 10.1, 10.3, 10.1]}
    draws, changed, by_rule = races["minds"](near, 50, random.Random(1))
    assert draws == 50
    assert changed > 5
    assert by_rule < changed


def test_sweeps_of_one_kind_are_compared_cell_by_cell(races: dict[str, Any], recorded: Any) -> None:
    name, sweep, trials = recorded
    assert list(races["across"]([recorded])) == []
    (same,) = races["across"]([recorded, recorded])
    assert same.endswith("differs in 0 of 10 cells, the choice by the rule for ties in 0")

    def slower(trial: Trial) -> Trial:
        """At one token the best of the first sweep is three times as slow."""
        taken = tuple(replace(s, latency_us=3 * s.latency_us) for s in trial.samples)
        return replace(trial, samples=taken, outcome=Measurement(taken))

    here = [t for t in trials if t.cell.num_tokens == 1 and isinstance(t.outcome, Measurement)]
    best = min(here, key=lambda t: t.outcome.latency_us)  # type: ignore[union-attr]
    other = (f"{name} again", sweep, [slower(t) if t is best else t for t in trials])
    (differs,) = races["across"]([recorded, other])
    assert differs.endswith("differs in 1 of 10 cells, the choice by the rule for ties in 1")


def test_where_finalists_move_a_bias_of_places_makes_fewer_slower_ones_win(
    races: dict[str, Any], recorded: Any
) -> None:
    """2 % slower, a bias of up to 2 % either way: the truly best is told apart wrongly, or only outrun.

    Where those who are not told apart move on it is outrun less often still.
    """
    noises = [n for rows in races["cells"](recorded[2], 15).values() if (n := races["Noise"].of(rows))]
    stay, move, further = (races["simulate"](noises, 0.02, 15, 60, 7, 0.02, rule) for rule in races["RULES"])
    assert further.slower_best < move.slower_best
    assert further.told_wrongly == 0
    assert move.slower_best < stay.slower_best / 2
    assert move.told_wrongly <= 1 < stay.told_wrongly
    assert move.bands < stay.bands
