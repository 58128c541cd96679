"""The head on CUDA: partial sums to a gate a stream, and the streams' weighted sum."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.collapse import weigh_streams
from mhctune.kernels.cuda.mixes import sigmoid
from mhctune.kernels.cuda.widen import SOURCE


def head(hidden_size: int, n_splits: int, n_thr: int, vec: int) -> PrimFunc:
    """Build the head's epilogue: a program a token.

    Four threads of the first warp add a gate's partial sums and the squares over the splits, in order.
    """
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def mhctune_head(
        mul: T.Tensor((n_splits, num_tokens, 4), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
        residual: T.Tensor((num_tokens, 4, hidden_size), "bfloat16"),
        scale: T.Tensor((1,), "float32"),
        base: T.Tensor((4,), "float32"),
        collapsed: T.Tensor((num_tokens, hidden_size), "bfloat16"),
        rms_eps: T.float32,
        hc_pre_eps: T.float32,
    ):
        with T.Kernel(num_tokens, threads=n_thr) as token:
            T.import_source(SOURCE)
            thread = T.get_thread_binding()
            gates = T.alloc_shared((4,), "float32")
            weights = T.alloc_local((1, 4), "float32")
            scalar = T.alloc_local((2,), "float32")
            old = T.alloc_local((4, vec), "bfloat16")
            total = T.alloc_local((vec,), "float32")
            rounded = T.alloc_local((vec,), "bfloat16")
            T.pdl_sync()
            if thread < 4:
                scalar[0] = T.float32(0)
                scalar[1] = T.float32(0)
                for split in T.unroll(n_splits):
                    scalar[0] = scalar[0] + mul[split, token, thread]
                    scalar[1] = scalar[1] + sqrsum[split, token]
                scalar[1] = T.rsqrt(scalar[1] * T.float32(1 / (4 * hidden_size)) + rms_eps)
                gates[thread] = sigmoid(scalar[0] * scalar[1] * scale[0] + base[thread]) + hc_pre_eps
            T.sync_threads()
            for j in T.unroll(4):
                weights[0, j] = gates[j]
            for step in T.unroll(hidden_size // (n_thr * vec)):
                first = (step * n_thr + thread) * vec
                for j in T.unroll(4):
                    for v in T.vectorized(vec):
                        old[j, v] = residual[token, j, first + v]
                weigh_streams(weights, old, total, vec)
                for v in T.unroll(vec):
                    rounded[v] = T.cast(total[v], "bfloat16")
                for v in T.vectorized(vec):
                    collapsed[token, first + v] = rounded[v]

    return mhctune_head
