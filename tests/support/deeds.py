"""Benches for a real worker on a real GPU whose candidates harm it."""

from __future__ import annotations

import torch

from mhctune.autotuner.cuda_bench import CudaBench
from mhctune.autotuner.records import Failure, Footprint
from mhctune.kernels.compiler import Compiler, quiet
from mhctune.kernels.registry import seam
from mhctune.kernels.space import Candidate

ILLEGAL, SPIN = "illegal_access", "spin"
SPIN_CYCLES = 120 * 1_700_000_000
"""About 120 s: it ends by itself, so that nothing can hang a host."""


def illegal_access() -> None:
    """Write far outside every allocation."""
    import tilelang
    import tilelang.language as T

    @T.prim_func
    def stray(a: T.Tensor((32,), "float32"), far: T.int64):  # noqa: ANN202
        with T.Kernel(1, threads=32):
            a[far + T.get_thread_binding()] = T.float32(1)

    config = {"tl.disable_safe_memory_legalize": True}
    kernel = tilelang.compile(stray, target={"kind": "cuda", "arch": "sm_90a"}, pass_configs=config)
    kernel(torch.zeros(32, device="cuda"), 1 << 40)
    torch.cuda.synchronize()


class HarmfulBench(CudaBench):
    """Real candidates, and two that are not."""

    def forecast(self, candidate: Candidate) -> Footprint:
        if candidate.arm in (ILLEGAL, SPIN):
            return Footprint(0, 0, 0)
        return super().forecast(candidate)

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        if candidate.arm in (ILLEGAL, SPIN):
            return self.forecast(candidate)
        return super().prepare(candidate)

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        if candidate.arm == SPIN:
            torch.cuda._sleep(SPIN_CYCLES)
            torch.cuda.synchronize()
        if candidate.arm == ILLEGAL:
            try:
                illegal_access()
            except Exception as error:
                from mhctune.autotuner.bench import raised

                return raised(error)
        return super().sample(candidate, batch, round, launches)


def make() -> tuple[HarmfulBench, Compiler]:
    """Return the bench and compiler of a worker."""
    quiet()
    compiler = Compiler()
    return HarmfulBench(seam("post_pre_delayed"), compiler), compiler
