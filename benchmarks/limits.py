"""What limits each winner of the target table, by Nsight Compute: `python benchmarks/limits.py DB`.

The winner at each token count of each hidden size (as `benchmarks/hopper.py DB` has it) is launched once more
under `ncu`, on the GPU that it was measured on, with clocks and caches as they are: one process launches all,
each after a warm-up. Printed is a line a kernel; the two largest reasons why warps did not issue are shares
of the warps' time. Kernels are profiled one by one: what overlaps when served does not overlap here.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hopper import MODELS, SEAM, alike, runs_of
from hopper_table import best

from mhctune.autotuner.store import SweepRecord
from mhctune.configs.loader import load_model
from mhctune.db.repository import Repository
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

METRICS = {
    "duration": "gpu__time_duration.sum",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)(?<!_not_issued)_per_issue_active\.ratio")
"""Warps in a state per issue; those in all states together are the warps' time."""
SECTION = "WarpStateStats"
_US = {
    "ns": 1e-3,
    "nsecond": 1e-3,
    "us": 1.0,
    "usecond": 1.0,
    "ms": 1e3,
    "msecond": 1e3,
    "s": 1e6,
    "second": 1e6,
}
BOUND = 60.0
"""From so many percent of its peak on a unit is taken to be what limits."""
WARM_UP = 3


class NoProfile(RuntimeError):
    """`ncu` is missing, failed, or printed something else than was asked for: what and what can be done."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What is profiled: a candidate at a token count, and how many kernels it launches."""

    problem: Problem
    num_tokens: int
    candidate: Candidate
    kernels: int

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return {"problem": self.problem.to_dict(), "num_tokens": self.num_tokens, "arm": self.candidate.arm,
                "config": self.candidate.config, "kernels": self.kernels}  # fmt: skip

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Launch:
        """Read what `to_data` returned."""
        candidate = Candidate.of(data["arm"], data["config"])
        return cls(Problem(**data["problem"]), data["num_tokens"], candidate, data["kernels"])


@dataclass(frozen=True, slots=True)
class Profile:
    """One profiled kernel: microseconds, percent of peak, registers a thread, shares of the warps' time."""

    kernel: str
    duration_us: float
    dram: float
    l2: float
    sm: float
    occupancy: float
    registers: int
    stalls: Mapping[str, float]

    @property
    def limit(self) -> str:
        """The unit nearest to its peak, or latency where none is near."""
        name, percent = max((("dram", self.dram), ("l2", self.l2), ("sm", self.sm)), key=lambda each: each[1])
        return name if percent >= BOUND else "latency"

    def __str__(self) -> str:
        """Return the line of the kernel."""
        worst = sorted(self.stalls.items(), key=lambda each: -each[1])[:2]
        waits = ", ".join(f"{name} {share:.0%}" for name, share in worst)
        return (
            f"{self.kernel:32} {self.duration_us:8.2f} us  dram {self.dram:5.1f} %  l2 {self.l2:5.1f} %  "
            f"sm {self.sm:5.1f} %  occupancy {self.occupancy:5.1f} %  {self.registers:3} registers  "
            f"{self.limit}; {waits}"
        )


def parse(text: str) -> list[Profile]:
    """Return the kernels of what `ncu --csv --page raw` printed, in launch order.

    A row of names, a row of units and a row a kernel stand between lines of the profiler's own (`==PROF==`).

    Raises:
        NoProfile: there is no table, or a metric is missing: with the profiler's own errors.
    """
    own = [line for line in text.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]
    table = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if len(table) < 3 or table[0][:1] != ["ID"]:
        raise NoProfile("\n".join(["ncu printed no kernel", *own]))
    names, units, *rows = table
    missing = [metric for metric in METRICS.values() if metric not in names]
    if missing:
        raise NoProfile("\n".join([f"ncu printed no {', '.join(missing)}", *own]))
    unit = dict(zip(names, units, strict=True))[METRICS["duration"]]
    if unit not in _US:
        raise NoProfile(f"ncu gave durations in {unit!r}; known are {', '.join(_US)}")
    return [_profile(dict(zip(names, row, strict=True)), _US[unit]) for row in rows]


def _profile(row: Mapping[str, str], us: float) -> Profile:
    numbers = {name: _number(row, metric) for name, metric in METRICS.items()}
    found = {match[1]: _number(row, name) for name in row if (match := STALL.fullmatch(name))}
    whole = sum(found.values())
    stalls = {name: n / whole for name, n in found.items() if name != "selected" and whole > 0}
    registers, duration_us = int(numbers.pop("registers")), numbers.pop("duration") * us
    return Profile(row["Kernel Name"], duration_us, registers=registers, stalls=stalls, **numbers)


def _number(row: Mapping[str, str], name: str) -> float:
    try:
        return float(row[name].replace(",", ""))
    except ValueError:
        raise NoProfile(f"ncu gave {row[name]!r} as {name} of {row['Kernel Name']}") from None


def shared_out(launches: Sequence[Launch], profiles: Sequence[Profile]) -> list[tuple[Profile, ...]]:
    """Return the kernels of each launch.

    Raises:
        NoProfile: there are more or fewer kernels than the launches have.
    """
    expected = sum(launch.kernels for launch in launches)
    if len(profiles) != expected:
        seen = "\n".join(map(str, profiles))
        raise NoProfile(f"ncu profiled {len(profiles)} kernels, the winners launch {expected}:\n{seen}")
    rest = iter(profiles)
    return [tuple(next(rest) for _ in range(launch.kernels)) for launch in launches]


def winners(
    db: str, hidden_sizes: Sequence[int], tokens: Sequence[int] | None, runs: int
) -> list[tuple[Launch, SweepRecord]]:
    """Return the winner at each token count, with the record of its sweep."""
    found = []
    with Repository.open(db, readonly=True) as store:
        stored = store.sweeps()
        for hidden in hidden_sizes:
            sweeps = alike(stored, hidden, runs)
            raced = runs_of(store, sweeps, {})
            for count in sweeps[0].record.token_counts if sweeps else ():
                ours = best(raced, count, lambda c: True)
                if ours is not None and (not tokens or count in tokens):
                    record, candidate = sweeps[0].record, ours.candidate
                    arm = find_seam(SEAM).arm(record.target, candidate.arm)
                    kernels = len(arm.variants(record.problem, candidate.config))
                    found.append((Launch(record.problem, count, candidate, kernels), record))
    return found


def profile(launches: Sequence[Launch], named: str) -> str:
    """Launch each once under `ncu` and return what it printed.

    Raises:
        NoProfile: `ncu` is missing or failed.
    """
    ncu = shutil.which(named)
    if ncu is None:
        raise NoProfile(f"there is no {named} (Nsight Compute): put it on the PATH, or name it with --ncu")
    with tempfile.TemporaryDirectory() as folder:
        asked, log = Path(folder) / "launches.json", Path(folder) / "ncu.csv"
        asked.write_text(json.dumps([launch.to_data() for launch in launches]), encoding="utf-8")
        command = [*options(ncu, str(log)), sys.executable, __file__, "--launch", str(asked)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if ran.returncode:
        tail = "\n".join(
            [*said.splitlines()[-5:], *ran.stdout.splitlines()[-5:], *ran.stderr.splitlines()[-10:]]
        )
        raise NoProfile(f"ncu left with {ran.returncode}:\n{tail}")
    return said


def options(ncu: str, log: str) -> list[str]:
    """Return the command up to the program: clocks and caches stay as they are; units are not scaled."""
    return [
        ncu, "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off",
        "--target-processes", "application-only", "--csv", "--page", "raw", "--print-units", "base",
        "--metrics", ",".join(METRICS.values()), "--section", SECTION, "--log-file", log,
    ]  # fmt: skip


def launch_all(launches: Sequence[Launch]) -> None:
    """Launch each once between the profiler's start and stop, on the first GPU."""
    import torch

    from mhctune.kernels.buffers import OutputBuffers
    from mhctune.kernels.compiler import Compiler, quiet

    quiet()
    seam, compiler = find_seam(SEAM), Compiler()
    arms = [seam.arm("cuda", launch.candidate.arm) for launch in launches]
    for launch, arm in zip(launches, arms, strict=True):
        compiler.request(arm.variants(launch.problem, launch.candidate.config))
    for launch, arm in zip(launches, arms, strict=True):
        config = launch.candidate.config
        kernels = [compiler.get(variant).run for variant in arm.variants(launch.problem, config)]
        inputs = seam.inputs(launch.problem, launch.num_tokens, launch.num_tokens, "cuda")
        buffers = OutputBuffers(arm.plan(launch.problem, config, launch.num_tokens), "cuda")
        run, views = arm.bind(launch.problem, config, kernels), buffers.bind(launch.num_tokens)
        for _ in range(WARM_UP):
            run(inputs, views)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        run(inputs, views)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    compiler.close()


def lines(launches: Sequence[Launch], profiles: Sequence[Profile]) -> Iterator[str]:
    """Yield, for each launch, who it is and its kernels.

    Raises:
        NoProfile: see `shared_out`.
    """
    for launch, kernels in zip(launches, shared_out(launches, profiles), strict=True):
        yield f"hidden {launch.problem.hidden_size}, {launch.num_tokens} tokens: {launch.candidate}"
        yield from (f"  {kernel}" for kernel in kernels)


def main() -> None:
    """Profile the winners, or launch them where `ncu` looks on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("db", nargs="?")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help="token counts (default: all)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ncu", default=shutil.which("/usr/local/cuda/bin/ncu") or "ncu", metavar="FILE")
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.launch:
        launch_all([Launch.of(each) for each in json.loads(given.launch.read_text(encoding="utf-8"))])
        return
    if given.db is None:
        parser.error("give the database of `python benchmarks/hopper.py DB --measure`")
    hidden_sizes = [load_model(name).hidden_size for name in given.models]
    launches = [found for found, record in winners(given.db, hidden_sizes, given.tokens, given.runs)
                if record.target == "cuda"]  # fmt: skip
    if not launches:
        sys.exit(f"{given.db} has no ended sweep of a GPU at these hidden sizes and token counts")
    try:
        print("\n".join(lines(launches, parse(profile(launches, given.ncu)))))
    except NoProfile as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
