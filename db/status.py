"""What a database holds, counted."""

from __future__ import annotations

from mhctune.autotuner.conditions import summary
from mhctune.autotuner.report import SweepLine
from mhctune.autotuner.words import counted
from mhctune.db.repository import Repository


def sweep_lines(store: Repository) -> list[SweepLine]:
    """Return all sweeps, the newest first, and how far each has come."""
    lines = []
    for found in store.sweeps():
        counts = store.counts(found.id)
        line = SweepLine(
            found.id,
            found.state,
            found.started_at,
            found.record,
            counts.measured,
            counts.failures,
            summary(store.conditions(found.id)),
            counts.probes,
        )
        lines.append(line)
    return lines


def read_back(store: Repository) -> str:
    """Read every sweep, trial and table, and return how many there are."""
    sweeps, tables = store.sweeps(), store.tables()
    trials = sum(len(store.trials(found.id)) for found in sweeps)
    held = [(len(sweeps), "sweep"), (trials, "trial"), (len(tables), "table")]
    return ", ".join(counted(*each) for each in held)
