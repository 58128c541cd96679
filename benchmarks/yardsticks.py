"""What kernels are held against, in graphs, as candidates are timed.

An empty kernel, a copy kernel, and what ships as it is described.
"""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import tilelang
import tilelang.language as T
import torch
from described import compile_all, described_us
from hopper_yardstick import COPIED, Asked, Yardstick

from mhctune.autotuner.floor import copy_us
from mhctune.autotuner.graph import CapturedGraph, empty_graph, overhead_us
from mhctune.autotuner.protocol import UNROLL
from mhctune.kernels.compiler import PASS_CONFIG, Compiler, cuda_arch

CEILING_BYTES = {"cuda": 2 * 2**30, "c": 2**28}
"""A GPU reads 1 GiB and writes as much; a CPU takes 0.1 s for an eighth of it."""
EMPTY_PROGRAMS, EMPTY_THREADS = 60, 128
"""Six tiles of columns and ten splits: `fused` at one token and hidden 5120. One warp alone took 0.41 us."""
REPLAYS, ROUNDS = 10, 31
_LEAST_US = 0.2
"""No launch is faster: less means that a graph has no kernel in it."""


def yardsticks_of(target: str, asked: Mapping[str, Asked]) -> dict[str, Yardstick]:
    """Return yardsticks by name."""
    if target != "cuda":
        return {name: host_yardstick(each) for name, each in asked.items()}
    compiled = compile_all(asked.values())
    try:
        return {name: cuda_yardstick(each, compiled) for name, each in asked.items()}
    finally:
        compiled.close()


def empty_program() -> Any:
    """Build a kernel that does nothing where `asked` is 0, of the seam's first kernel's shape at one token.

    Without any body it would lose its shape: one thread and no argument, less than any kernel is. It
    has no `pdl_sync`, so that it is launched without programmatic dependent launch: each launch of a graph
    waits for the whole one ahead, and none hides in another.
    """

    @T.prim_func
    def mhctune_empty(out: T.Tensor((1,), "float32"), asked: T.int32):  # noqa: ANN202
        with T.Kernel(EMPTY_PROGRAMS, threads=EMPTY_THREADS):
            if asked > 0:
                out[0] = T.float32(1)

    return mhctune_empty


def compile_empty() -> Any:
    """Compile the empty kernel for the GPU that is here, or for Hopper."""
    target = {"kind": "cuda", "arch": cuda_arch()}
    return tilelang.compile(empty_program(), target=target, pass_configs=PASS_CONFIG)


def cuda_yardstick(asked: Asked, compiled: Compiler) -> Yardstick:
    """Measure on the current GPU: an empty kernel, copies of `COPIED` x H bytes a token, the ceiling.

    And what ships as described, from the kernels that `compile_all` compiled. The empty kernel waits for the
    one ahead of it.

    Raises:
        RuntimeError: a graph ran no kernel, or there is no memory for a copy.
        NoReproduction: what is described computes something else.
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

    hidden_size = asked.problem.hidden_size
    copies = {count: copied(COPIED * hidden_size * count) for count in asked.token_counts}
    ceiling = copied(CEILING_BYTES["cuda"])
    taken, who = described_us(asked, compiled, overhead)
    for count, us in taken.items():
        _launched(us, f"what ships, at {count} tokens,")
    empty.close()
    launched_us = _launched(empty_us, "the empty kernel")
    return Yardstick(launched_us, copies, CEILING_BYTES["cuda"], ceiling, taken, who)


def _launched(us: float, what: str) -> float:
    if us < _LEAST_US:
        raise RuntimeError(f"{what} took {us:.3f} us a launch: it did not run, or found no memory")
    return us


def host_yardstick(asked: Asked) -> Yardstick:
    """Measure on the CPU; a launch costs nothing there that a kernel would be held against.

    Nor is anything described that ships for it.
    """
    hidden_size = asked.problem.hidden_size
    copies = {count: _host_copy_us(COPIED * hidden_size * count) for count in asked.token_counts}
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
