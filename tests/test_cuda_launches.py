"""What every CUDA arm passes to its kernels is what they declare; no GPU is needed to see that.

The kernels are built by their real factories and not compiled. A launch is bound to stand-ins that compare
each argument with the kernel's parameter: dtype, rank, extents (the symbolic ones agree across arguments) and
contiguity. The values that kernels compute are the GPU tests' matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch

from mhctune.kernels.buffers import OutputBuffers
from mhctune.kernels.compiler import _factory
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Arm, Problem, Seam, Variant
from mhctune.kernels.space import Config
from mhctune.kernels.topk_arm import TopkLaunch

HIDDEN, TOKENS = 1024, 3


@cache
def program_of(variant: Variant) -> Any:
    """A kernel as its factory builds it, once: seams share kernels, and one takes 0.2 s to build."""
    return _factory(variant)(**dict(variant.params))


class Declared:
    """Stands in for a compiled kernel and holds its arguments against the declaration."""

    def __init__(self, variant: Variant) -> None:
        self.variant, self.calls = variant, 0
        self.program = program_of(variant)

    def __call__(self, *arguments: Any) -> None:
        self.calls += 1
        parameters = list(self.program.params)
        assert len(arguments) == len(parameters), (len(arguments), [str(p) for p in parameters])
        symbols: dict[str, int] = {}
        for parameter, argument in zip(parameters, arguments, strict=True):
            if parameter not in self.program.buffer_map:
                kind = int if "int" in str(parameter.dtype) else float
                assert isinstance(argument, kind), (str(parameter), argument)
                continue
            buffer = self.program.buffer_map[parameter]
            assert isinstance(argument, torch.Tensor), (buffer.name, argument)
            assert str(argument.dtype) == f"torch.{buffer.dtype}", (buffer.name, argument.dtype)
            assert argument.dim() == len(buffer.shape), (buffer.name, argument.shape)
            assert argument.is_contiguous(), (buffer.name, argument.stride())
            for declared, given in zip(buffer.shape, argument.shape, strict=True):
                try:
                    expected = int(declared)
                except TypeError:
                    expected = symbols.setdefault(str(declared), given)
                assert given == expected, (buffer.name, str(declared), tuple(argument.shape))


def cases() -> Iterator[Any]:
    for seam in SEAMS.values():
        seen = set()
        for flags in ({}, {"aux": True}, {"carried": False}, {"norm": False}, {"delayed": False}):
            problem = seam.canonical(Problem(HIDDEN, ranks=8, interleave=16, **flags))
            if problem in seen:
                continue
            seen.add(problem)
            for arm in seam.arms("cuda"):
                yield pytest.param(
                    seam, problem, arm, id=f"{seam.name}-{arm.name}-{'-'.join(flags) or 'usual'}"
                )


@cache
def configs(arm: Arm, problem: Problem) -> tuple[Config, ...]:
    """The preferred config where it is legal, and the first legal one of each value of `collapse`."""
    space = arm.space(problem)
    found = [] if space.refusals(arm.preferred) else [arm.preferred]
    values = [tunable.values for tunable in space.tunables if tunable.name == "collapse"]
    # Not a walk of the whole space: with 10^5 points it took 3 s.
    limits = [{"collapse": (value,)} for value in values[0]] if values else [{}]
    for limit in limits:
        found += [candidate.config for candidate in islice(space.restricted(limit).legal(), 1)]
    return tuple(found)


CASES = list(cases())


@pytest.mark.parametrize(("seam", "problem", "arm"), CASES)
def test_a_launch_passes_what_its_kernels_declare(seam: Seam, problem: Problem, arm: Arm) -> None:
    inputs = seam.inputs(problem, TOKENS, 1, "cpu")
    tried = configs(arm, problem)
    assert tried
    for config in tried:
        kernels = [Declared(variant) for variant in arm.variants(problem, config)]
        buffers = OutputBuffers(arm.plan(problem, config, TOKENS), "cpu")
        launch = arm.bind(problem, config, kernels)
        launch(inputs, buffers.bind(TOKENS))
        if isinstance(launch, TopkLaunch):
            launch.convert(inputs["local_ids"], buffers.bind(TOKENS)["ids"], 0)
        assert [kernel.calls for kernel in kernels] == [1] * len(kernels)


@pytest.mark.parametrize(("seam", "problem", "arm"), CASES)
def test_every_element_is_written_once_by_the_legal_configs(seam: Seam, problem: Problem, arm: Arm) -> None:
    for config in configs(arm, problem):
        cover = {
            spec.name: torch.zeros(spec.shape, dtype=torch.int32)
            for spec in arm.plan(problem, config, TOKENS)
        }
        for region in arm.writes(problem, config, TOKENS):
            cover[region.buffer][tuple(slice(*extent) for extent in region.ranges)] += 1
        assert all(bool((counts == 1).all()) for counts in cover.values()), (
            config,
            {name: counts.unique().tolist() for name, counts in cover.items()},
        )


def test_a_collapse_of_rows_that_its_loads_do_not_fit_is_refused() -> None:
    seam = SEAMS["collapse"]
    problem, (arm,) = seam.canonical(Problem(HIDDEN)), seam.arms("cuda")
    apart = torch.zeros(TOKENS, 4 * HIDDEN + 2, dtype=torch.bfloat16)[:, : 4 * HIDDEN]
    inputs = {**seam.inputs(problem, TOKENS, 1, "cpu"), "residual": apart.view(TOKENS, 4, HIDDEN)}
    for vec, allowed in ((2, True), (4, False)):
        config = {"n_thr": 64, "vec": vec}
        kernels = [Declared(variant) for variant in arm.variants(problem, config)]
        buffers = OutputBuffers(arm.plan(problem, config, TOKENS), "cpu").bind(TOKENS)
        if allowed:
            arm.bind(problem, config, kernels)(inputs, buffers)
        else:
            with pytest.raises(ValueError, match=r"rows of residual lie 4098 elements apart; .* vec 4"):
                arm.bind(problem, config, kernels)(inputs, buffers)


@pytest.mark.parametrize("hidden", [4096, 5120, 7168])
def test_every_seam_is_served_on_a_gpu_without_a_table(hidden: int) -> None:
    """Each was swept on an H200. The tensor cores' arms refuse what another arm then serves."""
    for name, seam in SEAMS.items():
        served = seam.preference("cuda")
        assert sorted(a.name for a in served) == sorted(a.name for a in seam.arms("cuda")), name
        if name != "topk_merge":
            problem = seam.canonical(Problem(hidden))
            assert not served[0].space(problem).refusals(served[0].preferred), name
