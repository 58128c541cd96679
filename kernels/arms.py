"""The arms of `post_pre_delayed`, by target, in the order ties are broken."""

from __future__ import annotations

from mhctune.kernels.c import arms as c
from mhctune.kernels.cuda import arms as cuda
from mhctune.kernels.seam import Arm

ARMS: dict[str, tuple[Arm, ...]] = {
    "c": (c.Fused(), c.Unfused()),
    "cuda": (cuda.Fused(), cuda.Unfused(), cuda.UnfusedMma()),
}
