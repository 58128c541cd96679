"""Converting local ids to global ones on CUDA, without a merge."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.topk_pack import THREADS
from mhctune.kernels.cuda.topk_row import loads
from mhctune.kernels.topk_key import global_id


def topk_convert(interleave: int, top_k: int) -> PrimFunc:
    """Build the conversion: a program is a row and up to 512 of its entries. In place is allowed."""
    rows, vec = T.dynamic("rows"), loads(top_k)

    @T.prim_func
    def mhctune_topk_convert(
        local_ids: T.Tensor((rows, top_k), "int32"),
        ids: T.Tensor((rows, top_k), "int32"),
        rank: T.int32,
        ranks: T.int32,
    ):
        with T.Kernel(rows, T.ceildiv(top_k, THREADS * vec), threads=THREADS) as (row, block):
            first = (block * THREADS + T.get_thread_binding()) * vec
            entry = T.alloc_local((vec,), "int32")
            if first < top_k:
                for v in T.vectorized(vec):
                    entry[v] = local_ids[row, first + v]
                for v in T.unroll(vec):
                    entry[v] = global_id(entry[v], rank, ranks, interleave)
                for v in T.vectorized(vec):
                    ids[row, first + v] = entry[v]

    return mhctune_topk_convert
