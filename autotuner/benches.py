"""Opening the bench of a target: a worker process that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from mhctune.autotuner.worker import Limits, RemoteBench

if TYPE_CHECKING:
    from mhctune.autotuner.bench import Bench
    from mhctune.autotuner.worker import Compiling


def make_bench(seam_name: str, target: str, l2: str, device: int = 0) -> tuple[Bench, Compiling]:
    """Return the bench of a target and the compiler it builds with; called in the worker."""
    from mhctune.autotuner.threads import threads_here
    from mhctune.kernels.compiler import Compiler, quiet
    from mhctune.kernels.registry import seam

    quiet()
    compiler = Compiler(threads_here(target))
    if target == "cuda":
        from mhctune.autotuner.cuda_bench import CudaBench

        return CudaBench(seam(seam_name), compiler, l2, device), compiler
    from mhctune.autotuner.bench import HostBench

    return HostBench(seam(seam_name), compiler), compiler


@contextmanager
def open_bench(
    seam_name: str, target: str, l2: str = "warm", limits: Limits | None = None, device: int = 0
) -> Iterator[RemoteBench]:
    """Start a worker with the bench of a target, timed `warm` or `cold`; it ends with the block."""
    bench = RemoteBench(partial(make_bench, seam_name, target, l2, device), limits)
    try:
        yield bench
    finally:
        bench.close()
