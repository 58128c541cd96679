"""Sums across the threads of a block, in a fixed order: no atomics, so results do not depend on timing."""

import tilelang.language as T


@T.macro
def store_partials(sums, partials, mul, sqrsum, rows, tile, split, block_m, tile_n, n_thr, num_tokens):
    """Reduce [block_m, tile_n + 1] sums of each thread and write this program's partial sums.

    The last column is the square sum; the programs of the first column tile write it. `partials` is shared
    memory [n_thr / 32, block_m * (tile_n + 1)].
    """
    thread = T.get_thread_binding()
    for m in T.unroll(block_m):
        for n in T.unroll(tile_n + 1):
            sums[m, n] = T.warp_reduce_sum(sums[m, n])
    # `partials` may be laid over the shared coefficients, which are dead from here on: TileLang's ThreadSync
    # pass puts a barrier before the first write, so that no warp overwrites what another still reads.
    if thread % 32 == 0:
        for m in T.unroll(block_m):
            for n in T.unroll(tile_n + 1):
                partials[thread // 32, m * (tile_n + 1) + n] = sums[m, n]
    T.sync_threads()
    total = T.alloc_local((1,), "float32")
    for part in T.unroll(T.ceildiv(block_m * (tile_n + 1), n_thr)):
        index = part * n_thr + thread
        if index < block_m * (tile_n + 1):
            token = rows * block_m + index // (tile_n + 1)
            column = index % (tile_n + 1)
            total[0] = T.float32(0)
            for warp in T.unroll(n_thr // 32):
                total[0] = total[0] + partials[warp, index]
            if token < num_tokens:
                if column < tile_n:
                    mul[split, token, tile * tile_n + column] = total[0]
                else:
                    if tile == 0:
                        sqrsum[split, token] = total[0]
