"""What is gained over what is served today; nothing, where the noise does not tell the two apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mhctune.autotuner.derive import Derived, derive
from mhctune.autotuner.gain import gain_note, gains
from mhctune.autotuner.incumbent import Incumbent
from mhctune.autotuner.records import Cell, Footprint, Measurement, Sample, Trial
from mhctune.kernels.dispatch import Choice

Derive = Callable[..., Derived]


@pytest.fixture
def derived(make_sweep: Any) -> Derive:
    """Derive a sweep of two candidates; the second is slower by a share at each token count."""

    def make(slower: dict[int, float], *served: tuple[int, int | None], loud: float = 0.0) -> Derived:
        sweep = make_sweep()
        trials = []
        for count in sweep.token_counts:
            cell = Cell(sweep.seam, sweep.problem, count)
            for place, candidate in enumerate(sweep.candidates):
                by = (0.0, slower[count], 0.5, 0.5)[place]
                noise = [loud * (-1) ** (n + place) for n in range(12)]
                samples = tuple(Sample(0, n, 0, 20, 10.0 * (1 + by + noise[n])) for n in range(12))
                trials.append(Trial(cell, candidate, Footprint(1, 1, 1), Measurement(samples), samples))
        second = sweep.candidates[1]
        choice = Choice.of(second.arm, second.config)
        incumbent = Incumbent("hand.toml", tuple((first, last, choice) for first, last in served))
        return derive(sweep, 1, trials, 0.05, incumbent if served else None)

    return make


def test_within_the_noise_everywhere_there_is_nothing_to_gain(derived: Derive) -> None:
    found = derived({1: 0.001, 8: 0.002, 64: 0.001}, (1, None), loud=0.02)
    assert all(gain.tied for gain in gains(found))
    assert gain_note(found) == (
        "nothing to gain: hand.toml is within the noise of the best at 3 of 3 measured token counts"
    )


def test_what_is_gained_is_said_with_limits_and_where(derived: Derive) -> None:
    found = derived({1: 0.0, 8: 0.2, 64: 0.1}, (1, None))
    assert [round(gain.point, 3) for gain in gains(found)] == [0.0, 0.2, 0.1]
    assert gain_note(found) == (
        "to gain over hand.toml: up to 20.0 % (20.0 % to 20.0 %) at 8 tokens; 1 of 3 are within the noise"
    )


def test_where_nothing_is_served_today_nothing_is_known(derived: Derive) -> None:
    slower = {1: 0.0, 8: 0.2, 64: 0.1}
    assert gain_note(derived(slower)) == ""
    assert gain_note(derived(slower, (1, 8))).endswith("(1 token count unknown)")
    assert "unknown, this sweep did not measure" in gain_note(derived(slower, (200, None)))
