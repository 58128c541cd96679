"""What a lookup, opening a table and importing its code cost: `python benchmarks/lookup.py DB_OR_JSON`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import timeit

from mhctune.db.tables import load_table


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
    code = "import time; b = time.perf_counter(); import mhctune.db.tables; print(time.perf_counter() - b)"
    imports = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(11)
    ]
    print(f"lookup  {statistics.median(each):.0f} ns, of which {empty:.0f} ns is the call that times it")
    print(f"open    {statistics.median(opened):.2f} ms  ({path})")
    print(f"import  {statistics.median(imports) * 1e3:.1f} ms")
    print(time.strftime("%Y-%m-%d"), sys.version.split()[0])


if __name__ == "__main__":
    main(sys.argv[1])
