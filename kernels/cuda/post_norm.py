"""The post block with the whole layer input on CUDA: nothing in it waits for the projection."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.post import (
    average_stream,
    collapse_stream,
    load_streams,
    mix_stream,
    store_rounded,
    widen_streams,
)
from mhctune.kernels.cuda.row import inverse_rms, load_norm_weights
from mhctune.kernels.cuda.widen import SOURCE, widen


def post_norm(
    hidden_size: int, n_thr: int, vec: int, carried: int, norm: int, write_aux: int = 0
) -> PrimFunc:
    """Build post, collapse and RMSNorm in one kernel: a program is a token's whole row.

    Args:
        hidden_size: H; a multiple of `n_thr * vec`.
        n_thr: threads of a program, a multiple of 32.
        vec: neighbouring elements a thread loads at once.
        carried: collapse with `pre_mix`; otherwise take stream 0.
        norm: apply RMSNorm to the collapse, rounded to bf16.
        write_aux: also write the mean over the new streams.
    """
    num_tokens = T.dynamic("num_tokens")
    steps = hidden_size // (n_thr * vec)

    @T.prim_func
    def mhctune_post_norm(
        x: T.Tensor((num_tokens, hidden_size), "bfloat16"),
        residual: T.Tensor((num_tokens, 4, hidden_size), "bfloat16"),
        post_mix: T.Tensor((num_tokens, 4), "float32"),
        comb_mix: T.Tensor((num_tokens, 4, 4), "float32"),
        pre_mix: T.Tensor((num_tokens, 4), "float32"),
        norm_weight: T.Tensor((hidden_size,), "bfloat16"),
        residual_out: T.Tensor((num_tokens, 4, hidden_size), "bfloat16"),
        layer_input: T.Tensor((num_tokens, hidden_size), "bfloat16"),
        aux: T.Tensor((num_tokens, hidden_size), "bfloat16"),
        norm_eps: T.float32,
    ):
        with T.Kernel(num_tokens, threads=n_thr) as token:
            T.import_source(SOURCE)
            thread = T.get_thread_binding()
            squares = T.alloc_shared((n_thr // 32,), "float32")
            held = T.alloc_local((1, 20), "float32")
            mine = T.alloc_local((1,), "float32")
            mix_in = T.alloc_local((1, 4), "float32")
            new_x = T.alloc_local((steps, vec), "bfloat16")
            old = T.alloc_local((steps, 4, vec), "bfloat16")
            stream = T.alloc_local((vec,), "bfloat16")
            wide = T.alloc_local((5, vec), "float32")
            exact = T.alloc_local((vec,), "float32")
            row = T.alloc_local((steps, vec), "bfloat16")
            total = T.alloc_local((vec,), "float32")
            mean = T.alloc_local((vec,), "float32")
            weights = T.alloc_local((steps, vec), "bfloat16")
            scalar = T.alloc_local((1,), "float32")
            T.pdl_trigger()
            if norm:
                load_norm_weights(norm_weight, weights, thread, steps, n_thr, vec)
            T.pdl_sync()
            for step in T.unroll(steps):
                load_streams(x, residual, new_x, old, step, token, (step * n_thr + thread) * vec, vec)
            # Lane 0 to 23 has post, comb and pre: one load, and in the loop one register a stream.
            lane = thread % 32
            mine[0] = T.if_then_else(
                lane < 4,
                post_mix[token, lane % 4],
                T.if_then_else(
                    lane < 20,
                    comb_mix[token, T.max(lane - 4, 0) // 4 % 4, lane % 4],
                    pre_mix[token, lane % 4],
                ),
            )
            scalar[0] = T.float32(0)
            for step in T.unroll(steps):
                first = (step * n_thr + thread) * vec
                for v in T.unroll(vec):
                    # The one value that, added to, changes nothing: 0 would make +0 of a -0.
                    total[v] = T.float32(-0.0)
                    mean[v] = T.float32(-0.0)
                widen_streams(new_x, old, wide, step, vec)
                # Not unrolled: code that each launch fetches and runs once, 0.1 us of 3.6 at one token.
                for j in T.unroll(4, unroll_factor=1):
                    held[0, 0] = T.shfl_sync(mine[0], j)
                    for i in T.unroll(4):
                        held[0, 4 + 4 * i] = T.shfl_sync(mine[0], 4 + 4 * i + j)
                    mix_in[0, 1] = T.shfl_sync(mine[0], 20 + j)
                    mix_stream(wide, held, exact, 0, 0, vec)
                    for v in T.vectorized(vec):
                        stream[v] = T.cast(exact[v], "bfloat16")
                    for v in T.vectorized(vec):
                        residual_out[token, j, first + v] = stream[v]
                    widen(exact[0], stream[0], vec)
                    if not carried:
                        for v in T.unroll(vec):
                            total[v] = T.Select(j == 0, exact[v], total[v])
                    if carried:
                        collapse_stream(total, exact, mix_in, 0, 1, vec)
                    if write_aux:
                        average_stream(mean, exact, 1, vec)
                for v in T.vectorized(vec):
                    row[step, v] = T.cast(total[v], "bfloat16")
                if norm:
                    widen(total[0], row[step, 0], vec)
                    for v in T.unroll(vec):
                        scalar[0] = T.ieee_fmaf(total[v], total[v], scalar[0], "rn")
                else:
                    for v in T.vectorized(vec):
                        layer_input[token, first + v] = row[step, v]
                if write_aux:
                    for v in T.unroll(vec):
                        mean[v] = mean[v] * T.float32(0.25)
                    store_rounded(mean, aux, token, first, vec)
            if norm:
                inverse_rms(squares, scalar, thread, n_thr, hidden_size, norm_eps)
                for step in T.unroll(steps):
                    widen(total[0], row[step, 0], vec)
                    widen(exact[0], weights[step, 0], vec)
                    for v in T.unroll(vec):
                        total[v] = total[v] * scalar[0] * exact[v]
                    store_rounded(total, layer_input, token, (step * n_thr + thread) * vec, vec)

    return mhctune_post_norm
