"""The split-k projection on the C backend: dot products and the square sum of each token's streams."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.c.bf16 import fma, load, widen
from mhctune.kernels.c.lanes import LANES


def register_columns(block_m: int, tile_n: int) -> int:
    """Return how many columns of a tile are accumulated in registers at once.

    Each needs `block_m` vector registers of 16 lanes; AVX-512 has 32, of which the loads take a few.
    """
    return max(n for n in range(1, tile_n + 1) if tile_n % n == 0 and (n * block_m <= 24 or n == 1))


@T.macro
def clear(totals, squares, values, block_m, tile_n, block_h, streams):  # type: ignore[no-untyped-def]
    """Zero the accumulators, and the rows past the last token: denormals there cost 44 times the time."""
    for m, n, lane in T.grid(block_m, tile_n, LANES):
        totals[m, n, lane] = T.float32(0)
    for m, lane in T.grid(block_m, LANES):
        squares[m, lane] = T.float32(0)
    for m, j, h in T.grid(block_m, streams, block_h):
        values[m, j, h] = T.float32(0)


@T.macro
def add_dots(  # type: ignore[no-untyped-def]
    fn, values, totals, column, first, block_m, tile_n, block_h, columns, streams, bf16_weights
):
    """Add one block of H to the dot products of `tile_n` columns for `block_m` tokens."""
    for group in T.serial(tile_n // columns):
        sums = T.alloc_local((block_m, columns, LANES), "float32")
        for m, n, lane in T.grid(block_m, columns, LANES):
            sums[m, n, lane] = totals[m, group * columns + n, lane]
        for j, h in T.grid(streams, block_h // LANES):
            for m in T.unroll(block_m):
                for n in T.unroll(columns):
                    for lane in T.serial(LANES):
                        sums[m, n, lane] = fma(
                            load(fn[column + group * columns + n, j, first + h * LANES + lane], bf16_weights),
                            values[m, j, h * LANES + lane],
                            sums[m, n, lane],
                        )
        for m, n, lane in T.grid(block_m, columns, LANES):
            totals[m, group * columns + n, lane] = sums[m, n, lane]


@T.macro
def add_squares(values, squares, row, block_h, streams):  # type: ignore[no-untyped-def]
    """Add one block of H to the square sum of one token."""
    for j, h, lane in T.grid(streams, block_h // LANES, LANES):
        squares[row, lane] = fma(
            values[row, j, h * LANES + lane], values[row, j, h * LANES + lane], squares[row, lane]
        )


@T.macro
def store_partials(totals, squares, mul, sqrsum, row, token, split, column, tile_n):  # type: ignore[no-untyped-def]
    """Sum the lanes in order and write this program's partial sums; column 0's program writes the squares."""
    total = T.alloc_local((1,), "float32")
    for n in T.serial(tile_n):
        total[0] = T.float32(0)
        for lane in T.serial(LANES):
            total[0] = total[0] + totals[row, n, lane]
        mul[split, token, column + n] = total[0]
    if column == 0:
        total[0] = T.float32(0)
        for lane in T.serial(LANES):
            total[0] = total[0] + squares[row, lane]
        sqrsum[split, token] = total[0]


def projection(
    hidden_size: int, tile_n: int, n_splits: int, block_h: int, block_m: int,
    n_columns: int = 24, n_streams: int = 4, bf16_weights: int = 0,
) -> PrimFunc:  # fmt: skip
    """Build the projection of stored streams, or with `n_streams` 1 of what all streams are equal to.

    A program owns `block_m` tokens, `tile_n` of the columns and one of `n_splits` ranges of H (all streams
    of it). Splits are the outer loop, so that a split's weights stay in cache across tokens.
    """
    num_tokens = T.dynamic("num_tokens")
    split_h = hidden_size // n_splits
    columns = register_columns(block_m, tile_n)
    weight_type = "uint16" if bf16_weights else "float32"

    @T.prim_func
    def mhctune_projection(
        residual: T.Tensor((num_tokens, n_streams, hidden_size), "uint16"),
        fn: T.Tensor((n_columns, n_streams, hidden_size), weight_type),
        mul: T.Tensor((n_splits, num_tokens, n_columns), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_tokens, block_m), n_columns // tile_n, n_splits) as (rows, tile, split):
            totals = T.alloc_local((block_m, tile_n, LANES), "float32")
            squares = T.alloc_local((block_m, LANES), "float32")
            values = T.alloc_local((block_m, n_streams, block_h), "float32")
            clear(totals, squares, values, block_m, tile_n, block_h, n_streams)
            for block in T.serial(split_h // block_h):
                for m in T.serial(block_m):
                    if rows * block_m + m < num_tokens:
                        for j, h in T.grid(n_streams, block_h):
                            values[m, j, h] = widen(
                                residual[rows * block_m + m, j, split * split_h + block * block_h + h]
                            )
                        if tile == 0:
                            add_squares(values, squares, m, block_h, n_streams)
                add_dots(
                    fn, values, totals, tile * tile_n, split * split_h + block * block_h,
                    block_m, tile_n, block_h, columns, n_streams, bf16_weights,
                )  # fmt: skip
            for m in T.serial(block_m):
                if rows * block_m + m < num_tokens:
                    store_partials(
                        totals, squares, mul, sqrsum, m, rows * block_m + m, split, tile * tile_n, tile_n
                    )

    return mhctune_projection
