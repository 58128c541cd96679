"""The seams that mhctune knows."""

from __future__ import annotations

from mhctune.kernels import forms
from mhctune.kernels.mix_seam import CollapseSeam, MixSeam
from mhctune.kernels.post_pre_delayed import PostPreDelayed
from mhctune.kernels.seam import Seam
from mhctune.kernels.topk_merge import TopkMerge

_MIXES = (
    forms.PRE_DELAYED, forms.POST_PRE, forms.POST_PRE_BF16, forms.PRE, forms.PRE_BROADCAST, forms.POST,
)  # fmt: skip
_COLLAPSES = (forms.HC_HEAD, forms.COLLAPSE)

SEAMS: dict[str, Seam] = {
    seam.name: seam
    for seam in (PostPreDelayed(), *map(MixSeam, _MIXES), *map(CollapseSeam, _COLLAPSES), TopkMerge())
}


def seam(name: str) -> Seam:
    """Return a seam by name.

    Raises:
        KeyError: there is none of that name; the message lists those there are.
    """
    if name not in SEAMS:
        raise KeyError(f"unknown seam {name!r}; known: {', '.join(sorted(SEAMS))}")
    return SEAMS[name]
