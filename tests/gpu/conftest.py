"""Everything below this folder needs an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from mhctune.autotuner.cuda_bench import CudaBench
from mhctune.kernels.buffers import OutputBuffers
from mhctune.kernels.compiler import Compiler
from mhctune.kernels.registry import seam
from mhctune.kernels.seam import Launch, Problem
from mhctune.kernels.space import Candidate


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def bind(compiler: Compiler) -> Callable[..., tuple[Launch, OutputBuffers]]:
    """Compile a candidate and return its launch and a poisoned buffer set."""

    def make(candidate: Candidate, problem: Problem, max_tokens: int) -> tuple[Launch, OutputBuffers]:
        arm = seam("post_pre_delayed").arm("cuda", candidate.arm)
        variants = arm.variants(problem, candidate.config)
        compiler.request(variants)
        launch = arm.bind(problem, candidate.config, [compiler.get(v).run for v in variants])
        buffers = OutputBuffers(arm.plan(problem, candidate.config, max_tokens), "cuda")
        buffers.poison()
        return launch, buffers

    return make


@pytest.fixture
def bench(compiler: Compiler) -> Iterator[CudaBench]:
    opened = CudaBench(seam("post_pre_delayed"), compiler)
    yield opened
    opened.leave()
    torch.cuda.empty_cache()
