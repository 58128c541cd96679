"""The bench of the target `cuda`: candidates are captured into graphs and timed as served."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from mhctune.autotuner.bench import (
    check_release,
    fewest_bytes,
    input_bytes,
    moved_apart,
    raised,
    verdict,
)
from mhctune.autotuner.floor import copy_us
from mhctune.autotuner.graph import CapturedGraph, empty_graph, live_bytes, overhead_us
from mhctune.autotuner.inputs import InputSets, offset_of
from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint
from mhctune.autotuner.slots import cold_slots, unroll
from mhctune.kernels.buffers import OutputBuffers, Role, total_bytes
from mhctune.kernels.compiler import CompileError, Compiler
from mhctune.kernels.seam import Seam, Tensors
from mhctune.kernels.space import Candidate
from mhctune.kernels.until import END


@dataclass
class _Resident:
    buffers: OutputBuffers
    graph: CapturedGraph
    inputs: Tensors
    """What its graph reads in the first slot: not the live set, for whoever stayed when that moved."""


def ownership(
    run: Callable[[], None], graph: CapturedGraph, buffers: OutputBuffers, change: Callable[[], None]
) -> list[str]:
    """Return what contradicts that a captured candidate writes the caller's buffers and nothing else.

    `change` gives the inputs other values in place. A replay must then overwrite the poison in every slot
    and equal the directly launched candidate to the bit, at the same addresses and with no new live byte.
    """
    pointers, live = buffers.pointers(), live_bytes()
    change()
    buffers.poison()
    run()
    expected = [tensor.clone() for tensor in buffers.storages()]
    buffers.poison()
    graph.replay()
    torch.cuda.synchronize()
    same = [bool(torch.equal(a, b)) for a, b in zip(expected, buffers.storages(), strict=True)]
    del expected
    findings = []
    if not all(same):
        names = [name for name, ok in zip(buffers.names(), same, strict=True) if not ok]
        findings.append(f"a replay with changed inputs left other bits than a launch in {', '.join(names)}")
    if graph.live_bytes:
        findings.append(f"capture allocated {graph.live_bytes:,} bytes: outputs are not the caller's")
    if graph.reserved_bytes:
        findings.append(f"capture reserved {graph.reserved_bytes:,} bytes that nobody budgeted")
    if buffers.pointers() != pointers:
        findings.append("the buffers moved")
    grown = live_bytes() - live
    if grown:
        findings.append(f"launch and replay left {grown:,} live bytes")
    return findings


def _apart(slots: Sequence[tuple[Tensors, Tensors]]) -> Failure | None:
    """Return the mismatch of slots that left other bits than the first one from the same inputs."""
    first = {name: view.clone() for name, view in slots[0][1].items()} if len(slots) > 1 else {}
    wrong = [
        f"{name} in slot {at}"
        for at, (_, views) in enumerate(slots[1:], start=1)
        for name, view in first.items()
        if not torch.equal(view, views[name])
    ]
    detail = f"equal inputs left other bits than in slot 0: {', '.join(wrong[:4])}"
    return Failure(FailureKind.MISMATCH, detail) if wrong else None


class CudaBench:
    """Runs candidates on one GPU, in this process.

    A candidate's buffers are the same storage when it is checked, captured, primed, timed and replayed. Two
    sets of inputs are kept beside the live ones, so that a replay can be checked with changed values, and lie
    elsewhere with every placement. Timed
    cold, inputs and buffers have several slots, which the launches of a graph take in turn.

    Until an output, a kernel of nobody's stands behind each launch, and graphs of it alone are subtracted: a
    first kernel may let the next one begin while it runs, which would then be our own first kernel again and
    hide its start; when served it is another's, behind which nothing of ours is hidden.
    """

    def __init__(
        self, seam: Seam, compiler: Compiler, l2: str = "warm", device: int = 0, until: str = END
    ) -> None:
        """Measure a seam's candidates, `warm` or `cold`, on a GPU by index, to the end or to an output."""
        self._seam, self._compiler, self._l2, self._until = seam, compiler, l2, until
        self._device = torch.device("cuda", device)
        torch.cuda.set_device(self._device)
        # Kept open: torch holds 1,024 live bytes of random state while any graph exists, which would count
        # against the first candidate.
        self._empty = empty_graph()
        self._overhead: dict[int, float] = {}
        self._apart: torch.Tensor | None = None
        self._apart_us: dict[tuple[int, int], float] = {}
        self._residents: dict[Candidate, _Resident] = {}
        self._cell: Cell | None = None
        self._placement = 0
        self._inputs: InputSets | None = None

    def input_bytes(self, cell: Cell) -> int:
        """Return the bytes that the inputs of a cell will take."""
        return input_bytes(self._seam, cell.problem, cell.num_tokens, "cuda", self._slots_of(cell))

    def _slots_of(self, cell: Cell) -> int:
        if self._l2 == "warm":
            return 1
        l2_bytes = torch.cuda.get_device_properties(self._device).L2_cache_size
        return cold_slots(self._seam, cell.problem, cell.num_tokens, l2_bytes)

    def enter(self, cell: Cell, seed: int) -> int | Failure:
        """Make fresh inputs for a cell and return their bytes, or why there is no room for them."""
        self._cell, self._placement = cell, 0
        # Anew in each cell: unlike a graph without nodes it runs at the clocks of the moment.
        self._apart_us.clear()
        if self._until != END and self._apart is None:
            self._apart = torch.zeros(1, device=self._device)

        def draw(seed: int) -> Tensors:
            return self._seam.inputs(cell.problem, cell.num_tokens, seed, "cpu")

        try:
            self._inputs = InputSets(draw, (seed, seed + 2**30), self._device, self._slots_of(cell))
        except (MemoryError, RuntimeError) as error:
            return raised(error)
        # Every capture collects garbage; what the compiler left behind need not be walked each time.
        gc.collect()
        gc.freeze()
        return self._inputs.bytes

    def floor_us(self) -> float:
        """Return the microseconds that a copy of the cell's fewest bytes takes, timed as candidates are."""
        cell = self._entered()
        bytes_ = fewest_bytes(self._seam, cell.problem, cell.num_tokens, self._until)
        return copy_us(bytes_, self._device, self._replay_overhead)

    def forecast(self, candidate: Candidate) -> Footprint:
        """Return the bytes a candidate will take: capture adds nothing to what the caller owns."""
        cell = self._entered()
        specs = self._seam.arm("cuda", candidate.arm).plan(cell.problem, candidate.config, cell.num_tokens)
        outputs = total_bytes(specs, Role.OUTPUT)
        inputs = self._sets()
        slots = len(inputs.live)
        return Footprint(inputs.bytes, slots * outputs, slots * (total_bytes(specs) - outputs))

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        """Build, allocate, check, capture and prime a candidate; it stays resident unless it fails."""
        try:
            return self._prepare(candidate)
        except CompileError as error:
            return Failure(FailureKind.COMPILE, str(error))
        except Exception as error:  # candidates run here: whatever they raise is their failure row
            failure = raised(error)
        # Not before the block has ended: the exception's frames hold the buffers of the candidate.
        if failure.kind is FailureKind.OUT_OF_MEMORY:
            self._collect()
        return failure

    def _prepare(self, candidate: Candidate) -> Footprint | Failure:
        cell, before = self._entered(), live_bytes()
        buffers, slots, run, whole = self._bound(candidate)
        self._sets().change(0)
        buffers.poison()
        whole()
        torch.cuda.synchronize()
        failure = verdict(self._seam.check(cell.problem, *slots[0])) or _apart(slots)
        if failure is None and self._until != END:
            arm = self._seam.arm("cuda", candidate.arm)
            failure = check_release(self._seam, cell, arm, candidate, self._until, *slots[0], run)
        if failure is not None:
            return failure
        graph = CapturedGraph(run, unroll(len(slots)) // len(slots))
        findings = self._ownership(run, graph, buffers)
        if findings:
            graph.close()
            return Failure(FailureKind.MISMATCH, "; ".join(findings))
        self._residents[candidate] = _Resident(buffers, graph, slots[0][0])
        measured = live_bytes() - before
        return replace(self.forecast(candidate), graph_bytes=graph.reserved_bytes, measured_bytes=measured)

    def _bound(
        self, candidate: Candidate, offset_bytes: int = 0
    ) -> tuple[OutputBuffers, list[tuple[Tensors, Tensors]], Callable[[], None], Callable[[], None]]:
        """Allocate a candidate's buffers; return them, the slots' tensors, and what launches in all slots.

        First what is timed, then the whole of it: the same, unless it is timed until an output is complete.
        """
        cell, config, live = self._entered(), candidate.config, self._sets().live
        arm = self._seam.arm("cuda", candidate.arm)
        kernels = [self._compiler.get(variant).run for variant in arm.variants(cell.problem, config)]
        specs = arm.plan(cell.problem, config, cell.num_tokens)
        buffers = OutputBuffers(specs, self._device, len(live), offset_bytes)
        slots: list[tuple[Tensors, Tensors]] = [
            (inputs, buffers.bind(cell.num_tokens, at)) for at, inputs in enumerate(live)
        ]

        def bound(until: str) -> Callable[[], None]:
            launch = arm.bind_until(cell.problem, config, kernels, until)

            def run() -> None:
                for inputs, views in slots:
                    launch(inputs, views)
                    if until != END:
                        self._launch_apart()

            return run

        return buffers, slots, bound(self._until), bound(END)

    def _launch_apart(self) -> None:
        """Launch the kernel of nobody's; it waits for all ahead of it, and all behind wait for it."""
        assert self._apart is not None
        self._apart.add_(1)

    def move(self, candidate: Candidate, placement: int) -> Failure | None:
        """Capture a resident candidate anew, with buffers and inputs at other addresses."""
        try:
            failure = self._move(candidate, placement)
        except Exception as error:  # candidates run here: whatever they raise is their failure row
            failure = raised(error)
        # Not before the block has ended: the exception's frames hold the buffers of the candidate.
        if failure is not None and failure.kind is FailureKind.OUT_OF_MEMORY:
            self._collect()
        return failure

    def _move(self, candidate: Candidate, placement: int) -> Failure | None:
        if placement != self._placement:
            self._sets().turn(placement)
            self._placement = placement
        old = self._residents[candidate]
        buffers, slots, run, _ = self._bound(candidate, offset_of(placement))
        graph = CapturedGraph(run, unroll(len(slots)) // len(slots))
        buffers.poison()
        with self._sets().showing(old.inputs) as restore:
            old.graph.replay()
            restore()
            graph.replay()
            torch.cuda.synchronize()
        failure = moved_apart(old.buffers, buffers)
        if failure is not None:
            graph.close()
            return failure
        old.graph.close()
        self._residents[candidate] = _Resident(buffers, graph, slots[0][0])
        return None

    def _ownership(self, run: Callable[[], None], graph: CapturedGraph, buffers: OutputBuffers) -> list[str]:
        return ownership(run, graph, buffers, lambda: self._sets().change(1))

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        """Time replays of the candidate's graph, less those of a graph without its kernels, per launch."""
        launched = unroll(len(self._sets().live))
        replays = max(1, -(-launches // launched))
        try:
            to_end = self._until == END
            overhead = self._replay_overhead(replays) if to_end else self._apart_overhead(replays, launched)
            total = self._residents[candidate].graph.time_us(replays)
        except Exception as error:  # candidates run here: whatever they raise is their failure row
            return raised(error)
        return (total - overhead) / (replays * launched)

    def _replay_overhead(self, replays: int) -> float:
        if replays not in self._overhead:
            self._overhead[replays] = overhead_us(self._empty, replays)
        return self._overhead[replays]

    def _apart_overhead(self, replays: int, launches: int) -> float:
        """Return what so many replays of so many kernels of nobody's take."""
        if (replays, launches) not in self._apart_us:
            graph = CapturedGraph(self._launch_apart, launches)
            graph.time_us(replays)
            self._apart_us[replays, launches] = overhead_us(graph, replays)
            graph.close()
        return self._apart_us[replays, launches]

    def release(self, candidate: Candidate) -> None:
        """Free what a candidate holds."""
        resident = self._residents.pop(candidate, None)
        if resident is not None:
            resident.graph.close()

    def leave(self) -> None:
        """Free the inputs and give the allocator's reserve back."""
        for candidate in list(self._residents):
            self.release(candidate)
        self._inputs, self._cell = None, None
        gc.unfreeze()
        self._collect()

    def healthy(self) -> bool:
        """Whether the device still works: an illegal access makes every later call of the process fail."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    @staticmethod
    def _collect() -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def _sets(self) -> InputSets:
        if self._inputs is None:
            raise RuntimeError("enter a cell first")
        return self._inputs

    def _entered(self) -> Cell:
        if self._cell is None:
            raise RuntimeError("enter a cell first")
        return self._cell
