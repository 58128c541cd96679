"""The arms of every seam, by target: in the order ties are broken, and as served without a table."""

from __future__ import annotations

from mhctune.kernels.c import arms as c
from mhctune.kernels.c import topk_arms
from mhctune.kernels.cuda import fused, unfused
from mhctune.kernels.seam import Arm

ARMS: dict[str, dict[str, tuple[Arm, ...]]] = {
    "c": {**c.ARMS, "topk_merge": topk_arms.ARMS},
    "cuda": {
        "post_pre_delayed": (fused.Fused(), fused.FusedMma(), unfused.Unfused(), unfused.UnfusedMma()),
    },
}

# Without a table one choice serves every token count: by default the first arm. On c, `fused` is legal
# wherever `unfused` is, which also needs multiples of 256. On cuda the tensor cores' arms degrade least: on
# an H200 at hidden 5120 the best of each took 6.2, 7.3, 5.8 and 3.8 us at 1 token, but 11.9, 12.5, 17.0 and
# 19.4 us at 128, in this order.
PREFERENCE: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {"post_pre_delayed": ("fused_mma", "unfused_mma", "unfused", "fused")},
}
