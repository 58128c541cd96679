"""Write a stored sweep as a recording: `python benchmarks/record.py DB SWEEP OUT.jsonl ABOUT SOURCE`."""

from __future__ import annotations

import sys
from pathlib import Path

from mhctune.autotuner.recording import Unfinished, recording
from mhctune.autotuner.records import SweepState
from mhctune.db.repository import Repository


def main(db: str, sweep_id: str, out: str, about: str, source: str) -> None:
    """Read one sweep that has ended and write its lines."""
    with Repository.open(db, readonly=True) as store:
        sweep, trials = store.sweep(int(sweep_id)), store.trials(int(sweep_id))
    if sweep.state not in (SweepState.COMPLETE, SweepState.INCOMPLETE):
        sys.exit(f"sweep {sweep.id} of {db} is {sweep.state}; run it to its end before it is recorded")
    try:
        lines = recording(sweep.record, trials, about, source)
    except Unfinished as error:
        sys.exit(f"sweep {sweep.id} of {db}: {error}")
    Path(out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{out}: {len(trials)} trials")


if __name__ == "__main__":
    main(*sys.argv[1:])
