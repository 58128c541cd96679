"""Mail: what the ranks of a tuning group write to each other through a torch store, each wait bounded.

A key-value store and no collectives: it can say which rank did not answer, where a collective only hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from mhctune.autotuner.bench import BenchLost
from mhctune.autotuner.records import Failure, FailureKind

_Result = TypeVar("_Result")

_POLL_S = (0.0005, 0.02)
"""First and longest pause between looks: a replay takes milliseconds, a compilation minutes."""


class KeyValue(Protocol):
    """A torch.distributed store, as far as it is used here."""

    def set(self, key: str, value: Any, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value that is there."""

    def add(self, key: str, number: int, /) -> int:
        """Add to a counter and return it."""

    def check(self, keys: list[str], /) -> bool:
        """Say whether all keys are there."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""


class RankLost(BenchLost):
    """A rank that died, hangs or gave up: the message names it and what it was asked for."""

    def __init__(self, detail: str) -> None:
        """Keep the sentence."""
        super().__init__(Failure(FailureKind.CRASHED, detail))


class Mail:
    """One rank's letter box. Beats in the background while it is open, so that others know it lives."""

    def __init__(
        self, store: KeyValue, rank: int, size: int, silence_s: float = 30.0, limit_s: float = 900.0
    ) -> None:
        """Open it on a store that all ranks share.

        Who has not beaten for `silence_s` is lost; no answer is waited for longer than `limit_s`, both in
        seconds. A bench has shorter limits of its own for a candidate that hangs.
        """
        self.rank, self.size = rank, size
        self._store, self._silence_s, self._limit_s = store, silence_s, limit_s
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._heard: dict[int, tuple[int, float]] = {}
        self._what, self._ended, self._lost = "the start", False, set[int]()
        self._thread = threading.Thread(target=self._beat, name="beat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop beating. After an end rank 0, which holds the store, first lets the others read why."""
        if self._ended and self.rank == 0:
            with suppress(RankLost):
                self._wait_until_heard()
        self._closed.set()
        self._thread.join()

    def _wait_until_heard(self) -> None:
        begin = time.monotonic()
        others = {f"heard/{rank}" for rank in range(1, self.size) if rank not in self._lost}
        while time.monotonic() - begin < self._silence_s and not all(map(self._has, others)):
            time.sleep(_POLL_S[1])

    def post(self, key: str, letter: bytes) -> None:
        """Write a letter under a key."""
        self._ask(lambda: self._store.set(key, letter))

    def drop(self, key: str) -> None:
        """Throw a letter away that all have read."""
        self._ask(lambda: self._store.delete_key(key))

    def end(self, reason: str) -> None:
        """Tell every rank that it is over and why; their waits raise it."""
        self._ended = True
        self.post("end", reason.encode())
        self.post(f"heard/{self.rank}", b"")

    def wait(self, senders: Mapping[str, int], what: str, patience: int = 1) -> dict[int, bytes]:
        """Return the letters under keys, by the rank that each is expected of, within `patience` limits.

        Raises:
            RankLost: a rank is silent or too late, or somebody ended it; names rank and `what`.
        """
        begin, pause, found = time.monotonic(), _POLL_S[0], dict[int, bytes]()
        self._heard, self._what = {}, what
        while missing := {key: rank for key, rank in senders.items() if rank not in found}:
            for key, rank in missing.items():
                if self._has(key):
                    found[rank] = self._read(key)
            if len(found) == len(senders):
                break
            if self._has("end"):
                self._ended, reason = True, self._read("end").decode()
                self.post(f"heard/{self.rank}", b"")
                raise RankLost(reason)
            late = [rank for rank in missing.values() if rank not in found]
            self._require_life(late, begin, what, patience * self._limit_s)
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])
        return found

    def _require_life(self, ranks: list[int], begin: float, what: str, limit_s: float) -> None:
        now = time.monotonic()
        for rank in ranks:
            beats = self._add(f"beat/{rank}", 0)
            if self._heard.get(rank, (-1, 0.0))[0] != beats:
                self._heard[rank] = (beats, now)
            if now - self._heard[rank][1] > self._silence_s:
                self._lose(rank, f"rank {rank} was not heard for {self._silence_s:g} s in {what}: it died")
            if now - begin > limit_s:
                self._lose(rank, f"rank {rank} lives and did not answer within {limit_s:g} s in {what}")

    def _lose(self, rank: int, detail: str) -> None:
        self._lost.add(rank)
        self.end(detail)
        raise RankLost(detail)

    def _read(self, key: str) -> bytes:
        return bytes(self._ask(lambda: self._store.get(key)))

    def _add(self, key: str, number: int) -> int:
        return self._ask(lambda: self._store.add(key, number))

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([key])))

    def _ask(self, call: Callable[[], _Result]) -> _Result:
        try:
            with self._lock:
                return call()
        except dist.DistError as error:
            host = f"rank 0, which holds the store of the group, is gone in {self._what}"
            raise RankLost(f"{host}: {error}") from error

    def _beat(self) -> None:
        while not self._closed.wait(min(1.0, self._silence_s / 5)):
            try:
                self._add(f"beat/{self.rank}", 1)
            except RankLost:
                return  # whoever waits for a letter says so
