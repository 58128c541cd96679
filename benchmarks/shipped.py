"""What ships beside what was tuned.

`python benchmarks/shipped.py`, on any machine: the recorded sweep of each seam on an H200, with the shipped
constants in our kernels beside the bands, of one run. `python benchmarks/shipped.py DB`: the same for every
newest sweep of a seam in a database, such as `mhctune sweep --sweep seams` makes.

`python benchmarks/shipped.py DB SWEEP`, on that H200: the best candidate of each token count, the whole
seam's median and the recorded one of vLLM's own kernels; then its first kernel alone, beside the recorded
prototype of a fused projection: unrolled in a graph, where launches of one kernel overlap, and between
launches of a foreign kernel that lets nothing overlap, less its own time.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from statistics import geometric_mean

import torch

from mhctune.autotuner.beside import beside, sheet_of
from mhctune.autotuner.derive import Derived, derive
from mhctune.autotuner.graph import CapturedGraph, empty_graph, overhead_us
from mhctune.autotuner.protocol import UNROLL
from mhctune.autotuner.recording import replay
from mhctune.autotuner.records import Measurement, SweepState
from mhctune.configs.recorded import load_recorded, recorded_names
from mhctune.db.derivation import derive_stored
from mhctune.db.repository import Repository
from mhctune.kernels.buffers import OutputBuffers
from mhctune.kernels.compiler import Compiler, quiet
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Problem
from mhctune.kernels.until import END, brief, until_of

REPLAYS, ROUNDS = 5, 31


def shipped(hidden_size: int) -> dict[int, float]:
    """Return the recorded microseconds of the whole seam as shipped, by token count."""
    found: dict[int, float] = {}
    for row in load_recorded("h200_as_shipped").rows:
        count = int(row["num_tokens"])  # type: ignore[arg-type]
        label = "shipped_band" if count <= 32 else "configured_split"
        if row["hidden_size"] == hidden_size and row["pdl"] == 1 and row["label"] == label:
            found[count] = float(row["latency_us"])  # type: ignore[arg-type]
    return found


def prototype() -> dict[int, float]:
    """Return the best recorded microseconds of the prototype's fused projection, by token count."""
    best: dict[int, float] = {}
    for row in load_recorded("h200_post_pre_hidden5120_prototype").rows:
        count, latency = int(row["num_tokens"]), float(row["latency_us"])  # type: ignore[arg-type]
        best[count] = min(latency, best.get(count, latency))
    return best


def graph_us(runs: list[Callable[[], None]]) -> list[float]:
    """Return the median microseconds a launch of each, timed in interleaved rounds."""
    empty = empty_graph()
    graphs = [CapturedGraph(run, UNROLL) for run in runs]
    overhead = overhead_us(empty, REPLAYS)
    samples: list[list[float]] = [[] for _ in graphs]
    for round in range(ROUNDS + 2):
        for at in range(len(graphs)) if round % 2 else reversed(range(len(graphs))):
            taken = graphs[at].time_us(REPLAYS)
            if round >= 2:
                samples[at].append((taken - overhead) / (REPLAYS * UNROLL))
    for graph in (*graphs, empty):
        graph.close()
    return [statistics.median(s) for s in samples]


def stored(db: str) -> Iterator[tuple[str, Derived]]:
    """Yield the newest ended sweep to the end of each seam and problem of a database, with its bands."""
    with Repository.open(db, readonly=True) as store:
        ended = [
            s for s in store.sweeps()
            if s.state is SweepState.COMPLETE and until_of(s.record.protocol) == END
        ]  # fmt: skip
        newest = {(s.record.seam, s.record.problem.digest): s for s in reversed(ended)}  # stored newest first
        for sweep in newest.values():
            label = f"{sweep.record.seam}, {sweep.record.problem}, sweep {sweep.id}"
            yield label, derive_stored(store, sweep)


def recorded() -> Iterator[tuple[str, Derived]]:
    """Yield the recorded sweep of each seam on an H200, with its bands."""
    for name in recorded_names():
        if name.startswith("h200_seams_"):
            sweep, trials = replay(load_recorded(name))
            yield f"{sweep.seam}, {sweep.problem}, {name}", derive(sweep, 1, trials, sweep.bound)


def seams(sweeps: Iterable[tuple[str, Derived]]) -> None:
    """Print, for each sweep, what ships beside what was tuned."""
    for label, derived in sweeps:
        found = beside(derived)
        measured = [row.ratio for row in found if row.ratio]
        print(label, f"geometric mean {geometric_mean(measured):.2f}" if measured else "")
        sheet = sheet_of(derived, found)
        for row in (sheet.columns, *sheet.rows):
            count, shipped_us, tuned_us, ratio, limits, status, candidate = map(str, row)
            served = f"tuned {derived.table.lookup(int(count)).choice}" if count.isdigit() else "tuned"
            print(f"{count:>6} {shipped_us:>10} {tuned_us:>8} {ratio:>5} {limits:>9} {status:7}  "
                  f"{candidate}{' | ' if candidate else ''}{served}")  # fmt: skip


def main(db: str, sweep_id: int) -> None:
    """Print one line a token count."""
    quiet()
    with Repository.open(db, readonly=True) as store:
        sweep = store.sweep(sweep_id)
        if (until := until_of(sweep.record.protocol)) != END:
            sys.exit(
                f"sweep {sweep_id} was timed {brief(until)}: no time of the whole seam; name one to the end"
            )
        trials = sweep.record.without_probes(store.trials(sweep_id))
    problem: Problem = sweep.record.problem
    seam, compiler = find_seam(sweep.record.seam), Compiler()
    known, alone = shipped(problem.hidden_size), prototype()
    print("tokens  seam us  shipped  ratio   kernel alone us: overlapping  apart  prototype   candidate")
    for count in sorted({trial.cell.num_tokens for trial in trials}):
        best, candidate = min(
            (trial.outcome.latency_us, trial.candidate)
            for trial in trials
            if trial.cell.num_tokens == count and isinstance(trial.outcome, Measurement)
        )
        arm = seam.arm("cuda", candidate.arm)
        kernels = [compiler.get(v).run for v in arm.variants(problem, candidate.config)]
        inputs = seam.inputs(problem, count, count, "cuda")
        buffers = OutputBuffers(arm.plan(problem, candidate.config, count), "cuda")
        views, foreign = buffers.bind(count), torch.zeros(1, device="cuda")
        first = arm.bind(problem, candidate.config, [kernels[0], *(lambda *_: None for _ in kernels[1:])])
        arm.bind(problem, candidate.config, kernels)(inputs, views)

        def single(first: Callable[..., None] = first, i: object = inputs, v: object = views) -> None:
            first(i, v)

        def apart(single: Callable[[], None] = single, foreign: torch.Tensor = foreign) -> None:
            single()
            foreign.add_(1)

        overlapping, both, only = graph_us([single, apart, lambda foreign=foreign: foreign.add_(1)])  # type: ignore[misc]
        ships = known.get(count, float("nan"))
        print(
            f"{count:6} {best:8.2f} {ships:8.2f} {ships / best:6.2f} {overlapping:29.2f} {both - only:6.2f} "
            f"{alone.get(count, float('nan')):10.2f}   {candidate}"
        )


if __name__ == "__main__":
    if sys.argv[2:]:
        main(sys.argv[1], int(sys.argv[2]))
    else:
        seams(stored(sys.argv[1]) if sys.argv[1:] else recorded())
