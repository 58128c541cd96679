"""What a global top-k sorts by, as expressions of a kernel: one int64 an entry, the larger the better."""

import tilelang.language as T
from tvm.tirx import PrimExpr

NONE = 1 - 2**63
"""Sorts behind every entry: the lowest finite score has a key of about -0.996 * 2^63."""


def order_key(identifier: PrimExpr, score: PrimExpr) -> PrimExpr:
    """Return the key of a global id and the bits of its score (both int32): higher score, then lower id.

    Bits of floats order like integers once those of negative ones are reversed. -0 and +0 are one score;
    NaN and -inf are no score at all, whatever the id, and so is a negative id. Never floats for ids: float32
    holds integers up to 2^24 only.
    """
    magnitude = T.bitwise_and(score, T.int32(0x7FFFFFFF))
    reversed_bits = T.bitwise_xor(score, T.int32(0x7FFFFFFF))
    ordered = T.if_then_else(magnitude == 0, T.int32(0), T.if_then_else(score < 0, reversed_bits, score))
    key = T.cast(ordered, "int64") * T.int64(2**32) + (T.int64(2**32 - 1) - T.cast(identifier, "int64"))
    # Above the bits of infinity are NaNs; -inf itself is 0xFF800000.
    absent = T.Or(T.Or(identifier < 0, magnitude > T.int32(0x7F800000)), score == T.int32(-0x800000))
    return T.if_then_else(absent, T.int64(NONE), key)


def id_of(key: PrimExpr) -> PrimExpr:
    """Return the global id (int32) of a key; -1 of none."""
    low = T.int64(2**32 - 1) - T.bitwise_and(key, T.int64(2**32 - 1))
    return T.cast(T.if_then_else(key == T.int64(NONE), T.int64(-1), low), "int32")


def global_id(local: PrimExpr, rank: PrimExpr, ranks: PrimExpr, interleave: int) -> PrimExpr:
    """Return the global id of a rank's local id, -1 of a negative one.

    Ranks hold `interleave` consecutive entries of the KV cache in turn: (l // S) * W * S + r * S + l % S.
    """
    block, inside = T.truncdiv(local, interleave), T.truncmod(local, interleave)
    found = block * (ranks * interleave) + rank * interleave + inside
    return T.if_then_else(local < 0, T.int32(-1), found)
