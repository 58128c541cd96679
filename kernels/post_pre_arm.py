"""What every arm of `post_pre_delayed` shares, on every target: buffers and what an epilogue writes."""

from __future__ import annotations

from collections.abc import Iterator

from mhctune.kernels.buffers import BufferSpec, Role
from mhctune.kernels.seam import Arm, Problem, Region
from mhctune.kernels.space import Config

MIX_SIZE = 24
"""Columns of the projection: 4 pre, 4 post, 16 comb."""


def output_specs(problem: Problem, max_tokens: int) -> tuple[BufferSpec, ...]:
    """Return the seam's outputs: new streams, next post, comb and pre mixes, and the layer input."""
    hidden, n = problem.hidden_size, problem.hc_mult
    return (
        BufferSpec("residual_out", (max_tokens, n, hidden), "bfloat16"),
        BufferSpec("next_post_mix", (max_tokens, n), "float32"),
        BufferSpec("next_comb_mix", (max_tokens, n, n), "float32"),
        BufferSpec("layer_input", (max_tokens, hidden), "bfloat16"),
        BufferSpec("next_pre_mix", (max_tokens, n), "float32"),
    )


class PostPreArm(Arm):
    """An arm whose scratch is the projection's partial sums, split by split."""

    def plan(self, problem: Problem, config: Config, max_tokens: int) -> tuple[BufferSpec, ...]:
        """Return outputs and the partial sums [n_splits, T, 24] and [n_splits, T]."""
        splits = config["n_splits"]
        return (
            *output_specs(problem, max_tokens),
            BufferSpec("mul", (splits, max_tokens, MIX_SIZE), "float32", 1, Role.SCRATCH),
            BufferSpec("sqrsum", (splits, max_tokens), "float32", 1, Role.SCRATCH),
        )

    @staticmethod
    def _partials(n_splits: int, block_m: int, tile_n: int, num_tokens: int) -> Iterator[Region]:
        """Yield the partial sums that programs of `block_m` tokens and `tile_n` columns write."""
        for split in range(n_splits):
            for rows in range(-(-num_tokens // block_m)):
                tokens = (rows * block_m, min(num_tokens, (rows + 1) * block_m))
                yield Region("sqrsum", ((split, split + 1), tokens))
                for tile in range(MIX_SIZE // tile_n):
                    columns = (tile * tile_n, (tile + 1) * tile_n)
                    yield Region("mul", ((split, split + 1), tokens, columns))

    @staticmethod
    def _epilogue_writes(problem: Problem, num_tokens: int) -> Iterator[Region]:
        for token in range(num_tokens):
            row = (token, token + 1)
            yield Region("next_post_mix", (row, (0, 4)))
            yield Region("next_comb_mix", (row, (0, 4), (0, 4)))
            yield Region("layer_input", (row, (0, problem.hidden_size)))
            yield Region("next_pre_mix", (row, (0, 4)))
