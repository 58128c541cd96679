"""What every arm with a projection shares, on every target: buffers and what an epilogue writes."""

from __future__ import annotations

from collections.abc import Iterator

from mhctune.kernels.buffers import BufferSpec, Role
from mhctune.kernels.forms import POST_PRE_DELAYED, Form
from mhctune.kernels.seam import Arm, Problem, Region
from mhctune.kernels.space import Config

MIX_SIZE = 24
"""Columns of the projection: 4 pre, 4 post, 16 comb."""


class PostPreArm(Arm):
    """An arm whose scratch is the projection's partial sums, split by split."""

    form: Form = POST_PRE_DELAYED
    writes_aux = False
    """Whether its kernels can write the mean over the streams."""

    @property
    def columns(self) -> int:
        """Columns of the projection."""
        assert self.form.weights is not None
        return int(self.form.weights.axes[0])

    def plan(self, problem: Problem, config: Config, max_tokens: int) -> tuple[BufferSpec, ...]:
        """Return outputs and the partial sums [n_splits, T, columns] and [n_splits, T].

        Raises:
            ValueError: the problem asks for aux and this arm cannot write it.
        """
        if problem.aux and not self.writes_aux:
            raise ValueError(
                f"arm {self.name} on target {self.target!r} does not write aux; "
                "call without aux and take torch.mean of residual_out"
            )
        splits = config["n_splits"]
        return (
            *self.form.outputs(problem, max_tokens),
            BufferSpec("mul", (splits, max_tokens, self.columns), "float32", 1, Role.SCRATCH),
            BufferSpec("sqrsum", (splits, max_tokens), "float32", 1, Role.SCRATCH),
        )

    def _partials(self, n_splits: int, block_m: int, tile_n: int, num_tokens: int) -> Iterator[Region]:
        """Yield the partial sums that programs of `block_m` tokens and `tile_n` columns write."""
        for split in range(n_splits):
            for rows in range(-(-num_tokens // block_m)):
                tokens = (rows * block_m, min(num_tokens, (rows + 1) * block_m))
                yield Region("sqrsum", ((split, split + 1), tokens))
                for tile in range(self.columns // tile_n):
                    columns = (tile * tile_n, (tile + 1) * tile_n)
                    yield Region("mul", ((split, split + 1), tokens, columns))

    def _epilogue_writes(self, problem: Problem, num_tokens: int) -> Iterator[Region]:
        """Yield a row a token of every output that the post block has not written before."""
        for spec in self.form.outputs(problem, num_tokens):
            if spec.name != "residual_out" or not self.form.has_post:
                rest = tuple((0, extent) for extent in spec.shape[1:])
                for token in range(num_tokens):
                    yield Region(spec.name, ((token, token + 1), *rest))
