"""The seams that mhctune knows."""

from __future__ import annotations

from mhctune.kernels.post_pre_delayed import PostPreDelayed
from mhctune.kernels.seam import Seam

SEAMS: dict[str, Seam] = {seam.name: seam for seam in (PostPreDelayed(),)}


def seam(name: str) -> Seam:
    """Return a seam by name.

    Raises:
        KeyError: there is none of that name; the message lists those there are.
    """
    if name not in SEAMS:
        raise KeyError(f"unknown seam {name!r}; known: {', '.join(sorted(SEAMS))}")
    return SEAMS[name]
