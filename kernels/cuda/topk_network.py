"""A bitonic network on CUDA: one block sorts a power of two keys that its threads hold in registers.

Thread t of N holds E neighbours of the sequence, t * E to t * E + E - 1. What lies closer than E is compared
in the thread, closer than 32 E in the warp, the rest through shared memory: at 2048 keys and 256 threads 30,
30 and 6 of the 66 steps.
"""

from __future__ import annotations

import tilelang.language as T

Step = tuple[int, int]
"""Length of the sequences that a step helps to sort, and how far apart the compared keys lie."""


def merge_steps(length: int) -> list[Step]:
    """Return the steps that sort a bitonic sequence of `length`, a power of two."""
    return [(length, length >> at) for at in range(1, length.bit_length())]


def sort_steps(length: int) -> list[Step]:
    """Return the steps that sort `length` keys, a power of two."""
    return [step for log in range(1, length.bit_length()) for step in merge_steps(1 << log)]


@T.macro
def order_in_thread(keys, falling, first, second):
    """Put the larger of a thread's two keys first where `falling`, else second."""
    mine = T.alloc_local((2,), "int64")
    mine[0] = keys[first]
    mine[1] = keys[second]
    swapped = (mine[0] < mine[1]) == falling
    keys[first] = T.if_then_else(swapped, mine[1], mine[0])
    keys[second] = T.if_then_else(swapped, mine[0], mine[1])


@T.macro
def run_steps(keys, exchange, thread, steps, per_thread, n_thr):
    """Run steps, the largest key first. `exchange` is shared memory for `per_thread * n_thr` int64.

    Every thread of the block takes part; whoever read `exchange` before must have been waited for.
    """
    other = T.alloc_local((per_thread,), "int64")
    for length, distance in steps:
        if distance < per_thread:
            for at in [at for at in range(per_thread) if not at & distance]:
                if length < per_thread:
                    order_in_thread(keys, T.bool(not at & length), at, at + distance)
                else:
                    order_in_thread(keys, falls(thread, length, per_thread, n_thr), at, at + distance)
        else:
            apart = distance // per_thread
            if apart < 32:
                for at in T.unroll(per_thread):
                    # Stored, so that no lane skips the exchange by a condition it is used under.
                    other[at] = T.shfl_xor(keys[at], apart)
            else:
                for at in T.unroll(per_thread):
                    exchange[at * n_thr + thread] = keys[at]
                T.sync_threads()
                for at in T.unroll(per_thread):
                    other[at] = exchange[at * n_thr + T.bitwise_xor(thread, apart)]
                T.sync_threads()
            larger = (T.bitwise_and(thread, apart) == 0) == falls(thread, length, per_thread, n_thr)
            for at in T.unroll(per_thread):
                keys[at] = T.if_then_else((keys[at] < other[at]) == larger, other[at], keys[at])


def falls(thread, length, per_thread, n_thr):  # type: ignore[no-untyped-def]
    """Return whether the sequence of `length` that a thread's keys are part of is sorted largest first."""
    if length >= per_thread * n_thr:
        return T.bool(True)
    return T.bitwise_and(thread, length // per_thread) == 0
