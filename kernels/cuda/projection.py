"""The split-k projection of stored streams on CUDA, by fused multiply-adds."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.reduction import store_partials


def projection(
    hidden_size: int,
    tile_n: int,
    n_splits: int,
    n_thr: int,
    vec: int,
    block_m: int,
    n_columns: int = 24,
    n_streams: int = 4,
    bf16_weights: int = 0,
) -> PrimFunc:
    """Build the FMA projection: the grid of the fused kernel, over the flat K = n_streams * H.

    A program owns `block_m` tokens, `tile_n` columns and one of `n_splits` ranges of K.
    """
    num_tokens = T.dynamic("num_tokens")
    k_size = n_streams * hidden_size
    weight_type = "bfloat16" if bf16_weights else "float32"
    split_k = k_size // n_splits

    @T.prim_func
    def mhctune_projection(
        residual: T.Tensor((num_tokens, k_size), "bfloat16"),
        fn: T.Tensor((n_columns, k_size), weight_type),
        mul: T.Tensor((n_splits, num_tokens, n_columns), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_tokens, block_m), n_columns // tile_n, n_splits, threads=n_thr) as (
            rows,
            tile,
            split,
        ):
            thread = T.get_thread_binding()
            partials = T.alloc_shared((n_thr // 32, block_m * (tile_n + 1)), "float32")
            sums = T.alloc_local((block_m, tile_n + 1), "float32")
            stored = T.alloc_local((block_m, vec), "bfloat16")
            values = T.alloc_local((block_m, vec), "float32")
            weights = T.alloc_local((vec,), weight_type)
            T.pdl_trigger()
            T.pdl_sync()
            for m in T.unroll(block_m):
                for n in T.unroll(tile_n + 1):
                    sums[m, n] = T.float32(0)
            for step in T.serial(split_k // (n_thr * vec)):
                first = split * split_k + (step * n_thr + thread) * vec
                for m in T.unroll(block_m):
                    for v in T.vectorized(vec):
                        stored[m, v] = residual[T.min(rows * block_m + m, num_tokens - 1), first + v]
                for m in T.unroll(block_m):
                    for v in T.unroll(vec):
                        values[m, v] = T.cast(stored[m, v], "float32")
                    if tile == 0:
                        for v in T.unroll(vec):
                            sums[m, tile_n] = T.ieee_fmaf(values[m, v], values[m, v], sums[m, tile_n], "rn")
                for n in T.unroll(tile_n):
                    for v in T.vectorized(vec):
                        weights[v] = fn[tile * tile_n + n, first + v]
                    for v in T.unroll(vec):
                        for m in T.unroll(block_m):
                            sums[m, n] = T.ieee_fmaf(
                                T.cast(weights[v], "float32"), values[m, v], sums[m, n], "rn"
                            )
            store_partials(sums, partials, mul, sqrsum, rows, tile, split, block_m, tile_n, n_thr, num_tokens)

    return mhctune_projection
