"""Converting local ids to global ones on the C backend, without a merge."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.topk_key import global_id


def topk_convert(interleave: int) -> PrimFunc:
    """Build the conversion: one program a row. In place is allowed: an entry is read before it is written."""
    rows, top_k = T.dynamic("rows"), T.dynamic("top_k")

    @T.prim_func
    def mhctune_topk_convert(
        local_ids: T.Tensor((rows, top_k), "int32"),
        ids: T.Tensor((rows, top_k), "int32"),
        rank: T.int32,
        ranks: T.int32,
    ):
        with T.Kernel(rows) as row:
            for k in T.serial(top_k):
                ids[row, k] = global_id(local_ids[row, k], rank, ranks, interleave)

    return mhctune_topk_convert
