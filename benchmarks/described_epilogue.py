"""The epilogue of what ships, written from its description: one token a block, Sinkhorn in one warp.

For the yardstick of `described.py` alone: `kernels/cuda/epilogue.py` is ours, which is held against it.
"""

import math

import tilelang.language as T
from tvm.tirx import PrimFunc

BLOCK_H = 1024
"""A block of H is its greatest common divisor with this."""
THREADS = 96
STAGES = 2


@T.macro
def _normalise(matrix, total, eps, by_rows):
    """Normalise each row, or each column, of a 4x4 matrix by its sum + eps."""
    for i in T.unroll(4):
        total[0] = eps
        for j in T.unroll(4):
            total[0] = total[0] + (matrix[i, j] if by_rows else matrix[j, i])
        total[0] = T.float32(1) / total[0]
        for j in T.unroll(4):
            if by_rows:
                matrix[i, j] = matrix[i, j] * total[0]
            else:
                matrix[j, i] = matrix[j, i] * total[0]


@T.macro
def _sinkhorn(matrix, total, iterations, eps):
    """Turn 4x4 logits into comb: softmax of the rows + eps, a column step, then rows and columns in turn."""
    for i in T.unroll(4):
        total[0] = T.max(T.max(matrix[i, 0], matrix[i, 1]), T.max(matrix[i, 2], matrix[i, 3]))
        for j in T.unroll(4):
            matrix[i, j] = T.exp(matrix[i, j] - total[0])
        total[0] = T.float32(1) / (matrix[i, 0] + matrix[i, 1] + matrix[i, 2] + matrix[i, 3])
        for j in T.unroll(4):
            matrix[i, j] = matrix[i, j] * total[0] + eps
    _normalise(matrix, total, eps, 0)
    for _ in T.serial(iterations - 1):
        _normalise(matrix, total, eps, 1)
        _normalise(matrix, total, eps, 0)


@T.macro
def _sinkhorn_by_lanes(element, total, iterations, eps):
    """The same with element i, j in lane 4 i + j (modulo 16): sums by exchanges, one division a half step."""
    total[0] = T.max(element[0], T.shfl_xor(element[0], 1))
    total[0] = T.max(total[0], T.shfl_xor(total[0], 2))
    element[0] = T.exp(element[0] - total[0])
    for half in T.serial(2 * iterations):
        distance = T.if_then_else(half % 2 == 0, 1, 4)  # rows, then columns
        total[0] = element[0] + T.shfl_xor(element[0], distance)
        total[0] = total[0] + T.shfl_xor(total[0], 2 * distance)
        if half == 0:
            element[0] = element[0] / total[0] + eps
        else:
            element[0] = element[0] / (total[0] + eps)


def _sigmoid(value):
    return T.float32(1) / (T.float32(1) + T.exp(-value))


def described_epilogue(
    hidden_size: int, n_splits: int, sinkhorn_iters: int, carried: int = 1, lanes: int = 1
) -> PrimFunc:
    """Build the delayed epilogue with a norm as it is described for what ships.

    From the description: a block of 96 threads a token; all of them add the partial sums, split after split;
    then warp 0 (`thread < 32`) has post, comb with its whole Sinkhorn in registers, and their stores; warps 1
    and 2 have pre, collapse and norm. Blocks of gcd(1024, H) elements of the four streams come through bf16
    shared memory, two stages of asynchronous copies; the row is kept there in bf16 before it is normalised,
    and a second pass multiplies, its weights in two stages too. It waits for the kernel ahead first, and
    lets the next one begin last.

    Left open, and chosen here: a thread adds the column that its number has modulo 24, and each its own sum
    of squares; the loop of iterations is not unrolled. How warp 0 holds the matrix is tried (`lanes`).

    Args:
        hidden_size: H; a multiple of 512, as 64 threads copy 8 elements each.
        n_splits: partial sums, mul [n_splits, T, 24] and sqrsum [n_splits, T].
        sinkhorn_iters: column steps.
        carried: collapse the streams [T, 4, H] with `pre_mix` [T, 4]; otherwise take stream 0.
        lanes: 1: every lane holds the whole matrix, with one IEEE division a line; 16: an element each.
    """
    num_tokens = T.dynamic("num_tokens")
    block_h = math.gcd(BLOCK_H, hidden_size)
    n_streams = 4 if carried else 1
    numel = 4 * hidden_size

    @T.prim_func
    def mhctune_described_epilogue(
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
        rms_eps: T.float32,
        hc_pre_eps: T.float32,
        sinkhorn_eps: T.float32,
        post_mult: T.float32,
        norm_eps: T.float32,
    ):
        with T.Kernel(num_tokens, threads=THREADS) as token:
            thread = T.get_thread_binding()
            mixes = T.alloc_shared((24,), "float32")
            blocks = T.alloc_shared((n_streams, block_h), "bfloat16")
            row = T.alloc_shared((hidden_size,), "bfloat16")
            weights = T.alloc_shared((block_h,), "bfloat16")
            sums = T.alloc_local((2,), "float32")
            T.pdl_sync()
            sums[0] = T.float32(0)
            sums[1] = T.float32(0)
            for split in T.unroll(n_splits):
                sums[0] = sums[0] + mul[split, token, thread % 24]
                sums[1] = sums[1] + sqrsum[split, token]
            sums[1] = T.rsqrt(sums[1] * T.float32(1 / numel) + rms_eps)
            if thread < 24:
                mixes[thread] = sums[0] * sums[1] * scale[T.min(thread // 4, 2)] + base[thread]
            T.sync_threads()
            if thread < 32:
                matrix = T.alloc_local((4, 4), "float32")
                total = T.alloc_local((1,), "float32")
                if thread < 4:
                    next_post[token, thread] = _sigmoid(mixes[4 + thread]) * post_mult
                if lanes == 16:
                    element = T.alloc_local((1,), "float32")
                    element[0] = mixes[8 + thread % 16]
                    _sinkhorn_by_lanes(element, total, sinkhorn_iters, sinkhorn_eps)
                    if thread < 16:
                        next_comb[token, thread // 4, thread % 4] = element[0]
                else:
                    for i in T.unroll(4):
                        for j in T.unroll(4):
                            matrix[i, j] = mixes[8 + 4 * i + j]
                    _sinkhorn(matrix, total, sinkhorn_iters, sinkhorn_eps)
                    if thread == 0:
                        for i in T.unroll(4):
                            for j in T.vectorized(4):
                                next_comb[token, i, j] = matrix[i, j]
            else:
                mix_in = T.alloc_local((4,), "float32")
                # Of its own: read again behind a store, a fragment gives what it held before it.
                rounded = T.alloc_fragment((block_h,), "bfloat16")
                squares = T.alloc_fragment((block_h,), "float32")
                square = T.alloc_fragment((1,), "float32")
                if thread < 36:
                    next_pre[token, thread - 32] = _sigmoid(mixes[thread - 32]) + hc_pre_eps
                if carried:
                    for j in T.vectorized(4):
                        mix_in[j] = pre_mix[token, j]
                T.clear(squares)
                for block in T.Pipelined(hidden_size // block_h, num_stages=STAGES):
                    # Stream by stream: TileLang makes plain loads of one copy of all four.
                    for j in T.unroll(n_streams):
                        T.copy(residual[token, j, block * block_h : (block + 1) * block_h], blocks[j, :])
                    for h in T.Parallel(block_h):
                        if carried:
                            rounded[h] = T.cast(
                                mix_in[0] * T.cast(blocks[0, h], "float32")
                                + mix_in[1] * T.cast(blocks[1, h], "float32")
                                + mix_in[2] * T.cast(blocks[2, h], "float32")
                                + mix_in[3] * T.cast(blocks[3, h], "float32"),
                                "bfloat16",
                            )
                        else:
                            rounded[h] = blocks[0, h]
                    for h in T.Parallel(block_h):
                        row[block * block_h + h] = rounded[h]
                    for h in T.Parallel(block_h):
                        squares[h] = squares[h] + T.cast(rounded[h], "float32") * T.cast(
                            rounded[h], "float32"
                        )
                T.reduce_sum(squares, square)
                square[0] = T.rsqrt(square[0] * T.float32(1 / hidden_size) + norm_eps)
                for block in T.Pipelined(hidden_size // block_h, num_stages=STAGES):
                    T.copy(norm_weight[block * block_h : (block + 1) * block_h], weights)
                    for h in T.Parallel(block_h):
                        layer_input[token, block * block_h + h] = T.cast(
                            T.cast(row[block * block_h + h], "float32")
                            * square[0]
                            * T.cast(weights[h], "float32"),
                            "bfloat16",
                        )
            T.pdl_trigger()

    return mhctune_described_epilogue
