"""A token's whole row on CUDA: collapse of stored streams and RMSNorm by the threads of one program."""

import tilelang.language as T

from mhctune.kernels.cuda.collapse import weigh_streams
from mhctune.kernels.cuda.sinkhorn import fma
from mhctune.kernels.cuda.widen import widen


@T.macro
def load_norm_weights(norm_weight, weights, thread, steps, n_thr, vec):
    """Load a thread's weights [steps, vec] of the norm; they come from no kernel ahead."""
    for step in T.unroll(steps):
        for v in T.vectorized(vec):
            weights[step, v] = norm_weight[(step * n_thr + thread) * vec + v]


@T.macro
def inverse_rms(squares, scalar, thread, n_thr, hidden_size, norm_eps):
    """Make of each thread's sum of squares, scalar[0], the row's 1 / RMS, the same in every thread.

    `squares` is shared memory [n_thr / 32]; the sum is in an order that depends on nothing else. The barrier
    is that of `n_thr` threads alone.
    """
    scalar[0] = T.warp_reduce_sum(scalar[0])
    if thread % 32 == 0:
        squares[thread // 32] = scalar[0]
    T.sync_threads(1, n_thr)
    scalar[0] = T.float32(0)
    for warp in T.unroll(n_thr // 32):
        scalar[0] = scalar[0] + squares[warp]
    scalar[0] = T.rsqrt(scalar[0] * T.float32(1 / hidden_size) + norm_eps)


@T.macro
def collapse_row(
    residual, streams, mix_in, weights, squares, layer_input, token, thread, hidden_size, n_thr, vec, mixed,
    norm, collapsed, norm_eps, delayed=1, broadcast=0,
):  # fmt: skip
    """Write a token's layer input from stored streams, or from the collapse that is in its place.

    Args:
        residual: streams [T, 4, H], [T, 1, H] if `broadcast`; unread if `collapsed`.
        streams: where the equal streams of a `broadcast` go.
        mix_in: the pre-mix, registers [1, 4]; read if `mixed`, otherwise stream 0 is taken.
        weights: of the norm, registers [steps, vec].
        squares: shared memory [n_thr / 32].
        layer_input: [T, H]; holds the collapse if `collapsed`.
        token: whose row.
        thread: 0 to n_thr - 1.
        hidden_size: H; a multiple of `n_thr * vec`.
        n_thr: threads that take part.
        vec: neighbouring elements a thread loads at once.
        mixed: whether to collapse by `mix_in`.
        norm: apply RMSNorm to the collapse, rounded to bf16.
        collapsed: whether `layer_input` holds the collapse.
        norm_eps: of the norm.
        delayed: square the rounded collapse (V4.1), otherwise the unrounded one (V4).
        broadcast: whether all streams are equal to one.
    """
    steps = hidden_size // (n_thr * vec)
    row = T.alloc_local((steps, vec), "float32")
    exact = T.alloc_local((vec,), "float32")
    total = T.alloc_local((vec,), "float32")
    stored = T.alloc_local((4, vec), "bfloat16")
    rounded = T.alloc_local((vec,), "bfloat16")
    scalar = T.alloc_local((1,), "float32")
    scalar[0] = T.float32(0)
    for step in T.unroll(steps):
        first = (step * n_thr + thread) * vec
        if collapsed:
            for v in T.vectorized(vec):
                rounded[v] = layer_input[token, first + v]
        else:
            for j in T.unroll((1 if broadcast else 4) if mixed else 1):
                for v in T.vectorized(vec):
                    stored[j, v] = residual[token, j, first + v]
            if broadcast:
                for j in T.unroll(4):
                    for v in T.vectorized(vec):
                        streams[token, j, first + v] = stored[0, v]
            if mixed:
                weigh_streams(mix_in, stored, total, vec, broadcast)
                for v in T.vectorized(vec):
                    rounded[v] = T.cast(total[v], "bfloat16")
            else:
                for v in T.unroll(vec):
                    rounded[v] = stored[0, v]
        if norm:
            widen(row[step, 0], rounded[0], vec)
            for v in T.unroll(vec):
                if delayed:
                    scalar[0] = fma(row[step, v], row[step, v], scalar[0])
                else:
                    scalar[0] = fma(total[v], total[v], scalar[0])
        elif not collapsed:
            for v in T.vectorized(vec):
                layer_input[token, first + v] = rounded[v]
    if norm:
        inverse_rms(squares, scalar, thread, n_thr, hidden_size, norm_eps)
        for step in T.unroll(steps):
            widen(exact[0], weights[step, 0], vec)
            for v in T.unroll(vec):
                row[step, v] = row[step, v] * scalar[0] * exact[v]
            for v in T.vectorized(vec):
                rounded[v] = T.cast(row[step, v], "bfloat16")
            for v in T.vectorized(vec):
                layer_input[token, (step * n_thr + thread) * vec + v] = rounded[v]
