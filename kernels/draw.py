"""Drawing inputs: random tensors of a seam in a named regime, the same on every device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mhctune.kernels.buffers import torch_dtype
from mhctune.kernels.seam import Problem
from mhctune.kernels.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Regime:
    """How inputs are drawn: the scale of streams and sublayer output, and of the Sinkhorn logits."""

    magnitude: float = 1.0
    logit_scale: float = 4.0
    zero_row: bool = False


# Ordinary inputs hide faults: 19 against 20 Sinkhorn iterations differ by 3e-13 at logit scale 1 and by
# 3e-4 at scale 4; an eps in the wrong place shows only where the streams are small or zero.
REGIMES = {
    "served": Regime(),
    "mild": Regime(logit_scale=1.0),
    "sharp": Regime(logit_scale=8.0),
    "tiny": Regime(magnitude=1e-5),
    "large": Regime(magnitude=1e3),
    "zero_row": Regime(zero_row=True),
}

Normal = Callable[..., torch.Tensor]
_Shape = tuple[int, ...]
_OF_TOKENS = ("x", "residual")


def _scale(normal: Normal, shape: _Shape, regime: Regime, problem: Problem) -> torch.Tensor:
    factors = torch.tensor([1.0, 1.0, regime.logit_scale])[: shape[0]]
    return factors * (1 + 0.1 * normal(*shape))


_DRAWS: dict[str, Callable[[Normal, _Shape, Regime, Problem], torch.Tensor]] = {
    "x": lambda normal, shape, regime, problem: normal(*shape) * regime.magnitude,
    "residual": lambda normal, shape, regime, problem: normal(*shape) * regime.magnitude,
    "post_mix": lambda normal, shape, regime, problem: normal(*shape).sigmoid() * problem.post_mult,
    "comb_mix": lambda normal, shape, regime, problem: torch.softmax(normal(*shape), dim=-1),
    # Columns of norm 1: the mixes, divided by the RMS of the streams, come out at scale 1.
    "fn": lambda normal, shape, regime, problem: normal(*shape) / math.prod(shape[1:]) ** 0.5,
    "scale": _scale,
    "base": lambda normal, shape, regime, problem: 0.5 * normal(*shape),
    "pre_mix": lambda normal, shape, regime, problem: normal(*shape).sigmoid() + problem.hc_pre_eps,
    "norm_weight": lambda normal, shape, regime, problem: 1 + 0.1 * normal(*shape),
}


def draw(
    reads: Sequence[TensorSpec], problem: Problem, num_tokens: int, seed: int, regime: str
) -> dict[str, torch.Tensor]:
    """Return a tensor for each spec, on the CPU.

    Raises:
        KeyError: there is no such regime.
    """
    chosen, generator = REGIMES[regime], torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    drawn = {}
    for spec in reads:
        tensor = _DRAWS[spec.name](normal, spec.shape(problem, num_tokens), chosen, problem)
        drawn[spec.name] = tensor.to(torch_dtype(spec.dtype))
        if chosen.zero_row and num_tokens and spec.name in _OF_TOKENS:
            drawn[spec.name][num_tokens // 2] = 0
    return drawn
