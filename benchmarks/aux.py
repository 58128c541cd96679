"""What the mean over the streams costs inside the seam and beside it: `python benchmarks/aux.py [cpu|cuda]`.

Three forms of each candidate of `post_pre_delayed`: the seam alone, the seam with `aux`, and the seam
followed by `torch.mean` of the stored streams. Rounds alternate forward and back, so that ratios are of
paired rounds; on CUDA a sample is a replay of a graph of 20 launches less an empty graph's. All means must
be equal to the bit. For each form the candidate with the lowest median counts: what is best with `aux` need
not be best without.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from mhctune.autotuner.graph import CapturedGraph, empty_graph, overhead_us
from mhctune.autotuner.protocol import UNROLL
from mhctune.autotuner.records import Sample
from mhctune.autotuner.stats import regret
from mhctune.kernels.buffers import OutputBuffers
from mhctune.kernels.compiler import Compiler, quiet
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Launch, Problem, Tensors
from mhctune.kernels.space import Candidate

SEAM, PROBLEM = find_seam("post_pre_delayed"), Problem(5120)
TOKENS = {"c": (1, 32, 1024), "cuda": (1, 32, 1024, 4096)}
ROUNDS = {"c": 9, "cuda": 31}
FORMS = ("alone", "folded", "beside")
_LATE = {"epilogue_thr": 320, "collapse": 1}
CANDIDATES = {
    "c": [Candidate.of(arm.name, arm.preferred) for arm in SEAM.arms("c")],
    # The recorded winners at 1 and at 32 tokens, then what fills the GPU from 1024 tokens on.
    "cuda": [
        Candidate.of("fused", {"tile_n": 2, "n_splits": 10, "n_thr": 128, "vec": 4, "block_m": 1, "ahead": 2,
                               "epilogue_thr": 128, "collapse": 1}),
        Candidate.of("fused_mma", {"n_splits": 80, "block_h": 64, "block_m": 16, "n_thr": 128, **_LATE}),
        Candidate.of("fused_mma", {"n_splits": 8, "block_h": 64, "block_m": 64, "n_thr": 128, **_LATE}),
        Candidate.of("unfused_mma", {"n_splits": 8, "block_k": 64, **_LATE}),
    ],
}  # fmt: skip


def candidates(target: str, tokens: int) -> list[Candidate]:
    """Return who is timed: of the fused multiply-adds not above decode, where they take ten times as long."""
    return [c for c in CANDIDATES[target] if target == "c" or c.arm != "fused" or tokens <= 32]


def run_of(launch: Launch, inputs: Tensors, views: Tensors, mean: torch.Tensor | None) -> Callable[[], None]:
    """Return the seam's launch, with a mean of the stored streams behind it where it has a place."""

    def run() -> None:
        launch(inputs, views)
        if mean is not None:
            torch.mean(views["residual_out"], 1, out=mean)

    return run


def forms(compiler: Compiler, target: str, candidate: Candidate, tokens: int) -> list[Callable[[], None]]:
    """Return the launches of the three forms, their means compared with torch's to the bit."""
    device = "cpu" if target == "c" else "cuda"
    inputs, runs, means = SEAM.inputs(PROBLEM, tokens, 1, device), [], []
    arm = SEAM.arm(target, candidate.arm)
    for form in FORMS:
        problem = replace(PROBLEM, aux=form == "folded")
        kernels = [compiler.get(variant).run for variant in arm.variants(problem, candidate.config)]
        buffers = OutputBuffers(arm.plan(problem, candidate.config, tokens), device)
        launch, views = arm.bind(problem, candidate.config, kernels), buffers.bind(tokens)
        mean = torch.empty_like(views["layer_input"]) if form == "beside" else views.get("aux")

        run = run_of(launch, inputs, views, mean if form == "beside" else None)
        buffers.poison()
        run()
        if mean is not None:
            means.append(mean)
            assert torch.equal(mean, views["residual_out"].mean(1)), (form, str(candidate), tokens)
        runs.append(run)
    assert torch.equal(*means), (str(candidate), tokens)
    return runs


@contextmanager
def timers(target: str, runs: list[Callable[[], None]], tokens: int) -> Iterator[list[Callable[[], float]]]:
    """Yield a function for each launch that takes one sample, in microseconds a launch."""
    if target == "c":

        def timed(run: Callable[[], None]) -> float:
            begin = time.perf_counter()
            run()
            return (time.perf_counter() - begin) * 1e6

        yield [lambda run=run: timed(run) for run in runs]  # type: ignore[misc]
        return
    replays = 5 if tokens <= 32 else 1  # 20 launches of the smallest seam take 80 us, too little for events
    empty = empty_graph()
    graphs = [CapturedGraph(run, UNROLL) for run in runs]
    overhead = overhead_us(empty, replays)
    yield [lambda g=g: (g.time_us(replays) - overhead) / (replays * UNROLL) for g in graphs]  # type: ignore[misc]
    for graph in (*graphs, empty):
        graph.close()


def sampled(take: list[Callable[[], float]], rounds: int) -> list[list[Sample]]:
    """Return the samples of each, in rounds forward and back; the first two rounds only warm up."""
    found: list[list[Sample]] = [[] for _ in take]
    for round in range(rounds + 2):
        order = range(len(take)) if round % 2 else reversed(range(len(take)))
        for at in order:
            latency = take[at]()
            if round >= 2:
                found[at].append(Sample(0, round, 0, UNROLL, latency))
    return found


def report(tokens: int, samples: dict[str, dict[Candidate, list[Sample]]]) -> None:
    """Print the best of each form with its spread, and its paired ratio to the best seam alone."""

    def median(taken: list[Sample]) -> float:
        return statistics.median(s.latency_us for s in taken)

    best = {form: min(of.values(), key=median) for form, of in samples.items()}
    for form in FORMS:
        who = next(c for c, taken in samples[form].items() if taken is best[form])
        low, *_, high = statistics.quantiles((s.latency_us for s in best[form]), n=20)
        line = f"{tokens:5} tokens  {form:7}{median(best[form]):9.2f} us  (5-95 %: {low:.2f}-{high:.2f})"
        if form != "alone":
            ratio = regret(best[form], best["alone"])
            more = median(best[form]) - median(best["alone"])
            line += f"  +{more:.2f} us, x{1 + ratio.point:.3f} ({1 + ratio.lower:.3f}-{1 + ratio.upper:.3f})"
        print(f"{line}  {who}", flush=True)
    ratio = regret(best["beside"], best["folded"])
    print(f"{tokens:5} tokens  beside / folded x{1 + ratio.point:.3f} "
          f"({1 + ratio.lower:.3f}-{1 + ratio.upper:.3f}); means equal to the bit", flush=True)  # fmt: skip


def main(device: str) -> None:
    """Time every token count."""
    quiet()
    target, compiler = {"cpu": "c", "cuda": "cuda"}[device], Compiler()
    for candidate in CANDIDATES[target]:
        for aux in (False, True):
            problem = replace(PROBLEM, aux=aux)
            compiler.request(SEAM.arm(target, candidate.arm).variants(problem, candidate.config))
    for tokens in TOKENS[target]:
        chosen = candidates(target, tokens)
        runs = [run for c in chosen for run in forms(compiler, target, c, tokens)]
        with timers(target, runs, tokens) as take:
            taken = iter(sampled(take, ROUNDS[target]))
        samples: dict[str, dict[Candidate, list[Sample]]] = {form: {} for form in FORMS}
        for candidate in chosen:
            for form in FORMS:
                samples[form][candidate] = next(taken)
        report(tokens, samples)
    compiler.close()


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "cuda" if torch.cuda.is_available() else "cpu")
