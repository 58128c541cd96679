"""A bench of hostile candidates: it runs in a real worker, which imports this file by name."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence

from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint
from mhctune.kernels.seam import Variant
from mhctune.kernels.space import Candidate

HARMLESS, SEGFAULT, EXIT, LOOP, KILL, ABORT, RAISE, LOSE_DEVICE = range(8)
PREPARE, SAMPLE = range(2)


def candidate(deed: int, when: int = SAMPLE, number: int = 0) -> Candidate:
    """Return a candidate that commits a deed when it is prepared or sampled."""
    return Candidate.of("hostile", {"deed": deed, "when": when, "number": number})


class HostileBench:
    """Holds no memory; a sample is 100 us plus the candidate's number."""

    def __init__(self) -> None:
        self._residents: set[Candidate] = set()
        self._lost = False

    def input_bytes(self, cell: Cell) -> int:
        return 1000

    def enter(self, cell: Cell, seed: int) -> int:
        return 1000

    def floor_us(self) -> float:
        return 0.0

    def forecast(self, candidate: Candidate) -> Footprint:
        return Footprint(1000, 100, 0)

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        failure = self._commit(candidate, PREPARE)
        if failure is not None:
            return failure
        self._residents.add(candidate)
        return self.forecast(candidate)

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        if candidate not in self._residents:
            return Failure(FailureKind.LAUNCH, f"{candidate} is not resident in this worker")
        return self._commit(candidate, SAMPLE) or 100.0 + candidate.config["number"]

    def move(self, candidate: Candidate, placement: int) -> Failure | None:
        return None

    def release(self, candidate: Candidate) -> None:
        self._residents.discard(candidate)

    def leave(self) -> None:
        self._residents.clear()

    def healthy(self) -> bool:
        return not self._lost

    def _commit(self, candidate: Candidate, when: int) -> Failure | None:
        if candidate.config["when"] != when:
            return None
        match candidate.config["deed"]:
            case 1:
                ctypes.string_at(0)
            case 2:
                os._exit(3)
            case 3:
                while True:
                    time.sleep(0.01)
            case 4:
                os.kill(os.getpid(), signal.SIGKILL)
            case 5:
                os.abort()
            case 6:
                return Failure(FailureKind.LAUNCH, "RuntimeError: no")
            case 7:
                self._lost = True
                return Failure(
                    FailureKind.LAUNCH, "AcceleratorError: an illegal memory access was encountered"
                )
        return None


class HostileCompiler:
    """Compiles by doing nothing, unless a variant is called `fatal`."""

    def compile_all(self, variants: Sequence[Variant], tell: Callable[[int, int], None]) -> None:
        for done, variant in enumerate(variants, start=1):
            if variant.kernel == "fatal":
                os.abort()
            tell(done, len(variants))

    def request(self, variants: Sequence[Variant]) -> None:
        """Begin nothing."""

    wait = compile_all


def make() -> tuple[HostileBench, HostileCompiler]:
    """Return the bench and compiler of a worker."""
    return HostileBench(), HostileCompiler()


def refuse() -> tuple[HostileBench, HostileCompiler]:
    """Fail to start."""
    raise RuntimeError("no device")
