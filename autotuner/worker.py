"""The worker: candidates run in a process of their own, which may hang, crash or be killed."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

from mhctune.autotuner.bench import Bench, BenchLost
from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint
from mhctune.kernels.seam import Variant
from mhctune.kernels.space import Candidate

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _is_main_thread() -> bool:
    """Only there may Python set signal handlers."""
    return threading.current_thread() is threading.main_thread()


class Compiling(Protocol):
    """What a worker builds with."""

    def compile_all(self, variants: Sequence[Variant], tell: Callable[[int, int], None]) -> None:
        """Compile all variants; `tell` hears how many are done."""

    def request(self, variants: Sequence[Variant]) -> None:
        """Begin to compile and return."""

    def wait(self, variants: Sequence[Variant], tell: Callable[[int, int], None]) -> None:
        """Return once these are compiled; `tell` hears how many are done of all that were asked for."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a worker may take, in seconds, before it is killed."""

    start_s: float = 120.0
    prepare_s: float = 180.0
    sample_s: float = 60.0
    compile_s: float = 600.0
    """Without any kernel finishing."""


def _serve(connection: Connection, make: Callable[[], tuple[Bench, Compiling]]) -> None:
    """Answer calls until the connection closes. Runs in the worker.

    A session of its own takes the compilers it starts with it when it is killed; it dies with its parent.
    """
    os.setsid()
    _die_with_parent()
    # A terminal or a job manager signals everybody: the parent decides what it means.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    bench, compiler = make()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has gone
        _answer(connection, bench, compiler)


def _answer(connection: Connection, bench: Bench, compiler: Compiling) -> None:
    connection.send((0, "ready", None))
    while True:
        serial, name, arguments = connection.recv()
        if name == "request":
            compiler.request(arguments[0])
        elif name in ("compile_all", "wait"):
            getattr(compiler, name)(arguments[0], partial(_tell, connection, serial))
        if name in ("request", "compile_all", "wait"):
            connection.send((serial, "done", None))
            continue
        result = getattr(bench, name)(*arguments)
        healthy = getattr(bench, "healthy", lambda: True)
        kind = "done" if not isinstance(result, Failure) or healthy() else "lost"
        connection.send((serial, kind, result))


def _tell(connection: Connection, serial: int, done: int, total: int) -> None:
    connection.send((serial, "told", (done, total)))


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however that ends; elsewhere do nothing."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


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
        self.seconds: dict[str, float] = defaultdict(float)
        """Wall seconds by the name of the call, as the parent waited for it; `start` is the worker's."""
        self._serial, self._busy = 0, False
        self._start()
        # Before multiprocessing's own farewell, which would ask politely a worker that does not listen.
        atexit.register(self._kill)

    def compile_all(self, variants: Sequence[Variant], tell: Callable[[int, int], None]) -> None:
        """Compile in the worker; one that dies over it is replaced, and the rest is compiled when needed."""
        try:
            self._call("compile_all", (tuple(variants),), self._limits.compile_s, tell)
        except BenchLost:
            self._respawn()

    def request(self, variants: Sequence[Variant]) -> None:
        """Begin to compile in the worker, and return."""
        self._plain("request", (tuple(variants),))

    def wait(self, variants: Sequence[Variant], tell: Callable[[int, int], None]) -> None:
        """Wait until these are compiled in the worker; one that dies over it is replaced, as above."""
        try:
            self._call("wait", (tuple(variants),), self._limits.compile_s, tell)
        except BenchLost:
            self._respawn()

    def input_bytes(self, cell: Cell) -> int:
        """Return the bytes that the inputs of a cell will take."""
        return int(self._plain("input_bytes", (cell,)))

    def enter(self, cell: Cell, seed: int) -> int | Failure:
        """Make fresh inputs for a cell and return their bytes, or why there is no room for them."""
        self._cell, self._residents, self._lost = None, [], {}
        result: int | Failure = self._plain("enter", (cell, seed))
        self._cell = (cell, seed)
        return result

    def floor_us(self) -> float:
        """Return the microseconds of a copy of the cell's fewest bytes; 0 where it says nothing."""
        return float(self._plain("floor_us", ()))

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

    def move(self, candidate: Candidate, placement: int) -> Failure | None:
        """Give a resident candidate other addresses.

        Who found no room in a fresh worker is not resident: its next sample says so, too.
        """
        if candidate in self._lost:
            return self._lost[candidate]
        arguments = (candidate, placement)
        result: Failure | None = self._guarded("move", candidate, arguments, self._limits.prepare_s)
        return result

    def release(self, candidate: Candidate) -> None:
        """Free what a candidate holds."""
        if candidate in self._residents:
            self._residents.remove(candidate)
            if not self._interrupted():
                self._plain("release", (candidate,))

    def leave(self) -> None:
        """Free the inputs."""
        self._cell, self._residents, self._lost = None, [], {}
        if not self._interrupted():
            self._plain("leave", ())

    def close(self) -> None:
        """End the worker."""
        self._connection.close()
        if not self._busy:
            self._process.join(5)
        self._kill()
        atexit.unregister(self._kill)

    def _interrupted(self) -> bool:
        """Whether an exception cut a call short: the worker is still at it, and is ended instead of asked."""
        if self._busy:
            self._kill()
        return self._busy

    def _plain(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Call what no candidate takes part in; once more in a fresh worker if this one is gone."""
        try:
            return self._call(name, arguments, self._limits.prepare_s)
        except BenchLost:
            self._respawn()
            return self._call(name, arguments, self._limits.prepare_s)

    def _guarded(self, name: str, culprit: Candidate, arguments: tuple[Any, ...], limit_s: float) -> Any:
        """Call what runs a candidate; whatever happens to the worker is that candidate's failure."""
        try:
            return self._call(name, arguments, limit_s)
        except BenchLost as lost:
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
        self._serial += 1
        self._busy = True
        begin = time.monotonic()
        try:
            self._connection.send((self._serial, name, arguments))
            while True:
                serial, kind, result = self._receive(name, limit_s)
                if serial != self._serial:
                    continue  # the answer to a call that was cut short
                if kind == "told":
                    tell(*result)
                    continue
                self._busy = False
                if kind == "lost":
                    detail = f"the device was lost in {name}: {result.detail}"
                    raise BenchLost(Failure(FailureKind.CRASHED, detail))
                return result
        except (EOFError, OSError) as error:
            raise BenchLost(self._obituary(name)) from error
        finally:
            self.seconds[name] += time.monotonic() - begin

    def _receive(self, name: str, limit_s: float) -> tuple[int, str, Any]:
        if not self._connection.poll(limit_s):
            self._kill()
            raise BenchLost(Failure(FailureKind.TIMEOUT, f"{name} took more than {limit_s:g} s; killed"))
        serial, kind, result = self._connection.recv()
        return serial, kind, result

    def _obituary(self, name: str) -> Failure:
        self._process.join(5)
        code = self._process.exitcode
        if code is None:
            how = "closed its pipe and did not end"
        elif code < 0:
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
        self._busy = False
        # What is ignored stays so across exec: the worker imports for seconds before it can say so itself.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS if _is_main_thread()}
        try:
            self._process.start()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        theirs.close()
        begin = time.monotonic()
        try:
            _, kind, _ = self._receive("start", self._limits.start_s)
        except (EOFError, OSError) as error:
            raise BenchLost(self._obituary("start")) from error
        except BaseException:
            self._kill()
            raise
        assert kind == "ready"
        self.seconds["start"] += time.monotonic() - begin

    def _kill(self) -> None:
        """Kill the worker and the compilers it started."""
        if self._process.is_alive() and self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()  # if it had no session of its own yet
            self._process.join(10)

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
