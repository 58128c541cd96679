"""A table as it stands on the machine at hand."""

from __future__ import annotations

from pathlib import Path

from mhctune.autotuner.planner import known_seam
from mhctune.autotuner.probe import Device, fingerprint
from mhctune.db.tables import load_table
from mhctune.kernels.dispatch import DispatchTable


def load_here(path: Path, device: Device, *, seam: str | None, problem_digest: str | None) -> DispatchTable:
    """Return the table to serve on a device of this machine, with its status there.

    Raises:
        TableError: as `load_table`.
        ConfigError: the table is of a seam that this version does not know.
    """
    table = load_table(path, seam=seam, problem_digest=problem_digest)
    if device.target != table.target:
        return table.elsewhere()
    here = fingerprint(known_seam(table.seam), device.target)
    return load_table(path, here, seam=seam, problem_digest=problem_digest)
