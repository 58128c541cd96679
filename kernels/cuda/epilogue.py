"""The epilogue on CUDA: partial sums to coefficients, Sinkhorn, collapse and RMSNorm."""

import tilelang.language as T
from tvm.tirx import PrimFunc

LOG2_E = 1.4426950408889634

TURNS = 2
"""Iterations that Sinkhorn's loop unrolls: a branch costs 8 of their 80 cycles each, new code its fetch."""


def reciprocal(value):
    """Approximate reciprocal (`rcp.approx`, 1 ulp): inside the 1e-5 of the coefficients, deterministic."""
    return T.call_extern("float32", "tl::fast_rcp", value)


def fma(a, b, c):
    """Return a * b + c, rounded once; left to itself nvcc fuses another pair and adds a step to the chain."""
    return T.ieee_fmaf(a, b, c, "rn")


def sigmoid(value):
    """Return 1 / (1 + exp(-value))."""
    return reciprocal(T.float32(1) + T.exp(-value))


def pick(values, index):
    """Return one of four registers; indexed by what is not constant they would move to memory."""
    low, high = T.Select(index < 1, values[0], values[1]), T.Select(index < 3, values[2], values[3])
    return T.Select(index < 2, low, high)


@T.macro
def _balance(matrix, transposed, factors, others, sums, level, next_level, eps, fma):
    """One half step: `factors` of the rows (of the columns if `transposed`) for the `others` as they are.

    Two levels, because TileLang takes the second reading of one register's bits from the first.
    """
    shrink = T.alloc_local((1,), "float32")
    pairs = T.alloc_local((4,), "float32")
    shrink[0] = T.reinterpret(
        T.uint32(0x3D800000) - T.shift_left(T.reinterpret(level[0], "uint32"), T.uint32(2)), "float32"
    )
    next_level[0] = level[0] * eps
    for i in T.unroll(4):
        sums[i] = (matrix[0, i] if transposed else matrix[i, 0]) * others[0]
        for j in T.unroll(3):
            sums[i] = fma(matrix[j + 1, i] if transposed else matrix[i, j + 1], others[j + 1], sums[i])
        sums[i] = fma(sums[i], factors[i], next_level[0])
    pairs[0] = sums[0] * sums[1]
    pairs[1] = sums[2] * sums[3]
    pairs[2] = pairs[0] * shrink[0]
    pairs[3] = pairs[1] * shrink[0]
    for i in T.unroll(4):
        factors[i] = factors[i] * (sums[i ^ 1] * pairs[3 - i // 2])
    next_level[0] = pairs[0] * pairs[3]


@T.macro
def sinkhorn(matrix, rows, columns, level, iterations, eps, inverse, fma):
    """Normalise a 4x4 matrix, exp(logits - the row's largest), in the registers of one thread.

    The result is diag(rows) * matrix * diag(columns) / level: no shuffles, and no division in the loop.
    A half step divides each line by its sum s_i (eps included), which is to multiply it by the product of
    the other three sums and to divide all by the product of all four. That last, common factor is left out:
    it makes the whole matrix `level` times too large, and eps is scaled to match. A division in its place
    costs a half step four reciprocals, which a warp's unit begins 8 cycles apart and ends 20 later.

    The level stays near 1. After the first column step the true sums are between 1/4 and 4 and add up to 4
    (each line of the other kind summed to 1 before), so that their product is 1/20 to 1. Each half step also
    multiplies by `shrink`, about 1 / level^4, read off the exponent and mantissa of the level it begins with:
    the next level is the product of the sums times 0.7 to 1.4. Only that first step, whose sums may be as
    small as eps, takes four reciprocals (`inverse`). Holds for eps from 1e-30 to 10, whatever the logits.
    """
    sums = T.alloc_local((4,), "float32")
    pairs = T.alloc_local((2,), "float32")
    row_level = T.alloc_local((1,), "float32")
    for i in T.unroll(4):
        sums[i] = (matrix[i, 0] + matrix[i, 1]) + (matrix[i, 2] + matrix[i, 3])
        for j in T.unroll(4):
            matrix[i, j] = matrix[i, j] + eps * sums[i]
    pairs[0] = sums[0] * sums[1]
    pairs[1] = sums[2] * sums[3]
    for i in T.unroll(4):
        rows[i] = sums[i ^ 1] * pairs[1 - i // 2]
    for j in T.unroll(4):
        columns[j] = inverse(
            (matrix[0, j] * rows[0] + (matrix[1, j] * rows[1] + eps * (pairs[0] * pairs[1])))
            + (matrix[2, j] * rows[2] + matrix[3, j] * rows[3])
        )
    level[0] = T.float32(1)
    # Not unrolled as a whole: 38 half steps would be 22 KB of code that each launch fetches and runs once.
    for _ in T.unroll(iterations - 1, unroll_factor=TURNS):
        _balance(matrix, 0, rows, columns, sums, level, row_level, eps, fma)
        _balance(matrix, 1, columns, rows, sums, row_level, level, eps, fma)


def lane_groups(n_splits: int) -> int:
    """Return how many lanes share the splits of four columns: 1, 2, 4 or 8 of a warp.

    A lane's split costs two loads, 4 cycles each, that the group divides; doubling the group costs a shuffle
    of 33 cycles.
    """
    groups = 1
    while groups < 8 and n_splits >= 8 * groups:
        groups *= 2
    return groups


@T.macro
def add_partials(mul, sqrsum, sums, token, quad, group, n_splits, groups, numel, rms_eps):
    """Put the mixes of the columns 4 quad to 4 quad + 3 into sums[0:4].

    Each group of lanes adds its own splits, in order; a butterfly over the groups then gives every lane the
    same total, in an order that depends on `n_splits` alone. `group` is 0 to `groups` - 1.
    """
    part = T.alloc_local((4,), "float32")
    square = T.alloc_local((1,), "float32")
    for j in T.vectorized(4):
        sums[j] = mul[group, token, quad * 4 + j]
    # Added here, where loads are waited for: behind the sums the argument would be, for 30 cycles.
    square[0] = sqrsum[group, token] + T.Select(group == 0, rms_eps * T.float32(numel), T.float32(0))
    for step in T.unroll(n_splits // groups - 1):
        for j in T.vectorized(4):
            part[j] = mul[(step + 1) * groups + group, token, quad * 4 + j]
        for j in T.unroll(4):
            sums[j] = sums[j] + part[j]
        square[0] = square[0] + sqrsum[(step + 1) * groups + group, token]
    if n_splits % groups:
        if group < n_splits % groups:
            for j in T.vectorized(4):
                part[j] = mul[n_splits // groups * groups + group, token, quad * 4 + j]
            for j in T.unroll(4):
                sums[j] = sums[j] + part[j]
            square[0] = square[0] + sqrsum[n_splits // groups * groups + group, token]
    for doubling in T.unroll(groups.bit_length() - 1):
        square[0] = square[0] + T.shfl_xor(square[0], T.shift_left(4, doubling))
        for j in T.unroll(4):
            sums[j] = sums[j] + T.shfl_xor(sums[j], T.shift_left(4, doubling))
    square[0] = T.rsqrt(square[0] * T.float32(1 / numel))
    for j in T.unroll(4):
        sums[j] = sums[j] * square[0]


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
        n_splits: partial sums to add, in an order that depends on nothing else.
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
    groups = lane_groups(n_splits)
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
            own_mix = T.alloc_shared((4,), "float32")
            row = T.alloc_local((steps, vec), "float32")
            stored = T.alloc_local((4, vec), "bfloat16")
            rounded = T.alloc_local((vec,), "bfloat16")
            weights = T.alloc_local((steps, vec), "bfloat16")
            mix_in = T.alloc_local((4,), "float32")
            scalar = T.alloc_local((1,), "float32")
            quad = T.alloc_local((1,), "int32")
            factor = T.alloc_local((1,), "float32")
            shifts = T.alloc_local((4,), "float32")
            sums = T.alloc_local((4,), "float32")
            matrix = T.alloc_local((4, 4), "float32")
            rows = T.alloc_local((4,), "float32")
            columns = T.alloc_local((4,), "float32")
            level = T.alloc_local((1,), "float32")
            if thread < n_thr:
                if norm:
                    for step in T.unroll(steps):
                        for v in T.vectorized(vec):
                            weights[step, v] = norm_weight[(step * n_thr + thread) * vec + v]
                T.pdl_sync()
            else:
                # The first warp owns comb: a lane holds row `lane % 4`. The second owns pre (`lane % 4` is 0)
                # and post (1; 2 and 3 repeat it).
                first_warp = thread < n_thr + 32
                part = T.min(thread % 4, 1)
                quad[0] = T.if_then_else(first_warp, 2 + thread % 4, part)
                factor[0] = scale[T.if_then_else(first_warp, 2, part)]
                for j in T.vectorized(4):
                    shifts[j] = base[quad[0] * 4 + j]
                T.pdl_sync()
            if not delayed:
                if thread >= n_thr:
                    add_partials(
                        mul, sqrsum, sums, token, quad[0], thread // 4 % groups, n_splits, groups,
                        n_streams * hidden_size, rms_eps,
                    )  # fmt: skip
                    for j in T.unroll(4):
                        sums[j] = sums[j] * factor[0] + shifts[j]
                    if thread >= n_thr + 32:
                        if (thread - n_thr - 32) % 4 == 0 and thread < n_thr + 48:
                            own_mix[(thread - n_thr - 32) // 4] = (
                                sigmoid(pick(sums, (thread - n_thr - 32) // 4)) + hc_pre_eps
                            )
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
                if delayed:
                    add_partials(
                        mul, sqrsum, sums, token, quad[0], thread // 4 % groups, n_splits, groups,
                        n_streams * hidden_size, rms_eps,
                    )  # fmt: skip
                    for j in T.unroll(4):
                        sums[j] = sums[j] * factor[0] + shifts[j]
                lane = thread % 32
                # Lane 4 j + i has element j of row i, or of pre and post: a lane takes one exponential.
                scalar[0] = pick(sums, lane // 4 % 4)
                if thread < n_thr + 32:
                    largest = T.max(T.max(sums[0], sums[1]), T.max(sums[2], sums[3]))
                    scalar[0] = T.exp2((scalar[0] - largest) * T.float32(LOG2_E))
                    for i in T.unroll(4):
                        for j in T.unroll(4):
                            matrix[i, j] = T.shfl_sync(scalar[0], 4 * j + i)
                    sinkhorn(matrix, rows, columns, level, sinkhorn_iters, sinkhorn_eps, reciprocal, fma)
                    level[0] = reciprocal(level[0])
                    if lane < 4:
                        scalar[0] = pick(rows, lane)
                        for j in T.unroll(4):
                            mix_in[j] = (
                                pick([matrix[0, j], matrix[1, j], matrix[2, j], matrix[3, j]], lane)
                                * scalar[0] * columns[j] * level[0]
                            )  # fmt: skip
                        for j in T.vectorized(4):
                            next_comb[token, lane, j] = mix_in[j]
                else:
                    if lane < 16:
                        if lane % 4 == 0:
                            if delayed:
                                next_pre[token, lane // 4] = sigmoid(scalar[0]) + hc_pre_eps
                        else:
                            if lane % 4 == 1:
                                next_post[token, lane // 4] = sigmoid(scalar[0]) * post_mult

    return mhctune_epilogue
