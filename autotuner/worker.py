"""The worker: candidates run in a process of their own, which may hang, crash or be killed."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from mhctune.autotuner.bench import Bench
from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint
from mhctune.kernels.seam import Variant
from mhctune.kernels.space import Candidate


class Compiling(Protocol):
    """What a worker builds with."""

    def compile_all(self, variants: Sequence[Variant], tell: Callable[[int, int], None]) -> None:
        """Compile all variants; `tell` hears how many are done."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a worker may take, in seconds, before it is killed."""

    start_s: float = 120.0
    prepare_s: float = 180.0
    sample_s: float = 60.0
    compile_s: float = 600.0
    """Without any kernel finishing."""


class WorkerLost(Exception):
    """The worker is gone: the failure that explains it."""

    def __init__(self, failure: Failure) -> None:
        """Keep the failure."""
        super().__init__(failure.detail)
        self.failure = failure


def _serve(connection: Connection, make: Callable[[], tuple[Bench, Compiling]]) -> None:
    """Answer calls until the connection closes. Runs in the worker."""
    # The terminal sends SIGINT to the whole group: the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    bench, compiler = make()
    connection.send(("ready", None))
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        if name == "compile_all":
            compiler.compile_all(arguments[0], lambda done, total: connection.send(("told", (done, total))))
            connection.send(("done", None))
            continue
        result = getattr(bench, name)(*arguments)
        healthy = getattr(bench, "healthy", lambda: True)
        connection.send(("done" if not isinstance(result, Failure) or healthy() else "lost", result))


class RemoteBench:
    """A bench in a spawned worker process; the parent keeps database and terminal.

    A worker that dies, hangs past its limit or loses its device costs one failure, that of the candidate it
    was working on. A fresh worker then gets the cell and the other residents back.
    """

    def __init__(self, make: Callable[[], tuple[Bench, Compiling]], limits: Limits | None = None) -> None:
        """Start a worker; `make` is called in it and must be importable there (spawn, never fork)."""
        self._make, self._limits = make, limits or Limits()
        self._cell: tuple[Cell, int] | None = None
        self._residents: list[Candidate] = []
        self._lost: dict[Candidate, Failure] = {}
        self.respawns = 0
        self._start()

    def compile_all(self, variants: Sequence[Variant], tell: Callable[[int, int], None]) -> None:
        """Compile in the worker; one that dies over it is replaced, and the rest is compiled when needed."""
        try:
            self._call("compile_all", (tuple(variants),), self._limits.compile_s, tell)
        except WorkerLost:
            self._respawn()

    def enter(self, cell: Cell, seed: int) -> int:
        """Make fresh inputs for a cell and return their bytes."""
        self._cell, self._residents, self._lost = (cell, seed), [], {}
        return int(self._plain("enter", (cell, seed)))

    def forecast(self, candidate: Candidate) -> Footprint:
        """Return the bytes a candidate will take."""
        footprint = self._plain("forecast", (candidate,))
        assert isinstance(footprint, Footprint)
        return footprint

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        """Build, allocate, check and prime a candidate; it stays resident unless it fails."""
        self._lost.pop(candidate, None)
        arguments = (candidate,)
        result: Footprint | Failure = self._guarded("prepare", candidate, arguments, self._limits.prepare_s)
        if isinstance(result, Footprint):
            self._residents.append(candidate)
        return result

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        """Time one replay, in microseconds per launch."""
        if candidate in self._lost:
            return self._lost.pop(candidate)
        arguments = (candidate, batch, round, launches)
        result: float | Failure = self._guarded("sample", candidate, arguments, self._limits.sample_s)
        return result

    def release(self, candidate: Candidate) -> None:
        """Free what a candidate holds."""
        if candidate in self._residents:
            self._residents.remove(candidate)
            self._plain("release", (candidate,))

    def leave(self) -> None:
        """Free the inputs."""
        self._plain("leave", ())
        self._cell, self._residents, self._lost = None, [], {}

    def close(self) -> None:
        """End the worker."""
        self._connection.close()
        self._process.join(5)
        self._kill()

    def _plain(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Call what no candidate takes part in; once more in a fresh worker if this one is gone."""
        try:
            return self._call(name, arguments, self._limits.prepare_s)
        except WorkerLost:
            self._respawn()
            return self._call(name, arguments, self._limits.prepare_s)

    def _guarded(self, name: str, culprit: Candidate, arguments: tuple[Any, ...], limit_s: float) -> Any:
        """Call what runs a candidate; whatever happens to the worker is that candidate's failure."""
        try:
            return self._call(name, arguments, limit_s)
        except WorkerLost as lost:
            if culprit in self._residents:
                self._residents.remove(culprit)
            self._respawn()
            return lost.failure

    def _call(
        self,
        name: str,
        arguments: tuple[Any, ...],
        limit_s: float,
        tell: Callable[[int, int], None] = lambda done, total: None,
    ) -> Any:
        try:
            self._connection.send((name, arguments))
            while True:
                kind, result = self._receive(name, limit_s)
                if kind == "told":
                    tell(*result)
                elif kind == "lost":
                    raise WorkerLost(
                        Failure(FailureKind.CRASHED, f"the device was lost in {name}: {result.detail}")
                    )
                else:
                    return result
        except (EOFError, OSError) as error:
            raise WorkerLost(self._obituary(name)) from error

    def _receive(self, name: str, limit_s: float) -> tuple[str, Any]:
        if not self._connection.poll(limit_s):
            self._kill()
            raise WorkerLost(Failure(FailureKind.TIMEOUT, f"{name} took more than {limit_s:g} s; killed"))
        kind, result = self._connection.recv()
        return kind, result

    def _obituary(self, name: str) -> Failure:
        self._process.join(5)
        code = self._process.exitcode
        if code is not None and code < 0:
            how = f"died by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (the kernel kills so when the host is out of memory)"
        else:
            how = f"left with exit code {code}"
        return Failure(FailureKind.CRASHED, f"the worker {how} in {name}")

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._make), daemon=True)
        self._process.start()
        theirs.close()
        try:
            kind, _ = self._receive("start", self._limits.start_s)
        except (EOFError, OSError) as error:
            raise WorkerLost(self._obituary("start")) from error
        assert kind == "ready"

    def _kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _respawn(self) -> None:
        """Replace the worker and give the new one the cell and whoever was resident."""
        self._connection.close()
        self._kill()
        self.respawns += 1
        self._start()
        if self._cell is None:
            return
        self._call("enter", self._cell, self._limits.prepare_s)
        survivors, self._residents = self._residents, []
        for candidate in survivors:
            result = self.prepare(candidate)
            if isinstance(result, Failure):
                self._lost[candidate] = result
