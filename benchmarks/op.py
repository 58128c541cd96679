"""What `mhctune::post_pre_delayed_out` costs beside its kernels, on the CPU: `python benchmarks/op.py`.

The launch is replaced by one that does nothing, so that what is left is checks, dispatch and torch.
"""

from __future__ import annotations

import statistics
import timeit

import torch

from mhctune.kernels import ops, serving
from mhctune.kernels.compiler import quiet
from mhctune.kernels.registry import seam
from mhctune.kernels.seam import Problem

HIDDEN, REPEATS, CALLS = 768, 9, 200


def main() -> None:
    """Print the medians in microseconds a call."""
    quiet()
    found, problem = seam("post_pre_delayed"), Problem(HIDDEN)
    inputs = found.inputs(problem, 1, 1, "cpu")
    names = ("x", "residual", "post_mix", "comb_mix", "fn", "scale", "base", "pre_mix", "norm_weight")
    outputs = [torch.empty(s.shape, dtype=getattr(torch, s.dtype)) for s in found.outputs(problem, 1)]
    scratch = torch.empty(serving.scratch_numel("", found.name, problem, "c", 1))
    eps = (problem.rms_eps, problem.hc_pre_eps, problem.sinkhorn_eps, problem.post_mult, problem.norm_eps)
    arguments = (*(inputs[n] for n in names), *outputs, scratch, *eps, problem.sinkhorn_iters, "")

    def call() -> None:
        torch.ops.mhctune.post_pre_delayed_out(*arguments)

    whole = _median(call)
    for key, (arm, _) in list(serving._launches.items()):
        serving._launches[key] = (arm, lambda inputs, buffers: None)
    overhead = _median(call)
    where = f"{ops.__name__}, 1 token, hidden {HIDDEN}"
    print(f"{where}: {whole:.0f} us a call, {overhead:.0f} us of it beside the kernels")


def _median(call: object) -> float:
    timeit.timeit(call, number=CALLS)  # type: ignore[arg-type]
    times = [timeit.timeit(call, number=CALLS) for _ in range(REPEATS)]  # type: ignore[arg-type]
    return statistics.median(times) / CALLS * 1e6


if __name__ == "__main__":
    main()
