"""float32 weights as three bf16 terms: an operand of the tensor cores that keeps 24 bits."""

import tilelang.language as T

from mhctune.kernels.cuda.widen import widen

TERM_ROWS = 32
"""Rows of a term in shared memory: 24 columns, padded so that N = 96 is one instruction."""

PRODUCT_WIDTH = 3 * TERM_ROWS + 8
"""Row of the products in shared memory: 8 more than 96, or 8 rows of a warp would meet in the same banks."""


@T.macro
def load_weights(fn, weights, first, thread, parts, threads, width, stride, stream=0):
    """Load 24 rows of `width` float32 weights into registers, four neighbours a thread and part.

    `thread` is one of `threads`. Element k of a row is fn[row, k // stride, first + k % stride].
    """
    for part in T.unroll(parts):
        for v in T.vectorized(4):
            weights[part, v] = fn[
                (part * threads + thread) // (width // 4),
                (part * threads + thread) % (width // 4) * 4 // stride + stream,
                first + (part * threads + thread) % (width // 4) * 4 % stride + v,
            ]


@T.macro
def store_terms(weights, terms, thread, parts, threads, width):
    """Split the weights of `load_weights` and store term i of row n in shared memory terms[32 i + n, k].

    Each term is the bf16 nearest to what the terms before it left over, so that the three sum to the
    float32 weight to 24 bits and every product with a bf16 stream is exact.
    """
    term = T.alloc_local((3, 4), "bfloat16")
    exact = T.alloc_local((4,), "float32")
    for part in T.unroll(parts):
        # Vectorised, two conversions are one instruction of an eighth of the time (F2FP, not F2F).
        for i in T.unroll(2):
            for v in T.vectorized(4):
                term[i, v] = T.cast(weights[part, v], "bfloat16")
            widen(exact[0], term[i, 0], 4)
            for v in T.unroll(4):
                weights[part, v] = weights[part, v] - exact[v]
        for v in T.vectorized(4):
            term[2, v] = T.cast(weights[part, v], "bfloat16")
        for i in T.unroll(3):
            for v in T.vectorized(4):
                terms[
                    i * TERM_ROWS + (part * threads + thread) // (width // 4),
                    (part * threads + thread) % (width // 4) * 4 + v,
                ] = term[i, v]


@T.macro
def store_products(products, mul, split, rows, thread, block_m, threads, num_tokens):
    """Add the three terms of shared memory products[block_m, PRODUCT_WIDTH] and write mul[split]."""
    term = T.alloc_local((3, 4), "float32")
    for part in T.unroll(T.ceildiv(block_m * 6, threads)):
        index = part * threads + thread
        token = rows * block_m + index // 6
        if index < block_m * 6:
            if token < num_tokens:
                for i in T.unroll(3):
                    for v in T.vectorized(4):
                        term[i, v] = products[index // 6, i * TERM_ROWS + index % 6 * 4 + v]
                for v in T.unroll(4):
                    term[0, v] = term[0, v] + (term[1, v] + term[2, v])
                for v in T.vectorized(4):
                    mul[split, token, index % 6 * 4 + v] = term[0, v]
