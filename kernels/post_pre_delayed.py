"""The seam `post_pre_delayed`: a sublayer's post block and the next one's delayed pre."""

from __future__ import annotations

from mhctune.kernels.forms import POST_PRE_DELAYED
from mhctune.kernels.mix_seam import MixSeam


class PostPreDelayed(MixSeam):
    """X' = comb^T X + post x; coefficients of X'; layer input = norm(pre_mix . X')."""

    form = POST_PRE_DELAYED
