"""The floor of a cell is a copy of its fewest bytes, and it leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from cuda_configs import BASE  # type: ignore[import-not-found]

from mhctune.autotuner.cuda_bench import CudaBench
from mhctune.autotuner.nvidia import conditions_reader
from mhctune.autotuner.records import Cell, Footprint
from mhctune.autotuner.runner import FLOOR
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate


@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_a_real_candidate_is_slower_than_the_floor_and_no_byte_is_left(bench: CudaBench, tokens: int) -> None:
    candidate = Candidate.of("fused", BASE)
    bench.enter(Cell("post_pre_delayed", Problem(4096), tokens), 1)
    live = torch.cuda.memory_allocated()
    floor = bench.floor_us()
    assert torch.cuda.memory_allocated() == live
    assert isinstance(bench.prepare(candidate), Footprint)
    latency = bench.sample(candidate, 0, 0, 200)
    print(f"\n{tokens} tokens: floor {floor:.2f} us, candidate {latency} us", end="")
    assert isinstance(latency, float)
    assert latency > FLOOR * floor > 0
    bench.leave()


def test_the_driver_tells_clock_heat_and_reasons() -> None:
    with conditions_reader("cuda") as read:
        found = read()
    print(f"\n{found}", end="")
    assert found.source == "nvml"
    assert found.sm_clock_mhz is not None
    assert found.sm_clock_mhz > 100
