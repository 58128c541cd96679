"""The collapse on CUDA: the streams' sum, weighted by the carried pre-mix; rows may lie apart."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.post import collapse_stream
from mhctune.kernels.cuda.widen import SOURCE, widen


@T.macro
def weigh_streams(weights, old, total, vec, broadcast=0):
    """Compute total[v] = sum_j weights[0, j] * old[j, v] in float32, j in order; of old[0] if `broadcast`."""
    exact = T.alloc_local((vec,), "float32")
    for j in T.unroll(4):
        widen(exact[0], old[0 if broadcast else j, 0], vec)
        collapse_stream(total, exact, weights, 0, j, vec)


def collapse(hidden_size: int, n_thr: int, vec: int) -> PrimFunc:
    """Build the collapse: a program is a token and `n_thr * vec` elements of H.

    The streams come as a flat view with the distance of two tokens' rows in elements (int64), because
    TileLang's host code does not read a symbolic stride off a tensor. `vec` neighbours are loaded at once:
    the distance, H and the view's address must be multiples of it.
    """
    num_tokens = T.dynamic("num_tokens")
    extent = T.dynamic("extent", "int64")
    block_h = n_thr * vec

    @T.prim_func
    def mhctune_collapse(
        residual: T.Tensor((extent,), "bfloat16"),
        pre_mix: T.Tensor((num_tokens, 4), "float32"),
        collapsed: T.Tensor((num_tokens, hidden_size), "bfloat16"),
        row_stride: T.int64,
    ):
        with T.Kernel(num_tokens, T.ceildiv(hidden_size, block_h), threads=n_thr) as (token, block):
            T.import_source(SOURCE)
            thread = T.get_thread_binding()
            weights = T.alloc_local((1, 4), "float32")
            old = T.alloc_local((4, vec), "bfloat16")
            total = T.alloc_local((vec,), "float32")
            rounded = T.alloc_local((vec,), "bfloat16")
            T.pdl_trigger()
            T.pdl_sync()
            first = block * block_h + thread * vec
            for j in T.vectorized(4):
                weights[0, j] = pre_mix[token, j]
            if first < hidden_size:
                start = T.cast(token, "int64") * row_stride + first
                for j in T.unroll(4):
                    for v in T.vectorized(vec):
                        old[j, v] = residual[start + j * hidden_size + v]
                weigh_streams(weights, old, total, vec)
                for v in T.unroll(vec):
                    rounded[v] = T.cast(total[v], "bfloat16")
                for v in T.vectorized(vec):
                    collapsed[token, first + v] = rounded[v]

    return mhctune_collapse
