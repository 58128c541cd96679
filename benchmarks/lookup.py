"""What a lookup, opening a table and importing its code cost: `python benchmarks/lookup.py DB_OR_JSON`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit

from mhctune.db.tables import load_table

IMPORT = """
import time
wall, cpu = time.perf_counter(), time.process_time()
import mhctune.db.tables
print(time.perf_counter() - wall, time.process_time() - cpu)
"""
PROCESSES = 25


def imports() -> list[tuple[float, float]]:
    """Return milliseconds of wall and of CPU time that each of 25 fresh processes took to import the code.

    Bytecode is kept, as where the package is installed: with PYTHONDONTWRITEBYTECODE set, as in many
    containers, a checkout is compiled by every process anew.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    taken = []
    with tempfile.TemporaryDirectory() as kept:
        command = [sys.executable, "-X", f"pycache_prefix={kept}", "-c", IMPORT]
        for _ in range(1 + PROCESSES):
            ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
            wall, cpu = (float(each) * 1e3 for each in ran.stdout.split())
            taken.append((wall, cpu))
    return taken[1:]  # the first one compiled


def main(path: str) -> None:
    """Print the medians."""
    table = load_table(path)
    counts = range(1, table.max_tokens + 3)
    each = [
        timeit.timeit(lambda n=n: table.lookup(n), number=20_000) / 20_000 * 1e9  # type: ignore[misc]
        for n in counts
    ]
    empty = timeit.timeit(lambda: None, number=200_000) / 200_000 * 1e9
    opened = [timeit.timeit(lambda: load_table(path), number=1) * 1e3 for _ in range(51)]
    load = os.getloadavg()[0]
    wall, cpu = (statistics.median(each) for each in zip(*imports(), strict=True))
    print(f"lookup  {statistics.median(each):.0f} ns, of which {empty:.0f} ns is the call that times it")
    print(f"open    {statistics.median(opened):.2f} ms  ({path})")
    print(
        f"import  {wall:.1f} ms, {cpu:.1f} ms of CPU time "
        f"({PROCESSES} processes; load before {load:.1f} on {os.cpu_count()} cores)"
    )
    print(time.strftime("%Y-%m-%d"), sys.version.split()[0])


if __name__ == "__main__":
    main(sys.argv[1])
