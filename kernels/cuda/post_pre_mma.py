"""The fused kernel on CUDA with the projection on tensor cores, at float32 accuracy."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.post import (
    average_stream,
    collapse_stream,
    hold_coefficients,
    load_streams,
    mix_stream,
    store_rounded,
    widen_streams,
)
from mhctune.kernels.cuda.terms import PRODUCT_WIDTH, TERM_ROWS, load_weights, store_products, store_terms
from mhctune.kernels.cuda.widen import SOURCE, widen


def post_pre_mma(
    hidden_size: int, n_splits: int, block_h: int, block_m: int, collapse: int, write_aux: int = 0,
    n_thr: int = 128,
) -> PrimFunc:  # fmt: skip
    """Build post + projection in one kernel, the stored bf16 streams as operand A, exactly.

    A program owns `block_m` tokens, all columns and one of `n_splits` ranges of H, which it walks in blocks
    of `block_h`: it mixes the streams, stores them, and multiplies them by the weights' three bf16 terms.
    The weights do not come from the kernel before: those of the first block are in shared memory before
    `pdl_sync`. With `collapse` it also writes the layer input, not yet normalised, from the incoming pre-mix,
    with `write_aux` the mean over the streams. With 256 threads two programs share an SM, and twice the warps
    wait for memory, which is what limits this kernel (no warp can issue in 62 % of cycles).
    """
    num_tokens = T.dynamic("num_tokens")
    split_h = hidden_size // n_splits
    blocks = split_h // block_h
    width = 4 * block_h
    vec = min(8, block_m * block_h // n_thr)
    lanes = block_h // vec  # threads that share a token
    parts = block_m * lanes // n_thr
    weight_parts = 24 * width // 4 // n_thr

    @T.prim_func
    def mhctune_post_pre_mma(
        x: T.Tensor((num_tokens, hidden_size), "bfloat16"),
        residual: T.Tensor((num_tokens, 4, hidden_size), "bfloat16"),
        post_mix: T.Tensor((num_tokens, 4), "float32"),
        comb_mix: T.Tensor((num_tokens, 4, 4), "float32"),
        pre_mix: T.Tensor((num_tokens, 4), "float32"),
        fn: T.Tensor((24, 4, hidden_size), "float32"),
        residual_out: T.Tensor((num_tokens, 4, hidden_size), "bfloat16"),
        layer_input: T.Tensor((num_tokens, hidden_size), "bfloat16"),
        mul: T.Tensor((n_splits, num_tokens, 24), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
        aux: T.Tensor((num_tokens, hidden_size), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(num_tokens, block_m), n_splits, threads=n_thr) as (rows, split):
            T.import_source(SOURCE)
            thread = T.get_thread_binding()
            operand = T.alloc_shared((block_m, width), "bfloat16")
            terms = T.alloc_shared((3 * TERM_ROWS, width), "bfloat16")
            products = T.alloc_shared((block_m, PRODUCT_WIDTH), "float32")
            block_sums = T.alloc_fragment((block_m, 3 * TERM_ROWS), "float32")
            sums = T.alloc_fragment((block_m, 3 * TERM_ROWS), "float32")
            weights = T.alloc_local((weight_parts, 4), "float32")
            new_x = T.alloc_local((parts, vec), "bfloat16")
            old = T.alloc_local((parts, 4, vec), "bfloat16")
            held = T.alloc_local((1, 20), "float32")
            mix_in = T.alloc_local((1, 4), "float32")
            stream = T.alloc_local((vec,), "bfloat16")
            wide = T.alloc_local((5, vec), "float32")
            exact = T.alloc_local((vec,), "float32")
            total = T.alloc_local((vec,), "float32")
            mean = T.alloc_local((vec,), "float32")
            squares = T.alloc_local((parts,), "float32")
            if n_thr > 128:
                T.annotate_min_blocks_per_sm(2)
            T.pdl_trigger()
            load_weights(fn, weights, split * split_h, thread, weight_parts, n_thr, width, block_h)
            store_terms(weights, terms, thread, weight_parts, n_thr, width)
            T.pdl_sync()
            for part in T.unroll(parts):
                squares[part] = T.float32(0)
            if blocks > 1:
                T.clear(sums)
            for block in T.serial(blocks):
                first = split * split_h + block * block_h + thread % lanes * vec
                for part in T.unroll(parts):
                    token = rows * block_m + part * (n_thr // lanes) + thread // lanes
                    if token < num_tokens:
                        load_streams(x, residual, new_x, old, part, token, first, vec)
                for part in T.unroll(parts):
                    row = part * (n_thr // lanes) + thread // lanes
                    token = rows * block_m + row
                    if token < num_tokens:
                        hold_coefficients(post_mix, comb_mix, held, token, 1, num_tokens)
                        if collapse:
                            for j in T.vectorized(4):
                                mix_in[0, j] = pre_mix[token, j]
                        widen_streams(new_x, old, wide, part, vec)
                        for j in T.unroll(4):
                            # Stream by stream: two programs an SM leave a thread 128 registers.
                            mix_stream(wide, held, exact, 0, j, vec)
                            for v in T.vectorized(vec):
                                stream[v] = T.cast(exact[v], "bfloat16")
                            for v in T.vectorized(vec):
                                residual_out[token, j, first + v] = stream[v]
                            for v in T.vectorized(vec):
                                operand[row, j * block_h + thread % lanes * vec + v] = stream[v]
                            widen(exact[0], stream[0], vec)
                            for v in T.unroll(vec):
                                squares[part] = T.ieee_fmaf(exact[v], exact[v], squares[part], "rn")
                            if collapse:
                                collapse_stream(total, exact, mix_in, 0, j, vec)
                            if write_aux:
                                average_stream(mean, exact, j, vec)
                        if write_aux:
                            store_rounded(mean, aux, token, first, vec)
                        if collapse:
                            store_rounded(total, layer_input, token, first, vec)
                # The tensor cores read shared memory through another proxy: each writer fences first.
                T.fence_proxy_async()
                T.sync_threads()
                if block < blocks - 1:
                    load_weights(
                        fn, weights, split * split_h + (block + 1) * block_h, thread, weight_parts, n_thr,
                        width, block_h,
                    )  # fmt: skip
                # Tensor cores truncate as they accumulate: over all of K that is 2.4e-5 in the coefficients,
                # so each block starts from zero and is added in float32.
                T.gemm(operand, terms, block_sums, transpose_B=True, clear_accum=True)
                if blocks > 1:
                    for i, j in T.Parallel(block_m, 3 * TERM_ROWS):
                        sums[i, j] = sums[i, j] + block_sums[i, j]
                    T.sync_threads()
                    if block < blocks - 1:
                        store_terms(weights, terms, thread, weight_parts, n_thr, width)
            for part in T.unroll(parts):
                for distance in T.unroll(lanes.bit_length() - 1):
                    squares[part] = squares[part] + T.shfl_xor(squares[part], 1 << distance)
            T.copy(sums if blocks > 1 else block_sums, products[0:block_m, 0 : 3 * TERM_ROWS])
            T.sync_threads()
            if thread % lanes == 0:
                for part in T.unroll(parts):
                    token = rows * block_m + part * (n_thr // lanes) + thread // lanes
                    if token < num_tokens:
                        sqrsum[split, token] = squares[part]
            store_products(products, mul, split, rows, thread, block_m, n_thr, num_tokens)

    return mhctune_post_pre_mma
