"""The global top-k beside torch.topk and conversion: `python benchmarks/topk.py`, on a GPU or the processor.

Every candidate of sweep `topk` is checked and timed in interleaved rounds, forward and back, beside what
torch does: pack, `torch.topk` over the W x K scores of a row, gather, and -1 for what is no score; on a GPU
captured into a graph of as many launches. torch gives no rule for ties and takes NaN for the largest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from mhctune.autotuner.bench import Bench
from mhctune.autotuner.benches import make_bench
from mhctune.autotuner.graph import CapturedGraph, empty_graph, overhead_us
from mhctune.autotuner.planner import plan_sweep, target_of
from mhctune.autotuner.probe import detect
from mhctune.autotuner.protocol import UNROLL, Protocol
from mhctune.autotuner.records import Cell, Failure
from mhctune.autotuner.timer import HostTimer, Slot
from mhctune.kernels import topk_reference as reference
from mhctune.kernels.seam import Problem, Tensors
from mhctune.kernels.space import Candidate

Timed = Callable[[int, int], float]
"""Takes the round and the launches of a sample; returns microseconds a launch."""
Medians = dict[Candidate | None, float]

ROWS, ROUNDS = (1, 4, 16, 64), 9


def torch_merge(problem: Problem, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a rank packs [T, 2, K] and the ids [T, K], by torch's operators; can be captured."""
    local, size, last = inputs["local_ids"], problem.interleave, problem.ranks - 1
    found = local // size * (problem.ranks * size) + last * size + local % size
    packed = torch.stack([found.masked_fill(local < 0, -1), inputs["scores"].view(torch.int32)], 1)
    ids, bits = inputs["gathered"].permute(2, 1, 0, 3).reshape(2, local.shape[0], -1)
    scores, places = bits.view(torch.float32).topk(problem.top_k, dim=1)
    return packed, ids.gather(1, places).masked_fill(scores == -torch.inf, -1)


def torch_timer(problem: Problem, inputs: Tensors, target: str) -> Timed:
    """Return what times launches of `torch_merge` as the bench of the target does."""

    def run() -> None:
        torch_merge(problem, inputs)

    run()
    if target == "c":
        slot = Slot(Cell("topk_merge", problem, 1), Candidate.of("torch", {}), 0, 0)
        # 20 to 100 times as slow as the arms: as many launches would take minutes.
        return lambda at, launches: HostTimer().time(slot, run, 1)
    graph, empty = CapturedGraph(run, UNROLL), empty_graph()

    def timed(at: int, launches: int) -> float:
        replays = max(1, -(-launches // UNROLL))
        return (graph.time_us(replays) - overhead_us(empty, replays, 5)) / (replays * UNROLL)

    return timed


def race(bench: Bench, candidates: Sequence[Candidate], by_torch: Timed, protocol: Protocol) -> Medians:
    """Return the median microseconds a launch of every candidate and, under None, of torch."""

    def timed(name: Candidate | None, at: int, launches: int) -> float:
        took = bench.sample(name, 0, at, launches) if name else by_torch(at, launches)
        if isinstance(took, Failure):
            raise SystemExit(f"{name}: {took.kind}: {took.detail}")
        return took

    launches = protocol.launches(min(timed(name, 0, protocol.unroll) for name in candidates))
    samples: dict[Candidate | None, list[float]] = {name: [] for name in (*candidates, None)}
    for at in range(ROUNDS):
        for name in samples if at % 2 else reversed(samples):
            samples[name].append(timed(name, at, launches))
    return {name: statistics.median(took) for name, took in samples.items()}


def main() -> None:
    """Print a line a row count, and the best of each arm."""
    device = detect()
    plan = plan_sweep(target_of("auto", device), "topk", tokens=",".join(map(str, ROWS)))
    bench, compiler = make_bench(plan.seam.name, plan.target, plan.protocol.l2)
    compiler.compile_all(plan.variants, lambda done, total: None)
    print(f"{device.name}: {plan.seam.label(plan.problem)}, {len(plan.candidates)} candidates")
    where = "cpu" if plan.target == "c" else "cuda"
    for cell in plan.cells:
        bench.enter(cell, plan.protocol.seed)
        for candidate in plan.candidates:
            prepared = bench.prepare(candidate)
            if isinstance(prepared, Failure):
                raise SystemExit(f"{candidate} at {cell.num_tokens} rows: {prepared.kind}: {prepared.detail}")
        inputs = plan.seam.inputs(plan.problem, cell.num_tokens, plan.protocol.seed, where)
        alike = torch_merge(plan.problem, inputs)[1] == reference.merge(inputs["gathered"])
        by_torch = torch_timer(plan.problem, inputs, plan.target)
        took = race(bench, plan.candidates, by_torch, plan.protocol)
        bench.leave()
        report(cell.num_tokens, took, alike)


def report(rows: int, took: Medians, alike: torch.Tensor) -> None:
    """Print one row count: the best candidate, torch, their ratio, and the best of each arm."""
    by_torch = took.pop(None)
    best = min(took, key=lambda name: took[name])
    assert best is not None
    print(
        f"{rows:3} rows: {took[best]:8.2f} us ({took[best] / rows:6.2f} a row) {best}; "
        f"torch {by_torch:8.2f} us, ratio {by_torch / took[best]:.1f}, "
        f"{float(alike.float().mean()):.2%} of its places alike"
    )
    for arm in dict.fromkeys(name.arm for name in took if name):
        mine = min((us, name) for name, us in took.items() if name and name.arm == arm)
        print(f"          {arm}: {mine[0]:.2f} us {mine[1]}")


if __name__ == "__main__":
    main()
