"""What ships, built as it is described: its structure in our kernels, and the described epilogue behind it.

Unlike the candidates of `hopper_baselines.py`, which race and run our epilogue. What is not described of the
kernels ahead of the epilogue, and how its warp 0 holds Sinkhorn's matrix, is tried, and the fastest counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from described_epilogue import described_epilogue
from hopper_baselines import described
from hopper_yardstick import Asked, NoReproduction

from mhctune.autotuner.graph import CapturedGraph
from mhctune.autotuner.protocol import UNROLL
from mhctune.kernels import compiler
from mhctune.kernels.buffers import OutputBuffers
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Launch, Problem, Seam, Tensors, Variant
from mhctune.kernels.space import Candidate

EPILOGUE = "described_epilogue"
PASSES = {**compiler.PASS_CONFIG, "tl.ptxas_register_usage_level": 10}
"""As it is described to be compiled: no TMA, no warp specialisation, ptxas at register-usage level 10."""
BUDGET_US = 1e5
"""What the rounds of a reproduction may take, where that is enough for the least of them."""
ROUNDS, MOST_REPLAYS = (9, 31), 10
"""Least and most rounds, and the replays of one."""

LANES = (1, 16)
"""How warp 0 of the described epilogue may hold Sinkhorn's matrix."""

_OURS = frozenset(("epilogue_thr", "collapse"))
"""Tunables of the epilogue that is left out."""


@dataclass(frozen=True, slots=True)
class Reproduction:
    """One way to launch what ships: a candidate's kernels up to its epilogue, and the described one."""

    candidate: Candidate
    first: tuple[Variant, ...]
    epilogue: Variant

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The kernels, in launch order."""
        return *self.first, self.epilogue

    def __str__(self) -> str:
        """Return a label for people."""
        config = {name: value for name, value in self.candidate.items if name not in _OURS}
        lanes = dict(self.epilogue.params)["lanes"]
        return f"{Candidate.of(self.candidate.arm, config)} + {EPILOGUE}(lanes={lanes})"


def reproductions(seam: Seam, problem: Problem, sm_count: int, num_tokens: int) -> tuple[Reproduction, ...]:
    """Return what to try for a seam at a token count, each combination of kernels once.

    Raises:
        ValueError: nothing ships for the seam, or its epilogue is not the described one.
    """
    if not (problem.norm and problem.delayed):
        raise ValueError(f"{problem}: the described epilogue is delayed and has a norm")
    found: dict[tuple[Variant, ...], Reproduction] = {}
    for candidate in described(seam, problem, "cuda", sm_count, num_tokens).candidates:
        *first, _ = seam.arm("cuda", candidate.arm).variants(problem, candidate.config)
        for lanes in LANES:
            epilogue = Variant.of(
                EPILOGUE, "cuda", hidden_size=problem.hidden_size, n_splits=candidate.config["n_splits"],
                sinkhorn_iters=problem.sinkhorn_iters, carried=int(problem.carried), lanes=lanes,
            )  # fmt: skip
            made = Reproduction(candidate, tuple(first), epilogue)
            found.setdefault(made.variants, made)
    return tuple(found.values())


def bind(seam: Seam, problem: Problem, made: Reproduction, kernels: Sequence[Callable[..., None]]) -> Launch:
    """Return the launch of a reproduction, given its compiled `variants` in order."""
    *first, epilogue = kernels

    def last(*arguments: Any) -> None:
        # Ours also takes the streams, behind eleven tensors: it stores them where a seam begins with one.
        epilogue(*arguments[:11], *arguments[12:])

    return seam.arm("cuda", made.candidate.arm).bind(problem, made.candidate.config, [*first, last])


def compile_one(variant: Variant) -> compiler.Compiled:
    """Compile a variant of ours, or the described epilogue; TileLang's cache on disk is used for both."""
    if variant.kernel != EPILOGUE:
        return compiler.compile_variant(variant)
    options = {"target": {"kind": "cuda", "arch": compiler.cuda_arch()}, "pass_configs": PASSES}
    return compiler.compile_program(str(variant), lambda: described_epilogue(**dict(variant.params)), options)


def compile_all(asked: Iterable[Asked]) -> compiler.Compiler:
    """Return a compiler that has compiled all reproductions: none compiles while another is timed."""
    wanted = [
        variant
        for each in asked
        for count in each.token_counts
        for made in reproductions(find_seam(each.seam), each.problem, each.sm_count, count)
        for variant in made.variants
    ]
    compiler.quiet()
    compiling = compiler.Compiler(compile_one=compile_one)
    compiling.compile_all(wanted, lambda done, of: None)
    return compiling


def described_us(
    asked: Asked, compiled: compiler.Compiler, overhead_us: Callable[[int], float], device: str = "cuda"
) -> tuple[dict[int, float], dict[int, str]]:
    """Return the microseconds of the fastest reproduction by token count, and which it was.

    `overhead_us` tells what so many replays of a graph without nodes take.

    Raises:
        NoReproduction: one computes something else.
    """
    seam, taken, who = find_seam(asked.seam), {}, {}
    for count in asked.token_counts:
        inputs = seam.inputs(asked.problem, count, asked.seed, device)
        times = {
            made: _timed(seam, asked.problem, made, compiled, inputs, count, overhead_us)
            for made in reproductions(seam, asked.problem, asked.sm_count, count)
        }
        fastest = min(times, key=lambda made: times[made])
        taken[count], who[count] = times[fastest], str(fastest)
        del inputs
        torch.cuda.empty_cache()
    return taken, who


def _timed(
    seam: Seam,
    problem: Problem,
    made: Reproduction,
    compiled: compiler.Compiler,
    inputs: Tensors,
    num_tokens: int,
    overhead_us: Callable[[int], float],
) -> float:
    """Check one reproduction and return its microseconds a launch, timed as candidates are."""
    kernels = [compiled.get(variant).run for variant in made.variants]
    launch = bind(seam, problem, made, kernels)
    plan = seam.arm("cuda", made.candidate.arm).plan(problem, made.candidate.config, num_tokens)
    buffers = OutputBuffers(plan, inputs["x"].device)
    views = buffers.bind(num_tokens)
    buffers.poison()
    launch(inputs, views)
    check(seam, problem, made, inputs, views)
    graph = CapturedGraph(lambda: launch(inputs, views), UNROLL)
    graph.time_us(1)
    replays, rounds = pace(graph.time_us(1))
    total = statistics.median(graph.time_us(replays) for _ in range(rounds))
    graph.close()
    return (total - overhead_us(replays)) / (replays * UNROLL)


def pace(replay_us: float) -> tuple[int, int]:
    """Return the replays of a round and the rounds, given the microseconds of a replay."""
    least, most = ROUNDS
    affordable = int(BUDGET_US / replay_us)
    replays = max(1, min(MOST_REPLAYS, affordable // most))
    return replays, max(least, min(most, affordable // replays))


def check(seam: Seam, problem: Problem, made: Reproduction, inputs: Tensors, outputs: Tensors) -> None:
    """Hold what a reproduction wrote to the reference.

    Raises:
        NoReproduction: an element was not written, or is further off than the seam allows.
    """
    wrong = [str(each) for each in seam.check(problem, inputs, outputs) if not each.ok]
    if wrong:
        tokens = outputs["layer_input"].shape[0]
        raise NoReproduction(f"{made} at {tokens} tokens is no reproduction: {'; '.join(wrong)}")
