"""Tensors of the seams: name, axes, dtype and meaning of each, written down once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mhctune.kernels.buffers import BufferSpec

if TYPE_CHECKING:
    from mhctune.kernels.seam import Problem

_Extent = TypeVar("_Extent")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a seam reads or writes.

    Attributes:
        name: Its name in the ops, the arms and the reference.
        axes: Extents: a number, `T` (tokens) or `H` (hidden size).
        dtype: `bfloat16` or `float32`.
        about: What it is.
        when: The field of the problem that must be true for it to exist; empty for always.
        strided: Its rows may lie apart; otherwise it is contiguous.
    """

    name: str
    axes: tuple[int | str, ...]
    dtype: str
    about: str
    when: str = ""
    strided: bool = False

    def exists(self, problem: Problem) -> bool:
        """Whether the problem has it."""
        return not self.when or bool(getattr(problem, self.when))

    def extents(self, num_tokens: _Extent, hidden: _Extent) -> tuple[int | _Extent, ...]:
        """Return its shape."""
        known = {"T": num_tokens, "H": hidden}
        return tuple(known[axis] if isinstance(axis, str) else axis for axis in self.axes)

    def shape(self, problem: Problem, num_tokens: int) -> tuple[int, ...]:
        """Return its shape for a problem."""
        return self.extents(num_tokens, problem.hidden_size)

    def buffer(self, problem: Problem, max_tokens: int) -> BufferSpec:
        """Return it as a buffer for up to `max_tokens`."""
        return BufferSpec(self.name, self.shape(problem, max_tokens), self.dtype)

    def __str__(self) -> str:
        """Return a line of documentation, such as `x [T, H] bf16: sublayer output.`."""
        short = {"bfloat16": "bf16", "float32": "fp32"}[self.dtype]
        return f"{self.name} [{', '.join(map(str, self.axes))}] {short}: {self.about}."


BF16, FP32 = "bfloat16", "float32"

X = TensorSpec("x", ("T", "H"), BF16, "sublayer output")
EMBEDDING = TensorSpec("x", ("T", "H"), BF16, "embedding, which all streams begin with")
RESIDUAL = TensorSpec("residual", ("T", 4, "H"), BF16, "streams")
ROWS = TensorSpec("residual", ("T", 4, "H"), BF16, "streams; rows may lie apart", strided=True)
POST_MIX = TensorSpec("post_mix", ("T", 4), FP32, "of the pre block before this sublayer")
COMB_MIX = TensorSpec("comb_mix", ("T", 4, 4), FP32, "rows are old streams, columns new ones")
FN = TensorSpec("fn", (24, 4, "H"), FP32, "projection weights: rows 0-3 pre, 4-7 post, 8-23 comb")
FN_BF16 = TensorSpec("fn", (24, 4, "H"), BF16, "projection weights: rows 0-3 pre, 4-7 post, 8-23 comb")
FN_SUMMED = TensorSpec("fn", (24, 1, "H"), FP32, "projection weights, summed over the streams")
FN_HEAD = TensorSpec("fn", (4, 4, "H"), FP32, "weights of the gates")
SCALE = TensorSpec("scale", (3,), FP32, "factors of the mixes, for pre, post and comb")
SCALE_HEAD = TensorSpec("scale", (1,), FP32, "factor of the gates' logits")
BASE = TensorSpec("base", (24,), FP32, "added to the scaled mixes")
BASE_HEAD = TensorSpec("base", (4,), FP32, "added to the scaled logits")
PRE_MIX = TensorSpec(
    "pre_mix", ("T", 4), FP32, "carried pre-mix, or None at the model's entry (stream 0 is taken)", "carried"
)
CARRIED = TensorSpec("pre_mix", ("T", 4), FP32, "carried pre-mix")
NORM_WEIGHT = TensorSpec("norm_weight", ("H",), BF16, "RMSNorm weight, or None for no norm", "norm")

RESIDUAL_OUT = TensorSpec("residual_out", ("T", 4, "H"), BF16, "new streams")
NEXT_POST_MIX = TensorSpec("next_post_mix", ("T", 4), FP32, "post-mix of the sublayer that follows")
NEXT_COMB_MIX = TensorSpec("next_comb_mix", ("T", 4, 4), FP32, "comb-mix of the sublayer that follows")
LAYER_INPUT = TensorSpec("layer_input", ("T", "H"), BF16, "input of the sublayer that follows")
NEXT_PRE_MIX = TensorSpec("next_pre_mix", ("T", 4), FP32, "pre-mix to carry to the next seam")
ENTRY_PRE_MIX = TensorSpec(
    "next_pre_mix", ("T", 4), FP32, "pre-mix to carry to the next seam (V4.1)", "delayed"
)
AUX = TensorSpec("aux", ("T", "H"), BF16, "mean over the new streams", "aux")
COLLAPSED = TensorSpec("collapsed", ("T", "H"), BF16, "weighted sum of the streams")
