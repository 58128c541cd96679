"""The arms of `post_pre_delayed` on the C backend: their spaces, buffers and launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType

import torch

from mhctune.kernels.c.lanes import LANES
from mhctune.kernels.post_pre_arm import MIX_SIZE, PostPreArm
from mhctune.kernels.seam import Launch, Problem, Region, Tensors, Variant
from mhctune.kernels.space import Config, Constraint, SearchSpace, Tunable

_POST_BLOCK_H = 256
"""Block of the stand-alone post kernel; 256 and 1024 were equal within noise at T = 1 to 64 (hidden 5120)."""

_TUNABLES = (
    Tunable("tile_n", (6, 12, 24), "columns of the projection a program computes"),
    Tunable("n_splits", (1, 2, 4, 5, 8), "ranges of H that are summed apart"),
    Tunable("block_h", (64, 128, 256), "elements of H a program holds at a time"),
    Tunable("block_m", (1, 2, 4, 8), "tokens a program shares the weights among"),
)


def _constraints(hidden_size: int) -> tuple[Constraint, ...]:
    """Return the closed form of the legality certificate (`Arm.writes`)."""
    return (
        Constraint(
            f"{MIX_SIZE} columns are not a multiple of tile_n {{tile_n}}: the last columns would be dropped",
            lambda c: c["tile_n"] > 0 and MIX_SIZE % c["tile_n"] == 0,
        ),
        Constraint(
            f"hidden {hidden_size} is not a multiple of n_splits {{n_splits}} x block_h {{block_h}}: "
            "a slice of k would be dropped",
            lambda c: min(c["n_splits"], c["block_h"]) > 0
            and hidden_size % (c["n_splits"] * c["block_h"]) == 0,
        ),
        Constraint(
            f"block_h {{block_h}} is not a multiple of the {LANES} lanes of an accumulator",
            lambda c: c["block_h"] % LANES == 0,
        ),
        Constraint("block_m {block_m} must be 1 to 8: 8 tokens fill the vector registers",
                   lambda c: 1 <= c["block_m"] <= 8),
    )  # fmt: skip


class _PostPre(PostPreArm):
    """What both arms share: tunables and the epilogue."""

    target = "c"
    preferred: Config = MappingProxyType({"tile_n": 24, "n_splits": 1, "block_h": 64, "block_m": 4})
    _shared_sources = (
        "post_pre_arm.py", "c/arms.py", "c/bf16.py", "c/lanes.py", "c/post.py", "c/projection.py",
        "c/epilogue.py",
    )  # fmt: skip

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        return SearchSpace(self.name, _TUNABLES, _constraints(problem.hidden_size))

    def _epilogue(self, problem: Problem) -> Variant:
        return Variant.of(
            "epilogue", self.target, hidden_size=problem.hidden_size, sinkhorn_iters=problem.sinkhorn_iters,
            carried=int(problem.carried), norm=int(problem.norm),
        )  # fmt: skip

    def _tiled(self, kernel: str, problem: Problem, config: Config) -> Variant:
        return Variant.of(kernel, self.target, hidden_size=problem.hidden_size, **config)

    def _tiles(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        return self._partials(config["n_splits"], config["block_m"], config["tile_n"], num_tokens)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a bfloat16 tensor's bits; a view."""
    return tensor.view(torch.uint16)


def _run_epilogue(kernel: Callable[..., None], problem: Problem, inputs: Tensors, buffers: Tensors) -> None:
    kernel(
        buffers["mul"], buffers["sqrsum"], _bits(buffers["residual_out"]), inputs["pre_mix"],
        inputs["scale"], inputs["base"], _bits(inputs["norm_weight"]),
        buffers["next_post_mix"], buffers["next_comb_mix"], _bits(buffers["layer_input"]),
        buffers["next_pre_mix"],
        problem.rms_eps, problem.hc_pre_eps, problem.sinkhorn_eps, problem.post_mult, problem.norm_eps,
    )  # fmt: skip


class Fused(_PostPre):
    """Post folded into the projection, then the epilogue: two launches."""

    name = "fused"
    sources = (*_PostPre._shared_sources, "c/post_pre.py")

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the fused kernel and the epilogue."""
        return self._tiled("post_pre", problem, config), self._epilogue(problem)

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes, by the same floor divisions as the kernel."""
        split_h, block_h = problem.hidden_size // config["n_splits"], config["block_h"]
        for split in range(config["n_splits"]):
            for block in range(split_h // block_h):
                first = split * split_h + block * block_h
                yield Region("residual_out", ((0, num_tokens), (0, 4), (first, first + block_h)))
        yield from self._tiles(problem, config, num_tokens)
        yield from self._epilogue_writes(problem, num_tokens)

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        """Return the launch."""
        post_pre, epilogue = kernels

        def launch(inputs: Tensors, buffers: Tensors) -> None:
            post_pre(
                _bits(inputs["x"]), _bits(inputs["residual"]), inputs["post_mix"], inputs["comb_mix"],
                inputs["fn"], _bits(buffers["residual_out"]), buffers["mul"], buffers["sqrsum"],
            )  # fmt: skip
            _run_epilogue(epilogue, problem, inputs, buffers)

        return launch


class Unfused(_PostPre):
    """Post, split-k projection of the stored streams, epilogue: three launches."""

    name = "unfused"
    sources = _PostPre._shared_sources

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the post kernel, the projection and the epilogue."""
        post = Variant.of("post", self.target, hidden_size=problem.hidden_size, block_h=_POST_BLOCK_H)
        return post, self._tiled("projection", problem, config), self._epilogue(problem)

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes."""
        for token in range(num_tokens):
            for block in range(problem.hidden_size // _POST_BLOCK_H):
                columns = (block * _POST_BLOCK_H, (block + 1) * _POST_BLOCK_H)
                yield Region("residual_out", ((token, token + 1), (0, 4), columns))
        yield from self._tiles(problem, config, num_tokens)
        yield from self._epilogue_writes(problem, num_tokens)

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem; the post kernel's block must divide H as well."""
        space = super().space(problem)
        rule = Constraint(
            f"hidden {problem.hidden_size} is not a multiple of the post kernel's block of {_POST_BLOCK_H}",
            lambda c: problem.hidden_size % _POST_BLOCK_H == 0,
        )
        return SearchSpace(space.arm, space.tunables, (*space.constraints, rule))

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        """Return the launch."""
        post, projection, epilogue = kernels

        def launch(inputs: Tensors, buffers: Tensors) -> None:
            streams = _bits(buffers["residual_out"])
            post(
                _bits(inputs["x"]), _bits(inputs["residual"]), inputs["post_mix"], inputs["comb_mix"], streams
            )
            projection(streams, inputs["fn"], buffers["mul"], buffers["sqrsum"])
            _run_epilogue(epilogue, problem, inputs, buffers)

        return launch
