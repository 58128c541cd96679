"""Opening the bench of a target: a worker process that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from mhctune.autotuner.worker import Limits, RemoteBench
from mhctune.kernels.until import END

if TYPE_CHECKING:
    from mhctune.autotuner.bench import Bench
    from mhctune.autotuner.records import Cell, Failure, Footprint
    from mhctune.autotuner.worker import Compiling
    from mhctune.kernels.compiler import Passes
    from mhctune.kernels.space import Candidate


class SeamsBench:
    """A bench of several seams: that of the cell which is entered.

    One worker then serves a family: to start another takes 8 s, and seams share kernels.
    """

    def __init__(self, first: str, make: Callable[[str], Bench]) -> None:
        """Open the first seam's bench now (a broken device shows then), others with their cells."""
        self._make = make
        self._benches: dict[str, Bench] = {first: make(first)}
        self._entered: Bench | None = None

    def _of(self, cell: Cell) -> Bench:
        if cell.seam not in self._benches:
            self._benches[cell.seam] = self._make(cell.seam)
        return self._benches[cell.seam]

    @property
    def _bench(self) -> Bench:
        if self._entered is None:
            raise RuntimeError("enter a cell first")
        return self._entered

    def input_bytes(self, cell: Cell) -> int:
        """Return the bytes that the inputs of a cell will take, without touching the device."""
        return self._of(cell).input_bytes(cell)

    def enter(self, cell: Cell, seed: int) -> int | Failure:
        """Make fresh inputs for a cell and return their bytes, or why there is no room for them."""
        self._entered = self._of(cell)
        return self._entered.enter(cell, seed)

    def floor_us(self) -> float:
        """Return the microseconds of a copy of the cell's fewest bytes; 0 where it says nothing."""
        return self._bench.floor_us()

    def forecast(self, candidate: Candidate) -> Footprint:
        """Return the bytes a candidate will take, without touching the device."""
        return self._bench.forecast(candidate)

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        """Build, allocate, check and prime a candidate; it stays resident unless it fails."""
        return self._bench.prepare(candidate)

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        """Time one replay, in microseconds per launch."""
        return self._bench.sample(candidate, batch, round, launches)

    def move(self, candidate: Candidate, placement: int) -> Failure | None:
        """Give a resident candidate other addresses."""
        return self._bench.move(candidate, placement)

    def release(self, candidate: Candidate) -> None:
        """Free what a candidate holds."""
        self._bench.release(candidate)

    def leave(self) -> None:
        """Free the inputs; without a cell there are none."""
        if self._entered is not None:
            self._entered.leave()

    def healthy(self) -> bool:
        """Whether the device still works, where the bench can say so."""
        return bool(getattr(self._bench, "healthy", lambda: True)())


def make_bench(
    seam_name: str,
    target: str,
    l2: str,
    device: int = 0,
    passes: Passes | None = None,
    until: str = END,
) -> tuple[Bench, Compiling]:
    """Return the bench of a target, for a seam first, and its compiler; called in the worker."""
    from mhctune.autotuner.threads import threads_here
    from mhctune.kernels.compiler import Compiler, compile_variant, quiet
    from mhctune.kernels.registry import seam

    quiet()
    compiler = Compiler(threads_here(target), partial(compile_variant, passes=passes))
    if target == "cuda":
        from mhctune.autotuner.cuda_bench import CudaBench

        return SeamsBench(
            seam_name, lambda name: CudaBench(seam(name), compiler, l2, device, until)
        ), compiler
    from mhctune.autotuner.bench import HostBench

    return SeamsBench(seam_name, lambda name: HostBench(seam(name), compiler, until=until)), compiler


@contextmanager
def open_bench(
    seam_name: str,
    target: str,
    l2: str = "warm",
    limits: Limits | None = None,
    device: int = 0,
    passes: Passes | None = None,
    until: str = END,
) -> Iterator[RemoteBench]:
    """Start a worker with the bench of a target, timed `warm` or `cold`; it ends with the block.

    Launches are timed to their end, or `until` an output is complete. Kernels are compiled with other
    `passes` (`mhctune.kernels.compiler.pass_config`) if some are given.
    """
    bench = RemoteBench(partial(make_bench, seam_name, target, l2, device, passes, until), limits)
    try:
        yield bench
    finally:
        bench.close()
