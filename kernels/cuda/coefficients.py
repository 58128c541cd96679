"""The coefficients alone on CUDA: what the sublayer does not wait for."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.mixes import add_partials, load_terms, store_coefficients

N_TOKENS = 4
"""Tokens of a program: two warps each."""


def coefficients(hidden_size: int, n_splits: int, sinkhorn_iters: int) -> PrimFunc:
    """Build the kernel from partial sums to post, comb and next pre mixes.

    Its programs are few and short: what is launched next may always begin beside them.
    """
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def mhctune_coefficients(
        mul: T.Tensor((n_splits, num_tokens, 24), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((24,), "float32"),
        next_post: T.Tensor((num_tokens, 4), "float32"),
        next_comb: T.Tensor((num_tokens, 4, 4), "float32"),
        next_pre: T.Tensor((num_tokens, 4), "float32"),
        rms_eps: T.float32,
        hc_pre_eps: T.float32,
        sinkhorn_eps: T.float32,
        post_mult: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, N_TOKENS), threads=64 * N_TOKENS) as program:
            thread = T.get_thread_binding()
            quad = T.alloc_local((1,), "int32")
            factor = T.alloc_local((1,), "float32")
            shifts = T.alloc_local((4,), "float32")
            sums = T.alloc_local((4,), "float32")
            T.pdl_trigger()
            load_terms(scale, base, quad, factor, shifts, thread % 64 < 32, thread % 32)
            T.pdl_sync()
            token = program * N_TOKENS + thread // 64
            if token < num_tokens:
                add_partials(
                    mul, sqrsum, sums, factor, shifts, token, quad, thread % 32, n_splits, 4 * hidden_size,
                    rms_eps,
                )  # fmt: skip
                store_coefficients(
                    sums, thread % 64 < 32, thread % 32, token, next_post, next_comb, next_pre, 1,
                    sinkhorn_iters, hc_pre_eps, sinkhorn_eps, post_mult,
                )  # fmt: skip

    return mhctune_coefficients
