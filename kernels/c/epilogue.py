"""The epilogue on the C backend: partial sums to coefficients, Sinkhorn, collapse and RMSNorm."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.c.bf16 import fma, mean, narrow, round_to_bf16, weighted, widen
from mhctune.kernels.c.lanes import LANES


def sigmoid(value):  # type: ignore[no-untyped-def]
    """Return 1 / (1 + exp(-value))."""
    return T.float32(1) / (T.float32(1) + T.exp(-value))


@T.macro
def sinkhorn(comb, sums, iterations, eps):  # type: ignore[no-untyped-def]
    """Make the 4x4 matrix of logits `comb` nearly doubly stochastic, in place.

    One softmax over rows (eps added to the quotient), one column step, then `iterations - 1` pairs of a
    row and a column step with eps in the denominator; the last step is a column step.
    """
    for i in T.serial(4):
        sums[i] = T.max(T.max(comb[i, 0], comb[i, 1]), T.max(comb[i, 2], comb[i, 3]))
        for j in T.serial(4):
            comb[i, j] = T.exp(comb[i, j] - sums[i])
        sums[i] = comb[i, 0] + comb[i, 1] + comb[i, 2] + comb[i, 3]
        for j in T.serial(4):
            comb[i, j] = comb[i, j] / sums[i] + eps
    for iteration in T.serial(iterations):
        if iteration > 0:
            for i in T.serial(4):
                sums[i] = comb[i, 0] + comb[i, 1] + comb[i, 2] + comb[i, 3] + eps
            for i, j in T.grid(4, 4):
                comb[i, j] = comb[i, j] / sums[i]
        for j in T.serial(4):
            sums[j] = comb[0, j] + comb[1, j] + comb[2, j] + comb[3, j] + eps
        for i, j in T.grid(4, 4):
            comb[i, j] = comb[i, j] / sums[j]


# A macro's parameter gives its name to the kernel's scalar that it stands for: two may not share one.


@T.macro
def add_splits(mul, sqrsum, mixes, scalar, token, n_splits, n_columns, numel, rms_eps):  # type: ignore[no-untyped-def]
    """Add a token's partial sums over the splits, in order: the mixes, and in `scalar[0]` 1 / their RMS."""
    for n in T.serial(n_columns):
        mixes[n] = T.float32(0)
    scalar[0] = T.float32(0)
    for split in T.serial(n_splits):
        for n in T.serial(n_columns):
            mixes[n] = mixes[n] + mul[split, token, n]
        scalar[0] = scalar[0] + sqrsum[split, token]
    scalar[0] = T.float32(1) / T.sqrt(scalar[0] / T.float32(numel) + rms_eps)


@T.macro
def store_coefficients(  # type: ignore[no-untyped-def]
    mixes, scalar, scale, base, weights, comb, sums, next_post, next_comb, token, iterations,
    hc_pre_eps, sinkhorn_eps, post_mult,
):  # fmt: skip
    """Turn a token's mixes and 1 / their RMS into the pre-mix in `weights`, and the stored post and comb."""
    for j in T.serial(4):
        weights[j] = sigmoid(mixes[j] * scalar[0] * scale[0] + base[j]) + hc_pre_eps
        next_post[token, j] = sigmoid(mixes[4 + j] * scalar[0] * scale[1] + base[4 + j]) * post_mult
    for i, j in T.grid(4, 4):
        comb[i, j] = mixes[8 + 4 * i + j] * scalar[0] * scale[2] + base[8 + 4 * i + j]
    sinkhorn(comb, sums, iterations, sinkhorn_eps)
    for i, j in T.grid(4, 4):
        next_comb[token, i, j] = comb[i, j]


def _as_bf16(value, rounded):  # type: ignore[no-untyped-def]
    """Return a value rounded to bf16; rounding what is rounded takes an eighth of the epilogue's time."""
    return value if rounded else round_to_bf16(value)


@T.macro
def normalise(row, squares, scalar, weight, out, token, hidden_size, rounded, norm_eps):  # type: ignore[no-untyped-def]
    """Write the RMSNorm of a row: squares of the row as it is, the row rounded to bf16 as what is scaled."""
    for lane in T.serial(LANES):
        squares[lane] = T.float32(0)
    for h, lane in T.grid(hidden_size // LANES, LANES):
        squares[lane] = fma(row[h * LANES + lane], row[h * LANES + lane], squares[lane])
    scalar[0] = T.float32(0)
    for lane in T.serial(LANES):
        scalar[0] = scalar[0] + squares[lane]
    scalar[0] = T.float32(1) / T.sqrt(scalar[0] / T.float32(hidden_size) + norm_eps)
    for h in T.serial(hidden_size):
        out[token, h] = T.cast(narrow(_as_bf16(row[h], rounded) * scalar[0] * widen(weight[h])), "uint16")


def epilogue(
    hidden_size: int, sinkhorn_iters: int, carried: int, norm: int,
    delayed: int = 1, broadcast: int = 0, write_aux: int = 0,
) -> PrimFunc:  # fmt: skip
    """Build the epilogue; the split count is read off the partial sums at run time.

    Args:
        hidden_size: H.
        sinkhorn_iters: column steps of the Sinkhorn normalisation.
        carried: collapse with `pre_mix`; otherwise with weights [1, 0, 0, 0] (model entry).
        norm: apply RMSNorm to the collapse, rounded to bf16.
        delayed: V4.1: store the next pre-mix, and square the rounded collapse in the norm. Otherwise V4:
            collapse with the pre-mix just computed, store none, and square the unrounded collapse.
        broadcast: `residual` holds what all streams are equal to; store the streams in `streams`.
        write_aux: store the mean over the streams in `aux`.

    What a flag leaves out is neither read nor written: its slot may hold any tensor of its shape.
    """
    num_tokens = T.dynamic("num_tokens")
    n_splits = T.dynamic("n_splits")
    n_streams = 1 if broadcast else 4
    second, third, fourth = (0, 0, 0) if broadcast else (1, 2, 3)
    mixed = carried or not delayed

    @T.prim_func
    def mhctune_epilogue(
        mul: T.Tensor((n_splits, num_tokens, 24), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
        residual: T.Tensor((num_tokens, n_streams, hidden_size), "uint16"),
        pre_mix: T.Tensor((num_tokens, 4), "float32"),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((24,), "float32"),
        norm_weight: T.Tensor((hidden_size,), "uint16"),
        next_post: T.Tensor((num_tokens, 4), "float32"),
        next_comb: T.Tensor((num_tokens, 4, 4), "float32"),
        layer_input: T.Tensor((num_tokens, hidden_size), "uint16"),
        next_pre: T.Tensor((num_tokens, 4), "float32"),
        streams: T.Tensor((num_tokens, 4, hidden_size), "uint16"),
        aux: T.Tensor((num_tokens, hidden_size), "uint16"),
        rms_eps: T.float32,
        hc_pre_eps: T.float32,
        sinkhorn_eps: T.float32,
        post_mult: T.float32,
        norm_eps: T.float32,
    ):
        with T.Kernel(num_tokens) as token:
            mixes = T.alloc_local((24,), "float32")
            scalar = T.alloc_local((1,), "float32")
            weights = T.alloc_local((4,), "float32")
            comb = T.alloc_local((4, 4), "float32")
            sums = T.alloc_local((4,), "float32")
            row = T.alloc_local((hidden_size,), "float32")
            squares = T.alloc_local((LANES,), "float32")
            add_splits(mul, sqrsum, mixes, scalar, token, n_splits, 24, n_streams * hidden_size, rms_eps)
            store_coefficients(
                mixes, scalar, scale, base, weights, comb, sums, next_post, next_comb, token, sinkhorn_iters,
                hc_pre_eps, sinkhorn_eps, post_mult,
            )  # fmt: skip
            if delayed:
                for j in T.serial(4):
                    next_pre[token, j] = weights[j]
                if carried:
                    for j in T.serial(4):
                        weights[j] = pre_mix[token, j]

            for h in T.serial(hidden_size):
                r0 = widen(residual[token, 0, h])
                r1 = widen(residual[token, second, h])
                r2 = widen(residual[token, third, h])
                r3 = widen(residual[token, fourth, h])
                if mixed:
                    row[h] = weighted(weights, r0, r1, r2, r3)
                else:
                    row[h] = r0
                if delayed:
                    row[h] = round_to_bf16(row[h])
                if write_aux:
                    aux[token, h] = T.cast(narrow(mean(r0, r1, r2, r3)), "uint16")
            if broadcast:
                for j, h in T.grid(4, hidden_size):
                    streams[token, j, h] = residual[token, 0, h]
            if norm:
                normalise(
                    row, squares, scalar, norm_weight, layer_input, token, hidden_size, delayed, norm_eps
                )
            else:
                for h in T.serial(hidden_size):
                    layer_input[token, h] = T.cast(narrow(row[h]), "uint16")

    return mhctune_epilogue
