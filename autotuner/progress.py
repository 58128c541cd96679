"""Progress: what a sweep tells, as two lines that are drawn again and again."""

from __future__ import annotations

from typing import Any, Protocol

from mhctune.autotuner.exploration import Exploration
from mhctune.autotuner.records import Cell, Failure
from mhctune.autotuner.report import config_text
from mhctune.autotuner.sweep import Watcher
from mhctune.kernels.space import Candidate


class Display(Protocol):
    """Draws lines: each has a name, so much done of a total, and a note."""

    def add_task(self, description: str, *, total: float | None, note: str) -> Any:
        """Add a line and return what names it."""

    def update(
        self,
        task_id: Any,
        *,
        total: float | None = ...,
        completed: float | None = ...,
        advance: float | None = ...,
        note: str = ...,
    ) -> None:
        """Change the total, what is done, or the note of a line, or count on by `advance`."""


class Bar(Watcher):
    """Shows a sweep's progress: cells, candidates, the best so far and the time left."""

    def __init__(self, display: Display) -> None:
        """Draw on a display."""
        self._display, self._best = display, ("", float("inf"))
        self._compile = display.add_task("compile", total=None, note="")
        self._race = display.add_task("race", total=None, note="")

    def begun(self, sweep_id: int, finished: int, grid: int) -> None:
        """Show what was done before."""
        note = f"sweep {sweep_id}" + (f", resumed at {finished} of {grid} trials" if finished else "")
        self._display.update(self._race, total=grid, completed=finished, note=note)

    def proposed(self, search: Exploration, grid: int) -> None:
        """Show how far a search has come; its end says how many trials there are."""
        note = f"search: generation {search.begun} of {search.generations}"
        self._display.update(self._race, total=grid, note="shortlist" if search.finished else note)

    def compiled(self, done: int, total: int) -> None:
        """Show how many kernels are compiled."""
        self._display.update(self._compile, total=total, completed=done, note="kernels")

    def entered(self, cell: Cell, index: int, total: int) -> None:
        """Show which cell is raced."""
        self._best = ("", float("inf"))
        self._display.update(self._race, note=f"cell {index + 1}/{total}: {cell.num_tokens} tokens")

    def told(self, cell: Cell, candidate: Candidate, outcome: float | Failure) -> None:
        """Count a trial and show the best so far."""
        if not isinstance(outcome, Failure) and outcome < self._best[1]:
            self._best = (f"{candidate.arm} {config_text(candidate.items)}", outcome)
        best = f", best {self._best[1]:.1f} us: {self._best[0]}" if self._best[0] else ""
        self._display.update(self._race, advance=1, note=f"{cell.num_tokens} tokens{best}")
