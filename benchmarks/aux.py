"""What the mean over the streams costs inside the seam and beside it, on the CPU: `python benchmarks/aux.py`.

Rounds alternate, so that the ratios are of one run: the seam alone, the seam with `aux`, and the seam
followed by `torch.mean` of the stored streams.
"""

from __future__ import annotations

import statistics
import time

import torch

from mhctune.kernels import ops
from mhctune.kernels.compiler import quiet
from mhctune.kernels.forms import POST_PRE_DELAYED, SCALARS
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Problem

HIDDEN, TOKENS, ROUNDS = 5120, (1, 32, 1024), 9


def main() -> None:
    """Print the medians in microseconds a call, and their ratios to the seam alone."""
    quiet()
    form, problem = POST_PRE_DELAYED, Problem(HIDDEN)
    scalars = [getattr(problem, name) for name in (*SCALARS, "sinkhorn_iters")]
    for tokens in TOKENS:
        inputs = tuple(SEAMS[form.name].inputs(problem, tokens, 1, "cpu").values())

        def alone(given: tuple[torch.Tensor, ...] = inputs) -> None:
            ops.post_pre_delayed(*given, *scalars, "", False)

        def folded(given: tuple[torch.Tensor, ...] = inputs) -> None:
            ops.post_pre_delayed(*given, *scalars, "", True)

        def beside(given: tuple[torch.Tensor, ...] = inputs) -> None:
            ops.post_pre_delayed(*given, *scalars, "", False)[0].mean(1)

        took: dict[str, list[float]] = {"alone": [], "folded": [], "beside": []}
        for _ in range(ROUNDS + 1):  # the first round compiles and warms up
            for name, call in (("alone", alone), ("folded", folded), ("beside", beside)):
                begin = time.perf_counter()
                call()
                took[name].append(time.perf_counter() - begin)
        medians = {name: statistics.median(times[1:]) * 1e6 for name, times in took.items()}
        parts = [f"{name} {value:.0f} us ({value / medians['alone']:.2f})" for name, value in medians.items()]
        print(f"{tokens} tokens, hidden {HIDDEN}: {', '.join(parts)}")


if __name__ == "__main__":
    main()
