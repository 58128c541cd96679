"""The collapse on the C backend: the streams' sum, weighted by the carried pre-mix; rows may lie apart."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.c.bf16 import narrow, weighted, widen


@T.macro
def collapse_part(residual, weights, collapsed, token, start, first, width, hidden_size):  # type: ignore[no-untyped-def]
    """Write `width` elements of a token from `first` on; its streams begin at element `start`."""
    for h in T.serial(width):
        value = weighted(
            weights, widen(residual[start + first + h]), widen(residual[start + hidden_size + first + h]),
            widen(residual[start + 2 * hidden_size + first + h]),
            widen(residual[start + 3 * hidden_size + first + h]),
        )  # fmt: skip
        collapsed[token, first + h] = T.cast(narrow(value), "uint16")


def collapse(hidden_size: int, block_h: int) -> PrimFunc:
    """Build the collapse: a program a token, `block_h` elements at a time and the rest of H at the end.

    The streams come as a flat view with the distance of two tokens' rows in elements (int64), because
    TileLang's host code does not read a symbolic stride off a tensor.
    """
    num_tokens = T.dynamic("num_tokens")
    extent = T.dynamic("extent", "int64")
    blocks, rest = divmod(hidden_size, block_h)

    @T.prim_func
    def mhctune_collapse(
        residual: T.Tensor((extent,), "uint16"),
        pre_mix: T.Tensor((num_tokens, 4), "float32"),
        collapsed: T.Tensor((num_tokens, hidden_size), "uint16"),
        row_stride: T.int64,
    ):
        with T.Kernel(num_tokens) as token:
            weights = T.alloc_local((4,), "float32")
            start = T.cast(token, "int64") * row_stride
            for j in T.serial(4):
                weights[j] = pre_mix[token, j]
            for block in T.serial(blocks):
                collapse_part(
                    residual, weights, collapsed, token, start, block * block_h, block_h, hidden_size
                )
            if rest:
                collapse_part(residual, weights, collapsed, token, start, blocks * block_h, rest, hidden_size)

    return mhctune_collapse
