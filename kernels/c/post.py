"""The post block on the C backend: new streams from old streams and the sublayer's output."""

import tilelang.language as T
from tvm.tirx import PrimExpr, PrimFunc

from mhctune.kernels.c.bf16 import mean, narrow, widen


@T.macro
def mix_streams(x, residual, post_mix, comb_mix, streams, row, token, first, width):  # type: ignore[no-untyped-def]
    """Write the bf16 bits of `width` new elements of each stream into `streams[row, :, :]`.

    R'_j = post_j * x + sum_i comb[i, j] * R_i, in float32, in this order and without contraction, rounded
    once: every arm calls this macro, which is what makes their stored streams bit-identical.
    """
    for h in T.serial(width):
        xf = widen(x[token, first + h])
        r0 = widen(residual[token, 0, first + h])
        r1 = widen(residual[token, 1, first + h])
        r2 = widen(residual[token, 2, first + h])
        r3 = widen(residual[token, 3, first + h])
        for j in T.unroll(4):
            streams[row, j, h] = narrow(
                post_mix[token, j] * xf
                + comb_mix[token, 0, j] * r0
                + comb_mix[token, 1, j] * r1
                + comb_mix[token, 2, j] * r2
                + comb_mix[token, 3, j] * r3
            )


def _stored(bits: PrimExpr) -> PrimExpr:
    """Return the float32 of bf16 bits that stand in the low half of a uint32."""
    return T.reinterpret(T.shift_left(bits, T.uint32(16)), "float32")


def post(hidden_size: int, block_h: int, write_aux: int = 0) -> PrimFunc:
    """Build the stand-alone post kernel: one program a token, `block_h` elements at a time.

    With `write_aux` it also writes the mean over the new streams; otherwise `aux` is not touched.
    """
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def mhctune_post(
        x: T.Tensor((num_tokens, hidden_size), "uint16"),
        residual: T.Tensor((num_tokens, 4, hidden_size), "uint16"),
        post_mix: T.Tensor((num_tokens, 4), "float32"),
        comb_mix: T.Tensor((num_tokens, 4, 4), "float32"),
        residual_out: T.Tensor((num_tokens, 4, hidden_size), "uint16"),
        aux: T.Tensor((num_tokens, hidden_size), "uint16"),
    ):
        with T.Kernel(num_tokens) as token:
            streams = T.alloc_local((1, 4, block_h), "uint32")
            for block in T.serial(hidden_size // block_h):
                mix_streams(x, residual, post_mix, comb_mix, streams, 0, token, block * block_h, block_h)
                for j, h in T.grid(4, block_h):
                    residual_out[token, j, block * block_h + h] = T.cast(streams[0, j, h], "uint16")
                if write_aux:
                    for h in T.serial(block_h):
                        average = mean(
                            _stored(streams[0, 0, h]), _stored(streams[0, 1, h]),
                            _stored(streams[0, 2, h]), _stored(streams[0, 3, h]),
                        )  # fmt: skip
                        aux[token, block * block_h + h] = T.cast(narrow(average), "uint16")

    return mhctune_post
