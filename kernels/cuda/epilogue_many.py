"""The epilogue on CUDA for many tokens: a lane for a token's coefficients, a program for its row."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.cuda.mixes import sigmoid
from mhctune.kernels.cuda.row import collapse_row, load_norm_weights
from mhctune.kernels.cuda.sinkhorn import LOG2_E, fma, reciprocal, sinkhorn
from mhctune.kernels.cuda.widen import SOURCE

LANES = 32
"""Tokens of a program that computes coefficients: the lanes of one warp."""


def epilogue_many(
    hidden_size: int, n_splits: int, sinkhorn_iters: int, carried: int, norm: int, collapsed: int, n_thr: int,
    vec: int,
) -> PrimFunc:  # fmt: skip
    """Build the epilogue of a delayed layer input, its first programs for coefficients, the others for rows.

    In `epilogue` all lanes of two warps compute a token's coefficients, which is the shortest chain, and keep
    its SM's slots for that long; here a lane does, with a thirtieth of the instructions. Arguments as there;
    `n_thr` is 64 or more: a warp has comb, another pre and post.
    """
    num_tokens = T.dynamic("num_tokens")
    steps = hidden_size // (n_thr * vec)
    mixed = carried and not collapsed

    @T.prim_func
    def mhctune_epilogue_many(
        mul: T.Tensor((n_splits, num_tokens, 24), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
        residual: T.Tensor((num_tokens, 4, hidden_size), "bfloat16"),
        pre_mix: T.Tensor((num_tokens, 4), "float32"),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((24,), "float32"),
        norm_weight: T.Tensor((hidden_size,), "bfloat16"),
        next_post: T.Tensor((num_tokens, 4), "float32"),
        next_comb: T.Tensor((num_tokens, 4, 4), "float32"),
        layer_input: T.Tensor((num_tokens, hidden_size), "bfloat16"),
        next_pre: T.Tensor((num_tokens, 4), "float32"),
        streams: T.Tensor((num_tokens, 4, hidden_size), "bfloat16"),
        rms_eps: T.float32,
        hc_pre_eps: T.float32,
        sinkhorn_eps: T.float32,
        post_mult: T.float32,
        norm_eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, LANES) + num_tokens, threads=n_thr) as program:
            T.import_source(SOURCE)
            thread = T.get_thread_binding()
            T.annotate_min_blocks_per_sm(max(1, 1024 // n_thr))
            squares = T.alloc_shared((n_thr // 32,), "float32")
            weights = T.alloc_local((steps, vec), "bfloat16")
            mix_in = T.alloc_local((1, 4), "float32")
            part = T.alloc_local((4,), "float32")
            quad = T.alloc_local((1,), "int32")
            square = T.alloc_local((1,), "float32")
            matrix = T.alloc_local((4, 4), "float32")
            rows = T.alloc_local((4,), "float32")
            columns = T.alloc_local((4,), "float32")
            level = T.alloc_local((1,), "float32")
            if program < T.ceildiv(num_tokens, LANES):
                T.pdl_sync()
                owner = program * LANES + thread % LANES
                if thread < 2 * LANES and owner < num_tokens:
                    # The first warp owns comb (columns 8 to 23), the second pre and post (0 to 7).
                    quad[0] = T.if_then_else(thread < LANES, 2, 0)
                    square[0] = rms_eps * T.float32(4 * hidden_size)
                    for i in T.unroll(4):
                        for j in T.unroll(4):
                            matrix[i, j] = T.float32(0)
                    for split in T.serial(n_splits):
                        square[0] = square[0] + sqrsum[split, owner]
                        for i in T.unroll(4):
                            if thread < LANES or i < 2:
                                for j in T.vectorized(4):
                                    part[j] = mul[split, owner, (quad[0] + i) * 4 + j]
                                for j in T.unroll(4):
                                    matrix[i, j] = matrix[i, j] + part[j]
                    square[0] = T.rsqrt(square[0] * T.float32(1 / (4 * hidden_size)))
                    if thread < LANES:
                        for i in T.unroll(4):
                            for j in T.unroll(4):
                                matrix[i, j] = matrix[i, j] * square[0] * scale[2] + base[8 + 4 * i + j]
                            largest = T.max(
                                T.max(matrix[i, 0], matrix[i, 1]), T.max(matrix[i, 2], matrix[i, 3])
                            )
                            for j in T.unroll(4):
                                matrix[i, j] = T.exp2((matrix[i, j] - largest) * T.float32(LOG2_E))
                        sinkhorn(matrix, rows, columns, level, sinkhorn_iters, sinkhorn_eps, reciprocal, fma)
                        level[0] = reciprocal(level[0])
                        for i in T.unroll(4):
                            for j in T.unroll(4):
                                part[j] = matrix[i, j] * rows[i] * columns[j] * level[0]
                            for j in T.vectorized(4):
                                next_comb[owner, i, j] = part[j]
                    else:
                        for j in T.unroll(4):
                            part[j] = sigmoid(matrix[0, j] * square[0] * scale[0] + base[j]) + hc_pre_eps
                        for j in T.vectorized(4):
                            next_pre[owner, j] = part[j]
                        for j in T.unroll(4):
                            part[j] = sigmoid(matrix[1, j] * square[0] * scale[1] + base[4 + j]) * post_mult
                        for j in T.vectorized(4):
                            next_post[owner, j] = part[j]
            else:
                token = program - T.ceildiv(num_tokens, LANES)
                if norm:
                    load_norm_weights(norm_weight, weights, thread, steps, n_thr, vec)
                T.pdl_sync()
                if mixed:
                    for j in T.vectorized(4):
                        mix_in[0, j] = pre_mix[token, j]
                collapse_row(
                    residual, streams, mix_in, weights, squares, layer_input, token, thread, hidden_size,
                    n_thr, vec, mixed, norm, collapsed, norm_eps,
                )  # fmt: skip

    return mhctune_epilogue_many
