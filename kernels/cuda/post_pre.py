"""The fused kernel on CUDA: the post block folded into the projection."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.post import (
    collapse_streams,
    hold_coefficients,
    mean_streams,
    mix_streams,
    share_coefficients,
)
from mhctune.kernels.cuda.reduction import store_partials
from mhctune.kernels.cuda.widen import SOURCE


def post_pre(
    hidden_size: int,
    tile_n: int,
    n_splits: int,
    n_thr: int,
    vec: int,
    block_m: int,
    ahead: int,
    collapse: int,
    write_aux: int = 0,
    bf16_weights: int = 0,
) -> PrimFunc:
    """Build post + projection in one kernel.

    A program owns `block_m` tokens, `tile_n` of the 24 columns and one of `n_splits` ranges of H, all four
    streams of it; a thread holds `vec` neighbouring elements. Every program recomputes the streams of its
    tokens; those of the first column tile store them and sum their squares. What is projected is the stored
    bf16 value (numerics class `rounded`). The weights of the first `ahead` columns are loaded a step early,
    those of the first step before `pdl_sync`, at 4 * vec registers each. With `collapse` the programs of the
    last column tile also write the layer input, not yet normalised, from the incoming pre-mix, and with
    `write_aux` the mean over the streams. Rows past the last token repeat it and are not stored.
    """
    weight_type = "bfloat16" if bf16_weights else "float32"
    num_tokens = T.dynamic("num_tokens")
    split_h = hidden_size // n_splits
    steps = split_h // (n_thr * vec)
    last_tile = 24 // tile_n - 1
    held = block_m <= 2

    @T.macro
    def load_ahead(fn, first_weights, tile, first):
        for n in T.unroll(ahead):
            for j in T.unroll(4):
                for v in T.vectorized(vec):
                    first_weights[n, j, v] = fn[tile * tile_n + n, j, first + v]

    @T.prim_func
    def mhctune_post_pre(
        x: T.Tensor((num_tokens, hidden_size), "bfloat16"),
        residual: T.Tensor((num_tokens, 4, hidden_size), "bfloat16"),
        post_mix: T.Tensor((num_tokens, 4), "float32"),
        comb_mix: T.Tensor((num_tokens, 4, 4), "float32"),
        pre_mix: T.Tensor((num_tokens, 4), "float32"),
        fn: T.Tensor((24, 4, hidden_size), weight_type),
        residual_out: T.Tensor((num_tokens, 4, hidden_size), "bfloat16"),
        layer_input: T.Tensor((num_tokens, hidden_size), "bfloat16"),
        mul: T.Tensor((n_splits, num_tokens, 24), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
        aux: T.Tensor((num_tokens, hidden_size), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(num_tokens, block_m), 24 // tile_n, n_splits, threads=n_thr) as (
            rows,
            tile,
            split,
        ):
            T.import_source(SOURCE)
            thread = T.get_thread_binding()
            if held:
                coefficients = T.alloc_local((block_m, 20), "float32")
            else:
                coefficients = T.alloc_shared((block_m, 20), "float32")
            partials = T.alloc_shared((n_thr // 32, block_m * (tile_n + 1)), "float32")
            sums = T.alloc_local((block_m, tile_n + 1), "float32")
            values = T.alloc_local((block_m, 4, vec), "float32")
            streams = T.alloc_local((4, vec), "bfloat16")
            weights = T.alloc_local((4, vec), weight_type)
            first_weights = T.alloc_local((max(ahead, 1), 4, vec), weight_type)
            mix_in = T.alloc_local((block_m, 4), "float32")
            T.pdl_trigger()
            load_ahead(fn, first_weights, tile, split * split_h + thread * vec)
            T.pdl_sync()
            if collapse:
                if tile == last_tile:
                    for m in T.unroll(block_m):
                        for j in T.vectorized(4):
                            mix_in[m, j] = pre_mix[T.min(rows * block_m + m, num_tokens - 1), j]
            if held:
                hold_coefficients(post_mix, comb_mix, coefficients, rows, block_m, num_tokens)
            else:
                share_coefficients(post_mix, comb_mix, coefficients, rows, block_m, n_thr, num_tokens)
            for m in T.unroll(block_m):
                for n in T.unroll(tile_n + 1):
                    sums[m, n] = T.float32(0)
            for step in T.serial(steps):
                first = split * split_h + (step * n_thr + thread) * vec
                for m in T.unroll(block_m):
                    token = T.min(rows * block_m + m, num_tokens - 1)
                    mix_streams(x, residual, coefficients, streams, values, m, token, first, vec)
                    if tile == 0:
                        if rows * block_m + m < num_tokens:
                            for j in T.unroll(4):
                                for v in T.vectorized(vec):
                                    residual_out[rows * block_m + m, j, first + v] = streams[j, v]
                        for j in T.unroll(4):
                            for v in T.unroll(vec):
                                sums[m, tile_n] = T.ieee_fmaf(
                                    values[m, j, v], values[m, j, v], sums[m, tile_n], "rn"
                                )
                    if write_aux:
                        if tile == last_tile:
                            if rows * block_m + m < num_tokens:
                                mean_streams(values, aux, m, rows * block_m + m, first, vec)
                    if collapse:
                        if tile == last_tile:
                            if rows * block_m + m < num_tokens:
                                collapse_streams(
                                    values, mix_in, layer_input, m, rows * block_m + m, first, vec
                                )
                for n in T.unroll(ahead):
                    for j in T.unroll(4):
                        for v in T.unroll(vec):
                            for m in T.unroll(block_m):
                                sums[m, n] = T.ieee_fmaf(
                                    T.cast(first_weights[n, j, v], "float32"),
                                    values[m, j, v],
                                    sums[m, n],
                                    "rn",
                                )
                if steps > 1:
                    next_step = T.min(step + 1, steps - 1)
                    load_ahead(fn, first_weights, tile, split * split_h + (next_step * n_thr + thread) * vec)
                for n in T.unroll(tile_n - ahead):
                    for j in T.unroll(4):
                        for v in T.vectorized(vec):
                            weights[j, v] = fn[tile * tile_n + ahead + n, j, first + v]
                    for j in T.unroll(4):
                        for v in T.unroll(vec):
                            for m in T.unroll(block_m):
                                sums[m, ahead + n] = T.ieee_fmaf(
                                    T.cast(weights[j, v], "float32"),
                                    values[m, j, v],
                                    sums[m, ahead + n],
                                    "rn",
                                )
            store_partials(sums, partials, mul, sqrsum, rows, tile, split, block_m, tile_n, n_thr, num_tokens)

    return mhctune_post_pre
