"""The post block with the whole layer input on CUDA: nothing in it waits for the projection."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.post import combine_streams, hold_coefficients, load_streams


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
    warps = n_thr // 32

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
            thread = T.get_thread_binding()
            shared_squares = T.alloc_shared((warps,), "float32")
            held = T.alloc_local((1, 20), "float32")
            mix_in = T.alloc_local((4,), "float32")
            new_x = T.alloc_local((steps, vec), "bfloat16")
            old = T.alloc_local((steps, 4, vec), "bfloat16")
            streams = T.alloc_local((4, vec), "bfloat16")
            values = T.alloc_local((1, 4, vec), "float32")
            row = T.alloc_local((steps, vec), "bfloat16")
            total = T.alloc_local((vec,), "float32")
            rounded = T.alloc_local((vec,), "bfloat16")
            weights = T.alloc_local((steps, vec), "bfloat16")
            squares = T.alloc_local((1,), "float32")
            T.pdl_trigger()
            if norm:
                for step in T.unroll(steps):
                    for v in T.vectorized(vec):
                        weights[step, v] = norm_weight[(step * n_thr + thread) * vec + v]
            T.pdl_sync()
            for step in T.unroll(steps):
                load_streams(x, residual, new_x, old, step, token, (step * n_thr + thread) * vec, vec)
            hold_coefficients(post_mix, comb_mix, held, token, 1, num_tokens)
            if carried:
                for j in T.vectorized(4):
                    mix_in[j] = pre_mix[token, j]
            squares[0] = T.float32(0)
            for step in T.unroll(steps):
                first = (step * n_thr + thread) * vec
                combine_streams(new_x, old, held, streams, values, step, 0, vec)
                for j in T.unroll(4):
                    for v in T.vectorized(vec):
                        residual_out[token, j, first + v] = streams[j, v]
                for v in T.unroll(vec):
                    if carried:
                        total[v] = mix_in[0] * values[0, 0, v]
                        for j in T.unroll(3):
                            total[v] = T.ieee_fmaf(mix_in[j + 1], values[0, j + 1, v], total[v], "rn")
                    else:
                        total[v] = values[0, 0, v]
                for v in T.vectorized(vec):
                    row[step, v] = T.cast(total[v], "bfloat16")
                if norm:
                    for v in T.unroll(vec):
                        total[v] = T.cast(row[step, v], "float32")
                        squares[0] = T.ieee_fmaf(total[v], total[v], squares[0], "rn")
                else:
                    for v in T.vectorized(vec):
                        layer_input[token, first + v] = row[step, v]
                if write_aux:
                    for v in T.unroll(vec):
                        total[v] = (
                            ((values[0, 0, v] + values[0, 1, v]) + values[0, 2, v]) + values[0, 3, v]
                        ) * T.float32(0.25)
                    for v in T.vectorized(vec):
                        rounded[v] = T.cast(total[v], "bfloat16")
                    for v in T.vectorized(vec):
                        aux[token, first + v] = rounded[v]
            if norm:
                squares[0] = T.warp_reduce_sum(squares[0])
                if thread % 32 == 0:
                    shared_squares[thread // 32] = squares[0]
                T.sync_threads()
                squares[0] = T.float32(0)
                for warp in T.unroll(warps):
                    squares[0] = squares[0] + shared_squares[warp]
                squares[0] = T.rsqrt(squares[0] * T.float32(1 / hidden_size) + norm_eps)
                for step in T.unroll(steps):
                    first = (step * n_thr + thread) * vec
                    for v in T.unroll(vec):
                        total[v] = (
                            T.cast(row[step, v], "float32") * squares[0] * T.cast(weights[step, v], "float32")
                        )
                    for v in T.vectorized(vec):
                        rounded[v] = T.cast(total[v], "bfloat16")
                    for v in T.vectorized(vec):
                        layer_input[token, first + v] = rounded[v]

    return mhctune_post_norm
