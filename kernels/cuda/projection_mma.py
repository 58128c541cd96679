"""The split-k projection of stored streams on CUDA, on tensor cores at float32 accuracy."""

import tilelang.language as T
from tvm.tirx import PrimFunc

BLOCK_M = 64
"""Rows of a WGMMA tile."""
THREADS = 128


def projection_mma(hidden_size: int, n_splits: int, block_k: int) -> PrimFunc:
    """Build the tensor-core projection over the flat K = 4 H.

    The streams are bf16, exact as operand A. A float32 weight is the sum of three bf16 terms to 24 bits, so
    that operand B has 72 columns and the products are exact; the three accumulators are added at the end.
    TF32 would round the weights to 10 bits: 1e-3 instead of 1e-5 in the coefficients.

    A program owns 64 tokens and one of `n_splits` ranges of K; the next block is loaded into registers while
    the tensor cores work on this one. Rows past the last token repeat it and are not stored.
    """
    num_tokens = T.dynamic("num_tokens")
    k_size = 4 * hidden_size
    split_k = k_size // n_splits
    blocks = split_k // block_k
    row_threads = block_k // 8  # threads that share a row, 16 bytes each
    row_parts = BLOCK_M * row_threads // THREADS
    weight_threads = block_k // 4
    weight_parts = 24 * weight_threads // THREADS

    @T.macro
    def load(residual, fn, rows, split, block, thread, stored, weights):
        for part in T.unroll(row_parts):
            for v in T.vectorized(8):
                stored[part, v] = residual[
                    T.min(
                        rows * BLOCK_M + part * (THREADS // row_threads) + thread // row_threads,
                        num_tokens - 1,
                    ),
                    split * split_k + block * block_k + thread % row_threads * 8 + v,
                ]
        for part in T.unroll(weight_parts):
            for v in T.vectorized(4):
                weights[part, v] = fn[
                    (part * THREADS + thread) // weight_threads,
                    split * split_k + block * block_k + (part * THREADS + thread) % weight_threads * 4 + v,
                ]

    @T.prim_func
    def mhctune_projection_mma(
        residual: T.Tensor((num_tokens, k_size), "bfloat16"),
        fn: T.Tensor((24, k_size), "float32"),
        mul: T.Tensor((n_splits, num_tokens, 24), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_tokens, BLOCK_M), n_splits, threads=THREADS) as (rows, split):
            thread = T.get_thread_binding()
            streams = T.alloc_shared((BLOCK_M, block_k), "bfloat16")
            terms = T.alloc_shared((72, block_k), "bfloat16")
            sums = T.alloc_fragment((BLOCK_M, 72), "float32")
            block_sums = T.alloc_fragment((BLOCK_M, 72), "float32")
            result = T.alloc_shared((BLOCK_M, 72), "float32")
            stored = T.alloc_local((row_parts, 8), "bfloat16")
            weights = T.alloc_local((weight_parts, 4), "float32")
            term = T.alloc_local((3, 4), "bfloat16")
            squares = T.alloc_local((row_parts,), "float32")
            for part in T.unroll(row_parts):
                squares[part] = T.float32(0)
            T.clear(sums)
            load(residual, fn, rows, split, 0, thread, stored, weights)
            for block in T.serial(blocks):
                for part in T.unroll(row_parts):
                    for v in T.unroll(8):
                        squares[part] = T.ieee_fmaf(
                            T.cast(stored[part, v], "float32"), T.cast(stored[part, v], "float32"),
                            squares[part], "rn",
                        )  # fmt: skip
                    for v in T.vectorized(8):
                        streams[
                            part * (THREADS // row_threads) + thread // row_threads,
                            thread % row_threads * 8 + v,
                        ] = stored[part, v]
                for part in T.unroll(weight_parts):
                    for v in T.unroll(4):
                        term[0, v] = T.cast(weights[part, v], "bfloat16")
                        weights[part, v] = weights[part, v] - T.cast(term[0, v], "float32")
                        term[1, v] = T.cast(weights[part, v], "bfloat16")
                        weights[part, v] = weights[part, v] - T.cast(term[1, v], "float32")
                        term[2, v] = T.cast(weights[part, v], "bfloat16")
                    for i in T.unroll(3):
                        for v in T.vectorized(4):
                            terms[
                                i * 24 + (part * THREADS + thread) // weight_threads,
                                (part * THREADS + thread) % weight_threads * 4 + v,
                            ] = term[i, v]
                # The tensor cores read shared memory through another proxy: each writer fences first.
                T.fence_proxy_async()
                T.sync_threads()
                load(residual, fn, rows, split, T.min(block + 1, blocks - 1), thread, stored, weights)
                # Tensor cores truncate as they accumulate: over all of K that is 2.4e-5 in the coefficients,
                # so each block starts from zero and is added in float32.
                T.gemm(streams, terms, block_sums, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(BLOCK_M, 72):
                    sums[i, j] = sums[i, j] + block_sums[i, j]
                T.sync_threads()
            for part in T.unroll(row_parts):
                for distance in T.unroll(row_threads.bit_length() - 1):
                    squares[part] = squares[part] + T.shfl_xor(squares[part], 1 << distance)
            T.copy(sums, result)
            T.sync_threads()
            if thread % row_threads == 0:
                for part in T.unroll(row_parts):
                    token = rows * BLOCK_M + part * (THREADS // row_threads) + thread // row_threads
                    if token < num_tokens:
                        sqrsum[split, token] = squares[part]
            for part in T.unroll(BLOCK_M * 24 // THREADS):
                index = part * THREADS + thread
                token = rows * BLOCK_M + index // 24
                if token < num_tokens:
                    mul[split, token, index % 24] = result[index // 24, index % 24] + (
                        result[index // 24, 24 + index % 24] + result[index // 24, 48 + index % 24]
                    )

    return mhctune_projection_mma
