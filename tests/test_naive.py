"""Beside a derived cut-over stands the naive one, against what ships, with what it would cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mhctune.autotuner.derive import Derived, derive
from mhctune.autotuner.naive import naive_cutovers, naive_sheet
from mhctune.autotuner.recording import replay
from mhctune.autotuner.records import Cell, Footprint, Measurement, Sample, Trial
from mhctune.configs.recorded import load_recorded
from mhctune.kernels.space import Candidate

FUSED, TUNED, SHIPPED = (
    Candidate.of(arm, {"n_splits": n}) for arm, n in (("fused", 8), ("unfused", 40), ("unfused", 16))
)
Derive = Callable[..., Derived]


@pytest.fixture
def derived(make_sweep: Any, make_fingerprint: Any) -> Derive:
    """Derive bands of a sweep with given medians at 1, 8 and 64 tokens: fused, tuned and shipped unfused."""

    def make(
        *medians: tuple[float, ...], target: str = "cuda", order: Any = (FUSED, TUNED, SHIPPED)
    ) -> Derived:
        fingerprint = make_fingerprint(sm_count=132)
        sweep = make_sweep(
            variants={c: (str(c),) for c in order},
            target=target,
            fingerprint=fingerprint,
            token_counts=(1, 8, 64),
        )
        trials = []
        for candidate, row in zip(order, medians, strict=True):
            for count, latency in zip((1, 8, 64), row, strict=True):
                samples = tuple(Sample(0, n, 0, 20, latency + n / 1e4) for n in range(9))
                cell = Cell(sweep.seam, sweep.problem, count)
                trials.append(Trial(cell, candidate, Footprint(1, 1, 1), Measurement(samples), samples))
        return derive(sweep, 1, trials, 0.05)

    return make


def test_the_naive_cut_over_is_later_and_costs_what_the_tuned_route_wins(derived: Derive) -> None:
    found = derived((10.0, 10.0, 15.0), (12.0, 8.0, 10.0), (14.0, 12.0, 12.0))
    (naive,) = naive_cutovers(found)
    assert (naive.lower, naive.upper, naive.edge, naive.last) == ("fused", "unfused", 1, 8)
    assert naive.baselines == ("split-bucket", "vllm-two-bands")  # 16 splits at each of these counts
    assert {n: round(cost, 3) for n, cost in naive.costs.items()} == {8: 0.25}
    assert naive_sheet([naive]).rows == (("fused | unfused", 1, 8, "25.0 %", "8:25.0 %"),)


def test_where_the_shipped_route_is_ahead_sooner_its_own_regret_is_the_cost(derived: Derive) -> None:
    # The best of fused beats what ships at 1 token only; at 8 the derived bands still serve it.
    found = derived((10.0, 10.0, 15.0), (14.0, 11.0, 10.0), (14.0, 9.9, 12.0))
    assert [band.last for band in found.table.bands] == [8, 64]
    (naive,) = naive_cutovers(found)
    assert (naive.edge, naive.last) == (8, 1)
    assert naive.costs == {8: 0.0}


def test_without_a_measured_baseline_without_a_cut_over_and_on_c_there_is_none(derived: Derive) -> None:
    medians = (10.0, 10.0, 15.0), (12.0, 8.0, 10.0), (14.0, 12.0, 12.0)
    assert naive_cutovers(derived(*medians, target="c")) == []
    assert naive_cutovers(derived(*medians[:2], order=(FUSED, TUNED))) == []
    assert naive_cutovers(derived((1.0, 1.0, 1.0), *medians[1:])) == []


def test_the_h200_would_have_kept_fused_to_48_and_lost_a_quarter() -> None:
    sweep, trials = replay(load_recorded("h200_decode_hidden5120"))
    found = derive(sweep, 1, trials, sweep.bound)
    naive = naive_cutovers(found)
    # 16 splits with the FMA projection, 64 with that on tensor cores.
    assert [each.baselines for each in naive] == [("split-bucket", "vllm-two-bands"), ("split-power-of-two",)]
    for each in naive:
        assert (each.lower, each.upper, each.edge, each.last) == ("fused", "fused_mma", 26, 48)
        assert {n: round(cost, 3) for n, cost in each.costs.items()} == {32: 0.134, 48: 0.254}
    # With fewer SMs they ask for splits that the sweep did not measure.
    fewer = found.table.replace(fingerprint=found.table.fingerprint.replace(sm_count=4))
    assert naive_cutovers(replace(found, table=fewer)) == []
