"""The floor: what a copy of so many bytes costs on a GPU, timed as candidates are."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from mhctune.autotuner.graph import CapturedGraph
from mhctune.autotuner.protocol import UNROLL

REPLAYS, REPEATS = 10, 5


def copy_us(moved_bytes: int, device: torch.device, overhead_us: Callable[[int], float]) -> float:
    """Return the microseconds per launch of a kernel that moves `moved_bytes`: half read, half written.

    `overhead_us` tells what so many replays of a graph without nodes take. An elementwise kernel copies, not
    `copy_`: in a graph that becomes a copy node, which moved 2.8 TB/s on an H200 where kernels moved 4.1 and
    more. The same buffers are used every launch, as in a warm measurement, so that what fits is read from the
    L2. With no memory for it the answer is 0: no floor.
    """
    elements = max(1, moved_bytes // 8)
    try:
        source = torch.ones(elements, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
    except torch.OutOfMemoryError:
        return 0.0

    def copy() -> None:
        torch.neg(source, out=target)

    copy()
    graph = CapturedGraph(copy, UNROLL)
    total = statistics.median(graph.time_us(REPLAYS) for _ in range(REPEATS))
    graph.close()
    return max(0.0, total - overhead_us(REPLAYS)) / (REPLAYS * UNROLL)
