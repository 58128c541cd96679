"""Tuning in a group: rank 0 leads a sweep, every rank runs the same trials in the same order."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mhctune.autotuner.bench import Bench, BenchLost
from mhctune.autotuner.mail import Mail, RankLost
from mhctune.autotuner.planner import OtherDevice
from mhctune.autotuner.records import UNMEASURED, Cell, Failure, Footprint
from mhctune.autotuner.words import counted
from mhctune.autotuner.worker import Compiling
from mhctune.kernels.dispatch import DispatchTable, Fingerprint
from mhctune.kernels.group import ranks_text
from mhctune.kernels.seam import Variant
from mhctune.kernels.space import Candidate


@dataclass(frozen=True, slots=True)
class Station:
    """What a rank brings to the group.

    Attributes:
        fingerprint: Of its device and toolchain.
        free_bytes: Memory that its bench may take, in bytes.
    """

    fingerprint: Fingerprint
    free_bytes: int


class GroupBench:
    """The bench of a whole group, held by rank 0; the others follow (`follow`).

    Each call is sent to every rank and answered by every rank before the next one, whatever came of it: a
    candidate that fails on one rank fails, one that runs out of memory on one has no room. Its time is the
    slowest rank's. Cells are entered with rank 0's seed, so that all ranks draw the same inputs. What to race
    next is decided once, here.
    """

    def __init__(self, bench: Bench, compiler: Compiling, mail: Mail) -> None:
        """Lead the ranks of a mail with this rank's bench."""
        self._bench, self._compiler, self._mail = bench, compiler, mail
        self._serial = 0
        self._cell: Cell | None = None
        self._over = False

    def __enter__(self) -> GroupBench:
        """Lead until the block ends."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Tell the others if it ends without a table, and why."""
        self.end(f"rank 0 ended: {kind.__name__}: {error}" if kind else "rank 0 ended without a table")

    def meet(self, station: Station) -> int:
        """Require that all ranks have the same device and toolchain; return the fewest bytes that are free.

        Raises:
            OtherDevice: names the ranks that differ from rank 0 and the first fields that do.
            RankLost: a rank did not answer.
        """
        stations = self._together("meet", (), "the start", lambda: station)
        for rank, other in enumerate(stations):
            differing = station.fingerprint.differences(other.fingerprint)
            if differing:
                texts = [f"{field} {mine!r} and {theirs!r}" for field, (mine, theirs) in differing.items()]
                self.end(f"rank {rank} is another machine than rank 0: {'; '.join(texts[:3])}")
                raise OtherDevice(
                    f"rank {rank} differs from rank 0 in {'; '.join(texts[:3])}; tune equal machines together"
                )
        return int(min(other.free_bytes for other in stations))

    def compile_all(self, variants: Sequence[Variant], tell: Callable[[int, int], None]) -> None:
        """Compile on every rank; `tell` hears of this rank's."""
        names = tuple(variants)
        what = f"the compilation of {counted(len(names), 'kernel')}"
        self._together("compile_all", (names,), what, lambda: self._compiler.compile_all(names, tell))

    def input_bytes(self, cell: Cell) -> int:
        """Return the bytes that the inputs of a cell will take, the same on every rank."""
        return self._bench.input_bytes(cell)

    def enter(self, cell: Cell, seed: int) -> int | Failure:
        """Make the same inputs on every rank; return their bytes, or where there is no room for them."""
        self._cell = cell
        results = self._ask("enter", (cell, seed), f"entering {counted(cell.num_tokens, 'token')}")
        failure = _worst(results)
        if failure is None:
            return int(max(results))
        self.leave()
        return failure

    def floor_us(self) -> float:
        """Return the microseconds of a copy of the cell's fewest bytes: the fastest rank's."""
        return float(min(self._ask("floor_us", (), "timing a copy")))

    def forecast(self, candidate: Candidate) -> Footprint:
        """Return the bytes a candidate will take, the same on every rank."""
        return self._bench.forecast(candidate)

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        """Build, allocate, check and prime a candidate on every rank; resident on all of them or on none."""
        results = self._ask("prepare", (candidate,), self._trial("preparing", candidate))
        failure = _worst(results)
        if failure is not None:
            self.release(candidate)
            return failure
        names = [field.name for field in fields(Footprint)]
        return Footprint(*(max(getattr(footprint, name) for footprint in results) for name in names))

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        """Time one replay on every rank; return the slowest, in microseconds per launch."""
        arguments = (candidate, batch, round, launches)
        results = self._ask("sample", arguments, self._trial("timing", candidate))
        failure = _worst(results)
        return failure if failure is not None else float(max(results))

    def move(self, candidate: Candidate, placement: int) -> Failure | None:
        """Give a resident candidate other addresses on every rank."""
        return _worst(self._ask("move", (candidate, placement), self._trial("moving", candidate)))

    def release(self, candidate: Candidate) -> None:
        """Free what a candidate holds on every rank."""
        self._ask("release", (candidate,), self._trial("releasing", candidate))

    def leave(self) -> None:
        """Free the inputs on every rank."""
        self._ask("leave", (), "leaving a cell")

    def publish(self, table: DispatchTable) -> bytes:
        """End the tuning with one table and return its bytes, which every rank holds now.

        Raises:
            RankLost: a rank did not confirm them.
        """
        data = json.dumps(table.to_dict(), sort_keys=True).encode()
        digests = self._together("publish", (data,), "taking over the table", lambda: _digest(data))
        assert len(set(digests)) == 1
        self._over = True
        return data

    def end(self, reason: str) -> None:
        """End the tuning without a table: every rank raises the reason."""
        if not self._over:
            self._over = True
            self._mail.end(reason)

    def _trial(self, doing: str, candidate: Candidate) -> str:
        at = f" at {counted(self._cell.num_tokens, 'token')}" if self._cell else ""
        return f"{doing} {candidate}{at}"

    def _ask(self, name: str, arguments: tuple[Any, ...], what: str) -> list[Any]:
        return self._together(name, arguments, what, lambda: getattr(self._bench, name)(*arguments))

    def _together(
        self, name: str, arguments: tuple[Any, ...], what: str, here: Callable[[], Any]
    ) -> list[Any]:
        """Have every rank do one thing; return what came of it, in rank order."""
        if self._over:
            return [None] * self._mail.size  # a race that ends by an exception still frees its inputs
        self._serial += 1
        call = f"call/{self._serial}"
        answers = {f"answer/{self._serial}/{rank}": rank for rank in range(1, self._mail.size)}
        try:
            self._mail.post(call, pickle.dumps((name, arguments, what)))
            mine = here()
            letters = self._mail.wait(answers, f"{what} (call {self._serial})")
        except BenchLost as lost:
            self._over = True
            if not isinstance(lost, RankLost):
                self._mail.end(f"rank 0 lost its bench in {what}: {lost}")
            raise
        for key in (call, *answers):
            self._mail.drop(key)
        return [mine, *(pickle.loads(letters[rank]) for rank in range(1, self._mail.size))]


def follow(bench: Bench, compiler: Compiling, mail: Mail, station: Station) -> bytes:
    """Run what rank 0 asks for until it publishes the table; return the table's bytes.

    Raises:
        RankLost: a rank is lost, or rank 0 ended without a table; says which rank and trial, or why.
        TableError: what was published is no table.
    """
    serial, what = 0, "the start"
    while True:
        serial += 1
        # Rank 0 first does its own part, then waits for the slowest rank: longer than any answer may take.
        letter = mail.wait({f"call/{serial}": 0}, f"the call after {what}", patience=3)[0]
        name, arguments, what = pickle.loads(letter)
        data = b""
        try:
            if name == "meet":
                result: Any = station
            elif name == "compile_all":
                (names,) = arguments
                compiler.compile_all(names, lambda done, total: None)
                result = None
            elif name == "publish":
                (data,) = arguments
                DispatchTable.from_dict(json.loads(data), "the published table")
                result = _digest(data)
            else:
                result = getattr(bench, name)(*arguments)
        except BenchLost as lost:
            mail.end(f"rank {mail.rank} lost its bench in {what}: {lost}")
            raise
        mail.post(f"answer/{serial}/{mail.rank}", pickle.dumps(result))
        if data:
            return data


def _worst(results: Sequence[Any]) -> Failure | None:
    """Return the failure of a candidate that some ranks failed by; one that says nothing of it comes last."""
    found = [(rank, result) for rank, result in enumerate(results) if isinstance(result, Failure)]
    if not found:
        return None
    kind = min((failure.kind for _, failure in found), key=lambda kind: kind in UNMEASURED)
    alike = [(rank, failure) for rank, failure in found if failure.kind is kind]
    return Failure(kind, f"{ranks_text([rank for rank, _ in alike])}: {alike[0][1].detail}")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
