"""The head on the C backend: partial sums to a gate a stream, and the streams' weighted sum."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.c.bf16 import narrow, weighted, widen
from mhctune.kernels.c.epilogue import add_splits, sigmoid


def head(hidden_size: int) -> PrimFunc:
    """Build the head's epilogue; the split count is read off the partial sums at run time."""
    num_tokens = T.dynamic("num_tokens")
    n_splits = T.dynamic("n_splits")

    @T.prim_func
    def mhctune_head(
        mul: T.Tensor((n_splits, num_tokens, 4), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
        residual: T.Tensor((num_tokens, 4, hidden_size), "uint16"),
        scale: T.Tensor((1,), "float32"),
        base: T.Tensor((4,), "float32"),
        collapsed: T.Tensor((num_tokens, hidden_size), "uint16"),
        rms_eps: T.float32,
        hc_pre_eps: T.float32,
    ):
        with T.Kernel(num_tokens) as token:
            mixes = T.alloc_local((4,), "float32")
            scalar = T.alloc_local((1,), "float32")
            weights = T.alloc_local((4,), "float32")
            add_splits(mul, sqrsum, mixes, scalar, token, n_splits, 4, 4 * hidden_size, rms_eps)
            for j in T.serial(4):
                weights[j] = sigmoid(mixes[j] * scalar[0] * scale[0] + base[j]) + hc_pre_eps
            for h in T.serial(hidden_size):
                value = weighted(
                    weights, widen(residual[token, 0, h]), widen(residual[token, 1, h]),
                    widen(residual[token, 2, h]), widen(residual[token, 3, h]),
                )  # fmt: skip
                collapsed[token, h] = T.cast(narrow(value), "uint16")

    return mhctune_head
