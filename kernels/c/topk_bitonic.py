"""Merging by a bitonic network on the C backend: runs of K are sorted, then folded into the best K."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.topk_key import NONE, id_of, order_key


@T.macro
def exchange(keys, row, first, second):
    """Put the larger of two keys first."""
    larger = T.max(keys[row, first], keys[row, second])
    smaller = T.min(keys[row, first], keys[row, second])
    keys[row, first] = larger
    keys[row, second] = smaller


@T.macro
def halve(keys, row, first, length, distance):
    """Compare entries that lie `distance` apart, in `length` keys from `first` on."""
    for block in T.serial(T.truncdiv(length, 2 * distance)):
        for k in T.serial(distance):
            exchange(keys, row, first + block * 2 * distance + k, first + block * 2 * distance + k + distance)


@T.macro
def sort_run(keys, row, first, length, log_length):
    """Sort `length` (a power of two) keys, the largest first.

    A step begins with mirrored pairs, so that two sorted halves form a bitonic sequence and every exchange
    has the same direction.
    """
    for step in T.serial(log_length):
        size = T.shift_left(T.int32(2), step)
        for block in T.serial(T.shift_right(length, step + 1)):
            for k in T.serial(T.shift_left(T.int32(1), step)):
                exchange(keys, row, first + block * size + k, first + block * size + size - 1 - k)
        for later in T.serial(step):
            halve(keys, row, first, length, T.shift_left(T.int32(1), step - 1 - later))


def topk_bitonic() -> PrimFunc:
    """Build the merge: one program a row of `ranks * top_k` entries, sorted in runs of 2^log_run >= top_k.

    Two sorted runs hold their best run at the larger ends: a mirrored maximum and one more halving
    pass keep them. The key scratch [rows, key_width] holds whole runs and is padded with none.
    """
    rows, ranks, top_k = T.dynamic("rows"), T.dynamic("ranks"), T.dynamic("top_k")
    key_width = T.dynamic("key_width")

    @T.prim_func
    def mhctune_topk_bitonic(
        gathered: T.Tensor((ranks, rows, 2, top_k), "int32"),
        keys: T.Tensor((rows, key_width), "int64"),
        ids: T.Tensor((rows, top_k), "int32"),
        log_run: T.int32,
    ):
        with T.Kernel(rows) as row:
            width = ranks * top_k
            run = T.shift_left(T.int32(1), log_run)
            runs = T.shift_right(key_width, log_run)
            for rank in T.serial(ranks):
                for k in T.serial(top_k):
                    keys[row, rank * top_k + k] = order_key(
                        gathered[rank, row, 0, k], gathered[rank, row, 1, k]
                    )
            for k in T.serial(key_width - width):
                keys[row, width + k] = T.int64(NONE)
            for part in T.serial(runs):
                sort_run(keys, row, part * run, run, log_run)
            for part in T.serial(runs - 1):
                for k in T.serial(run):
                    keys[row, k] = T.max(keys[row, k], keys[row, (part + 2) * run - 1 - k])
                for later in T.serial(log_run):
                    halve(keys, row, 0, run, T.shift_left(T.int32(1), log_run - 1 - later))
            for k in T.serial(top_k):
                ids[row, k] = id_of(keys[row, k])

    return mhctune_topk_bitonic
