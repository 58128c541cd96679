"""Forms: what each seam reads, writes and depends on. Seams, arms and ops are built from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache

from mhctune.kernels import tensors as t
from mhctune.kernels.buffers import BufferSpec
from mhctune.kernels.seam import Problem
from mhctune.kernels.tensors import TensorSpec

SCALARS = ("rms_eps", "hc_pre_eps", "sinkhorn_eps", "post_mult", "norm_eps")
"""Fields of a problem that are run-time scalars of the kernels, in the order that the ops take them."""

_USUAL = {each.name: each.default for each in fields(Problem)}


@dataclass(frozen=True)
class Form:
    """What a seam is, as data.

    Attributes:
        name: The seam's name.
        about: Where it stands in a model.
        reads, writes: Its tensors; the first one read has the token count as its first axis, H as its last.
        free: Fields of the problem that it depends on, beside the hidden size.
        fixed: Fields that it holds at another value than the usual one.
    """

    name: str
    about: str
    reads: tuple[TensorSpec, ...]
    writes: tuple[TensorSpec, ...]
    free: tuple[str, ...]
    fixed: Mapping[str, bool] = field(default_factory=dict)

    def __hash__(self) -> int:
        """A name means one form."""
        return hash(self.name)

    @property
    def weights(self) -> TensorSpec | None:
        """The projection's weights; None for a seam that projects nothing."""
        return next((spec for spec in self.reads if spec.name == "fn"), None)

    @property
    def has_post(self) -> bool:
        """Whether it begins with the post block of a sublayer."""
        return any(spec.name == "post_mix" for spec in self.reads)

    @property
    def broadcast(self) -> bool:
        """Whether it begins with an embedding that all streams are equal to."""
        return not any(spec.name == "residual" for spec in self.reads)

    def outputs(self, problem: Problem, max_tokens: int) -> tuple[BufferSpec, ...]:
        """Return the buffers of what it writes for a problem."""
        return tuple(spec.buffer(problem, max_tokens) for spec in self.writes if spec.exists(problem))

    def canonical(self, problem: Problem) -> Problem:
        """Return the problem with the fields that this seam does not depend on at their one value."""
        return _canonical(self, problem)


@lru_cache(maxsize=1024)
def _canonical(form: Form, problem: Problem) -> Problem:
    free = {name: getattr(problem, name) for name in ("hidden_size", "hc_mult", *form.free)}
    return Problem(**{**_USUAL, **form.fixed, **free})


_MIXES = (t.NEXT_POST_MIX, t.NEXT_COMB_MIX, t.LAYER_INPUT)
_OF_MIXES = ("rms_eps", "hc_pre_eps", "sinkhorn_eps", "post_mult", "norm_eps", "norm", "sinkhorn_iters")
_V4 = {"delayed": False, "carried": False}
_POST = (t.X, t.RESIDUAL, t.POST_MIX, t.COMB_MIX)
_PROJECTION = (t.FN, t.SCALE, t.BASE)

POST_PRE_DELAYED = Form(
    "post_pre_delayed",
    "V4.1 attention and FFN seams: post block, then the delayed pre of the next sublayer",
    (*_POST, *_PROJECTION, t.PRE_MIX, t.NORM_WEIGHT),
    (t.RESIDUAL_OUT, *_MIXES, t.NEXT_PRE_MIX, t.AUX),
    (*_OF_MIXES, "carried", "aux"),
)
PRE_DELAYED = Form(
    "pre_delayed",
    "V4.1 pre of streams that something changed in between, such as an Engram injection",
    (t.RESIDUAL, *_PROJECTION, t.PRE_MIX, t.NORM_WEIGHT),
    (*_MIXES, t.NEXT_PRE_MIX),
    (*_OF_MIXES, "carried"),
)
POST_PRE = Form(
    "post_pre",
    "V4 attention and FFN seams: post block, then the pre of the next sublayer with its own mix",
    (*_POST, *_PROJECTION, t.NORM_WEIGHT),
    (t.RESIDUAL_OUT, *_MIXES, t.AUX),
    (*_OF_MIXES, "aux"),
    _V4,
)
POST_PRE_BF16 = Form(
    "post_pre_bf16",
    "post_pre with projection weights in bfloat16",
    (*_POST, t.FN_BF16, t.SCALE, t.BASE, t.NORM_WEIGHT),
    POST_PRE.writes,
    POST_PRE.free,
    _V4,
)
PRE = Form(
    "pre",
    "V4 pre block on its own",
    (t.RESIDUAL, *_PROJECTION, t.NORM_WEIGHT),
    _MIXES,
    _OF_MIXES,
    _V4,
)
PRE_BROADCAST = Form(
    "pre_broadcast",
    "first layer: pre of the embedding with weights summed over the streams, divisor H; makes the streams",
    (t.EMBEDDING, t.FN_SUMMED, t.SCALE, t.BASE, t.NORM_WEIGHT),
    (t.RESIDUAL_OUT, *_MIXES, t.ENTRY_PRE_MIX),
    (*_OF_MIXES, "delayed"),
    {"carried": False},
)
POST = Form(
    "post",
    "post block on its own: a rank's last layer, and the Engram seam",
    _POST,
    (t.RESIDUAL_OUT, t.AUX),
    ("aux",),
    {"norm": False},
)
HC_HEAD = Form(
    "hc_head",
    "V4 head: a gate a stream, and the streams' weighted sum; no Sinkhorn",
    (t.RESIDUAL, t.FN_HEAD, t.SCALE_HEAD, t.BASE_HEAD),
    (t.COLLAPSED,),
    ("rms_eps", "hc_pre_eps"),
    {**_V4, "norm": False},
)
COLLAPSE = Form(
    "collapse",
    "V4.1 head and DSpark head: the streams' sum, weighted by the carried pre-mix",
    (t.ROWS, t.CARRIED),
    (t.COLLAPSED,),
    (),
    {"norm": False},
)
FORMS = (
    POST_PRE_DELAYED, PRE_DELAYED, POST_PRE, POST_PRE_BF16, PRE, PRE_BROADCAST, POST, HC_HEAD, COLLAPSE,
)  # fmt: skip
