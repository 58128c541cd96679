"""What kernels are held against: an empty kernel and a copy kernel, in graphs, as candidates are timed."""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tilelang
import tilelang.language as T
import torch
from hopper_table import COPIED, Yardstick

from mhctune.autotuner.floor import copy_us
from mhctune.autotuner.graph import CapturedGraph, empty_graph, overhead_us
from mhctune.autotuner.protocol import UNROLL
from mhctune.kernels.compiler import PASS_CONFIG, cuda_arch

CEILING_BYTES = {"cuda": 2 * 2**30, "c": 2**28}
"""A GPU reads 1 GiB and writes as much; a CPU takes 0.1 s for an eighth of it."""
REPLAYS, ROUNDS = 10, 31
_LEAST_US = 0.2
"""No launch is faster: less means that a graph has no kernel in it."""


def yardsticks_of(target: str, asked: Mapping[str, tuple[int, Sequence[int]]]) -> dict[str, Yardstick]:
    """Return yardsticks by name, asked for by hidden size and token counts."""
    measured = cuda_yardstick if target == "cuda" else host_yardstick
    return {name: measured(hidden, counts) for name, (hidden, counts) in asked.items()}


def empty_program() -> Any:
    """Build a kernel that does nothing where `asked` is 0: a block of one warp that compares an argument.

    Without any body it would lose its launch shape: one thread and no argument, less than any kernel is. It
    has no `pdl_sync`, so that it is launched without programmatic dependent launch: each launch of a graph
    waits for the whole one ahead, and none hides in another.
    """

    @T.prim_func
    def mhctune_empty(out: T.Tensor((1,), "float32"), asked: T.int32):  # noqa: ANN202
        with T.Kernel(1, threads=32):
            if asked > 0:
                out[0] = T.float32(1)

    return mhctune_empty


def compile_empty() -> Any:
    """Compile the empty kernel for the GPU that is here, or for Hopper."""
    target = {"kind": "cuda", "arch": cuda_arch()}
    return tilelang.compile(empty_program(), target=target, pass_configs=PASS_CONFIG)


def cuda_yardstick(hidden_size: int, token_counts: Iterable[int]) -> Yardstick:
    """Measure on the current GPU: an empty kernel, copies of `COPIED` x H bytes a token, and the ceiling.

    The empty kernel waits for the one ahead of it.

    Raises:
        RuntimeError: a graph ran no kernel, or there is no memory for a copy.
    """
    device, empty = torch.device("cuda", torch.cuda.current_device()), empty_graph()

    def overhead(replays: int) -> float:
        return overhead_us(empty, replays)

    kernel, out = compile_empty(), torch.zeros(1, device=device)
    kernel(out, 0)
    torch.cuda.synchronize()
    graph = CapturedGraph(lambda: kernel(out, 0), UNROLL)
    graph.time_us(REPLAYS)
    total = statistics.median(graph.time_us(REPLAYS) for _ in range(ROUNDS))
    empty_us = (total - overhead(REPLAYS)) / (REPLAYS * UNROLL)
    graph.close()

    def copied(moved: int) -> float:
        us = copy_us(moved, device, overhead)
        torch.cuda.empty_cache()
        return _launched(us, f"the copy of {moved:,} bytes")

    copies = {count: copied(COPIED * hidden_size * count) for count in token_counts}
    ceiling = copied(CEILING_BYTES["cuda"])
    empty.close()
    return Yardstick(_launched(empty_us, "the empty kernel"), copies, CEILING_BYTES["cuda"], ceiling)


def _launched(us: float, what: str) -> float:
    if us < _LEAST_US:
        raise RuntimeError(f"{what} took {us:.3f} us a launch: it did not run, or found no memory")
    return us


def host_yardstick(hidden_size: int, token_counts: Iterable[int]) -> Yardstick:
    """Measure on the CPU; a launch costs nothing there that a kernel would be held against."""
    copies = {count: _host_copy_us(COPIED * hidden_size * count) for count in token_counts}
    return Yardstick(None, copies, CEILING_BYTES["c"], _host_copy_us(CEILING_BYTES["c"]))


def _host_copy_us(moved: int, repeats: int = 5) -> float:
    source = torch.ones(max(1, moved // 8))
    target = torch.empty_like(source)
    taken = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        torch.neg(source, out=target)
        taken.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(taken[1:])
