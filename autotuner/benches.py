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
    from mhctune.kernels.compiler import Passes


def make_bench(seam_name: str, target: str, l2: str, passes: Passes | None = None) -> tuple[Bench, Compiling]:
    """Return the bench of a target and the compiler it builds with; called in the worker."""
    from mhctune.autotuner.threads import threads_here
    from mhctune.kernels.compiler import Compiler, compile_variant, quiet
    from mhctune.kernels.registry import seam

    quiet()
    compiler = Compiler(threads_here(target), partial(compile_variant, passes=passes))
    if target == "cuda":
        from mhctune.autotuner.cuda_bench import CudaBench

        return CudaBench(seam(seam_name), compiler, l2), compiler
    from mhctune.autotuner.bench import HostBench

    return HostBench(seam(seam_name), compiler), compiler


@contextmanager
def open_bench(
    seam_name: str,
    target: str,
    l2: str = "warm",
    limits: Limits | None = None,
    passes: Passes | None = None,
) -> Iterator[RemoteBench]:
    """Start a worker with the bench of a target, timed `warm` or `cold`; it ends with the block.

    Kernels are compiled with other `passes` (`mhctune.kernels.compiler.pass_config`) if some are given.
    """
    bench = RemoteBench(partial(make_bench, seam_name, target, l2, passes), limits)
    try:
        yield bench
    finally:
        bench.close()
