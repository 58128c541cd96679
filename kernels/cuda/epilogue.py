"""The epilogue on CUDA: partial sums to coefficients, Sinkhorn, collapse and RMSNorm."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.mixes import add_partials, load_terms, pick, sigmoid, store_coefficients

EARLY_NEXT = 16
"""Tokens up to which the next kernel may begin while this one runs: 0.1 to 0.4 us less on an H200 where that
is a kernel of ours; from 32 on its programs take the place of those that work (0.2 to 0.7 us more)."""


def epilogue(
    hidden_size: int,
    n_splits: int,
    sinkhorn_iters: int,
    carried: int,
    norm: int,
    collapsed: int,
    n_thr: int,
    vec: int,
    delayed: int = 1,
    broadcast: int = 0,
) -> PrimFunc:
    """Build the epilogue: a program a token, `n_thr` threads that collapse and two warps for coefficients.

    A delayed layer input needs only the incoming pre-mix, so the collapse and its norm run beside the mixes
    and the Sinkhorn iterations without waiting for each other: the collapsing threads have a barrier of
    their own. Otherwise they wait for the pre-mix, and not for Sinkhorn. Weights are loaded before
    `pdl_sync`; the pre-mix comes from a kernel before the one ahead, and may not be.

    Args:
        hidden_size: H; a multiple of `n_thr * vec`.
        n_splits: partial sums to add, in an order that depends on nothing else.
        sinkhorn_iters: column steps.
        carried: collapse with `pre_mix`; otherwise take stream 0.
        norm: apply RMSNorm to the collapse, rounded to bf16.
        collapsed: the kernel before has written the collapse into `layer_input`: read one row, not four.
        n_thr: threads that collapse, a multiple of 32.
        vec: neighbouring elements a thread loads at once.
        delayed: V4.1: store the next pre-mix, and square the rounded collapse in the norm. Otherwise V4:
            collapse with the pre-mix just computed, store none, and square the unrounded collapse.
        broadcast: `residual` [T, 1, H] holds what all streams are equal to; store the streams in `streams`.

    What a flag leaves out is neither read nor written: its slot may hold any tensor of its shape.
    """
    num_tokens = T.dynamic("num_tokens")
    steps = hidden_size // (n_thr * vec)
    warps = n_thr // 32
    n_streams = 1 if broadcast else 4
    mixed = (carried or not delayed) and not collapsed

    @T.prim_func
    def mhctune_epilogue(
        mul: T.Tensor((n_splits, num_tokens, 24), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
        residual: T.Tensor((num_tokens, n_streams, hidden_size), "bfloat16"),
        pre_mix: T.Tensor((num_tokens, 4), "float32"),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((24,), "float32"),
        norm_weight: T.Tensor((hidden_size,), "bfloat16"),
        next_post: T.Tensor((num_tokens, 4), "float32"),
        next_comb: T.Tensor((num_tokens, 4, 4), "float32"),
        layer_input: T.Tensor((num_tokens, hidden_size), "bfloat16"),
        next_pre: T.Tensor((num_tokens, 4), "float32"),
        streams: T.Tensor((num_tokens, 4, hidden_size), "bfloat16"),
        rms_eps: T.float32,
        hc_pre_eps: T.float32,
        sinkhorn_eps: T.float32,
        post_mult: T.float32,
        norm_eps: T.float32,
    ):
        with T.Kernel(num_tokens, threads=n_thr + 64) as token:
            thread = T.get_thread_binding()
            squares = T.alloc_shared((warps,), "float32")
            own_mix = T.alloc_shared((4,), "float32")
            row = T.alloc_local((steps, vec), "float32")
            stored = T.alloc_local((4, vec), "bfloat16")
            rounded = T.alloc_local((vec,), "bfloat16")
            weights = T.alloc_local((steps, vec), "bfloat16")
            mix_in = T.alloc_local((4,), "float32")
            scalar = T.alloc_local((1,), "float32")
            quad = T.alloc_local((1,), "int32")
            factor = T.alloc_local((1,), "float32")
            shifts = T.alloc_local((4,), "float32")
            sums = T.alloc_local((4,), "float32")
            # All programs run by now, and leave the other SMs idle: what is launched next may begin there.
            if num_tokens <= EARLY_NEXT:
                T.pdl_trigger()
            if thread < n_thr:
                if norm:
                    for step in T.unroll(steps):
                        for v in T.vectorized(vec):
                            weights[step, v] = norm_weight[(step * n_thr + thread) * vec + v]
                T.pdl_sync()
            else:
                load_terms(scale, base, quad, factor, shifts, thread < n_thr + 32, thread % 32)
                T.pdl_sync()
            if not delayed:
                if thread >= n_thr:
                    add_partials(
                        mul, sqrsum, sums, factor, shifts, token, quad, thread % 32, n_splits,
                        n_streams * hidden_size, rms_eps,
                    )  # fmt: skip
                    if thread >= n_thr + 32:
                        if (thread - n_thr - 32) % 4 == 0 and thread < n_thr + 48:
                            own_mix[(thread - n_thr - 32) // 4] = (
                                sigmoid(pick(sums, (thread - n_thr - 32) // 4)) + hc_pre_eps
                            )
                T.sync_threads()
            if thread < n_thr:
                if mixed:
                    if delayed:
                        for j in T.vectorized(4):
                            mix_in[j] = pre_mix[token, j]
                    else:
                        for j in T.unroll(4):
                            mix_in[j] = own_mix[j]
                scalar[0] = T.float32(0)
                for step in T.unroll(steps):
                    first = (step * n_thr + thread) * vec
                    if collapsed:
                        for v in T.vectorized(vec):
                            rounded[v] = layer_input[token, first + v]
                    else:
                        for j in T.unroll(n_streams if mixed else 1):
                            for v in T.vectorized(vec):
                                stored[j, v] = residual[token, j, first + v]
                        if broadcast:
                            for j in T.unroll(4):
                                for v in T.vectorized(vec):
                                    streams[token, j, first + v] = stored[0, v]
                        if mixed:
                            for v in T.unroll(vec):
                                row[step, v] = mix_in[0] * T.cast(stored[0, v], "float32")
                                for j in T.unroll(3):
                                    row[step, v] = T.ieee_fmaf(
                                        mix_in[j + 1],
                                        T.cast(stored[0 if broadcast else j + 1, v], "float32"),
                                        row[step, v],
                                        "rn",
                                    )
                            for v in T.vectorized(vec):
                                rounded[v] = T.cast(row[step, v], "bfloat16")
                        else:
                            for v in T.unroll(vec):
                                rounded[v] = stored[0, v]
                    if norm:
                        for v in T.unroll(vec):
                            if delayed:
                                row[step, v] = T.cast(rounded[v], "float32")
                            scalar[0] = T.ieee_fmaf(row[step, v], row[step, v], scalar[0], "rn")
                            if not delayed:
                                row[step, v] = T.cast(rounded[v], "float32")
                    elif not collapsed:
                        for v in T.vectorized(vec):
                            layer_input[token, first + v] = rounded[v]
                if norm:
                    scalar[0] = T.warp_reduce_sum(scalar[0])
                    if thread % 32 == 0:
                        squares[thread // 32] = scalar[0]
                    T.sync_threads(1, n_thr)
                    scalar[0] = T.float32(0)
                    for warp in T.unroll(warps):
                        scalar[0] = scalar[0] + squares[warp]
                    scalar[0] = T.rsqrt(scalar[0] * T.float32(1 / hidden_size) + norm_eps)
                    for step in T.unroll(steps):
                        for v in T.unroll(vec):
                            row[step, v] = row[step, v] * scalar[0] * T.cast(weights[step, v], "float32")
                        for v in T.vectorized(vec):
                            rounded[v] = T.cast(row[step, v], "bfloat16")
                        for v in T.vectorized(vec):
                            layer_input[token, (step * n_thr + thread) * vec + v] = rounded[v]
            else:
                if delayed:
                    add_partials(
                        mul, sqrsum, sums, factor, shifts, token, quad, thread % 32, n_splits,
                        n_streams * hidden_size, rms_eps,
                    )  # fmt: skip
                store_coefficients(
                    sums, thread < n_thr + 32, thread % 32, token, next_post, next_comb, next_pre, delayed,
                    sinkhorn_iters, hc_pre_eps, sinkhorn_eps, post_mult,
                )  # fmt: skip

    return mhctune_epilogue
