"""Every seam's CUDA arms against the reference, captured and replayed with other inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mhctune.kernels.buffers import OutputBuffers
from mhctune.kernels.compiler import Compiler
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Arm, Launch, Problem, Seam
from mhctune.kernels.space import Candidate

TOKENS = (1, 3, 8, 16, 33, 64, 129, 1000)
HIDDEN = (4096, 5120, 7168)
HAVE_AUX = ("post", "post_pre", "post_pre_bf16", "post_pre_delayed")
FLAGS: tuple[dict[str, bool], ...] = (
    {}, {"aux": True}, {"carried": False}, {"norm": False}, {"delayed": False},
)  # fmt: skip


def problems(seam: Seam, hidden: int) -> list[Problem]:
    return list(dict.fromkeys(seam.canonical(Problem(hidden, **flags)) for flags in FLAGS))


@functools.cache
def some(arm: Arm, problem: Problem, count: int = 3) -> list[Candidate]:
    """The preferred config where it is legal, and legal ones from all over the space.

    The first from each of `count` places on: to walk all spaces would take tens of seconds.
    """
    space = arm.space(problem)
    values = [tunable.values for tunable in space.tunables]
    size = math.prod(map(len, values))

    def point(index: int) -> dict[str, int]:
        config = {}
        for tunable in reversed(space.tunables):
            index, at = divmod(index, len(tunable.values))
            config[tunable.name] = tunable.values[at]
        return config

    def first(start: int) -> dict[str, int]:
        points = (point((start + step) % size) for step in range(size))
        return next(config for config in points if not space.refusals(config))

    picked = [Candidate.of(arm.name, first(size * at // count)) for at in range(count)]
    preferred = [] if space.refusals(arm.preferred) else [Candidate.of(arm.name, arm.preferred)]
    return list(dict.fromkeys([*preferred, *picked]))


def cases() -> Iterator[Any]:
    for seam in SEAMS.values():
        for hidden in () if seam.name == "topk_merge" else HIDDEN:
            yield pytest.param(seam, hidden, id=f"{seam.name}-{hidden}")


Chosen = list[tuple[Problem, Arm, Candidate]]


@pytest.fixture
def warm(compiler: Compiler) -> Callable[[Chosen], None]:
    """Compile all that a test launches at once, on all cores."""

    def request(chosen: Chosen) -> None:
        for problem, arm, candidate in chosen:
            compiler.request(arm.variants(problem, candidate.config))

    return request


@pytest.fixture
def launch_of(compiler: Compiler) -> Callable[..., tuple[Launch, OutputBuffers]]:
    def make(arm: Arm, problem: Problem, config: Any, tokens: int) -> tuple[Launch, OutputBuffers]:
        kernels = [compiler.get(variant).run for variant in arm.variants(problem, config)]
        buffers = OutputBuffers(arm.plan(problem, config, tokens), "cuda")
        buffers.poison()
        return arm.bind(problem, config, kernels), buffers

    return make


@pytest.mark.parametrize(("seam", "hidden"), list(cases()))
def test_every_arm_of_every_seam_is_right(
    seam: Seam,
    hidden: int,
    warm: Callable[[Chosen], None],
    launch_of: Callable[..., Any],
    seed: int,
    record_property: Callable[..., None],
) -> None:
    arms = seam.arms("cuda")
    warm([(p, arm, c) for p in problems(seam, hidden) for arm in arms for c in some(arm, p)])
    for problem in problems(seam, hidden):
        chosen = [(arm, c.config) for arm in arms for c in some(arm, problem)]
        for at, tokens in enumerate(TOKENS):
            regime = seam.regimes[at % len(seam.regimes)]
            inputs = seam.inputs(problem, tokens, seed + at, "cuda", regime)
            for arm, config in chosen:
                launch, buffers = launch_of(arm, problem, config, tokens)
                views = buffers.bind(tokens)
                launch(inputs, views)
                deviations = seam.check(problem, inputs, views)
                record_property("cell", [(f"{seam.name} {d.output}", d.error, d.bound) for d in deviations])
                record_property("arm", (seam.name, arm.name))
                assert all(d.ok for d in deviations), (
                    str(problem), tokens, regime, arm.name, config, [str(d) for d in deviations],
                )  # fmt: skip


@pytest.mark.parametrize("name", sorted(name for name, seam in SEAMS.items() if seam.arms("cuda")))
def test_a_captured_seam_is_replayed_with_other_inputs(
    name: str, warm: Callable[[Chosen], None], launch_of: Callable[..., Any], seed: int
) -> None:
    seam, tokens = SEAMS[name], 17
    warm([(p, arm, some(arm, p, 1)[0]) for p in problems(seam, 5120) for arm in seam.arms("cuda")])
    for problem in problems(seam, 5120):
        inputs = seam.inputs(problem, tokens, seed, "cuda")
        others = seam.inputs(problem, tokens, seed + 1, "cuda")
        for arm in seam.arms("cuda"):
            (candidate, *_) = some(arm, problem, 1)
            launch, buffers = launch_of(arm, problem, candidate.config, tokens)
            views = buffers.bind(tokens)
            launch(inputs, views)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch(inputs, views)
            for key, tensor in others.items():
                inputs[key].copy_(tensor)
            buffers.poison()
            launch(inputs, views)
            expected = [storage.clone() for storage in buffers.storages()]
            buffers.poison()
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(expected, buffers.storages(), strict=True)), arm.name
            assert all(d.ok for d in seam.check(problem, inputs, views)), arm.name


@pytest.mark.parametrize("tokens", [1, 33, 257])
def test_the_mean_is_that_of_torch_to_the_bit(
    tokens: int, warm: Callable[[Chosen], None], launch_of: Callable[..., Any], seed: int
) -> None:
    asked = [(SEAMS[name], SEAMS[name].canonical(Problem(5120, aux=True))) for name in HAVE_AUX]
    warm([(p, arm, c) for seam, p in asked for arm in seam.arms("cuda") for c in some(arm, p, 2)])
    for name in HAVE_AUX:
        seam = SEAMS[name]
        problem = seam.canonical(Problem(5120, aux=True))
        inputs = seam.inputs(problem, tokens, seed, "cuda")
        for arm in seam.arms("cuda"):
            for candidate in some(arm, problem, 2):
                launch, buffers = launch_of(arm, problem, candidate.config, tokens)
                views = buffers.bind(tokens)
                launch(inputs, views)
                assert torch.equal(views["aux"], views["residual_out"].mean(1)), (name, str(candidate))
