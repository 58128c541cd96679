"""The arms of `post_pre_delayed`, by target."""

from __future__ import annotations

from mhctune.kernels.c.arms import Fused, Unfused
from mhctune.kernels.seam import Arm

ARMS: dict[str, tuple[Arm, ...]] = {"c": (Fused(), Unfused())}
