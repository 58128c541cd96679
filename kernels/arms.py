"""The arms of every seam, by target: in the order ties are broken, and as served without a table."""

from __future__ import annotations

from mhctune.kernels import forms
from mhctune.kernels.c import arms as c
from mhctune.kernels.c import topk_arms as c_topk
from mhctune.kernels.c.released import Released as CReleased
from mhctune.kernels.cuda import topk_arms as cuda_topk
from mhctune.kernels.cuda.fused import Fused, FusedMma, FusedWs
from mhctune.kernels.cuda.one_pass import OnePassCollapse, OnePassPost
from mhctune.kernels.cuda.released import Released
from mhctune.kernels.cuda.unfused import Unfused, UnfusedHead, UnfusedMma
from mhctune.kernels.seam import Arm

_CUDA: dict[str, tuple[Arm, ...]] = {
    **{form.name: (Fused(form), FusedMma(form), FusedWs(form), Unfused(form), UnfusedMma(form), *more)
       for form, more in ((forms.POST_PRE_DELAYED, (Released(),)), (forms.POST_PRE, ()))},
    **{form.name: (Unfused(form), UnfusedMma(form))
       for form in (forms.PRE_DELAYED, forms.PRE, forms.PRE_BROADCAST)},
    # The tensor cores' arms split float32 weights into three terms; one would do for these.
    forms.POST_PRE_BF16.name: (Fused(forms.POST_PRE_BF16), Unfused(forms.POST_PRE_BF16)),
    forms.POST.name: (OnePassPost(),),
    forms.HC_HEAD.name: (UnfusedHead(forms.HC_HEAD),),
    forms.COLLAPSE.name: (OnePassCollapse(),),
}  # fmt: skip

_C: dict[str, tuple[Arm, ...]] = {
    **c.ARMS,
    forms.POST_PRE_DELAYED.name: (*c.ARMS[forms.POST_PRE_DELAYED.name], CReleased()),
    "topk_merge": c_topk.ARMS,
}

ARMS: dict[str, dict[str, tuple[Arm, ...]]] = {
    "c": _C,
    "cuda": {**_CUDA, "topk_merge": cuda_topk.ARMS},
}

# Without a table one choice serves every token count: by default the first arm. On c, `fused` is legal
# wherever `unfused` is, which also needs multiples of 256. On cuda the tensor cores' arms degrade least. On
# an H200 at hidden 5120 the best of each took at 1, 128 and 4096 tokens for post_pre_delayed 4.0, 9.6 and
# 223 us (fused_mma), 6.8, 9.9 and 140, 5.7, 10.6 and 204, 4.7, 15.2 and 356, 3.1, 19.8 and 542, 7.3, 11.2
# and 216, in this order; for pre_delayed at 1 and 128 tokens 6.6 and 9.3 (unfused_mma), 4.6 and 12.7; for
# post_pre_bf16 at 1 and 1024 tokens 5.7 and 94 (unfused), 4.3 and 120.
PREFERENCE: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {
        "post_pre_delayed": ("fused_mma", "fused_ws", "unfused_mma", "unfused", "fused", "released"),
        "post_pre": ("fused_mma", "fused_ws", "unfused_mma", "unfused", "fused"),
        **dict.fromkeys(("pre_delayed", "pre", "pre_broadcast"), ("unfused_mma", "unfused")),
        "post_pre_bf16": ("unfused", "fused"),
    },
}
