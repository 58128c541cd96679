"""Timers: how many launches they make and what they answer."""

from __future__ import annotations

import time

import pytest

from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import Cell
from mhctune.autotuner.timer import HostTimer, ReplayTimer, Slot
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

CANDIDATE = Candidate.of("fused", {"tile_n": 24})
CELL = Cell("post_pre_delayed", Problem(hidden_size=256), 8)


def slot(round: int = 0, batch: int = 0) -> Slot:
    return Slot(CELL, CANDIDATE, batch, round)


@pytest.mark.parametrize("launches", [1, 7, 100])
def test_the_host_timer_launches_exactly_as_often_as_asked(launches: int) -> None:
    calls: list[int] = []
    HostTimer().time(slot(), lambda: calls.append(1), launches)
    assert len(calls) == launches


def test_the_host_timer_answers_in_microseconds_a_launch() -> None:
    # A sleep may take longer than asked on a busy machine, never shorter.
    latency = HostTimer().time(slot(), lambda: time.sleep(0.002), 5)
    assert 2000 <= latency < 200_000


def test_the_replay_timer_answers_what_was_recorded_and_launches_once() -> None:
    calls: list[int] = []
    timer = ReplayTimer({(8, CANDIDATE, 0): 3.5, (8, CANDIDATE, 1): 4.5})
    assert timer.time(slot(1), lambda: calls.append(1), 50) == 4.5
    assert timer.time(slot(0), lambda: calls.append(1), 50) == 3.5
    assert len(calls) == 2


def test_the_replay_timer_does_not_make_up_what_was_not_recorded() -> None:
    with pytest.raises(KeyError):
        ReplayTimer({(8, CANDIDATE, 0): 3.5}).time(slot(1), lambda: None, 1)


@pytest.mark.parametrize(("fastest", "launches"), [(1.0, 2000), (300.0, 7), (2000.0, 1), (1e6, 1)])
def test_a_sample_is_at_least_as_long_as_the_protocol_says(fastest: float, launches: int) -> None:
    protocol = Protocol(samples=9, replay_us=2000.0)
    assert protocol.launches(fastest) == launches
    assert launches * fastest >= protocol.replay_us


def test_a_sample_of_a_gpu_is_whole_replays_of_its_graph() -> None:
    protocol = Protocol.of("cuda", 9)
    assert [protocol.launches(us) for us in (2.0, 5.0, 15.0, 1e4)] == [100, 40, 20, 20]
    assert all(protocol.launches(us) % protocol.unroll == 0 for us in (0.5, 3.3, 7.7))


def test_launches_stay_finite_for_a_clock_that_saw_nothing() -> None:
    assert Protocol(samples=9, replay_us=2000.0).launches(0.0) == 2_000_000
