"""The coefficients on CUDA: partial sums to mixes, gates and a doubly stochastic comb, two warps a token."""

import tilelang.language as T

from mhctune.kernels.cuda.sinkhorn import LOG2_E, fma, reciprocal, sinkhorn


def sigmoid(value):
    """Return 1 / (1 + exp(-value))."""
    return reciprocal(T.float32(1) + T.exp(-value))


def pick(values, index):
    """Return one of four registers; indexed by what is not constant they would move to memory."""
    low, high = T.Select(index < 1, values[0], values[1]), T.Select(index < 3, values[2], values[3])
    return T.Select(index < 2, low, high)


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
def load_terms(scale, base, quad, factor, shifts, comb_warp, lane):
    """Choose four columns for a lane, quad[0], and load their factor[0] and shifts[0:4].

    A token has two warps. The first owns comb: a lane holds row `lane % 4`. The second owns pre (`lane % 4`
    is 0) and post (1; 2 and 3 repeat it).
    """
    part = T.min(lane % 4, 1)
    quad[0] = T.if_then_else(comb_warp, 2 + lane % 4, part)
    factor[0] = scale[T.if_then_else(comb_warp, 2, part)]
    for j in T.vectorized(4):
        shifts[j] = base[quad[0] * 4 + j]


@T.macro
def add_partials(mul, sqrsum, sums, factor, shifts, token, quad, lane, n_splits, numel, rms_eps):
    """Put the logits of the columns 4 quad[0] to 4 quad[0] + 3 into sums[0:4].

    Each group of lanes adds its own splits, in order; a butterfly over the groups then gives every lane the
    same total, in an order that depends on `n_splits` alone.
    """
    groups = lane_groups(n_splits)
    group = lane // 4 % groups
    part = T.alloc_local((4,), "float32")
    square = T.alloc_local((1,), "float32")
    for j in T.vectorized(4):
        sums[j] = mul[group, token, quad[0] * 4 + j]
    # Added here, where loads are waited for: behind the sums the argument would be, for 30 cycles.
    square[0] = sqrsum[group, token] + T.Select(group == 0, rms_eps * T.float32(numel), T.float32(0))
    for step in T.unroll(n_splits // groups - 1):
        for j in T.vectorized(4):
            part[j] = mul[(step + 1) * groups + group, token, quad[0] * 4 + j]
        for j in T.unroll(4):
            sums[j] = sums[j] + part[j]
        square[0] = square[0] + sqrsum[(step + 1) * groups + group, token]
    if n_splits % groups:
        if group < n_splits % groups:
            for j in T.vectorized(4):
                part[j] = mul[n_splits // groups * groups + group, token, quad[0] * 4 + j]
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
    for j in T.unroll(4):
        sums[j] = sums[j] * factor[0] + shifts[j]


@T.macro
def store_coefficients(
    sums, comb_warp, lane, token, next_post, next_comb, next_pre, delayed, iterations, hc_pre_eps, eps,
    post_mult,
):  # fmt: skip
    """Write a token's comb (the first warp), and its post and, if `delayed`, pre mixes (the second).

    Lane 4 j + i has element j of row i, or of pre and post: a lane takes one exponential.
    """
    matrix = T.alloc_local((4, 4), "float32")
    rows = T.alloc_local((4,), "float32")
    columns = T.alloc_local((4,), "float32")
    level = T.alloc_local((1,), "float32")
    scalar = T.alloc_local((1,), "float32")
    line = T.alloc_local((4,), "float32")
    scalar[0] = pick(sums, lane // 4 % 4)
    if comb_warp:
        largest = T.max(T.max(sums[0], sums[1]), T.max(sums[2], sums[3]))
        scalar[0] = T.exp2((scalar[0] - largest) * T.float32(LOG2_E))
        for i in T.unroll(4):
            for j in T.unroll(4):
                matrix[i, j] = T.shfl_sync(scalar[0], 4 * j + i)
        sinkhorn(matrix, rows, columns, level, iterations, eps, reciprocal, fma)
        level[0] = reciprocal(level[0])
        if lane < 4:
            scalar[0] = pick(rows, lane)
            for j in T.unroll(4):
                line[j] = (
                    pick([matrix[0, j], matrix[1, j], matrix[2, j], matrix[3, j]], lane)
                    * scalar[0] * columns[j] * level[0]
                )  # fmt: skip
            for j in T.vectorized(4):
                next_comb[token, lane, j] = line[j]
    else:
        if lane < 16:
            if lane % 4 == 0:
                if delayed:
                    next_pre[token, lane // 4] = sigmoid(scalar[0]) + hc_pre_eps
            else:
                if lane % 4 == 1:
                    next_post[token, lane // 4] = sigmoid(scalar[0]) * post_mult
