"""Merging by radix on the C backend: select by the top bits, then sort what is left digit by digit."""

import tilelang.language as T
from tvm.tirx import PrimExpr, PrimFunc

from mhctune.kernels.topk_key import id_of, order_key

_FLIP = 2**63 - 1
"""Turns keys, largest first, into digits that are sorted smallest first; its own inverse."""


def digit(key: PrimExpr, shift: PrimExpr, bits: int) -> PrimExpr:
    """Return `bits` bits of a flipped key, read as unsigned: its own sign bit is the top one."""
    return T.cast(T.bitwise_and(T.shift_right(key, T.cast(shift, "int64")), T.int64(2**bits - 1)), "int32")


@T.macro
def count_digits(keys, counts, row, first, length, shift, bits):
    """Count how often each digit occurs in `length` keys from `first` on."""
    for d in T.serial(2**bits):
        counts[row, d] = 0
    for i in T.serial(length):
        found = digit(keys[row, first + i], shift, bits)
        counts[row, found] = counts[row, found] + 1


def topk_radix(select_bits: int, digit_bits: int) -> PrimFunc:
    """Build the merge: one program a row of `ranks * top_k` entries.

    The digit of `select_bits` in which the K-th key falls bounds what is kept; 0 keeps everything. Then
    stable passes of `digit_bits`, lowest first; a digit that all keys share costs no pass. No branch:
    what does not happen has no iterations.
    """
    rows, ranks, top_k = T.dynamic("rows"), T.dynamic("ranks"), T.dynamic("top_k")
    key_width = T.dynamic("key_width")
    passes = -(-64 // digit_bits)

    @T.prim_func
    def mhctune_topk_radix(
        gathered: T.Tensor((ranks, rows, 2, top_k), "int32"),
        keys: T.Tensor((rows, key_width), "int64"),
        counts: T.Tensor((rows, 2 ** max(select_bits, digit_bits)), "int32"),
        ids: T.Tensor((rows, top_k), "int32"),
    ):
        with T.Kernel(rows) as row:
            width = ranks * top_k
            state = T.alloc_local((4,), "int32")  # keys kept, where they begin, running total, moving
            for rank in T.serial(ranks):
                for k in T.serial(top_k):
                    keys[row, rank * top_k + k] = T.bitwise_xor(
                        order_key(gathered[rank, row, 0, k], gathered[rank, row, 1, k]), T.int64(_FLIP)
                    )
            state[0] = width
            state[1] = 0
            if select_bits:
                count_digits(keys, counts, row, 0, width, 64 - select_bits, select_bits)
                state[2] = 0
                state[3] = 0  # the last digit that is kept
                for d in T.serial(2**select_bits):
                    state[3] = T.if_then_else(state[2] < top_k, d, state[3])
                    state[2] = state[2] + counts[row, d]
                state[0] = 0
                for i in T.serial(width):
                    # In place: never ahead of what is read. What is not kept is overwritten by the next one.
                    key = keys[row, i]
                    keys[row, state[0]] = key
                    state[0] = state[0] + T.cast(
                        digit(key, 64 - select_bits, select_bits) <= state[3], "int32"
                    )
            for step in T.serial(passes):
                count_digits(keys, counts, row, state[1], state[0], step * digit_bits, digit_bits)
                state[3] = T.cast(
                    counts[row, digit(keys[row, state[1]], step * digit_bits, digit_bits)] < state[0], "int32"
                )
                state[2] = 0
                for d in T.serial(2**digit_bits):
                    held = counts[row, d]
                    counts[row, d] = state[2]
                    state[2] = state[2] + held
                for i in T.serial(state[0] * state[3]):
                    key = keys[row, state[1] + i]
                    found = digit(key, step * digit_bits, digit_bits)
                    keys[row, width - state[1] + counts[row, found]] = key
                    counts[row, found] = counts[row, found] + 1
                state[1] = T.if_then_else(state[3] == 1, width - state[1], state[1])
            for k in T.serial(top_k):
                ids[row, k] = id_of(T.bitwise_xor(keys[row, state[1] + k], T.int64(_FLIP)))

    return mhctune_topk_radix
