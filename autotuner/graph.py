"""CUDA graphs: unrolled launches captured once, and what capture and replays cost in memory."""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable

import torch


class CapturedGraph:
    """`launches` unrolled launches in one CUDA graph.

    Attributes:
        live_bytes: What the allocator's live bytes grew by during capture; zero for an arm whose outputs
            are the caller's.
        reserved_bytes: What its reserved bytes grew by: the graph's pool.
    """

    def __init__(self, run: Callable[[], None], launches: int) -> None:
        """Capture; `run` must have run before, so that nothing compiles or initialises inside."""
        torch.cuda.synchronize()
        # torch gives its reserve back when a capture begins: not to be counted as the capture's.
        gc.collect()
        torch.cuda.empty_cache()
        live, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        self.launches = launches
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(launches):
                run()
        self.live_bytes = torch.cuda.memory_allocated() - live
        self.reserved_bytes = torch.cuda.memory_reserved() - reserved

    def replay(self) -> None:
        """Replay on the current stream; returns before it has finished."""
        self._graph.replay()

    def time_us(self, replays: int) -> float:
        """Replay and return the microseconds between two events around all replays."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(replays):
            self._graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def close(self) -> None:
        """Free the graph and its share of the pool."""
        self._graph.reset()


def empty_graph() -> CapturedGraph:
    """Capture a graph without nodes: replaying it costs what a replay costs by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        return CapturedGraph(lambda: None, 0)


def overhead_us(graph: CapturedGraph, replays: int, repeats: int = 31) -> float:
    """Return the median microseconds of `replays` replays of a graph."""
    return statistics.median(graph.time_us(replays) for _ in range(repeats))
