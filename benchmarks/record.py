"""Write a stored sweep as a recording: `python benchmarks/record.py DB SWEEP OUT.jsonl ABOUT SOURCE`."""

from __future__ import annotations

import sys
from pathlib import Path

from mhctune.autotuner.recording import recording
from mhctune.db.repository import Repository


def main(db: str, sweep_id: str, out: str, about: str, source: str) -> None:
    """Read one sweep and write its lines."""
    with Repository.open(db, readonly=True) as store:
        lines = list(recording(store.sweep(int(sweep_id)).record, store.trials(int(sweep_id)), about, source))
    Path(out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{out}: {len(lines) - 1} trials")


if __name__ == "__main__":
    main(*sys.argv[1:])
