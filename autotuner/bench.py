"""The bench: where candidates are built, checked, primed and timed on one device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from mhctune.autotuner.inputs import SLACK_BYTES, offset_of
from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint
from mhctune.autotuner.timer import HostTimer, Slot, Timer
from mhctune.kernels.buffers import OutputBuffers, Role, poison, total_bytes
from mhctune.kernels.compiler import CompileError, Compiler
from mhctune.kernels.seam import Arm, Deviation, Problem, Seam, Tensors
from mhctune.kernels.space import Candidate
from mhctune.kernels.until import END

SPARE_SETS = {"c": 0, "cuda": 2}
"""Input sets that the bench of a target holds beside the live ones: on a GPU two sets of values."""


class BenchLost(Exception):
    """A bench that is gone and could not be replaced: the failure that explains it."""

    def __init__(self, failure: Failure) -> None:
        """Keep the failure."""
        super().__init__(failure.detail)
        self.failure = failure


class Bench(Protocol):
    """Holds the inputs of one cell and the candidates that are resident in it."""

    def input_bytes(self, cell: Cell) -> int:
        """Return the bytes that the inputs of a cell will take, without touching the device."""

    def enter(self, cell: Cell, seed: int) -> int | Failure:
        """Make fresh inputs for a cell and return their bytes, or why there is no room for them."""

    def floor_us(self) -> float:
        """Return the microseconds of a copy of the cell's fewest bytes; 0 where it says nothing."""

    def forecast(self, candidate: Candidate) -> Footprint:
        """Return the bytes a candidate will take, without touching the device."""

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        """Build, allocate, check and prime a candidate; it stays resident unless it fails."""

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        """Time one replay, in microseconds per launch."""

    def move(self, candidate: Candidate, placement: int) -> Failure | None:
        """Give a resident candidate other addresses; it must leave the same bits there.

        Its old buffers live until the new ones are allocated, so that these lie elsewhere. Whoever finds no
        memory stays where it is, and is told so by a failure; after any other failure it has to be released.
        """

    def release(self, candidate: Candidate) -> None:
        """Free what a candidate holds."""

    def leave(self) -> None:
        """Free the inputs."""


@dataclass
class _Resident:
    buffers: OutputBuffers
    run: Callable[[], None]


def verdict(deviations: list[Deviation]) -> Failure | None:
    """Return the mismatch that a check found, or None."""
    wrong = [str(deviation) for deviation in deviations if not deviation.ok]
    return Failure(FailureKind.MISMATCH, "; ".join(wrong)) if wrong else None


def check_release(
    seam: Seam,
    cell: Cell,
    arm: Arm,
    candidate: Candidate,
    until: str,
    inputs: Tensors,
    views: Tensors,
    run: Callable[[], None],
) -> Failure | None:
    """Return the mismatch of a launch that ends too early for what its arm says is complete by then.

    `views` hold what a whole launch wrote, which was checked, and are poisoned before `run` launches up to
    `until`. What is released by then is compared with the reference, which is computed from the streams of
    the whole launch: an arm may release its layer input before they are stored.
    """
    launches = arm.launches_until(cell.problem, candidate.config, until)
    released = [n for n, at in arm.releases(cell.problem, candidate.config).items() if at <= launches]
    names, outputs = {until, *released}, seam.outputs(cell.problem, cell.num_tokens)
    whole = {spec.name: views[spec.name].clone() for spec in outputs}
    for view in views.values():
        poison(view)
    run()
    found = seam.check(cell.problem, inputs, {**whole, **{name: views[name] for name in names}})
    failure = verdict([deviation for deviation in found if deviation.output in names])
    if failure is None:
        return None
    every = len(arm.variants(cell.problem, candidate.config))
    return Failure(failure.kind, f"after {launches} of {every} launches, until {until}: {failure.detail}")


def moved_apart(old: OutputBuffers, new: OutputBuffers) -> Failure | None:
    """Return the mismatch of buffers that a candidate wrote other bits to than to those it was checked in."""
    pairs = zip(old.names(), old.storages(), new.storages(), strict=True)
    wrong = [name for name, before, after in pairs if not torch.equal(before, after)]
    detail = f"at other addresses equal inputs left other bits in {', '.join(wrong[:4])}"
    return Failure(FailureKind.MISMATCH, detail) if wrong else None


def raised(error: Exception) -> Failure:
    """Return the failure that an exception of a candidate is."""
    # torch's host allocator raises a plain RuntimeError; so do graphs and modules that the driver refuses.
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    text = str(error)
    no_memory = known or "DefaultCPUAllocator" in text or "out of memory" in text.lower()
    kind = FailureKind.OUT_OF_MEMORY if no_memory else FailureKind.LAUNCH
    return Failure(kind, f"{type(error).__name__}: {text}")


def tensor_bytes(seam: Seam, problem: Problem, num_tokens: int) -> int:
    """Return the bytes of one set of a cell's inputs; every input is affine in the tokens."""
    return _measures(seam, problem, num_tokens)[0]


def _measures(
    seam: Seam, problem: Problem, num_tokens: int, needed: frozenset[str] | None = None
) -> tuple[int, int]:
    """Return bytes and number of the tensors of one set of inputs, or of those that are needed."""
    one, two = (
        [
            t.numel() * t.element_size()
            for name, t in seam.inputs(problem, tokens, 0, "cpu").items()
            if needed is None or name in needed
        ]
        for tokens in (1, 2)
    )
    return sum(one) + (num_tokens - 1) * (sum(two) - sum(one)), len(one)


def input_bytes(seam: Seam, problem: Problem, num_tokens: int, target: str, slots: int = 1) -> int:
    """Return the bytes of a cell's inputs on the bench of a target: a live set a slot, and the spare ones.

    Where there are spare ones, they and one live set move: each of their tensors has some slack.
    """
    spare, (one, tensors) = SPARE_SETS[target], _measures(seam, problem, num_tokens)
    return (spare + slots) * one + ((spare + 1) * SLACK_BYTES * tensors if spare else 0)


def fewest_bytes(seam: Seam, problem: Problem, num_tokens: int, until: str = END) -> int:
    """Return the bytes that no arm can do without: every input read once, every output written once.

    Until one output is complete: what is read for it, and it alone.
    """
    needed = seam.needs(problem, until)
    outputs = [s for s in seam.outputs(problem, num_tokens) if needed is None or s.name in needed]
    return _measures(seam, problem, num_tokens, needed)[0] + total_bytes(outputs)


class HostBench:
    """The bench of the target `c`, in this process.

    A candidate's buffers are the same storage from its check to its last sample.
    """

    def __init__(self, seam: Seam, compiler: Compiler, timer: Timer | None = None, until: str = END) -> None:
        """Measure a seam's candidates with a timer (default: the host's clock), to the end or an output."""
        self._seam, self._compiler, self._timer = seam, compiler, timer or HostTimer()
        self._until = until
        self._residents: dict[Candidate, _Resident] = {}
        self._cell: Cell | None = None
        self._inputs: dict[str, torch.Tensor] = {}
        self._input_bytes = 0

    def input_bytes(self, cell: Cell) -> int:
        """Return the bytes that the inputs of a cell will take."""
        return input_bytes(self._seam, cell.problem, cell.num_tokens, "c")

    def enter(self, cell: Cell, seed: int) -> int | Failure:
        """Make fresh inputs for a cell and return their bytes, or why there is no room for them."""
        self._cell = cell
        try:
            self._inputs = self._seam.inputs(cell.problem, cell.num_tokens, seed, "cpu")
        except (MemoryError, RuntimeError) as error:
            return raised(error)
        self._input_bytes = sum(t.numel() * t.element_size() for t in self._inputs.values())
        return self._input_bytes

    def floor_us(self) -> float:
        """Return 0: in a processor's caches, and with more than one core, no copy is a floor."""
        return 0.0

    def forecast(self, candidate: Candidate) -> Footprint:
        """Return the bytes a candidate will take."""
        cell = self._entered()
        specs = self._arm(candidate).plan(cell.problem, candidate.config, cell.num_tokens)
        outputs = total_bytes(specs, Role.OUTPUT)
        return Footprint(self._input_bytes, outputs, total_bytes(specs) - outputs)

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        """Build, allocate, check and prime a candidate; it stays resident unless it fails."""
        try:
            return self._prepare(candidate)
        except CompileError as error:
            return Failure(FailureKind.COMPILE, str(error))
        except Exception as error:  # candidates run here: whatever they raise is their failure row
            return raised(error)

    def _prepare(self, candidate: Candidate) -> Footprint | Failure:
        cell, whole = self._entered(), self._launched(candidate, END)
        views = whole.buffers.bind(cell.num_tokens)
        failure = verdict(self._seam.check(cell.problem, self._inputs, views))
        if failure is None and self._until != END:
            whole.run = self._bound(candidate, self._until, views)
            failure = check_release(
                self._seam, cell, self._arm(candidate), candidate, self._until, self._inputs, views, whole.run
            )
        if failure is not None:
            return failure
        self._residents[candidate] = whole
        return replace(self.forecast(candidate), measured_bytes=whole.buffers.bytes)

    def _launched(self, candidate: Candidate, until: str, offset_bytes: int = 0) -> _Resident:
        """Allocate a candidate's buffers, poison them and launch it once."""
        cell, arm, config = self._entered(), self._arm(candidate), candidate.config
        specs = arm.plan(cell.problem, config, cell.num_tokens)
        buffers = OutputBuffers(specs, "cpu", offset_bytes=offset_bytes)
        run = self._bound(candidate, until, buffers.bind(cell.num_tokens))
        buffers.poison()
        run()
        return _Resident(buffers, run)

    def _bound(self, candidate: Candidate, until: str, views: Tensors) -> Callable[[], None]:
        """Return what launches a candidate, until then, into these buffers."""
        problem, arm, config = self._entered().problem, self._arm(candidate), candidate.config
        kernels = [self._compiler.get(variant).run for variant in arm.variants(problem, config)]
        launch, inputs = arm.bind_until(problem, config, kernels, until), self._inputs
        return lambda: launch(inputs, views)

    def move(self, candidate: Candidate, placement: int) -> Failure | None:
        """Give a resident candidate other addresses for what it writes; the inputs stay where they are."""
        try:
            moved = self._launched(candidate, self._until, offset_of(placement))
        except Exception as error:  # candidates run here: whatever they raise is their failure row
            return raised(error)
        failure = moved_apart(self._residents[candidate].buffers, moved.buffers)
        if failure is None:
            self._residents[candidate] = moved
        return failure

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        """Time one replay, in microseconds per launch."""
        slot = Slot(self._entered(), candidate, batch, round)
        try:
            return self._timer.time(slot, self._residents[candidate].run, launches)
        except Exception as error:  # candidates run here: whatever they raise is their failure row
            return raised(error)

    def release(self, candidate: Candidate) -> None:
        """Free what a candidate holds."""
        self._residents.pop(candidate, None)

    def leave(self) -> None:
        """Free the inputs."""
        self._residents.clear()
        self._inputs, self._cell = {}, None
        gc.collect()

    def _entered(self) -> Cell:
        if self._cell is None:
            raise RuntimeError("enter a cell first")
        return self._cell

    def _arm(self, candidate: Candidate) -> Arm:
        return self._seam.arm("c", candidate.arm)
