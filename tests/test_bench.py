"""The bench of the CPU: real kernels are checked before they are timed, and faults become failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from mhctune.autotuner.bench import HostBench, fewest_bytes
from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint
from mhctune.autotuner.timer import Slot
from mhctune.kernels.arms import ARMS
from mhctune.kernels.buffers import BufferSpec, Role, total_bytes
from mhctune.kernels.c.arms import Fused
from mhctune.kernels.compiler import Compiled, CompileError, Compiler
from mhctune.kernels.post_pre_delayed import PostPreDelayed
from mhctune.kernels.seam import Arm, Launch, Problem, Tensors, Variant
from mhctune.kernels.space import Candidate, Config

PROBLEM = Problem(hidden_size=256)
CELL = Cell("post_pre_delayed", PROBLEM, 3)
CONFIG = {"tile_n": 24, "n_splits": 1, "block_h": 64, "block_m": 1}
CANDIDATE = Candidate.of("fused", CONFIG)
Wrap = Callable[[Launch, Tensors, Tensors], None]


class Planted(Fused):
    """The fused arm with its launch wrapped."""

    def __init__(self, wrap: Wrap) -> None:
        self.wrap = wrap

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        inner = super().bind(problem, config, kernels)
        return lambda inputs, buffers: self.wrap(inner, inputs, buffers)


class SeamOf(PostPreDelayed):
    """The seam with arms of our own."""

    def __init__(self, *arms: Arm) -> None:
        self._arms = arms

    def arms(self, target: str) -> tuple[Arm, ...]:
        return self._arms


@dataclass
class Fixed:
    """A timer that answers 5 us and launches as often as asked."""

    slots: list[Slot] = field(default_factory=list)

    def time(self, slot: Slot, run: Callable[[], None], launches: int) -> float:
        self.slots.append(slot)
        for _ in range(launches):
            run()
        return 5.0


def bench_of(compiler: Compiler, *arms: Arm, timer: Fixed | None = None) -> HostBench:
    bench = HostBench(SeamOf(*arms), compiler, timer or Fixed())
    bench.enter(CELL, seed=7)
    return bench


def prepared(compiler: Compiler, wrap: Wrap) -> Footprint | Failure:
    return bench_of(compiler, Planted(wrap)).prepare(CANDIDATE)


def failure(outcome: Footprint | float | Failure) -> Failure:
    assert isinstance(outcome, Failure)
    return outcome


def test_a_correct_candidate_of_each_arm_becomes_resident_and_is_timed(compiler: Compiler) -> None:
    timer = Fixed()
    bench = bench_of(compiler, *ARMS["c"]["post_pre_delayed"], timer=timer)
    for arm in ("fused", "unfused"):
        candidate = Candidate.of(arm, CONFIG)
        assert isinstance(bench.prepare(candidate), Footprint)
        assert bench.sample(candidate, 1, 2, 3) == 5.0
        assert timer.slots[-1] == Slot(CELL, candidate, 1, 2)
    bench.leave()


def test_the_footprint_counts_inputs_outputs_scratch_and_what_was_allocated(compiler: Compiler) -> None:
    bench = bench_of(compiler, *ARMS["c"]["post_pre_delayed"])
    inputs = PostPreDelayed().inputs(PROBLEM, 3, 7, "cpu")
    specs = ARMS["c"]["post_pre_delayed"][0].plan(PROBLEM, CONFIG, 3)
    footprint = bench.prepare(CANDIDATE)
    assert isinstance(footprint, Footprint)
    assert footprint.input_bytes == sum(t.nbytes for t in inputs.values())
    assert footprint.output_bytes == total_bytes(specs, Role.OUTPUT)
    assert footprint.scratch_bytes == total_bytes(specs, Role.SCRATCH) == 3 * 25 * 4
    assert footprint.measured_bytes == footprint.forecast_bytes == total_bytes(specs)
    assert bench.forecast(CANDIDATE).measured_bytes == 0


@pytest.mark.parametrize(
    "output", ["residual_out", "next_post_mix", "next_comb_mix", "layer_input", "next_pre_mix"]
)
def test_an_output_that_is_not_written_is_a_mismatch_that_names_it(compiler: Compiler, output: str) -> None:
    def forget(launch: Launch, inputs: Tensors, buffers: Tensors) -> None:
        launch(inputs, {**buffers, output: torch.empty_like(buffers[output])})

    found = failure(prepared(compiler, forget))
    assert found.kind is FailureKind.MISMATCH
    elements = {"residual_out": 3 * 4 * 256, "next_comb_mix": 48, "layer_input": 3 * 256}.get(output, 12)
    assert f"{output}: {elements} elements not written" in found.detail


def test_the_fewest_bytes_are_every_input_and_every_output_once() -> None:
    seam = PostPreDelayed()
    for tokens in (1, 3, 64):
        inputs = seam.inputs(PROBLEM, tokens, 7, "cpu")
        outputs = ARMS["c"]["post_pre_delayed"][0].plan(PROBLEM, CONFIG, tokens)
        expected = sum(t.nbytes for t in inputs.values()) + total_bytes(outputs, Role.OUTPUT)
        assert fewest_bytes(seam, PROBLEM, tokens) == expected


def test_a_processor_has_no_floor(compiler: Compiler) -> None:
    assert bench_of(compiler, *ARMS["c"]["post_pre_delayed"]).floor_us() == 0.0


def test_one_wrong_element_is_a_mismatch_with_error_and_bound(compiler: Compiler) -> None:
    def disturb(launch: Launch, inputs: Tensors, buffers: Tensors) -> None:
        launch(inputs, buffers)
        buffers["next_pre_mix"][2, 3] += 1e-3

    found = failure(prepared(compiler, disturb))
    assert found.kind is FailureKind.MISMATCH
    assert found.detail == "next_pre_mix: error 0.001, bound 1e-05"


def test_a_computed_nan_is_a_mismatch(compiler: Compiler) -> None:
    def spoil(launch: Launch, inputs: Tensors, buffers: Tensors) -> None:
        launch(inputs, buffers)
        buffers["layer_input"][0, 0] = float("nan")

    found = failure(prepared(compiler, spoil))
    assert found.kind is FailureKind.MISMATCH
    assert "layer_input" in found.detail
    assert "1 NaN" in found.detail


def test_an_arm_that_raises_is_a_launch_failure_that_quotes_it(compiler: Compiler) -> None:
    def refuse(launch: Launch, inputs: Tensors, buffers: Tensors) -> None:
        raise RuntimeError("shape mismatch in argument 3")

    expected = Failure(FailureKind.LAUNCH, "RuntimeError: shape mismatch in argument 3")
    assert prepared(compiler, refuse) == expected


def test_an_arm_that_raises_while_it_is_timed_is_a_launch_failure(compiler: Compiler) -> None:
    calls: list[int] = []

    def tire(launch: Launch, inputs: Tensors, buffers: Tensors) -> None:
        calls.append(1)
        if len(calls) > 2:
            raise ValueError("tired")
        launch(inputs, buffers)

    bench = bench_of(compiler, Planted(tire))
    assert isinstance(bench.prepare(CANDIDATE), Footprint)
    assert bench.sample(CANDIDATE, 0, 0, 1) == 5.0
    assert bench.sample(CANDIDATE, 0, 1, 1) == Failure(FailureKind.LAUNCH, "ValueError: tired")


def test_a_memory_error_is_out_of_memory(compiler: Compiler) -> None:
    def exhaust(launch: Launch, inputs: Tensors, buffers: Tensors) -> None:
        raise MemoryError

    assert failure(prepared(compiler, exhaust)).kind is FailureKind.OUT_OF_MEMORY


class Huge(Fused):
    """Asks for 3 PiB of scratch."""

    def plan(self, problem: Problem, config: Config, max_tokens: int) -> tuple[BufferSpec, ...]:
        huge = BufferSpec("huge", (max_tokens, 2**48), "float32", role=Role.SCRATCH)
        return (*super().plan(problem, config, max_tokens), huge)


def test_an_allocation_that_torch_refuses_is_out_of_memory(compiler: Compiler) -> None:
    found = failure(bench_of(compiler, Huge()).prepare(CANDIDATE))
    assert found.kind is FailureKind.OUT_OF_MEMORY


def test_a_variant_that_does_not_compile_is_a_compile_failure() -> None:
    def refuse(variant: Variant) -> Compiled:
        raise CompileError(f"{variant}: gcc: internal compiler error")

    compiler = Compiler(1, refuse)
    found = failure(bench_of(compiler, Fused()).prepare(CANDIDATE))
    compiler.close()
    assert found.kind is FailureKind.COMPILE
    assert "c:post_pre(" in found.detail
    assert "internal compiler error" in found.detail


class Unknown(Fused):
    """Wants a kernel that nobody wrote."""

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        return (Variant.of("nonsense", "c"),)


def test_a_kernel_that_nobody_wrote_is_a_compile_failure(compiler: Compiler) -> None:
    found = failure(bench_of(compiler, Unknown()).prepare(CANDIDATE))
    assert found.kind is FailureKind.COMPILE
    assert "nonsense" in found.detail


def test_the_buffers_are_the_same_storage_from_the_check_to_the_last_sample(compiler: Compiler) -> None:
    seen: list[tuple[tuple[str, int], ...]] = []

    def record(launch: Launch, inputs: Tensors, buffers: Tensors) -> None:
        tensors = {**inputs, **{f"out {name}": tensor for name, tensor in buffers.items()}}
        seen.append(tuple((name, tensor.data_ptr()) for name, tensor in tensors.items()))
        launch(inputs, buffers)

    bench = bench_of(compiler, Planted(record))
    bench.prepare(CANDIDATE)
    for round in range(3):
        bench.sample(CANDIDATE, 0, round, 4)
    assert len(seen) == 1 + 3 * 4
    assert len(set(seen)) == 1


def test_a_failed_candidate_and_a_released_one_are_not_resident(compiler: Compiler) -> None:
    def forget(launch: Launch, inputs: Tensors, buffers: Tensors) -> None:
        """Write nothing."""

    wrong = bench_of(compiler, Planted(forget))
    wrong.prepare(CANDIDATE)
    assert isinstance(wrong.sample(CANDIDATE, 0, 0, 1), Failure)
    right = bench_of(compiler, *ARMS["c"]["post_pre_delayed"])
    right.prepare(CANDIDATE)
    right.release(CANDIDATE)
    assert isinstance(right.sample(CANDIDATE, 0, 0, 1), Failure)


def test_a_bench_that_was_left_says_so(compiler: Compiler) -> None:
    bench = bench_of(compiler, *ARMS["c"]["post_pre_delayed"])
    bench.leave()
    with pytest.raises(RuntimeError, match="enter a cell first"):
        bench.forecast(CANDIDATE)


def test_the_inputs_of_a_cell_follow_from_the_seed(compiler: Compiler) -> None:
    drawn: list[torch.Tensor] = []

    def record(launch: Launch, inputs: Tensors, buffers: Tensors) -> None:
        drawn.append(inputs["x"].clone())
        launch(inputs, buffers)

    for number in (7, 7, 8):
        bench = HostBench(SeamOf(Planted(record)), compiler, Fixed())
        bench.enter(CELL, number)
        bench.prepare(CANDIDATE)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_a_moved_candidate_writes_other_addresses_with_the_same_bits(compiler: Compiler) -> None:
    seen: list[tuple[int, ...]] = []

    def watch(inner: Launch, inputs: Tensors, buffers: Tensors) -> None:
        inner(inputs, buffers)
        seen.append(tuple(view.data_ptr() for view in buffers.values()))

    bench = bench_of(compiler, Planted(watch))
    assert isinstance(bench.prepare(CANDIDATE), Footprint)
    for placement in (1, 2, 3):
        assert bench.move(CANDIDATE, placement) is None
        assert bench.sample(CANDIDATE, 0, 1000 * placement, 2) == 5.0
        moved, first, second = seen[-3:]
        assert moved == first == second
        assert not set(moved) & set(seen[-4])


def test_other_bits_at_other_addresses_are_a_mismatch(compiler: Compiler) -> None:
    calls: list[int] = []

    def fickle(inner: Launch, inputs: Tensors, buffers: Tensors) -> None:
        inner(inputs, buffers)
        calls.append(1)
        if len(calls) > 1:
            buffers["layer_input"][0, 0] += 1

    bench = bench_of(compiler, Planted(fickle))
    assert isinstance(bench.prepare(CANDIDATE), Footprint)
    found = bench.move(CANDIDATE, 1)
    assert found is not None
    assert (found.kind, "layer_input" in found.detail) == (FailureKind.MISMATCH, True)


def test_a_move_that_fails_to_launch_is_a_failure_and_no_exception(compiler: Compiler) -> None:
    calls: list[int] = []

    def once(inner: Launch, inputs: Tensors, buffers: Tensors) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        inner(inputs, buffers)

    bench = bench_of(compiler, Planted(once))
    assert isinstance(bench.prepare(CANDIDATE), Footprint)
    assert failure(bench.move(CANDIDATE, 1)).kind is FailureKind.OUT_OF_MEMORY  # type: ignore[arg-type]
