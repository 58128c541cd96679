"""The epilogue on CUDA: partial sums to coefficients, Sinkhorn, collapse and RMSNorm."""

import tilelang.language as T
from tvm.tirx import PrimFunc


def _reciprocal(value):
    """Approximate reciprocal (`rcp.approx`, 1 ulp): inside the 1e-5 of the coefficients, deterministic."""
    return T.call_extern("float32", "tl::fast_rcp", value)


def sigmoid(value):
    """Return 1 / (1 + exp(-value))."""
    return T.float32(1) / (T.float32(1) + T.exp(-value))


@T.macro
def sinkhorn(matrix, rows, columns, row_sums, column_sums, iterations, eps):
    """Normalise the 4x4 logits `matrix` in the registers of one thread.

    The result is diag(rows) * matrix * diag(columns): no shuffles, and a half step is four dot products and
    four reciprocals instead of sixteen divisions. A row step C_ij / (sum_j C_ij + eps) with C = r_i K_ij c_j
    gives r_i' = 1 / (sum_j K_ij c_j + eps / r_i), and 1 / r_i is the denominator of the step before; a
    column step likewise.
    """
    for i in T.unroll(4):
        rows[i] = T.max(T.max(matrix[i, 0], matrix[i, 1]), T.max(matrix[i, 2], matrix[i, 3]))
        for j in T.unroll(4):
            matrix[i, j] = T.exp(matrix[i, j] - rows[i])
        rows[i] = T.float32(1) / ((matrix[i, 0] + matrix[i, 1]) + (matrix[i, 2] + matrix[i, 3]))
        for j in T.unroll(4):
            matrix[i, j] = matrix[i, j] * rows[i] + eps
    for i in T.unroll(4):
        rows[i] = T.float32(1)
        columns[i] = T.float32(1)
        row_sums[i] = T.float32(1)
        column_sums[i] = T.float32(1)
    for iteration in T.unroll(iterations):
        if iteration > 0:
            for i in T.unroll(4):
                row_sums[i] = (
                    matrix[i, 0] * columns[0] + (matrix[i, 1] * columns[1] + eps * row_sums[i])
                ) + (matrix[i, 2] * columns[2] + matrix[i, 3] * columns[3])
            for i in T.unroll(4):
                rows[i] = _reciprocal(row_sums[i])
        for j in T.unroll(4):
            column_sums[j] = (matrix[0, j] * rows[0] + (matrix[1, j] * rows[1] + eps * column_sums[j])) + (
                matrix[2, j] * rows[2] + matrix[3, j] * rows[3]
            )
        for j in T.unroll(4):
            columns[j] = _reciprocal(column_sums[j])


@T.macro
def add_partials(mul, sqrsum, scalar, token, column, n_splits, factor, shift, numel, rms_eps):
    """Put one column's logit into scalar[0]: every lane adds it and the squares over the splits, in order."""
    scalar[0] = T.float32(0)
    scalar[1] = T.float32(0)
    for split in T.unroll(n_splits):
        scalar[0] = scalar[0] + mul[split, token, column]
        scalar[1] = scalar[1] + sqrsum[split, token]
    scalar[1] = T.rsqrt(scalar[1] * T.float32(1 / numel) + rms_eps)
    scalar[0] = scalar[0] * scalar[1] * factor + shift


def epilogue(
    hidden_size: int,
    n_splits: int,
    sinkhorn_iters: int,
    carried: int,
    norm: int,
    collapsed: int,
    n_thr: int,
    vec: int,
    delayed: int = 1,
    broadcast: int = 0,
) -> PrimFunc:
    """Build the epilogue: a program a token, `n_thr` threads that collapse and two warps for coefficients.

    A delayed layer input needs only the incoming pre-mix, so the collapse and its norm run beside the mixes
    and the Sinkhorn iterations without waiting for each other: the collapsing threads have a barrier of
    their own. Otherwise they wait for the pre-mix, and not for Sinkhorn. Weights are loaded before
    `pdl_sync`; the pre-mix comes from a kernel before the one ahead, and may not be.

    Args:
        hidden_size: H; a multiple of `n_thr * vec`.
        n_splits: partial sums to add, in order.
        sinkhorn_iters: column steps.
        carried: collapse with `pre_mix`; otherwise take stream 0.
        norm: apply RMSNorm to the collapse, rounded to bf16.
        collapsed: the kernel before has written the collapse into `layer_input`: read one row, not four.
        n_thr: threads that collapse, a multiple of 32.
        vec: neighbouring elements a thread loads at once.
        delayed: V4.1: store the next pre-mix, and square the rounded collapse in the norm. Otherwise V4:
            collapse with the pre-mix just computed, store none, and square the unrounded collapse.
        broadcast: `residual` [T, 1, H] holds what all streams are equal to; store the streams in `streams`.

    What a flag leaves out is neither read nor written: its slot may hold any tensor of its shape.
    """
    num_tokens = T.dynamic("num_tokens")
    steps = hidden_size // (n_thr * vec)
    warps = n_thr // 32
    n_streams = 1 if broadcast else 4
    mixed = (carried or not delayed) and not collapsed

    @T.prim_func
    def mhctune_epilogue(
        mul: T.Tensor((n_splits, num_tokens, 24), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
        residual: T.Tensor((num_tokens, n_streams, hidden_size), "bfloat16"),
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
        with T.Kernel(num_tokens, threads=n_thr + 64) as token:
            thread = T.get_thread_binding()
            squares = T.alloc_shared((warps,), "float32")
            logits = T.alloc_shared((16,), "float32")
            own_mix = T.alloc_shared((4,), "float32")
            row = T.alloc_local((steps, vec), "float32")
            stored = T.alloc_local((4, vec), "bfloat16")
            rounded = T.alloc_local((vec,), "bfloat16")
            weights = T.alloc_local((steps, vec), "bfloat16")
            mix_in = T.alloc_local((4,), "float32")
            scalar = T.alloc_local((4,), "float32")
            column = T.alloc_local((1,), "int32")
            matrix = T.alloc_local((4, 4), "float32")
            rows = T.alloc_local((4,), "float32")
            columns = T.alloc_local((4,), "float32")
            row_sums = T.alloc_local((4,), "float32")
            column_sums = T.alloc_local((4,), "float32")
            if thread < n_thr:
                if norm:
                    for step in T.unroll(steps):
                        for v in T.vectorized(vec):
                            weights[step, v] = norm_weight[(step * n_thr + thread) * vec + v]
            else:
                # The first warp owns comb (lanes 0-15), the second pre and post (lanes 0-7).
                first_warp = thread < n_thr + 32
                lane = thread % 32
                column[0] = T.if_then_else(first_warp, 8 + T.min(lane, 15), T.min(lane, 7))
                mix_in[0] = scale[T.if_then_else(first_warp, 2, T.min(lane, 7) // 4)]
                mix_in[1] = base[column[0]]
            T.pdl_sync()
            if not delayed:
                if thread >= n_thr:
                    add_partials(
                        mul, sqrsum, scalar, token, column[0], n_splits, mix_in[0], mix_in[1],
                        n_streams * hidden_size, rms_eps,
                    )  # fmt: skip
                    if thread >= n_thr + 32:
                        if thread < n_thr + 36:
                            own_mix[thread - n_thr - 32] = sigmoid(scalar[0]) + hc_pre_eps
                T.sync_threads()
            if thread < n_thr:
                if mixed:
                    if delayed:
                        for j in T.vectorized(4):
                            mix_in[j] = pre_mix[token, j]
                    else:
                        for j in T.unroll(4):
                            mix_in[j] = own_mix[j]
                scalar[0] = T.float32(0)
                for step in T.unroll(steps):
                    first = (step * n_thr + thread) * vec
                    if collapsed:
                        for v in T.vectorized(vec):
                            rounded[v] = layer_input[token, first + v]
                    else:
                        for j in T.unroll(n_streams if mixed else 1):
                            for v in T.vectorized(vec):
                                stored[j, v] = residual[token, j, first + v]
                        if broadcast:
                            for j in T.unroll(4):
                                for v in T.vectorized(vec):
                                    streams[token, j, first + v] = stored[0, v]
                        if mixed:
                            for v in T.unroll(vec):
                                row[step, v] = mix_in[0] * T.cast(stored[0, v], "float32")
                                for j in T.unroll(3):
                                    row[step, v] = T.ieee_fmaf(
                                        mix_in[j + 1],
                                        T.cast(stored[0 if broadcast else j + 1, v], "float32"),
                                        row[step, v],
                                        "rn",
                                    )
                                rounded[v] = T.cast(row[step, v], "bfloat16")
                        else:
                            for v in T.unroll(vec):
                                rounded[v] = stored[0, v]
                    if norm:
                        for v in T.unroll(vec):
                            if delayed:
                                row[step, v] = T.cast(rounded[v], "float32")
                            scalar[0] = T.ieee_fmaf(row[step, v], row[step, v], scalar[0], "rn")
                            if not delayed:
                                row[step, v] = T.cast(rounded[v], "float32")
                    elif not collapsed:
                        for v in T.vectorized(vec):
                            layer_input[token, first + v] = rounded[v]
                if norm:
                    scalar[0] = T.warp_reduce_sum(scalar[0])
                    if thread % 32 == 0:
                        squares[thread // 32] = scalar[0]
                    T.sync_threads(1, n_thr)
                    scalar[0] = T.float32(0)
                    for warp in T.unroll(warps):
                        scalar[0] = scalar[0] + squares[warp]
                    scalar[0] = T.rsqrt(scalar[0] * T.float32(1 / hidden_size) + norm_eps)
                    for step in T.unroll(steps):
                        for v in T.unroll(vec):
                            rounded[v] = T.cast(
                                row[step, v] * scalar[0] * T.cast(weights[step, v], "float32"), "bfloat16"
                            )
                        for v in T.vectorized(vec):
                            layer_input[token, (step * n_thr + thread) * vec + v] = rounded[v]
            else:
                lane = thread % 32
                first_warp = thread < n_thr + 32
                if delayed:
                    add_partials(
                        mul, sqrsum, scalar, token, column[0], n_splits, mix_in[0], mix_in[1],
                        n_streams * hidden_size, rms_eps,
                    )  # fmt: skip
                if first_warp:
                    if lane < 16:
                        logits[lane] = scalar[0]
                    T.sync_warp()
                    for i in T.unroll(4):
                        for j in T.vectorized(4):
                            matrix[i, j] = logits[4 * i + j]
                    sinkhorn(matrix, rows, columns, row_sums, column_sums, sinkhorn_iters, sinkhorn_eps)
                    if lane < 4:
                        for i in T.unroll(4):
                            if lane == i:
                                for j in T.unroll(4):
                                    mix_in[j] = matrix[i, j] * rows[i] * columns[j]
                        for j in T.vectorized(4):
                            next_comb[token, lane, j] = mix_in[j]
                else:
                    if lane < 4:
                        if delayed:
                            next_pre[token, lane] = sigmoid(scalar[0]) + hc_pre_eps
                    else:
                        if lane < 8:
                            next_post[token, lane - 4] = sigmoid(scalar[0]) * post_mult

    return mhctune_epilogue
