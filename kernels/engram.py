"""The V4.1 seam where an Engram may be injected: one fused op, or a composition around the injection.

Nothing can be fused across an injection by the caller. The seam is then `post`, with the mean over the
streams (`aux`) taken before the injection, because draft models read the streams as the sublayer left them;
the injection; and `pre_delayed` of the streams as injected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mhctune.kernels import ops
from mhctune.kernels.seam import Problem

Inject = Callable[[Tensor], Tensor]
"""From the streams [T, 4, H] bf16 to the streams with the Engram: contiguous, of the same shape and dtype."""


@dataclass(frozen=True, slots=True)
class SeamOutputs:
    """What a V4.1 seam hands on: streams, mixes of the next sublayer, its input, and the pre-mix to carry."""

    residual: Tensor
    post_mix: Tensor
    comb_mix: Tensor
    layer_input: Tensor
    pre_mix: Tensor
    aux: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DelayedSeam:
    """The attention seam of V4.1 with its weights.

    Attributes:
        problem: What is fixed; `aux` and the carried pre-mix follow from the call.
        fn: [24, 4, H] fp32.
        scale: [3] fp32.
        base: [24] fp32.
        norm_weight: [H] bf16, or None for no norm.
        tables: Digests of served tables by seam name, or by seam name and `/aux` for calls that ask for aux,
            which is another problem. What is absent takes the built-in choice.
    """

    problem: Problem
    fn: Tensor
    scale: Tensor
    base: Tensor
    norm_weight: Tensor | None
    tables: Mapping[str, str] = field(default_factory=dict)

    def __call__(
        self, x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, pre_mix: Tensor | None,
        inject: Inject | None = None, aux: bool = False,
    ) -> SeamOutputs:  # fmt: skip
        """Run the seam: fused without an injection, as the composition with one.

        Args:
            x: Sublayer output [T, H] bf16.
            residual: Streams [T, 4, H] bf16.
            post_mix: [T, 4] fp32.
            comb_mix: [T, 4, 4] fp32.
            pre_mix: Carried pre-mix [T, 4] fp32, or None at the model's entry.
            inject: Adds the Engram to the streams; None where there is none.
            aux: Return the mean over the new streams, before any injection.

        Raises:
            ValueError: a tensor is not what the ops take; also what `inject` returns.
            LookupError: a table is not served in this process.
        """
        p = self.problem
        pre = (self.fn, self.scale, self.base, pre_mix, self.norm_weight)
        scalars = (
            p.rms_eps, p.hc_pre_eps, p.sinkhorn_eps, p.post_mult, p.norm_eps, p.sinkhorn_iters,
        )  # fmt: skip
        post = (x, residual, post_mix, comb_mix)
        if inject is None:
            table = self._table("post_pre_delayed", aux)
            streams, next_post, next_comb, layer_input, next_pre, *mean = ops.post_pre_delayed(
                *post, *pre, *scalars, table, aux
            )
        else:
            streams, *mean = ops.post(*post, self._table("post", aux), aux)
            streams = _injected(streams, inject)
            next_post, next_comb, layer_input, next_pre = ops.pre_delayed(
                streams, *pre, *scalars, self._table("pre_delayed", False)
            )
        return SeamOutputs(streams, next_post, next_comb, layer_input, next_pre, mean[0] if aux else None)

    def _table(self, seam: str, aux: bool) -> str:
        return self.tables.get(f"{seam}/aux" if aux else seam, "")


def _injected(streams: Tensor, inject: Inject) -> Tensor:
    found = inject(streams)
    if found.shape != streams.shape or found.dtype != torch.bfloat16:
        expected = f"expected torch.bfloat16 {tuple(streams.shape)}"
        raise ValueError(f"inject returned {found.dtype} {tuple(found.shape)}, {expected}")
    return found.contiguous()
