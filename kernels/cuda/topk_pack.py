"""Packing a rank's local top-k on CUDA: global ids and score bits, side by side as int32."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.topk_row import loads
from mhctune.kernels.topk_key import global_id

THREADS = 128


def topk_pack(interleave: int, top_k: int) -> PrimFunc:
    """Build the packing kernel: a program is a row and up to 512 of its entries."""
    rows, vec = T.dynamic("rows"), loads(top_k)

    @T.prim_func
    def mhctune_topk_pack(
        local_ids: T.Tensor((rows, top_k), "int32"),
        scores: T.Tensor((rows, top_k), "int32"),
        packed: T.Tensor((rows, 2, top_k), "int32"),
        rank: T.int32,
        ranks: T.int32,
    ):
        with T.Kernel(rows, T.ceildiv(top_k, THREADS * vec), threads=THREADS) as (row, block):
            first = (block * THREADS + T.get_thread_binding()) * vec
            entry = T.alloc_local((vec,), "int32")
            score = T.alloc_local((vec,), "int32")
            if first < top_k:
                for v in T.vectorized(vec):
                    entry[v] = local_ids[row, first + v]
                for v in T.vectorized(vec):
                    score[v] = scores[row, first + v]
                for v in T.unroll(vec):
                    entry[v] = global_id(entry[v], rank, ranks, interleave)
                for v in T.vectorized(vec):
                    packed[row, 0, first + v] = entry[v]
                for v in T.vectorized(vec):
                    packed[row, 1, first + v] = score[v]

    return mhctune_topk_pack
