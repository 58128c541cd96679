"""The unfused arms on CUDA: post where the seam has one, a projection of the stored streams, the epilogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from mhctune.kernels.cuda.arm import EPILOGUE_THR, N_SPLITS, TILE, CudaArm, tile_rules
from mhctune.kernels.cuda.one_pass import POST_LOADS, post_variant, run_post
from mhctune.kernels.post_pre_arm import MIX_SIZE
from mhctune.kernels.seam import Launch, Problem, Region, Tensors, Variant
from mhctune.kernels.space import Config, Constraint, SearchSpace, Tunable

_BLOCK_M = 64
"""Tokens of a tensor-core tile."""


class _Unfused(CudaArm):
    """A launch each; the projection takes the streams and the weights as rows of K elements."""

    _weights_rank = 2

    def _k_size(self, problem: Problem) -> int:
        """Return K: all streams of H, or the one that all streams are equal to."""
        return (1 if self.form.broadcast else 4) * problem.hidden_size

    def _post(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        if not self.form.has_post:
            return ()
        return (post_variant(problem.hidden_size, **POST_LOADS, **self._post_flags(problem, config)),)

    def _post_writes(self, problem: Problem, num_tokens: int) -> Iterator[Region]:
        width = POST_LOADS["n_thr"] * POST_LOADS["vec"]
        for token in range(num_tokens if self.form.has_post else 0):
            for first in range(0, problem.hidden_size, width):
                last = min(first + width, problem.hidden_size)
                yield Region("residual_out", ((token, token + 1), (0, 4), (first, last)))

    def _post_rules(self, problem: Problem) -> tuple[Constraint, ...]:
        vec = POST_LOADS["vec"]
        rule = Constraint(
            f"hidden {problem.hidden_size} is not a multiple of the post kernel's loads of {vec}",
            lambda c: problem.hidden_size % vec == 0,
        )
        return (rule,) if self.form.has_post else ()

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        """Return the launch."""
        *post, projection, epilogue = kernels
        k_size = self._k_size(problem)
        shape = (self.columns, k_size) if self._weights_rank == 2 else (self.columns, 1, k_size)

        def launch(inputs: Tensors, buffers: Tensors) -> None:
            for kernel in post:
                run_post(kernel, inputs, buffers, buffers["layer_input"])
            projected = self._projected(inputs, buffers).view(-1, k_size)
            projection(projected, inputs["fn"].view(shape), buffers["mul"], buffers["sqrsum"])
            self._run_epilogue(epilogue, problem, inputs, buffers)

        return launch

    def _projected(self, inputs: Tensors, buffers: Tensors) -> torch.Tensor:
        """Return what is projected: the streams, or the embedding as one of them."""
        if self.form.broadcast:
            return inputs["x"]
        return buffers["residual_out"] if self.form.has_post else inputs["residual"]


class Unfused(_Unfused):
    """The unfused route with a projection by fused multiply-adds."""

    name = "unfused"
    sources = (*CudaArm._shared_sources, "cuda/unfused.py", "cuda/one_pass.py", "cuda/projection.py")

    @property
    def preferred(self) -> Config:  # type: ignore[override]
        """Served without a table where it is legal."""
        return self._preferred(tile_n=4, n_splits=16, n_thr=64, vec=4, block_m=4)

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        registers = Constraint(
            "block_m {block_m} x (tile_n {tile_n} + vec {vec}) exceeds the 160 registers that sums and "
            "streams may take of a thread's 255",
            lambda c: c["block_m"] * (c["tile_n"] + c["vec"]) <= 160,
        )
        tiles = (4, 6, 8, 12, 24) if self.columns == MIX_SIZE else (1, 2, 4)
        return SearchSpace(
            self.name,
            (
                Tunable("tile_n", tiles, "columns of the projection a program computes"),
                N_SPLITS,
                Tunable("n_thr", (64, 128), "threads of a program"),
                Tunable("vec", (2, 4), "neighbouring elements a thread loads at once"),
                Tunable("block_m", (1, 2, 4, 8, 16), "tokens a program shares the weights among"),
                *self._epilogue_tunables,
            ),
            (
                *tile_rules(self._k_size(problem), "K", self.columns),
                registers,
                *self._post_rules(problem),
                *self._epilogue_rules(problem),
            ),
        )  # fmt: skip

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the post kernel, the projection and the epilogue."""
        projection = self._tiled("projection", problem, config, *TILE, **self._projection_flags())
        return *self._post(problem, config), projection, self._epilogue(problem, config)

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes."""
        yield from self._post_writes(problem, num_tokens)
        yield from self._partials(config["n_splits"], config["block_m"], config["tile_n"], num_tokens)
        yield from self._epilogue_writes(problem, num_tokens)


class UnfusedMma(_Unfused):
    """The unfused route with a projection on tensor cores, at float32 accuracy."""

    name = "unfused_mma"
    sources = (
        *CudaArm._shared_sources, "cuda/unfused.py", "cuda/one_pass.py", "cuda/projection_mma.py",
        "cuda/terms.py",
    )  # fmt: skip
    _weights_rank = 3

    @property
    def preferred(self) -> Config:  # type: ignore[override]
        """Served without a table where it is legal."""
        return self._preferred(n_splits=16, block_k=64)

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        k_size = self._k_size(problem)
        return SearchSpace(
            self.name,
            (
                N_SPLITS,
                Tunable("block_k", (64, 128, 256, 320, 512), "elements of K a tile holds"),
                *self._epilogue_tunables,
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
                *self._post_rules(problem),
                *self._epilogue_rules(problem),
            ),
        )

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the post kernel, the projection and the epilogue."""
        projection = self._tiled(
            "projection_mma", problem, config, "n_splits", "block_k", **self._projection_flags()
        )
        return *self._post(problem, config), projection, self._epilogue(problem, config)

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes."""
        yield from self._post_writes(problem, num_tokens)
        yield from self._partials(config["n_splits"], _BLOCK_M, MIX_SIZE, num_tokens)
        yield from self._epilogue_writes(problem, num_tokens)


class UnfusedHead(Unfused):
    """Projection to four gates, then the streams' weighted sum: two launches."""

    sources = (*Unfused.sources, "cuda/head.py")

    @property
    def _epilogue_tunables(self) -> tuple[Tunable, ...]:
        return (EPILOGUE_THR,)

    def _epilogue(self, problem: Problem, config: Config) -> Variant:
        return Variant.of(
            "head", self.target, hidden_size=problem.hidden_size, n_splits=config["n_splits"],
            n_thr=config["epilogue_thr"], vec=8,
        )  # fmt: skip

    def _run_epilogue(
        self, kernel: Callable[..., None], problem: Problem, inputs: Tensors, buffers: Tensors
    ) -> None:
        kernel(
            buffers["mul"], buffers["sqrsum"], inputs["residual"], inputs["scale"], inputs["base"],
            buffers["collapsed"], problem.rms_eps, problem.hc_pre_eps,
        )  # fmt: skip
