"""Loads and stores of what no kernel soon reads again: they leave the L2 to what one does."""

import tilelang.language as T

SOURCE = """
static __device__ __forceinline__ void mhctune_load_once(void *to, void const *from) {
  *(uint4 *)to = __ldcs((uint4 const *)from);
}
static __device__ __forceinline__ void mhctune_store_once(void *to, void const *from) {
  __stcs((uint4 *)to, *(uint4 const *)from);
}
"""
"""For `T.import_source`, in a kernel that calls the functions below."""


def load_once(to, source):
    """Load 16 bytes into registers: `ld.global.cs`."""
    return T.call_extern("handle", "mhctune_load_once", T.address_of(to), T.address_of(source))


def store_once(to, source):
    """Store 16 bytes from registers: `st.global.cs`."""
    return T.call_extern("handle", "mhctune_store_once", T.address_of(to), T.address_of(source))
