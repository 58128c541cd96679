"""Merging by radix on CUDA: a block finds a row's K-th key digit by digit, then sorts the K best."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.topk_network import run_steps, sort_steps
from mhctune.kernels.cuda.topk_row import load_keys, loads, store_ids, sum_before
from mhctune.kernels.topk_key import NONE

HIGHEST = 2**63 - 1


def sorted_keys(top_k: int, n_thr: int) -> int:
    """Return how many keys the network sorts: a power of two, at least one a thread."""
    return max(1 << (top_k - 1).bit_length(), n_thr)


def topk_radix(top_k: int, ranks: int, n_thr: int, digit_bits: int, held: int) -> PrimFunc:
    """Build the merge: one block of `n_thr` threads a row of `ranks * top_k` entries.

    A window of keys narrows around the K-th one. How far its keys lie below its upper end, whose free bits
    are ones, is counted by digits; the digit in which the K-th falls is the next window, unless it holds
    just what is missing. Then K keys, those above the window and as many of it as are missing, which are all
    or all equal, go to shared memory and through a bitonic network. Counts and places are integers, and the
    network orders every key: no result depends on the order of threads.

    `held` 1: keys stay in registers; 0: a row is read, from the L2, in each of its passes.
    """
    rows = T.dynamic("rows")
    width, vec, bins = ranks * top_k, loads(top_k), 2**digit_bits
    steps = -(-width // (n_thr * vec))
    length = sorted_keys(top_k, n_thr)
    per_thread, per_bin = length // n_thr, -(-bins // n_thr)
    end = steps * n_thr * vec

    @T.prim_func
    def mhctune_topk_radix(
        gathered: T.Tensor((ranks, rows, 2, top_k), "int32"),
        ids: T.Tensor((rows, top_k), "int32"),
    ):
        with T.Kernel(rows, threads=n_thr) as row:
            thread = T.get_thread_binding()
            counts = T.alloc_shared((bins,), "int32")
            totals = T.alloc_shared((n_thr // 32,), "int32")
            found = T.alloc_shared((3,), "int32")  # digit, keys of the window above it, its keys
            best = T.alloc_shared((length,), "int64")
            keys = T.alloc_local(((steps if held else 1) * vec,), "int64")
            chosen = T.alloc_local((per_thread,), "int64")
            window = T.alloc_local((2,), "int64")  # its lowest and its highest key
            state = T.alloc_local((2,), "int32")  # bits below the next digit, -1: decided; keys still missing
            tally = T.alloc_local((2,), "int32")
            place = T.alloc_local((2,), "int32")
            if held:
                for step in T.unroll(steps):
                    load_keys(
                        gathered, row, (step * n_thr + thread) * vec, width, top_k, vec, end, keys, step * vec
                    )
            window[0] = T.int64(NONE)
            window[1] = T.int64(HIGHEST)
            state[0] = T.int32(64 - digit_bits)
            state[1] = T.int32(top_k)
            while state[0] >= 0:
                for part in T.unroll(per_bin):
                    if part * n_thr + thread < bins:
                        counts[part * n_thr + thread] = 0
                T.sync_threads()
                for step in T.unroll(steps):
                    if not held:
                        load_keys(
                            gathered, row, (step * n_thr + thread) * vec, width, top_k, vec, end, keys, 0
                        )
                    for v in T.unroll(vec):
                        key = keys[(step if held else 0) * vec + v]
                        if T.And(key >= window[0], key <= window[1]):
                            below = T.shift_right(T.bitwise_xor(window[1], key), T.cast(state[0], "int64"))
                            T.atomic_add(counts[T.cast(T.bitwise_and(below, T.int64(bins - 1)), "int32")], 1)
                T.sync_threads()
                tally[0] = 0
                for part in T.unroll(per_bin):
                    if thread * per_bin + part < bins:
                        tally[0] = tally[0] + counts[thread * per_bin + part]
                sum_before(tally, totals, thread, place)
                for part in T.unroll(per_bin):
                    if thread * per_bin + part < bins:
                        tally[1] = counts[thread * per_bin + part]
                        if T.And(place[0] < state[1], place[0] + tally[1] >= state[1]):
                            found[0] = thread * per_bin + part
                            found[1] = place[0]
                            found[2] = tally[1]
                        place[0] = place[0] + tally[1]
                T.sync_threads()
                state[1] = state[1] - found[1]
                shift = T.cast(state[0], "int64")
                window[1] = T.bitwise_xor(window[1], T.shift_left(T.cast(found[0], "int64"), shift))
                inside = T.shift_left(T.int64(1), shift) - T.int64(1)
                window[0] = T.max(T.bitwise_xor(window[1], inside), T.int64(NONE))
                state[0] = T.if_then_else(
                    T.Or(found[2] == state[1], state[0] == 0), T.int32(-1), T.max(state[0] - digit_bits, 0)
                )
            # Keys above the window take the first places, keys of it the rest.
            tally[0] = 0
            tally[1] = 0
            for step in T.unroll(steps):
                if not held:
                    load_keys(gathered, row, (step * n_thr + thread) * vec, width, top_k, vec, end, keys, 0)
                for v in T.unroll(vec):
                    key = keys[(step if held else 0) * vec + v]
                    tally[0] = tally[0] + T.cast(key > window[1], "int32")
                    tally[1] = tally[1] + T.cast(T.And(key >= window[0], key <= window[1]), "int32")
            sum_before(tally, totals, thread, place)
            tally[0] = tally[1]
            place[1] = place[0]
            sum_before(tally, totals, thread, place)
            place[0] = place[0] + top_k - state[1]
            for step in T.unroll(steps):
                if not held:
                    load_keys(gathered, row, (step * n_thr + thread) * vec, width, top_k, vec, end, keys, 0)
                for v in T.unroll(vec):
                    key = keys[(step if held else 0) * vec + v]
                    if key > window[1]:
                        best[place[1]] = key
                        place[1] = place[1] + 1
                    else:
                        if T.And(key >= window[0], place[0] < top_k):
                            best[place[0]] = key
                            place[0] = place[0] + 1
            for part in T.unroll(-(-(length - top_k) // n_thr)):
                if top_k + part * n_thr + thread < length:
                    best[top_k + part * n_thr + thread] = T.int64(NONE)
            T.sync_threads()
            for e in T.unroll(per_thread):
                chosen[e] = best[e * n_thr + thread]
            T.sync_threads()
            run_steps(chosen, best, thread, sort_steps(length), per_thread, n_thr)
            store_ids(chosen, ids, row, thread, per_thread, top_k)

    return mhctune_topk_radix
