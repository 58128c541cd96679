"""The split-k projection of stored streams on CUDA, on tensor cores at float32 accuracy."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.terms import PRODUCT_WIDTH, TERM_ROWS, load_weights, store_products, store_terms
from mhctune.kernels.cuda.widen import SOURCE, widen

BLOCK_M = 64
"""Rows of a WGMMA tile."""
THREADS = 128


def projection_mma(hidden_size: int, n_splits: int, block_k: int, n_streams: int = 4) -> PrimFunc:
    """Build the tensor-core projection over the flat K = n_streams * H.

    The streams are bf16, exact as operand A. A float32 weight is the sum of three bf16 terms to 24 bits, so
    that the products are exact; the three accumulators are added at the end. TF32 would round the weights to
    10 bits: 1e-3 instead of 1e-5 in the coefficients.

    A program owns 64 tokens and one of `n_splits` ranges of K, walked in blocks of `block_k`; the next block
    is loaded into registers while the tensor cores work on this one, and the first block's weights before
    `pdl_sync`: they do not come from the kernel before. Rows past the last token are not read.
    """
    num_tokens = T.dynamic("num_tokens")
    k_size = n_streams * hidden_size
    split_k = k_size // n_splits
    blocks = split_k // block_k
    lanes = 8  # threads that share a row: 64 elements, 16 bytes each
    row_threads = THREADS // lanes
    row_parts = BLOCK_M // row_threads
    panels = block_k // 64
    weight_parts = 24 * block_k // 4 // THREADS

    @T.macro
    def load_rows(residual, rows, first, thread, stored):
        for part in T.unroll(row_parts):
            token = rows * BLOCK_M + part * row_threads + thread // lanes
            if token < num_tokens:
                for panel in T.unroll(panels):
                    for v in T.vectorized(8):
                        stored[part, panel, v] = residual[token, first + panel * 64 + thread % lanes * 8 + v]

    @T.prim_func
    def mhctune_projection_mma(
        residual: T.Tensor((num_tokens, k_size), "bfloat16"),
        fn: T.Tensor((24, 1, k_size), "float32"),
        mul: T.Tensor((n_splits, num_tokens, 24), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_tokens, BLOCK_M), n_splits, threads=THREADS) as (rows, split):
            T.import_source(SOURCE)
            thread = T.get_thread_binding()
            operand = T.alloc_shared((BLOCK_M, block_k), "bfloat16")
            terms = T.alloc_shared((3 * TERM_ROWS, block_k), "bfloat16")
            products = T.alloc_shared((BLOCK_M, PRODUCT_WIDTH), "float32")
            sums = T.alloc_fragment((BLOCK_M, 3 * TERM_ROWS), "float32")
            block_sums = T.alloc_fragment((BLOCK_M, 3 * TERM_ROWS), "float32")
            stored = T.alloc_local((row_parts, panels, 8), "bfloat16")
            weights = T.alloc_local((weight_parts, 4), "float32")
            squares = T.alloc_local((row_parts,), "float32")
            exact = T.alloc_local((8,), "float32")
            T.pdl_trigger()
            load_weights(fn, weights, split * split_k, thread, weight_parts, THREADS, block_k, block_k)
            store_terms(weights, terms, thread, weight_parts, THREADS, block_k)
            T.pdl_sync()
            load_rows(residual, rows, split * split_k, thread, stored)
            for part in T.unroll(row_parts):
                squares[part] = T.float32(0)
            if blocks > 1:
                T.clear(sums)
            for block in T.serial(blocks):
                for part in T.unroll(row_parts):
                    for panel in T.unroll(panels):
                        widen(exact[0], stored[part, panel, 0], 8)
                        for v in T.unroll(8):
                            squares[part] = T.ieee_fmaf(exact[v], exact[v], squares[part], "rn")
                        for v in T.vectorized(8):
                            operand[
                                part * row_threads + thread // lanes, panel * 64 + thread % lanes * 8 + v
                            ] = stored[part, panel, v]
                # The tensor cores read shared memory through another proxy: each writer fences first.
                T.fence_proxy_async()
                T.sync_threads()
                if block < blocks - 1:
                    next_k = split * split_k + (block + 1) * block_k
                    load_rows(residual, rows, next_k, thread, stored)
                    load_weights(fn, weights, next_k, thread, weight_parts, THREADS, block_k, block_k)
                # Tensor cores truncate as they accumulate: over all of K that is 2.4e-5 in the coefficients,
                # so each block starts from zero and is added in float32.
                T.gemm(operand, terms, block_sums, transpose_B=True, clear_accum=True)
                if blocks > 1:
                    for i, j in T.Parallel(BLOCK_M, 3 * TERM_ROWS):
                        sums[i, j] = sums[i, j] + block_sums[i, j]
                    T.sync_threads()
                    if block < blocks - 1:
                        store_terms(weights, terms, thread, weight_parts, THREADS, block_k)
            for part in T.unroll(row_parts):
                for distance in T.unroll(lanes.bit_length() - 1):
                    squares[part] = squares[part] + T.shfl_xor(squares[part], 1 << distance)
            T.copy(sums if blocks > 1 else block_sums, products[0:BLOCK_M, 0 : 3 * TERM_ROWS])
            T.sync_threads()
            if thread % lanes == 0:
                for part in T.unroll(row_parts):
                    token = rows * BLOCK_M + part * row_threads + thread // lanes
                    if token < num_tokens:
                        sqrsum[split, token] = squares[part]
            store_products(products, mul, split, rows, thread, BLOCK_M, THREADS, num_tokens)

    return mhctune_projection_mma
