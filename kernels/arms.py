"""The arms of `post_pre_delayed`, by target: in the order ties are broken, and as served without a table."""

from __future__ import annotations

from mhctune.kernels.c import arms as c
from mhctune.kernels.cuda import fused, unfused
from mhctune.kernels.seam import Arm

ARMS: dict[str, tuple[Arm, ...]] = {
    "c": (c.Fused(), c.Unfused()),
    "cuda": (fused.Fused(), fused.FusedMma(), unfused.Unfused(), unfused.UnfusedMma()),
}

# Without a table one choice serves every token count. On c, `fused` is legal wherever `unfused` is, which
# also needs multiples of 256. On cuda the tensor cores' arms degrade least.
PREFERENCE: dict[str, tuple[str, ...]] = {
    "c": ("fused", "unfused"),
    "cuda": ("fused_mma", "unfused_mma", "unfused", "fused"),
}
