"""The bench of the target `cuda` without a GPU: graphs are launches here, kernels those of the target `c`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from mhctune.autotuner import cuda_bench
from mhctune.autotuner.bench import input_bytes
from mhctune.autotuner.cuda_bench import CudaBench
from mhctune.autotuner.records import Cell, FailureKind, Footprint
from mhctune.autotuner.twin import Twin
from mhctune.kernels.compiler import Compiler
from mhctune.kernels.post_pre_delayed import PostPreDelayed
from mhctune.kernels.seam import Arm, Problem
from mhctune.kernels.space import Candidate

CELL = Cell("post_pre_delayed", Problem(hidden_size=256), 3)
CONFIG = {"tile_n": 24, "n_splits": 1, "block_h": 64, "block_m": 1}
OFTEN = Candidate.of("fused", CONFIG)
SELDOM = Twin.to(OFTEN)


@dataclass
class Launches:
    """What was to be captured, launched at every replay."""

    run: Callable[[], None]
    launches: int
    live_bytes: int = 0
    reserved_bytes: int = 0

    def replay(self) -> None:
        self.run()

    def close(self) -> None:
        """Nothing is held."""


class Seam(PostPreDelayed):
    def arms(self, target: str) -> tuple[Arm, ...]:
        return super().arms("c")


@pytest.fixture
def bench(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> CudaBench:
    monkeypatch.setattr(cuda_bench, "CapturedGraph", Launches)
    monkeypatch.setattr(cuda_bench, "live_bytes", lambda: 0)
    monkeypatch.setattr(cuda_bench, "empty_graph", lambda: Launches(lambda: None, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    opened = CudaBench(Seam(), compiler)
    opened._device = torch.device("cpu")
    return opened


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_whoever_moves_seldom_leaves_the_same_bits_when_it_does(bench: CudaBench, every: int) -> None:
    assert bench.enter(CELL, 1) == bench.input_bytes(CELL) == input_bytes(Seam(), CELL.problem, 3, "cuda")
    for candidate in (OFTEN, SELDOM):
        footprint = bench.prepare(candidate)
        assert isinstance(footprint, Footprint), footprint
        assert footprint.input_bytes == bench.input_bytes(CELL)
    weights = []
    for placement in range(1, 19):
        assert bench.move(OFTEN, placement) is None
        if placement % every == 0:
            assert bench.move(SELDOM, placement) is None, placement
            weights.append(bench._residents[SELDOM].inputs["fn"].data_ptr())
            assert weights[-1] == bench._residents[OFTEN].inputs["fn"].data_ptr()
    assert len(set(weights)) == 18 // every
    assert isinstance(bench.prepare(Twin.to(SELDOM)), Footprint)  # the inputs are still those of the check
    assert bench.forecast(OFTEN).input_bytes == bench.input_bytes(CELL)
    bench.leave()
    with pytest.raises(RuntimeError, match="enter a cell first"):
        bench.forecast(OFTEN)


def test_a_kernel_that_writes_other_bits_elsewhere_is_a_mismatch(bench: CudaBench) -> None:
    bench.enter(CELL, 1)
    assert isinstance(bench.prepare(OFTEN), Footprint)
    resident = bench._residents[OFTEN]
    inner, views = resident.graph.run, resident.buffers.bind(3)  # type: ignore[attr-defined]

    def fickle() -> None:
        inner()
        views["layer_input"][0, 0] += 1

    resident.graph.run = fickle  # type: ignore[attr-defined]
    found = bench.move(OFTEN, 1)
    assert found is not None
    assert found.kind is FailureKind.MISMATCH
    assert "other bits in layer_input" in found.detail
    bench.leave()
