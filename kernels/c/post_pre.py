"""The fused kernel on the C backend: the post block folded into the projection."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.c.lanes import LANES
from mhctune.kernels.c.post import mix_streams
from mhctune.kernels.c.projection import add_dots, add_squares, clear, register_columns, store_partials


def post_pre(
    hidden_size: int, tile_n: int, n_splits: int, block_h: int, block_m: int, bf16_weights: int = 0
) -> PrimFunc:
    """Build post + projection in one kernel.

    The grid is the projection's. Every program recomputes the streams of its tokens and its range of H;
    the programs of the first column tile store them and sum their squares. What is projected is the
    stored bf16 value (numerics class `rounded`).
    """
    num_tokens = T.dynamic("num_tokens")
    split_h = hidden_size // n_splits
    columns = register_columns(block_m, tile_n)
    weight_type = "uint16" if bf16_weights else "float32"

    @T.prim_func
    def mhctune_post_pre(
        x: T.Tensor((num_tokens, hidden_size), "uint16"),
        residual: T.Tensor((num_tokens, 4, hidden_size), "uint16"),
        post_mix: T.Tensor((num_tokens, 4), "float32"),
        comb_mix: T.Tensor((num_tokens, 4, 4), "float32"),
        fn: T.Tensor((24, 4, hidden_size), weight_type),
        residual_out: T.Tensor((num_tokens, 4, hidden_size), "uint16"),
        mul: T.Tensor((n_splits, num_tokens, 24), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_tokens, block_m), 24 // tile_n, n_splits) as (rows, tile, split):
            totals = T.alloc_local((block_m, tile_n, LANES), "float32")
            squares = T.alloc_local((block_m, LANES), "float32")
            values = T.alloc_local((block_m, 4, block_h), "float32")
            streams = T.alloc_local((block_m, 4, block_h), "uint32")
            clear(totals, squares, values, block_m, tile_n, block_h, 4)
            for block in T.serial(split_h // block_h):
                for m in T.serial(block_m):
                    if rows * block_m + m < num_tokens:
                        mix_streams(
                            x, residual, post_mix, comb_mix, streams, m, rows * block_m + m,
                            split * split_h + block * block_h, block_h,
                        )  # fmt: skip
                        for j, h in T.grid(4, block_h):
                            values[m, j, h] = T.reinterpret(
                                T.shift_left(streams[m, j, h], T.uint32(16)), "float32"
                            )
                        if tile == 0:
                            for j, h in T.grid(4, block_h):
                                residual_out[rows * block_m + m, j, split * split_h + block * block_h + h] = (
                                    T.cast(streams[m, j, h], "uint16")
                                )
                            add_squares(values, squares, m, block_h, 4)
                add_dots(
                    fn, values, totals, tile * tile_n, split * split_h + block * block_h,
                    block_m, tile_n, block_h, columns, 4, bf16_weights,
                )  # fmt: skip
            for m in T.serial(block_m):
                if rows * block_m + m < num_tokens:
                    store_partials(
                        totals, squares, mul, sqrsum, m, rows * block_m + m, split, tile * tile_n, tile_n
                    )

    return mhctune_post_pre
