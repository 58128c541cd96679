"""The CUDA arms of `topk_merge` on a GPU: to the bit as the reference, captured and replayed.

One GPU stands for all ranks: what they would have sent is drawn. Real ranks are in `test_cuda_ranks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cover import pairwise  # type: ignore[import-not-found]

from mhctune.autotuner.cuda_bench import CudaBench
from mhctune.autotuner.records import Cell, Footprint
from mhctune.kernels import topk_reference as reference
from mhctune.kernels.buffers import OutputBuffers, unwritten
from mhctune.kernels.compiler import Compiler
from mhctune.kernels.cuda.topk_arms import ARMS
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Arm, Problem
from mhctune.kernels.space import Candidate, Config

SEAM = SEAMS["topk_merge"]
ROWS = (1, 2, 4, 33, 64)
GRID = pairwise(((512, 1024, 2048), (1, 2, 4, 8), (1, 16, 64), ROWS, SEAM.regimes, ARMS))
Bind = Callable[..., tuple[Any, OutputBuffers]]


def problem_of(top_k: int, ranks: int = 1, interleave: int = 1) -> Problem:
    return SEAM.canonical(Problem(1, top_k=top_k, ranks=ranks, interleave=interleave))


WIDEST = problem_of(2048, 8, 16)


def served(arm: Arm, problem: Problem) -> Config:
    """The preferred config, or the first legal one."""
    space = arm.space(problem)
    return arm.preferred if not space.refusals(arm.preferred) else next(space.legal()).config


@pytest.fixture(scope="module")
def kernels(compiler: Compiler) -> Compiler:
    """All kernels of this file, compiled side by side."""
    chosen = [(arm, problem_of(k, w, s), served(arm, problem_of(k, w, s))) for k, w, s, _, _, arm in GRID]
    chosen += [(arm, WIDEST, c.config) for arm in ARMS for c in arm.space(WIDEST).legal()]
    compiler.request(v for arm, problem, config in chosen for v in arm.variants(problem, config))
    return compiler


@pytest.fixture
def bind_arm(kernels: Compiler) -> Bind:
    def make(arm: Arm, problem: Problem, config: Config, rows: int) -> tuple[Any, OutputBuffers]:
        launch = arm.bind(problem, config, [kernels.get(v).run for v in arm.variants(problem, config)])
        buffers = OutputBuffers(arm.plan(problem, config, rows), "cuda")
        buffers.poison()
        return launch, buffers

    return make


@pytest.mark.parametrize(("index", "row"), tuple(enumerate(GRID)), ids=[str(i) for i in range(len(GRID))])
def test_every_arm_matches_the_reference_to_the_bit(
    index: int, row: tuple[Any, ...], bind_arm: Bind, seed: int
) -> None:
    top_k, ranks, interleave, rows, regime, arm = row
    problem = problem_of(top_k, ranks, interleave)
    inputs = SEAM.inputs(problem, rows, seed, "cpu", regime)
    launch, buffers = bind_arm(arm, problem, served(arm, problem), rows)
    views = buffers.bind(rows)
    launch({name: tensor.cuda() for name, tensor in inputs.items()}, views)
    found = SEAM.check(problem, inputs, {name: tensor.cpu() for name, tensor in views.items()})
    assert all(d.ok for d in found), [str(d) for d in found]
    ids = inputs["local_ids"].cuda()
    launch.convert(ids, ids, ranks - 1)
    assert torch.equal(ids, views["packed"][:, 0])


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
@pytest.mark.parametrize("regime", ["served", "ties", "odd"])
def test_every_config_gives_the_same_bits(arm: Arm, regime: str, bind_arm: Bind, seed: int) -> None:
    inputs = SEAM.inputs(WIDEST, 3, seed, "cpu", regime)
    expected = reference.merge(inputs["gathered"])
    inputs = {name: tensor.cuda() for name, tensor in inputs.items()}
    for candidate in arm.space(WIDEST).legal():
        launch, buffers = bind_arm(arm, WIDEST, candidate.config, 3)
        views = buffers.bind(3)
        launch(inputs, views)
        assert torch.equal(views["ids"].cpu(), expected), str(candidate)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_row_does_not_depend_on_its_batch(arm: Arm, bind_arm: Bind, seed: int) -> None:
    inputs = SEAM.inputs(WIDEST, 64, seed, "cuda", "ties")
    launch, buffers = bind_arm(arm, WIDEST, served(arm, WIDEST), 64)
    launch(inputs, buffers.bind(64))
    batch = buffers.bind(64)["ids"].clone()
    for token in (0, 40, 63):
        row = {name: t[token : token + 1] for name, t in inputs.items() if name != "gathered"}
        row["gathered"] = inputs["gathered"][:, token : token + 1].contiguous()
        buffers.poison()
        launch(row, buffers.bind(1))
        assert torch.equal(buffers.bind(1)["ids"][0], batch[token])


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_captured_merge_is_replayed_with_other_inputs_and_a_thousand_times(
    arm: Arm, bind_arm: Bind, seed: int
) -> None:
    rows = 33
    launch, buffers = bind_arm(arm, WIDEST, served(arm, WIDEST), rows)
    views = buffers.bind(rows)
    live = SEAM.inputs(WIDEST, rows, seed, "cuda")
    launch(live, views)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(live, views)
    for at, regime in enumerate(SEAM.regimes):
        inputs = SEAM.inputs(WIDEST, rows, seed + at, "cpu", regime)
        for name, tensor in inputs.items():
            live[name].copy_(tensor)
        buffers.poison()
        graph.replay()
        torch.cuda.synchronize()
        found = SEAM.check(WIDEST, inputs, {name: view.cpu() for name, view in views.items()})
        assert all(d.ok for d in found), (regime, [str(d) for d in found])
    inputs = SEAM.inputs(WIDEST, rows, seed, "cuda", "ties")
    for name, tensor in inputs.items():
        live[name].copy_(tensor)
    graph.replay()
    first = {name: view.clone() for name, view in views.items()}
    other = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        buffers.poison()
        graph.replay()
        for name, view in views.items():
            other += (view != first[name]).sum()
    assert int(other) == 0
    assert sum(unwritten(view) for view in views.values()) == 0


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_the_bench_of_a_sweep_checks_captures_and_times_every_arm(
    arm: Arm, kernels: Compiler, seed: int
) -> None:
    bench, cell = CudaBench(SEAM, kernels), Cell(SEAM.name, WIDEST, 3)
    assert bench.enter(cell, seed) == bench.input_bytes(cell)
    candidate = Candidate.of(arm.name, served(arm, WIDEST))
    prepared = bench.prepare(candidate)
    assert isinstance(prepared, Footprint), prepared
    latency = bench.sample(candidate, 0, 0, 20)
    bench.leave()
    assert isinstance(latency, float)
    print(f"\n{candidate}: {latency:.2f} us at 3 rows")
    assert latency > 0
