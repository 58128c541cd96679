"""Signals: SIGINT and SIGTERM end a command at once, or ask a sweep to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def leave(number: int, frame: FrameType | None = None) -> None:
    """Leave at once with a signal's exit code."""
    raise SystemExit(128 + number)


@contextmanager
def on_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM."""
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], int]]:
    """Turn SIGINT and SIGTERM into a question: the signal that came, or 0. A second one ends at once."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            leave(number)
        came.append(number)

    with on_signals(note):
        yield lambda: came[0] if came else 0
