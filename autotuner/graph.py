"""CUDA graphs: unrolled launches captured once, and what capture and replays cost in memory."""

from __future__ import annotations

import contextlib
import gc
import statistics
import warnings
from collections.abc import Callable, Iterator

import torch


def live_bytes() -> int:
    """Return the allocator's live bytes on the current device.

    As `torch.cuda.memory_allocated`, which flattens all statistics first: 0.3 ms a call, eight of them a
    candidate.
    """
    return int(torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"])


def reserved_bytes() -> int:
    """Return the bytes that the allocator has reserved on the current device."""
    return int(torch.cuda.memory_stats_as_nested_dict()["reserved_bytes"]["all"]["current"])


@contextlib.contextmanager
def ignoring_empty() -> Iterator[None]:
    """Silence torch's warning that a graph without nodes was captured."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        yield


class CapturedGraph:
    """`launches` unrolled launches in one CUDA graph.

    Attributes:
        live_bytes: What the allocator's live bytes grew by during capture; zero for an arm whose outputs
            are the caller's.
        reserved_bytes: What its reserved bytes grew by: the graph's pool.
    """

    def __init__(self, run: Callable[[], None], launches: int) -> None:
        """Capture; `run` must have run before, so that nothing compiles or initialises inside.

        Not by `torch.cuda.graph`, which collects garbage and gives the allocator's reserve back at every
        capture: milliseconds a candidate, and the next one's buffers to be reserved anew. What it guards
        against, a graph that the collector destroys in mid-capture, is kept off by pausing the collector.
        """
        torch.cuda.synchronize()
        live, reserved = live_bytes(), reserved_bytes()
        self.launches = launches
        self._graph = torch.cuda.CUDAGraph()
        stream, collecting = torch.cuda.Stream(), gc.isenabled()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        gc.disable()
        try:
            with torch.cuda.stream(stream):
                # By default a call of any thread that might synchronise ends the capture; others may compile.
                self._graph.capture_begin(capture_error_mode="thread_local")
                try:
                    for _ in range(launches):
                        run()
                except BaseException:
                    # A broken capture cannot be ended without an error; the launch's own says more. Nor can
                    # one that broke at its first launch without a warning that it is empty.
                    with contextlib.suppress(RuntimeError), ignoring_empty():
                        self._graph.capture_end()
                    raise
                self._graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        torch.cuda.current_stream().wait_stream(stream)
        self.live_bytes = live_bytes() - live
        self.reserved_bytes = reserved_bytes() - reserved

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
    with ignoring_empty():
        return CapturedGraph(lambda: None, 0)


def overhead_us(graph: CapturedGraph, replays: int, repeats: int = 31) -> float:
    """Return the median microseconds of `replays` replays of a graph."""
    return statistics.median(graph.time_us(replays) for _ in range(repeats))
