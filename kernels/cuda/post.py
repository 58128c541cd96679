"""The post block on CUDA: new streams from old streams and the sublayer's output."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.widen import SOURCE, widen


@T.macro
def share_coefficients(post_mix, comb_mix, shared, rows, block_m, n_thr, num_tokens):
    """Put post_j and comb[i, j] of `block_m` tokens into shared memory [block_m, 20]; ends in a barrier."""
    thread = T.get_thread_binding()
    for part in T.unroll(T.ceildiv(block_m * 20, n_thr)):
        index = part * n_thr + thread
        if index < block_m * 20:
            shared[index // 20, index % 20] = T.if_then_else(
                index % 20 < 4,
                post_mix[T.min(rows * block_m + index // 20, num_tokens - 1), index % 4],
                comb_mix[
                    T.min(rows * block_m + index // 20, num_tokens - 1),
                    T.max(index % 20 - 4, 0) // 4,
                    T.max(index % 20 - 4, 0) % 4,
                ],
            )
    T.sync_threads()


@T.macro
def hold_coefficients(post_mix, comb_mix, held, rows, block_m, num_tokens):
    """Put post_j and comb[i, j] of `block_m` tokens into registers as [block_m, 20].

    Shared memory would cost a barrier before the first multiplication: 0.25 us of 2.2 us at one token on an
    H200. Twenty registers a token are too many from four tokens on.
    """
    for m in T.unroll(block_m):
        for j in T.vectorized(4):
            held[m, j] = post_mix[T.min(rows * block_m + m, num_tokens - 1), j]
        for i in T.unroll(4):
            for j in T.vectorized(4):
                held[m, 4 + 4 * i + j] = comb_mix[T.min(rows * block_m + m, num_tokens - 1), i, j]


@T.macro
def load_streams(x, residual, new_x, old, part, token, first, vec):
    """Load `vec` elements of one token's x and four old streams into new_x[part] and old[part]."""
    for v in T.vectorized(vec):
        new_x[part, v] = x[token, first + v]
    for i in T.unroll(4):
        for v in T.vectorized(vec):
            old[part, i, v] = residual[token, i, first + v]


@T.macro
def widen_streams(new_x, old, wide, part, vec):
    """Make float32 of what `load_streams` loaded: wide[0] is x, wide[1 + i] old stream i."""
    widen(wide[0, 0], new_x[part, 0], vec)
    for i in T.unroll(4):
        widen(wide[1 + i, 0], old[part, i, 0], vec)


@T.macro
def mix_stream(wide, coefficients, exact, row, j, vec):
    """Compute `vec` elements of one token's new stream j in float32, not yet rounded, from `widen_streams`.

    R'_j = post_j * x + sum_i comb[i, j] * R_i, in this order, by explicit fused multiply-adds: the compiler
    may not contract them otherwise, and every arm calls this macro, which is what makes their stored streams
    bit-identical.
    """
    for v in T.unroll(vec):
        exact[v] = coefficients[row, j] * wide[0, v]
        for i in T.unroll(4):
            exact[v] = T.ieee_fmaf(coefficients[row, 4 + 4 * i + j], wide[1 + i, v], exact[v], "rn")


@T.macro
def combine_streams(new_x, old, coefficients, streams, values, part, row, vec):
    """Compute `vec` elements of one token's four new streams, as bf16 and as the float32 of that bf16."""
    wide = T.alloc_local((5, vec), "float32")
    exact = T.alloc_local((vec,), "float32")
    widen_streams(new_x, old, wide, part, vec)
    for j in T.unroll(4):
        mix_stream(wide, coefficients, exact, row, j, vec)
        # Vectorised, two conversions are one instruction of an eighth of the time (F2FP, not F2F).
        for v in T.vectorized(vec):
            streams[j, v] = T.cast(exact[v], "bfloat16")
        widen(values[row, j, 0], streams[j, 0], vec)


@T.macro
def mix_streams(x, residual, coefficients, streams, values, row, token, first, vec):
    """Load and combine `vec` elements of one token."""
    new_x = T.alloc_local((1, vec), "bfloat16")
    old = T.alloc_local((1, 4, vec), "bfloat16")
    load_streams(x, residual, new_x, old, 0, token, first, vec)
    combine_streams(new_x, old, coefficients, streams, values, 0, row, vec)


@T.macro
def collapse_stream(total, exact, mix_in, row, j, vec):
    """Add pre_j * R'_j to `total`, in the order and by the operations of the epilogue.

    So it does not matter which of the two collapses.
    """
    for v in T.unroll(vec):
        if j == 0:
            total[v] = mix_in[row, 0] * exact[v]
        else:
            total[v] = T.ieee_fmaf(mix_in[row, j], exact[v], total[v], "rn")


@T.macro
def average_stream(total, exact, j, vec):
    """Add R'_j to `total`, in order as `torch.mean` does; behind the last, a quarter of it is the mean."""
    for v in T.unroll(vec):
        if j == 0:
            total[v] = exact[v]
        else:
            total[v] = total[v] + exact[v]
        if j == 3:
            total[v] = total[v] * T.float32(0.25)


@T.macro
def store_rounded(total, out, token, first, vec):
    """Write `vec` elements of a row, rounded to bf16."""
    rounded = T.alloc_local((vec,), "bfloat16")
    for v in T.vectorized(vec):
        rounded[v] = T.cast(total[v], "bfloat16")
    for v in T.vectorized(vec):
        out[token, first + v] = rounded[v]


@T.macro
def collapse_streams(values, mix_in, layer_input, row, token, first, vec):
    """Write sum_j pre_j * R'_j of `vec` elements, rounded to bf16."""
    exact = T.alloc_local((vec,), "float32")
    total = T.alloc_local((vec,), "float32")
    for j in T.unroll(4):
        for v in T.unroll(vec):
            exact[v] = values[row, j, v]
        collapse_stream(total, exact, mix_in, row, j, vec)
    store_rounded(total, layer_input, token, first, vec)


@T.macro
def mean_streams(values, aux, row, token, first, vec):
    """Write the mean over a token's four new streams."""
    exact = T.alloc_local((vec,), "float32")
    total = T.alloc_local((vec,), "float32")
    for j in T.unroll(4):
        for v in T.unroll(vec):
            exact[v] = values[row, j, v]
        average_stream(total, exact, j, vec)
    store_rounded(total, aux, token, first, vec)


def post(hidden_size: int, n_thr: int, vec: int, collapse: int = 0, write_aux: int = 0) -> PrimFunc:
    """Build the stand-alone post kernel: a program is a token and `n_thr * vec` elements of H.

    With `collapse` it also writes the layer input, not yet normalised, from the incoming pre-mix; with
    `write_aux` the mean over the new streams. What a flag leaves out is not touched.
    """
    num_tokens = T.dynamic("num_tokens")
    block_h = n_thr * vec

    @T.prim_func
    def mhctune_post(
        x: T.Tensor((num_tokens, hidden_size), "bfloat16"),
        residual: T.Tensor((num_tokens, 4, hidden_size), "bfloat16"),
        post_mix: T.Tensor((num_tokens, 4), "float32"),
        comb_mix: T.Tensor((num_tokens, 4, 4), "float32"),
        pre_mix: T.Tensor((num_tokens, 4), "float32"),
        residual_out: T.Tensor((num_tokens, 4, hidden_size), "bfloat16"),
        layer_input: T.Tensor((num_tokens, hidden_size), "bfloat16"),
        aux: T.Tensor((num_tokens, hidden_size), "bfloat16"),
    ):
        with T.Kernel(num_tokens, T.ceildiv(hidden_size, block_h), threads=n_thr) as (token, block):
            T.import_source(SOURCE)
            thread = T.get_thread_binding()
            coefficients = T.alloc_local((1, 20), "float32")
            mix_in = T.alloc_local((1, 4), "float32")
            streams = T.alloc_local((4, vec), "bfloat16")
            values = T.alloc_local((1, 4, vec), "float32")
            T.pdl_trigger()
            T.pdl_sync()
            hold_coefficients(post_mix, comb_mix, coefficients, token, 1, num_tokens)
            if collapse:
                for j in T.vectorized(4):
                    mix_in[0, j] = pre_mix[token, j]
            first = block * block_h + thread * vec
            if first < hidden_size:
                mix_streams(x, residual, coefficients, streams, values, 0, token, first, vec)
                for j in T.unroll(4):
                    for v in T.vectorized(vec):
                        residual_out[token, j, first + v] = streams[j, v]
                if collapse:
                    collapse_streams(values, mix_in, layer_input, 0, token, first, vec)
                if write_aux:
                    mean_streams(values, aux, 0, token, first, vec)

    return mhctune_post
