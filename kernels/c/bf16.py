"""bfloat16 on a backend that has none: the bits travel as uint16, the arithmetic is float32."""

import tilelang.language as T
from tvm.tirx import PrimExpr


def widen(bits: PrimExpr) -> PrimExpr:
    """Return the float32 of a bfloat16 given by its bits (uint16); exact."""
    return T.reinterpret(T.shift_left(T.cast(bits, "uint32"), T.uint32(16)), "float32")


def narrow(value: PrimExpr) -> PrimExpr:
    """Round a float32 to bfloat16, nearest even, and return its bits in the low half of a uint32.

    A NaN stays a quiet NaN: adding the rounding increment to a NaN with a full payload would carry
    into the exponent and turn it into a number. The test is on the bits because the simplifier
    folds `x != x` to false.
    """
    bits = T.reinterpret(value, "uint32")
    high = T.shift_right(bits, T.uint32(16))
    odd = T.bitwise_and(high, T.uint32(1))
    rounded = T.shift_right(bits + T.uint32(0x7FFF) + odd, T.uint32(16))
    is_nan = T.bitwise_and(bits, T.uint32(0x7FFFFFFF)) > T.uint32(0x7F800000)
    return T.if_then_else(is_nan, T.bitwise_or(high, T.uint32(0x40)), rounded)


def round_to_bf16(value: PrimExpr) -> PrimExpr:
    """Round a float32 to the nearest bfloat16 and return it as float32."""
    return T.reinterpret(T.shift_left(narrow(value), T.uint32(16)), "float32")


def fma(a: PrimExpr, b: PrimExpr, c: PrimExpr) -> PrimExpr:
    """Fused multiply-add; written out because contraction is off (it would move the stored streams)."""
    return T.call_extern("float32", "fmaf", a, b, c)


def load(values: PrimExpr, is_bf16: int) -> PrimExpr:
    """Return a float32 from a tensor's element: float32 as it is, or the bits of a bfloat16."""
    return widen(values) if is_bf16 else values


def weighted(weights, first, second, third, fourth):  # type: ignore[no-untyped-def]
    """Return the sum of the four streams' elements by `weights`, in order and without contraction."""
    return weights[0] * first + weights[1] * second + weights[2] * third + weights[3] * fourth


def mean(first: PrimExpr, second: PrimExpr, third: PrimExpr, fourth: PrimExpr) -> PrimExpr:
    """Return the mean of four float32, added in this order; rounded to bf16 it is torch.mean's to the bit."""
    return (first + second + third + fourth) * T.float32(0.25)
