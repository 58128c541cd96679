"""The arms of `post_pre_delayed` on CUDA: their spaces and launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType

import torch

from mhctune.kernels.post_pre_arm import MIX_SIZE, PostPreArm
from mhctune.kernels.seam import Launch, Problem, Region, Tensors, Variant
from mhctune.kernels.space import Config, Constraint, SearchSpace, Tunable

_POST = {"n_thr": 128, "vec": 4}
"""The stand-alone post kernel: best of 6, or within 2 %, at 1 to 128 tokens on an H200 (hidden 5120)."""

_BLOCK_M = 64
"""Tokens of a tensor-core tile."""

_SPLITS = (1, 2, 4, 5, 7, 8, 10, 14, 16, 20, 28, 32, 40, 64)
_N_SPLITS = Tunable("n_splits", _SPLITS, "ranges that are summed apart")
_EPILOGUE_THR = Tunable(
    "epilogue_thr", (128, 160, 224, 256, 320, 448, 512, 640, 896), "threads that collapse a token"
)


def _epilogue_rule(hidden_size: int) -> Constraint:
    return Constraint(
        f"hidden {hidden_size} is not a multiple of 8 x epilogue_thr {{epilogue_thr}}, or that is no "
        "multiple of 32 up to 960 (two warps of 1024 threads are the coefficients')",
        lambda c: (
            c["epilogue_thr"] % 32 == 0
            and 0 < c["epilogue_thr"] <= 960
            and hidden_size % (8 * c["epilogue_thr"]) == 0
        ),
    )


def _tile_rules(size: int, what: str) -> tuple[Constraint, ...]:
    """Return the rules of programs that own `block_m` tokens, `tile_n` columns and a range of `size`."""
    return (
        Constraint(
            f"{MIX_SIZE} columns are not a multiple of tile_n {{tile_n}}: the last columns would be dropped",
            lambda c: c["tile_n"] > 0 and MIX_SIZE % c["tile_n"] == 0,
        ),
        Constraint(
            f"{what} {size} is not a multiple of n_splits {{n_splits}} x n_thr {{n_thr}} x vec {{vec}}: "
            "a slice of k would be dropped",
            lambda c: min(c["n_splits"], c["n_thr"], c["vec"]) > 0
            and size % (c["n_splits"] * c["n_thr"] * c["vec"]) == 0,
        ),
        Constraint(
            "n_thr {n_thr} must be 32 to 1024 in whole warps",
            lambda c: 32 <= c["n_thr"] <= 1024 and c["n_thr"] % 32 == 0,
        ),
        Constraint(
            "vec {vec} must be 1, 2, 4 or 8: 8 elements are one 16-byte load of bf16, two of fp32 weights",
            lambda c: c["vec"] in (1, 2, 4, 8),
        ),
        Constraint("block_m {block_m} must be positive", lambda c: c["block_m"] > 0),
    )  # fmt: skip


class _CudaArm(PostPreArm):
    """What the CUDA arms share: the epilogue."""

    target = "cuda"
    _shared_sources = (
        "post_pre_arm.py", "cuda/arms.py", "cuda/post.py", "cuda/reduction.py", "cuda/epilogue.py",
    )  # fmt: skip

    def _epilogue(self, problem: Problem, config: Config) -> Variant:
        return Variant.of(
            "epilogue", self.target, hidden_size=problem.hidden_size, n_splits=config["n_splits"],
            sinkhorn_iters=problem.sinkhorn_iters, carried=int(problem.carried), norm=int(problem.norm),
            n_thr=config["epilogue_thr"], vec=8,
        )  # fmt: skip

    def _tiled(self, kernel: str, problem: Problem, config: Config, *names: str) -> Variant:
        params = {name: config[name] for name in names}
        return Variant.of(kernel, self.target, hidden_size=problem.hidden_size, **params)

    @staticmethod
    def _run_epilogue(
        kernel: Callable[..., None], problem: Problem, inputs: Tensors, buffers: Tensors
    ) -> None:
        kernel(
            buffers["mul"], buffers["sqrsum"], buffers["residual_out"], inputs["pre_mix"],
            inputs["scale"], inputs["base"], inputs["norm_weight"],
            buffers["next_post_mix"], buffers["next_comb_mix"], buffers["layer_input"],
            buffers["next_pre_mix"],
            problem.rms_eps, problem.hc_pre_eps, problem.sinkhorn_eps, problem.post_mult, problem.norm_eps,
        )  # fmt: skip


_TILE = ("tile_n", "n_splits", "n_thr", "vec", "block_m")


class Fused(_CudaArm):
    """Post folded into the projection, then the epilogue: two launches."""

    name = "fused"
    sources = (*_CudaArm._shared_sources, "cuda/post_pre.py")
    preferred: Config = MappingProxyType(
        {
            "tile_n": 4, "n_splits": 4, "n_thr": 128, "vec": 2, "block_m": 1, "ahead": 0,
            "epilogue_thr": 128,
        }
    )  # fmt: skip

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        registers = Constraint(
            "block_m {block_m} x (tile_n {tile_n} + 4 x vec {vec}) exceeds the 100 registers that sums and "
            "streams may take of a thread's 255",
            lambda c: c["block_m"] * (c["tile_n"] + 4 * c["vec"]) <= 100,
        )
        return SearchSpace(
            self.name,
            (
                Tunable("tile_n", (1, 2, 3, 4, 6, 8, 12, 24), "columns of the projection a program computes"),
                _N_SPLITS,
                Tunable("n_thr", (64, 128, 256), "threads of a program"),
                Tunable("vec", (2, 4, 8), "neighbouring elements a thread loads at once"),
                Tunable("block_m", (1, 2, 4), "tokens a program shares the weights among"),
                Tunable("ahead", (0, 4, 6, 8, 12), "columns whose weights are loaded before the streams mix"),
                _EPILOGUE_THR,
            ),
            (
                *_tile_rules(problem.hidden_size, "hidden"),
                registers,
                Constraint(
                    "ahead {ahead} must be at most tile_n {tile_n}, and 4 x vec {vec} x ahead at most the "
                    "128 registers that weights may take",
                    lambda c: 0 <= c["ahead"] <= c["tile_n"] and 4 * c["vec"] * c["ahead"] <= 128,
                ),
                _epilogue_rule(problem.hidden_size),
            ),
        )

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the fused kernel and the epilogue."""
        fused = self._tiled("post_pre", problem, config, *_TILE, "ahead")
        return fused, self._epilogue(problem, config)

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes."""
        split_h = problem.hidden_size // config["n_splits"]
        width = config["n_thr"] * config["vec"]
        for split in range(config["n_splits"]):
            for first in range(split * split_h, split * split_h + split_h // width * width, width):
                yield Region("residual_out", ((0, num_tokens), (0, 4), (first, first + width)))
        yield from self._partials(config["n_splits"], config["block_m"], config["tile_n"], num_tokens)
        yield from self._epilogue_writes(problem, num_tokens)

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        """Return the launch."""
        post_pre, epilogue = kernels

        def launch(inputs: Tensors, buffers: Tensors) -> None:
            post_pre(
                inputs["x"], inputs["residual"], inputs["post_mix"], inputs["comb_mix"],
                inputs["fn"], buffers["residual_out"], buffers["mul"], buffers["sqrsum"],
            )  # fmt: skip
            self._run_epilogue(epilogue, problem, inputs, buffers)

        return launch


class _Unfused(_CudaArm):
    """Post, then a projection of the stored streams, then the epilogue: three launches."""

    def _post(self, problem: Problem) -> Variant:
        return Variant.of("post", self.target, hidden_size=problem.hidden_size, **_POST)

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
            post(inputs["x"], inputs["residual"], inputs["post_mix"], inputs["comb_mix"], streams)
            flat, weights = streams.view(-1, k_size), inputs["fn"].view(MIX_SIZE, k_size)
            projection(flat, weights, buffers["mul"], buffers["sqrsum"])
            self._run_epilogue(epilogue, problem, inputs, buffers)

        return launch


class Unfused(_Unfused):
    """The unfused route with a projection by fused multiply-adds."""

    name = "unfused"
    sources = (*_CudaArm._shared_sources, "cuda/projection.py")
    preferred: Config = MappingProxyType(
        {"tile_n": 4, "n_splits": 16, "n_thr": 64, "vec": 4, "block_m": 4, "epilogue_thr": 128}
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
                _N_SPLITS,
                Tunable("n_thr", (64, 128), "threads of a program"),
                Tunable("vec", (2, 4), "neighbouring elements a thread loads at once"),
                Tunable("block_m", (1, 2, 4, 8, 16), "tokens a program shares the weights among"),
                _EPILOGUE_THR,
            ),
            (
                *_tile_rules(4 * problem.hidden_size, "K"),
                registers,
                self._post_rule(problem),
                _epilogue_rule(problem.hidden_size),
            ),
        )

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the post kernel, the projection and the epilogue."""
        projection = self._tiled("projection", problem, config, *_TILE)
        return self._post(problem), projection, self._epilogue(problem, config)

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes."""
        yield from self._post_writes(problem, num_tokens)
        yield from self._partials(config["n_splits"], config["block_m"], config["tile_n"], num_tokens)
        yield from self._epilogue_writes(problem, num_tokens)


class UnfusedMma(_Unfused):
    """The unfused route with a projection on tensor cores, at float32 accuracy."""

    name = "unfused_mma"
    sources = (*_CudaArm._shared_sources, "cuda/projection_mma.py")
    preferred: Config = MappingProxyType({"n_splits": 16, "block_k": 64, "epilogue_thr": 128})

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        k_size = 4 * problem.hidden_size
        return SearchSpace(
            self.name,
            (
                _N_SPLITS,
                Tunable("block_k", (64, 128), "elements of K a tile holds"),
                _EPILOGUE_THR,
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
                    "block_k {block_k} must be 64 or 128: a row is shared by 8 or 16 threads of a tile's 128",
                    lambda c: c["block_k"] in (64, 128),
                ),
                self._post_rule(problem),
                _epilogue_rule(problem.hidden_size),
            ),
        )

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the post kernel, the projection and the epilogue."""
        projection = self._tiled("projection_mma", problem, config, "n_splits", "block_k")
        return self._post(problem), projection, self._epilogue(problem, config)

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes."""
        yield from self._post_writes(problem, num_tokens)
        yield from self._partials(config["n_splits"], _BLOCK_M, MIX_SIZE, num_tokens)
        yield from self._epilogue_writes(problem, num_tokens)
