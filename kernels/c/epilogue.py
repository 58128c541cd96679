"""The delayed epilogue on the C backend: partial sums to coefficients, Sinkhorn, collapse and RMSNorm."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.c.bf16 import fma, narrow, round_to_bf16, widen
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


def epilogue(hidden_size: int, sinkhorn_iters: int, carried: bool, norm: bool) -> PrimFunc:
    """Build the epilogue; the split count is read off the partial sums at run time.

    Args:
        hidden_size: H.
        sinkhorn_iters: column steps of the Sinkhorn normalisation.
        carried: collapse with `pre_mix`; otherwise with weights [1, 0, 0, 0] (model entry).
        norm: apply RMSNorm to the collapse after rounding it to bf16.
    """
    num_tokens = T.dynamic("num_tokens")
    n_splits = T.dynamic("n_splits")

    @T.prim_func
    def mhctune_epilogue(
        mul: T.Tensor((n_splits, num_tokens, 24), "float32"),
        sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
        residual: T.Tensor((num_tokens, 4, hidden_size), "uint16"),
        pre_mix: T.Tensor((num_tokens, 4), "float32"),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((24,), "float32"),
        norm_weight: T.Tensor((hidden_size,), "uint16"),
        next_post: T.Tensor((num_tokens, 4), "float32"),
        next_comb: T.Tensor((num_tokens, 4, 4), "float32"),
        layer_input: T.Tensor((num_tokens, hidden_size), "uint16"),
        next_pre: T.Tensor((num_tokens, 4), "float32"),
        rms_eps: T.float32,
        hc_pre_eps: T.float32,
        sinkhorn_eps: T.float32,
        post_mult: T.float32,
        norm_eps: T.float32,
    ):
        with T.Kernel(num_tokens) as token:
            mixes = T.alloc_local((24,), "float32")
            scalar = T.alloc_local((1,), "float32")
            comb = T.alloc_local((4, 4), "float32")
            sums = T.alloc_local((4,), "float32")
            row = T.alloc_local((hidden_size,), "float32")
            squares = T.alloc_local((LANES,), "float32")
            for n in T.serial(24):
                mixes[n] = T.float32(0)
            scalar[0] = T.float32(0)
            for split in T.serial(n_splits):
                for n in T.serial(24):
                    mixes[n] = mixes[n] + mul[split, token, n]
                scalar[0] = scalar[0] + sqrsum[split, token]
            scalar[0] = T.float32(1) / T.sqrt(scalar[0] / T.float32(4 * hidden_size) + rms_eps)
            for j in T.serial(4):
                next_pre[token, j] = sigmoid(mixes[j] * scalar[0] * scale[0] + base[j]) + hc_pre_eps
                next_post[token, j] = sigmoid(mixes[4 + j] * scalar[0] * scale[1] + base[4 + j]) * post_mult
            for i, j in T.grid(4, 4):
                comb[i, j] = mixes[8 + 4 * i + j] * scalar[0] * scale[2] + base[8 + 4 * i + j]
            sinkhorn(comb, sums, sinkhorn_iters, sinkhorn_eps)
            for i, j in T.grid(4, 4):
                next_comb[token, i, j] = comb[i, j]

            if carried:
                for h in T.serial(hidden_size):
                    row[h] = round_to_bf16(
                        pre_mix[token, 0] * widen(residual[token, 0, h])
                        + pre_mix[token, 1] * widen(residual[token, 1, h])
                        + pre_mix[token, 2] * widen(residual[token, 2, h])
                        + pre_mix[token, 3] * widen(residual[token, 3, h])
                    )
            else:
                for h in T.serial(hidden_size):
                    row[h] = widen(residual[token, 0, h])
            if norm:
                for lane in T.serial(LANES):
                    squares[lane] = T.float32(0)
                for h, lane in T.grid(hidden_size // LANES, LANES):
                    squares[lane] = fma(row[h * LANES + lane], row[h * LANES + lane], squares[lane])
                scalar[0] = T.float32(0)
                for lane in T.serial(LANES):
                    scalar[0] = scalar[0] + squares[lane]
                scalar[0] = T.float32(1) / T.sqrt(scalar[0] / T.float32(hidden_size) + norm_eps)
                for h in T.serial(hidden_size):
                    layer_input[token, h] = T.cast(
                        narrow(row[h] * scalar[0] * widen(norm_weight[h])), "uint16"
                    )
            else:
                for h in T.serial(hidden_size):
                    layer_input[token, h] = T.cast(narrow(row[h]), "uint16")

    return mhctune_epilogue
