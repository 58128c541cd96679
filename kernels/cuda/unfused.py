"""The unfused arms of `post_pre_delayed` on CUDA: post, a projection of the stored streams, the epilogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType

import torch

from mhctune.kernels.cuda.arm import (
    COLLAPSE,
    EPILOGUE_THR,
    N_SPLITS,
    TILE,
    CudaArm,
    epilogue_rules,
    tile_rules,
)
from mhctune.kernels.post_pre_arm import MIX_SIZE
from mhctune.kernels.seam import Launch, Problem, Region, Tensors, Variant
from mhctune.kernels.space import Config, Constraint, SearchSpace, Tunable

_POST = {"n_thr": 128, "vec": 4}
"""The stand-alone post kernel: best of 6, or within 2 %, at 1 to 128 tokens on an H200 (hidden 5120)."""

_BLOCK_M = 64
"""Tokens of a tensor-core tile."""


class _Unfused(CudaArm):
    """Post, then a projection of the stored streams, then the epilogue: three launches."""

    _weights_shape: tuple[int, ...] = (MIX_SIZE,)

    def _post(self, problem: Problem, config: Config) -> Variant:
        return Variant.of(
            "post", self.target, hidden_size=problem.hidden_size, collapse=config["collapse"], **_POST
        )

    def _post_writes(self, problem: Problem, num_tokens: int) -> Iterator[Region]:
        width = _POST["n_thr"] * _POST["vec"]
        for token in range(num_tokens):
            for first in range(0, problem.hidden_size, width):
                last = min(first + width, problem.hidden_size)
                yield Region("residual_out", ((token, token + 1), (0, 4), (first, last)))

    def _post_rule(self, problem: Problem) -> Constraint:
        return Constraint(
            f"hidden {problem.hidden_size} is not a multiple of the post kernel's loads of {_POST['vec']}",
            lambda c: problem.hidden_size % _POST["vec"] == 0,
        )

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        """Return the launch."""
        post, projection, epilogue = kernels
        k_size = 4 * problem.hidden_size

        def launch(inputs: Tensors, buffers: Tensors) -> None:
            streams: torch.Tensor = buffers["residual_out"]
            post(
                inputs["x"], inputs["residual"], inputs["post_mix"], inputs["comb_mix"], inputs["pre_mix"],
                streams, buffers["layer_input"],
            )  # fmt: skip
            flat, weights = streams.view(-1, k_size), inputs["fn"].view(*self._weights_shape, k_size)
            projection(flat, weights, buffers["mul"], buffers["sqrsum"])
            self._run_epilogue(epilogue, problem, inputs, buffers)

        return launch


class Unfused(_Unfused):
    """The unfused route with a projection by fused multiply-adds."""

    name = "unfused"
    sources = (*CudaArm._shared_sources, "cuda/projection.py")
    preferred: Config = MappingProxyType(
        {"tile_n": 4, "n_splits": 16, "n_thr": 64, "vec": 4, "block_m": 4, "epilogue_thr": 128, "collapse": 0}
    )

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        registers = Constraint(
            "block_m {block_m} x (tile_n {tile_n} + vec {vec}) exceeds the 160 registers that sums and "
            "streams may take of a thread's 255",
            lambda c: c["block_m"] * (c["tile_n"] + c["vec"]) <= 160,
        )
        return SearchSpace(
            self.name,
            (
                Tunable("tile_n", (4, 6, 8, 12, 24), "columns of the projection a program computes"),
                N_SPLITS,
                Tunable("n_thr", (64, 128), "threads of a program"),
                Tunable("vec", (2, 4), "neighbouring elements a thread loads at once"),
                Tunable("block_m", (1, 2, 4, 8, 16), "tokens a program shares the weights among"),
                EPILOGUE_THR,
                COLLAPSE,
            ),
            (
                *tile_rules(4 * problem.hidden_size, "K"),
                registers,
                self._post_rule(problem),
                *epilogue_rules(problem),
            ),
        )

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the post kernel, the projection and the epilogue."""
        projection = self._tiled("projection", problem, config, *TILE)
        return self._post(problem, config), projection, self._epilogue(problem, config)

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes."""
        yield from self._post_writes(problem, num_tokens)
        yield from self._partials(config["n_splits"], config["block_m"], config["tile_n"], num_tokens)
        yield from self._epilogue_writes(problem, num_tokens)


class UnfusedMma(_Unfused):
    """The unfused route with a projection on tensor cores, at float32 accuracy."""

    name = "unfused_mma"
    sources = (*CudaArm._shared_sources, "cuda/projection_mma.py", "cuda/terms.py")
    preferred: Config = MappingProxyType({"n_splits": 16, "block_k": 64, "epilogue_thr": 128, "collapse": 0})
    _weights_shape = (MIX_SIZE, 1)

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        k_size = 4 * problem.hidden_size
        return SearchSpace(
            self.name,
            (
                N_SPLITS,
                Tunable("block_k", (64, 128, 256, 320, 512), "elements of K a tile holds"),
                EPILOGUE_THR,
                COLLAPSE,
            ),
            (
                Constraint(
                    f"K {k_size} is not a multiple of n_splits {{n_splits}} x block_k {{block_k}}: "
                    "a slice of k would be dropped",
                    lambda c: (
                        min(c["n_splits"], c["block_k"]) > 0 and k_size % (c["n_splits"] * c["block_k"]) == 0
                    ),
                ),
                Constraint(
                    "block_k {block_k} must be a multiple of 64 up to 512, above 320 the whole range of a "
                    "split: a tile and its weights fit shared memory, the next block the registers",
                    lambda c: (
                        c["block_k"] % 64 == 0
                        and 0 < c["block_k"] <= 512
                        and (c["block_k"] <= 320 or c["block_k"] * c["n_splits"] == k_size)
                    ),
                ),
                self._post_rule(problem),
                *epilogue_rules(problem),
            ),
        )

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the post kernel, the projection and the epilogue."""
        projection = self._tiled("projection_mma", problem, config, "n_splits", "block_k")
        return self._post(problem, config), projection, self._epilogue(problem, config)

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes."""
        yield from self._post_writes(problem, num_tokens)
        yield from self._partials(config["n_splits"], _BLOCK_M, MIX_SIZE, num_tokens)
        yield from self._epilogue_writes(problem, num_tokens)
