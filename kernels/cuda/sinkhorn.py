"""Sinkhorn's iterations on a 4x4 matrix in the registers of one thread."""

import tilelang.language as T

LOG2_E = 1.4426950408889634

TURNS = 2
"""Iterations that Sinkhorn's loop unrolls: a branch costs 8 of their 80 cycles each, new code its fetch."""


def reciprocal(value):
    """Approximate reciprocal (`rcp.approx`, 1 ulp): inside the 1e-5 of the coefficients, deterministic."""
    return T.call_extern("float32", "tl::fast_rcp", value)


def fma(a, b, c):
    """Return a * b + c, rounded once; left to itself nvcc fuses another pair and adds a step to the chain."""
    return T.ieee_fmaf(a, b, c, "rn")


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
