"""The arms of every seam, by target: in the order ties are broken, and as served without a table."""

from __future__ import annotations

from mhctune.kernels.c import arms as c
from mhctune.kernels.cuda import arms as cuda
from mhctune.kernels.seam import Arm

ARMS: dict[str, dict[str, tuple[Arm, ...]]] = {
    "c": c.ARMS,
    "cuda": {
        "post_pre_delayed": (cuda.Fused(), cuda.Unfused(), cuda.UnfusedMma()),
    },
}

# Without a table one choice serves every token count: by default the first arm. On c, `fused` is legal
# wherever `unfused` is, which also needs multiples of 256. On cuda the tensor cores' arm degrades least: on
# an H200 at hidden 5120 the best of each took 10.9, 8.5 and 6.2 us at 1 token, but 15.2, 18.2 and 18.3 us at
# 128, in this order.
PREFERENCE: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {"post_pre_delayed": ("unfused_mma", "unfused", "fused")},
}
