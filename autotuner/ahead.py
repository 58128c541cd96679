"""Ahead: candidates are checked and captured while other kernels are still compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mhctune.autotuner.bench import Bench
from mhctune.autotuner.records import Cell, Failure, Footprint
from mhctune.kernels.seam import Variant
from mhctune.kernels.space import Candidate

Tell = Callable[[int, int], None]
"""Hears how many kernels are compiled, of how many that were asked for."""


class Background(Protocol):
    """Compiles while its caller does something else."""

    def request(self, variants: Sequence[Variant]) -> None:
        """Begin to compile what was not asked for before, and return."""

    def wait(self, variants: Sequence[Variant], tell: Tell) -> None:
        """Return once these are compiled or have failed; `tell` hears of all that were asked for."""


class AheadBench:
    """A bench on a GPU whose candidates need not wait for each other's kernels.

    Checking and capturing are right or wrong whoever else is at work; times are not. A graph's replays are
    queued by one thread of the host, which shares the interpreter with the compiling ones and, on a machine
    with few cores, the cores: where it comes late the GPU idles between replays. So the first sample, and a
    copy that is timed as a floor, wait until no compiler runs. On the target `c` kernels are launched by the
    host and checks take its cores, too: there all is compiled first, without this.
    """

    def __init__(
        self, bench: Bench, background: Background, variants_of: Callable[[Candidate], tuple[Variant, ...]]
    ) -> None:
        """Race on `bench`, whose kernels `background` compiles; `variants_of` names a candidate's."""
        self._bench, self._background, self._variants_of = bench, background, variants_of
        self._wanted: tuple[Variant, ...] = ()
        self._running = False
        self._tell: Tell = lambda done, total: None

    def compile_all(self, variants: Sequence[Variant], tell: Tell) -> None:
        """Note what to compile, in the order in which it is needed; it begins with the next cell."""
        self._settle()
        self._wanted, self._tell = tuple(variants), tell

    def input_bytes(self, cell: Cell) -> int:
        """Return the bytes that the inputs of a cell will take."""
        return self._bench.input_bytes(cell)

    def enter(self, cell: Cell, seed: int) -> int | Failure:
        """Make fresh inputs for a cell and return their bytes, or why there is no room for them."""
        return self._bench.enter(cell, seed)

    def floor_us(self) -> float:
        """Return the microseconds of a copy of the cell's fewest bytes, timed before compiling begins."""
        self._settle()
        floor = self._bench.floor_us()
        self._begin()
        return floor

    def forecast(self, candidate: Candidate) -> Footprint:
        """Return the bytes a candidate will take."""
        return self._bench.forecast(candidate)

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        """Build, check and capture a candidate as soon as its own kernels are compiled."""
        self._begin()
        if self._running:
            self._background.wait(self._variants_of(candidate), self._tell)
        return self._bench.prepare(candidate)

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        """Time one replay, in microseconds per launch, once no compiler runs any more."""
        self._settle()
        return self._bench.sample(candidate, batch, round, launches)

    def move(self, candidate: Candidate, placement: int) -> Failure | None:
        """Give a resident candidate other addresses."""
        return self._bench.move(candidate, placement)

    def release(self, candidate: Candidate) -> None:
        """Free what a candidate holds."""
        self._bench.release(candidate)

    def leave(self) -> None:
        """Free the inputs."""
        self._bench.leave()

    def _begin(self) -> None:
        if self._wanted and not self._running:
            self._running = True
            self._background.request(self._wanted)

    def _settle(self) -> None:
        """Wait until what runs is compiled."""
        if self._running:
            self._background.wait(self._wanted, self._tell)
            self._wanted, self._running = (), False
