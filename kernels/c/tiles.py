"""What arms with a projection tune on the C backend, and the closed form of their legality certificate."""

from __future__ import annotations

from mhctune.kernels.c.lanes import LANES
from mhctune.kernels.space import Constraint, Tunable

_SPLITS = Tunable("n_splits", (1, 2, 4, 5, 8), "ranges of H that are summed apart")
_BLOCK_H = Tunable("block_h", (64, 128, 256), "elements of H a program holds at a time")
_BLOCK_M = Tunable("block_m", (1, 2, 4, 8), "tokens a program shares the weights among")


def tunables(columns: int) -> tuple[Tunable, ...]:
    """Return what is tuned for a projection of 24 columns, or of a head's 4."""
    widths = (6, 12, 24) if columns == 24 else (2, 4)
    tile_n = Tunable("tile_n", widths, "columns of the projection a program computes")
    return tile_n, _SPLITS, _BLOCK_H, _BLOCK_M


def constraints(hidden_size: int, columns: int) -> tuple[Constraint, ...]:
    """Return the closed form of the legality certificate (`Arm.writes`)."""
    return (
        Constraint(
            f"{columns} columns are not a multiple of tile_n {{tile_n}}: the last columns would be dropped",
            lambda c: c["tile_n"] > 0 and columns % c["tile_n"] == 0,
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
