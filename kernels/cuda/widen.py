"""bf16 in registers to float32, two neighbours at a time: one instruction each."""

import tilelang.language as T

# The compiler's own conversion moves an upper neighbour down before it moves it up again: two instructions of
# which one starts every other cycle, 138 of 867 a step of `fused_ws`, whose warps wait for a turn to issue.
SOURCE = """
template <int count>
static __device__ __forceinline__ void mhctune_widen(float *to, void const *from) {
#pragma unroll
  for (int i = 0; i < count / 2; ++i) {
    unsigned const pair = ((unsigned const *)from)[i];
    to[2 * i] = __uint_as_float(pair << 16);
    to[2 * i + 1] = __uint_as_float(pair & 0xFFFF0000u);
  }
  if (count % 2) to[count - 1] = __uint_as_float((unsigned)((unsigned short const *)from)[count - 1] << 16);
}
"""
"""For `T.import_source`, in a kernel that calls the function below."""


def widen(to, source, count):
    """Make float32 of `count` bf16: both are the first of as many neighbours in registers."""
    return T.call_extern("handle", f"mhctune_widen<{count}>", T.address_of(to), T.address_of(source))
