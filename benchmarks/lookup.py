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
import sys, time
wall, cpu = time.perf_counter(), time.process_time()
import mhctune.db.tables
print(time.perf_counter() - wall, time.process_time() - cpu)
wall, cpu = time.perf_counter(), time.process_time()
mhctune.db.tables.load_table(sys.argv[1])
print(time.perf_counter() - wall, time.process_time() - cpu)
"""
PROCESSES = 25
SHARES = 8


def imports(path: str) -> tuple[list[float], dict[str, float]]:
    """Return medians over 25 fresh processes, in milliseconds.

    They are wall and CPU time of importing the code, then of the first opening, which imports what only
    opening needs. Beside them, from as many other processes, each package's own share of the import.

    Bytecode is kept, as where the package is installed: with PYTHONDONTWRITEBYTECODE set, as in many
    containers, a checkout is compiled by every process anew.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as kept:
        python = [sys.executable, "-X", f"pycache_prefix={kept}"]

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*python, *arguments], env=environ, capture_output=True, text=True, check=True
            )

        run("-c", IMPORT, path)  # the first one compiles
        taken = [run("-c", IMPORT, path).stdout.split() for _ in range(PROCESSES)]
        bare = own(run("-X", "importtime", "-c", "pass").stderr).keys()
        traces = [own(run("-X", "importtime", "-c", "import mhctune.db.tables").stderr) for _ in taken]
    shares: dict[str, float] = {}
    for name in traces[0].keys() - bare:
        package = name.partition(".")[0].removeprefix("_")
        shares[package] = shares.get(package, 0.0) + statistics.median(trace[name] for trace in traces)
    return [statistics.median(map(float, each)) * 1e3 for each in zip(*taken, strict=True)], shares


def own(trace: str) -> dict[str, float]:
    """Return each module's own milliseconds of what `-X importtime` printed."""
    rows = [line.removeprefix("import time:").split("|") for line in trace.splitlines()]
    return {name.strip(): int(us) / 1e3 for us, _, name in rows if us.strip().isdigit()}


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
    (wall, cpu, first, first_cpu), shares = imports(path)
    largest = sorted(shares.items(), key=lambda item: -item[1])[:SHARES]
    print(f"lookup  {statistics.median(each):.0f} ns, of which {empty:.0f} ns is the call that times it")
    print(f"open    {statistics.median(opened):.2f} ms  ({path})")
    print(f"        {first:.1f} ms, {first_cpu:.1f} ms of CPU time, the first time in a process")
    print(
        f"import  {wall:.1f} ms, {cpu:.1f} ms of CPU time "
        f"({PROCESSES} processes; load before {load:.1f} on {os.cpu_count()} cores)"
    )
    print("of which", ", ".join(f"{name} {ms:.1f}" for name, ms in largest), "(traced, which takes longer)")
    print(time.strftime("%Y-%m-%d"), sys.version.split()[0])


if __name__ == "__main__":
    main(sys.argv[1])
