"""The epilogue on CUDA: partial sums to coefficients, Sinkhorn, collapse and RMSNorm."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.mixes import add_partials, load_terms, pick, sigmoid, store_coefficients
from mhctune.kernels.cuda.row import collapse_row, load_norm_weights
from mhctune.kernels.cuda.widen import SOURCE


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
    `pdl_sync`; the pre-mix comes from a kernel before the one ahead, and may not be. The next kernel may
    begin at the end, when comb is stored, as behind the epilogue that ships. Begun at once it takes 0.1 to
    0.8 us less up to 512 tokens where it is our own first kernel again: in a graph of one seam, and in no
    runtime.

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
            T.import_source(SOURCE)
            thread = T.get_thread_binding()
            squares = T.alloc_shared((n_thr // 32,), "float32")
            own_mix = T.alloc_shared((4,), "float32")
            weights = T.alloc_local((steps, vec), "bfloat16")
            mix_in = T.alloc_local((1, 4), "float32")
            quad = T.alloc_local((1,), "int32")
            factor = T.alloc_local((1,), "float32")
            shifts = T.alloc_local((4,), "float32")
            sums = T.alloc_local((4,), "float32")
            if thread < n_thr:
                if norm:
                    load_norm_weights(norm_weight, weights, thread, steps, n_thr, vec)
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
                            mix_in[0, j] = pre_mix[token, j]
                    else:
                        for j in T.unroll(4):
                            mix_in[0, j] = own_mix[j]
                collapse_row(
                    residual, streams, mix_in, weights, squares, layer_input, token, thread, hidden_size,
                    n_thr, vec, mixed, norm, collapsed, norm_eps, delayed, broadcast,
                )  # fmt: skip
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
                # One thread speaks for its program: that of comb, which ends last with few tokens.
                if thread < n_thr + 32:
                    T.pdl_trigger()

    return mhctune_epilogue
