"""Reading a row of a global top-k on CUDA and writing its ids; sums over a block."""

import tilelang.language as T

from mhctune.kernels.topk_key import id_of, order_key

VOID = -(2**63)
"""The key of no entry at all, where a row ends before its threads do: below every other."""


def loads(top_k: int) -> int:
    """Return how many neighbouring entries a thread loads at once: 16 bytes where K allows it."""
    return 4 if top_k % 4 == 0 else 1


@T.macro
def load_keys(gathered, row, first, width, top_k, vec, end, keys, at):
    """Write keys[at .. at + vec] of the entries from `first` on, of `width` in a row; VOID from there on.

    `end` is what `first` reaches at most: without a ragged end nothing is compared.
    """
    ids = T.alloc_local((vec,), "int32")
    bits = T.alloc_local((vec,), "int32")
    if end > width:
        for v in T.unroll(vec):
            keys[at + v] = T.int64(VOID)
        if first < width:
            load_entries(gathered, row, first, top_k, vec, ids, bits, keys, at)
    else:
        load_entries(gathered, row, first, top_k, vec, ids, bits, keys, at)


@T.macro
def load_entries(gathered, row, first, top_k, vec, ids, bits, keys, at):
    """Write keys[at .. at + vec] of the entries from `first` on, all of one rank."""
    rank = first // top_k
    k = first % top_k
    for v in T.vectorized(vec):
        ids[v] = gathered[rank, row, 0, k + v]
    for v in T.vectorized(vec):
        bits[v] = gathered[rank, row, 1, k + v]
    for v in T.unroll(vec):
        keys[at + v] = order_key(ids[v], bits[v])


@T.macro
def store_ids(keys, ids, row, thread, per_thread, top_k):
    """Write the ids of a row whose keys are sorted: a thread holds `per_thread` neighbours."""
    for e in T.unroll(per_thread):
        if thread * per_thread + e < top_k:
            ids[row, thread * per_thread + e] = id_of(keys[e])


@T.macro
def sum_before(value, totals, thread, before):
    """Write before[0], the sum of value[0] (int32) over all threads before this one.

    `totals` is shared memory, an int32 a warp; all threads have read it when this returns.
    """
    lane = thread % 32
    running = T.alloc_local((2,), "int32")
    running[0] = value[0]
    for distance in [1, 2, 4, 8, 16]:
        running[1] = T.shfl_up(running[0], distance)
        running[0] = running[0] + T.if_then_else(lane >= distance, running[1], T.int32(0))
    if lane == 31:
        totals[thread // 32] = running[0]
    T.sync_threads()
    running[1] = T.int32(0)
    if lane < thread // 32:
        running[1] = totals[lane]
    running[1] = T.warp_reduce_sum(running[1])
    before[0] = running[1] + running[0] - value[0]
    T.sync_threads()
