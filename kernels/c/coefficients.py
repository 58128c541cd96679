"""The coefficients on the C backend: partial sums to pre, post and comb, behind a released layer input."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.c.epilogue import add_splits, store_coefficients


def coefficients(hidden_size: int, sinkhorn_iters: int) -> PrimFunc:
    """Build the delayed epilogue without its layer input; the split count is read at run time.

    Args:
        hidden_size: H.
        sinkhorn_iters: column steps of the Sinkhorn normalisation.
    """
    num_tokens = T.dynamic("num_tokens")
    n_splits = T.dynamic("n_splits")

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
        with T.Kernel(num_tokens) as token:
            mixes = T.alloc_local((24,), "float32")
            scalar = T.alloc_local((1,), "float32")
            weights = T.alloc_local((4,), "float32")
            comb = T.alloc_local((4, 4), "float32")
            sums = T.alloc_local((4,), "float32")
            add_splits(mul, sqrsum, mixes, scalar, token, n_splits, 24, 4 * hidden_size, rms_eps)
            store_coefficients(
                mixes, scalar, scale, base, weights, comb, sums, next_post, next_comb, token, sinkhorn_iters,
                hc_pre_eps, sinkhorn_eps, post_mult,
            )  # fmt: skip
            for j in T.serial(4):
                next_pre[token, j] = weights[j]

    return mhctune_coefficients
