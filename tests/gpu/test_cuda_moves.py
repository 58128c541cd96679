"""Finalists move: other addresses, the same bits, and not a byte more than before."""

from __future__ import annotations

import time

import pytest
import torch
from cuda_configs import CONFIGS  # type: ignore[import-not-found]

from mhctune.autotuner.cuda_bench import CudaBench
from mhctune.autotuner.graph import live_bytes
from mhctune.autotuner.records import Cell, Footprint
from mhctune.autotuner.twin import Twin
from mhctune.kernels.compiler import Compiler
from mhctune.kernels.registry import seam
from mhctune.kernels.seam import Problem

MOVED = (CONFIGS[0], CONFIGS[5], Twin.to(CONFIGS[0]))


@pytest.mark.parametrize("l2", ["warm", "cold"])
def test_finalists_move_to_other_addresses_and_leave_no_byte(compiler: Compiler, l2: str) -> None:
    cell = Cell("post_pre_delayed", Problem(5120), 12)
    compiler.request(
        [v for c in MOVED for v in seam(cell.seam).arm("cuda", c.arm).variants(cell.problem, c.config)]
    )
    bench = CudaBench(seam(cell.seam), compiler, l2)
    bench.enter(cell, 1)
    for candidate in MOVED:
        assert isinstance(bench.prepare(candidate), Footprint)
    live, slots = live_bytes(), len(bench._sets().live)
    seen = {c: [bench._residents[c].buffers.pointers()] for c in MOVED}
    weights = [bench._sets().live[0]["fn"].data_ptr()]
    begin = time.perf_counter()
    for placement in range(1, 19):
        for candidate in MOVED:
            assert bench.move(candidate, placement) is None
            seen[candidate].append(bench._residents[candidate].buffers.pointers())
        weights.append(bench._sets().live[0]["fn"].data_ptr())
        assert all(isinstance(bench.sample(c, 0, 1000 * placement, 200), float) for c in MOVED)
    taken = time.perf_counter() - begin
    for candidate in MOVED:
        assert all(a != b for a, b in zip(seen[candidate], seen[candidate][1:], strict=False))
        print(f"\n{l2}, {candidate}: {len(set(seen[candidate]))} addresses in 19 placements", end="")
        assert len(set(seen[candidate])) >= 17
    assert len(set(weights)) == 19
    # What an offset adds: 18 x 2,304 bytes before each storage, and torch's rounding to 512.
    storages = sum(len(bench._residents[c].buffers.pointers()) for c in MOVED)
    print(f"\n{l2}: {1e3 * taken / 54:.2f} ms a move and sample, {slots} slots", end="")
    assert 0 <= live_bytes() - live <= storages * (18 * 9 * 256 + 512)
    assert isinstance(bench.prepare(CONFIGS[6]), Footprint)  # the inputs are still those of the check
    bench.leave()
    torch.cuda.empty_cache()


def test_who_missed_a_move_is_moved_at_the_next_one(compiler: Compiler) -> None:
    """Inputs turn through three sets: whoever stayed reads other values than the live ones by then.

    The last one moves at every fifth placement: where it read lies across another set's values by then.
    """
    cell = Cell("post_pre_delayed", Problem(5120), 12)
    bench = CudaBench(seam(cell.seam), compiler)
    bench.enter(cell, 1)
    for candidate in MOVED:
        assert isinstance(bench.prepare(candidate), Footprint)
    for placement in range(1, 19):
        for index, candidate in enumerate(MOVED):
            if placement % (1, 2, 5)[index] == 0:
                assert bench.move(candidate, placement) is None, (placement, str(candidate))
    bench.leave()
    torch.cuda.empty_cache()
