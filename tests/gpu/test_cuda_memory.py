"""Buffers are the caller's, bytes are what the forecast said, and they come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from cuda_configs import BASE  # type: ignore[import-not-found]

from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.cuda_bench import CudaBench, ownership
from mhctune.autotuner.graph import CapturedGraph, empty_graph, live_bytes, reserved_bytes
from mhctune.autotuner.protocol import UNROLL, Protocol
from mhctune.autotuner.race import Race
from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint, Measurement
from mhctune.autotuner.store import SweepRecord
from mhctune.db.repository import Repository
from mhctune.kernels.buffers import OutputBuffers
from mhctune.kernels.compiler import Compiler
from mhctune.kernels.cuda.fused import Fused
from mhctune.kernels.post_pre_delayed import PostPreDelayed
from mhctune.kernels.registry import seam
from mhctune.kernels.seam import Arm, Deviation, Launch, Problem, Tensors
from mhctune.kernels.space import Candidate, Config

SEAM = seam("post_pre_delayed")
OWNED, FUNCTIONAL = Candidate.of("fused", BASE), Candidate.of("functional", BASE)


class Functional(Fused):
    """Allocates its outputs in every launch and copies them over: what seeds/000 repaired."""

    name = "functional"

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        launch = super().bind(problem, config, kernels)

        def functional(inputs: Tensors, buffers: Tensors) -> None:
            fresh = {name: torch.empty_like(tensor) for name, tensor in buffers.items()}
            launch(inputs, fresh)
            for name, tensor in buffers.items():
                tensor.copy_(fresh[name])

        return functional


class BothSeam(PostPreDelayed):
    def arms(self, target: str) -> tuple[Arm, ...]:
        return (*super().arms(target), Functional())


@pytest.mark.parametrize("tokens", [3, 4096])
@pytest.mark.parametrize("arm", [Fused(), Functional()], ids=lambda arm: arm.name)
def test_the_acceptance_table_of_the_buffers(compiler: Compiler, arm: Fused, tokens: int, seed: int) -> None:
    problem = Problem(4096)
    inputs = SEAM.inputs(problem, tokens, seed, "cuda")
    other = SEAM.inputs(problem, tokens, seed + 1, "cuda")
    kernels = [compiler.get(v).run for v in arm.variants(problem, BASE)]
    launch = arm.bind(problem, BASE, kernels)
    buffers = OutputBuffers(arm.plan(problem, BASE, tokens), "cuda")
    views = buffers.bind(tokens)

    def run() -> None:
        launch(inputs, views)

    run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    first = empty_graph()  # torch keeps 1,024 bytes of random state while any graph lives
    before = torch.cuda.memory_allocated()
    reserved = torch.cuda.memory_reserved()
    graph = CapturedGraph(run, UNROLL)
    captured = torch.cuda.memory_allocated()
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    replayed = torch.cuda.memory_allocated()
    grown = torch.cuda.memory_reserved() - reserved

    def change() -> None:
        for name, tensor in inputs.items():
            tensor.copy_(other[name])

    findings = ownership(run, graph, buffers, change)
    print(
        f"\n{arm.name} at {tokens} tokens: live {before:,} before, {captured:,} after capture, "
        f"{replayed:,} after 100 replays, reserved +{grown:,}; findings: {findings or 'none'}"
    )
    graph.close()
    first.close()
    assert captured == replayed == before
    if arm.name == "functional":
        assert any("reserved" in finding for finding in findings)
    else:
        assert grown == 0
        assert findings == []


def test_the_bench_refuses_the_functional_variant(compiler: Compiler) -> None:
    bench = CudaBench(BothSeam(), compiler)
    bench.enter(Cell(SEAM.name, Problem(4096), 64), 1)
    outcome = bench.prepare(FUNCTIONAL)
    bench.leave()
    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.MISMATCH
    assert "bytes that nobody budgeted" in outcome.detail


def test_forecast_and_measured_bytes_agree_for_twenty_candidates(bench: CudaBench) -> None:
    problem = Problem(4096)
    bench.enter(Cell(SEAM.name, problem, 4096), 1)
    changes = [
        {"tile_n": tile_n, "n_thr": n_thr, "n_splits": splits, "epilogue_thr": width}
        for tile_n, n_thr, splits in ((2, 64, 8), (4, 64, 2), (4, 128, 4), (8, 128, 4), (8, 64, 4))
        for width in (128, 256, 512, 64)
    ]
    for candidate in (Candidate.of("fused", {**BASE, **change}) for change in changes):
        forecast = bench.forecast(candidate)
        # Out of a cached block that is up to 1 MiB too large, the allocator gives and counts the whole block.
        torch.cuda.empty_cache()
        measured = bench.prepare(candidate)
        assert isinstance(measured, Footprint), measured
        print(f"\n{candidate}: forecast {forecast.forecast_bytes:,}, measured {measured.measured_bytes:,}, "
              f"graph {measured.graph_bytes:,}", end="")  # fmt: skip
        # The allocator rounds each of the 7 buffers up to 512 bytes.
        assert 0 <= measured.measured_bytes - forecast.forecast_bytes <= 7 * 512
        assert measured.graph_bytes == 0
        bench.release(candidate)


def test_after_a_sweep_of_three_hundred_candidates_every_byte_is_back(
    bench: CudaBench, repository: Repository, make_sweep: Callable[..., SweepRecord]
) -> None:
    problem, counts = Problem(5120), tuple(range(1, 16))
    # 20 candidates at 15 token counts: 300 buffer sets and graphs of 10 kernels.
    limits = {"n_splits": (16, 20, 32, 40, 64), "block_k": (64,), "collapse": (1,)}
    candidates = SEAM.arm("cuda", "unfused_mma").space(problem).restricted(limits).candidates()
    sweep_id = repository.begin(make_sweep(problem=problem, token_counts=counts))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    live, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for count in counts:
        cell = Cell(SEAM.name, problem, count)
        budget = VramBudget(2**34, 2**34)
        Race(sweep_id, cell, repository, bench, budget, Protocol.of("cuda", 5)).run(candidates, ())
    outcomes = [trial.outcome for trial in repository.trials(sweep_id)]
    print(f"\n{len(outcomes)} candidates: live {live:,} -> {torch.cuda.memory_allocated():,}, "
          f"reserved {reserved:,} -> {torch.cuda.memory_reserved():,}")  # fmt: skip
    assert len(outcomes) == 300
    assert all(isinstance(outcome, Measurement) for outcome in outcomes), outcomes
    assert torch.cuda.memory_allocated() == live
    assert torch.cuda.memory_reserved() == reserved


class TrustingSeam(BothSeam):
    """Does not check: the float64 reference would need more memory than the story leaves."""

    def check(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> list[Deviation]:
        return []


class TrustingBench(CudaBench):
    """Does not ask who owns the outputs, as the tuner of the story did not; counts what found no memory."""

    refused = 0

    def _ownership(self, *arguments: object) -> list[str]:
        return []

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        outcome = super().prepare(candidate)
        self.refused += isinstance(outcome, Failure) and outcome.kind is FailureKind.OUT_OF_MEMORY
        return outcome


@pytest.mark.parametrize("arm", ["fused", "functional"])
def test_the_story_on_a_gpu_with_capped_memory(
    compiler: Compiler, repository: Repository, make_sweep: Callable[..., SweepRecord], arm: str
) -> None:
    """The same search under the same cap: functional outputs run out of memory, owned ones do not."""
    problem, tokens = Problem(4096), 4096
    options = [(thr, n_thr) for thr in (128, 256, 512) for n_thr in (64, 128)]
    candidates = [Candidate.of(arm, {**BASE, "epilogue_thr": thr, "n_thr": n}) for thr, n in options]
    one = sum(spec.bytes for spec in Fused().plan(problem, BASE, tokens))
    bench = TrustingBench(TrustingSeam(), compiler)
    cell = Cell(SEAM.name, problem, tokens)
    torch.cuda.empty_cache()
    # Three input sets, six buffer sets and an eighth of a GiB for the allocator's rounding.
    cap = torch.cuda.memory_reserved() + bench.enter(cell, 1) + 6 * one + 2**27
    bench.leave()
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(0).total_memory)
    try:
        sweep_id = repository.begin(make_sweep(problem=problem, token_counts=(tokens,)))
        Race(sweep_id, cell, repository, bench, VramBudget(cap, cap), Protocol.of("cuda", 5)).run(
            candidates, ()
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        bench.leave()
    outcomes = [trial.outcome for trial in repository.trials(sweep_id)]
    batches = {s.batch for o in outcomes if isinstance(o, Measurement) for s in o.samples}
    print(f"\n{arm}: cap {cap:,} bytes, {bench.refused} times out of memory, {len(batches)} batches")
    assert len(outcomes) == 6
    dropped = [outcome for outcome in outcomes if not isinstance(outcome, Measurement)]
    assert dropped == []
    if arm == "functional":
        assert bench.refused >= 1
        assert len(batches) > 1
    else:
        assert bench.refused == 0
        assert batches == {0}


def test_the_census_counts_what_torch_counts() -> None:
    held = torch.empty(2**20, device="cuda")
    assert live_bytes() == torch.cuda.memory_allocated() >= held.numel() * 4
    assert reserved_bytes() == torch.cuda.memory_reserved() >= live_bytes()


@pytest.mark.parametrize("tokens", [1, 64])
def test_timed_cold_a_graph_goes_through_slots_that_outgrow_the_cache(
    compiler: Compiler, tokens: int, seed: int
) -> None:
    candidate = OWNED
    times = {}
    for l2 in ("warm", "cold"):
        bench = CudaBench(seam("post_pre_delayed"), compiler, l2)
        cell = Cell(SEAM.name, Problem(5120), tokens)
        assert bench.enter(cell, seed) == bench.input_bytes(cell)
        footprint = bench.prepare(candidate)
        assert isinstance(footprint, Footprint), footprint
        times[l2] = min(bench.sample(candidate, 0, round, 200) for round in range(9))  # type: ignore[type-var]
        resident = bench._residents[candidate]
        moved = bench.input_bytes(cell) - 2 * bench.input_bytes(cell) // (resident.buffers.slots + 2)
        moved += footprint.output_bytes
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        assert (moved > 2 * l2_bytes) is (l2 == "cold")
        assert len(set(resident.buffers.pointers())) == len(resident.buffers.specs) * resident.buffers.slots
        bench.release(candidate)
        bench.leave()
    print(f"\n{tokens} tokens: warm {times['warm']:.2f} us, cold {times['cold']:.2f} us")
    assert times["cold"] > times["warm"]
