"""Merging by a bitonic network on CUDA: runs of a row are sorted in turn and folded into the best one."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.topk_network import merge_steps, run_steps, sort_steps
from mhctune.kernels.cuda.topk_radix import sorted_keys
from mhctune.kernels.cuda.topk_row import VOID, load_keys, loads, store_ids


def topk_bitonic(top_k: int, ranks: int, n_thr: int, run_k: int) -> PrimFunc:
    """Build the merge: one block of `n_thr` threads a row of `ranks * top_k` entries.

    A run holds the entries of `run_k` ranks, filled up to a power of two. It is sorted smallest first, that
    is its complements largest first, so that beside the best run, largest first, the larger key of each
    place is one of the best; what they leave is bitonic and one merge sorts it.
    """
    rows = T.dynamic("rows")
    width, entries, runs = ranks * top_k, run_k * top_k, -(-ranks // run_k)
    length = sorted_keys(entries, n_thr)
    per_thread = length // n_thr
    vec = min(loads(top_k), per_thread)

    @T.prim_func
    def mhctune_topk_bitonic(
        gathered: T.Tensor((ranks, rows, 2, top_k), "int32"),
        ids: T.Tensor((rows, top_k), "int32"),
    ):
        with T.Kernel(rows, threads=n_thr) as row:
            thread = T.get_thread_binding()
            exchange = T.alloc_shared((length,), "int64")
            keys = T.alloc_local((per_thread,), "int64")
            best = T.alloc_local((per_thread,), "int64")
            for run in T.serial(runs):
                for step in T.unroll(per_thread // vec):
                    first = (step * n_thr + thread) * vec
                    if length > entries:
                        for v in T.unroll(vec):
                            keys[step * vec + v] = T.int64(VOID)
                        if first < entries:
                            load_keys(
                                gathered, row, run * entries + first, width, top_k, vec, runs * entries, keys,
                                step * vec,
                            )  # fmt: skip
                    else:
                        load_keys(
                            gathered, row, run * entries + first, width, top_k, vec, runs * entries, keys,
                            step * vec,
                        )  # fmt: skip
                if runs == 1:
                    run_steps(keys, exchange, thread, sort_steps(length), per_thread, n_thr)
                    for e in T.unroll(per_thread):
                        best[e] = keys[e]
                else:
                    for e in T.unroll(per_thread):
                        keys[e] = T.bitwise_not(keys[e])
                    run_steps(keys, exchange, thread, sort_steps(length), per_thread, n_thr)
                    if run == 0:
                        for e in T.unroll(per_thread):
                            best[e] = T.int64(VOID)
                    for e in T.unroll(per_thread):
                        best[e] = T.max(best[e], T.bitwise_not(keys[e]))
                    run_steps(best, exchange, thread, merge_steps(length), per_thread, n_thr)
            store_ids(best, ids, row, thread, per_thread, top_k)

    return mhctune_topk_bitonic
