"""The seam `post_pre_delayed` of V4.1: a sublayer's post block, then the next sublayer's delayed pre."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mhctune.kernels import reference
from mhctune.kernels.arms import ARMS, PREFERENCE
from mhctune.kernels.buffers import BufferSpec, stray_nans, unwritten
from mhctune.kernels.post_pre_arm import output_specs
from mhctune.kernels.seam import Arm, Deviation, Problem, Seam, Tensors

COEFFICIENT_BOUND = 1e-5
"""Absolute error of pre, post and comb: fp32 sums of 4 H products, sigmoids and Sinkhorn (design)."""


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


class PostPreDelayed(Seam):
    """X' = comb^T X + post x; coefficients of X'; layer input = norm(pre_mix . X')."""

    name = "post_pre_delayed"
    regimes = tuple(REGIMES)
    about = "V4.1 attention and FFN seams: post block, then the delayed pre of the next sublayer"

    def arms(self, target: str) -> tuple[Arm, ...]:
        """Return the arms of a target, in the order ties are broken."""
        return ARMS.get(target, ())

    def preference(self, target: str) -> tuple[Arm, ...]:
        """Return the arms in the order in which the choice served without a table is sought."""
        return tuple(self.arm(target, name) for name in PREFERENCE.get(target, ()))

    def inputs(
        self, problem: Problem, num_tokens: int, seed: int, device: str, regime: str = ""
    ) -> dict[str, torch.Tensor]:
        """Return fresh random inputs by name; drawn on the CPU, so the same seed gives the same values."""
        chosen = REGIMES[regime or self.regimes[0]]
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        hidden, n = problem.hidden_size, problem.hc_mult
        tensors = {
            "x": (normal(num_tokens, hidden) * chosen.magnitude).bfloat16(),
            "residual": (normal(num_tokens, n, hidden) * chosen.magnitude).bfloat16(),
            "post_mix": normal(num_tokens, n).sigmoid() * problem.post_mult,
            "comb_mix": torch.softmax(normal(num_tokens, n, n), dim=-1),
            # Columns of norm 1: the mixes, divided by the RMS of the streams, come out at scale 1.
            "fn": normal(24, n, hidden) / (n * hidden) ** 0.5,
            "scale": torch.tensor([1.0, 1.0, chosen.logit_scale]) * (1 + 0.1 * normal(3)),
            "base": 0.5 * normal(24),
            "pre_mix": normal(num_tokens, n).sigmoid() + problem.hc_pre_eps,
            "norm_weight": (1 + 0.1 * normal(hidden)).bfloat16(),
        }
        if chosen.zero_row and num_tokens:
            tensors["x"][num_tokens // 2] = 0
            tensors["residual"][num_tokens // 2] = 0
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    def outputs(self, problem: Problem, max_tokens: int) -> tuple[BufferSpec, ...]:
        """Return the seam's outputs: new streams, next post, comb and pre mixes, and the layer input."""
        return output_specs(problem, max_tokens)

    def check(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> list[Deviation]:
        """Compare with the staged reference, stage by stage; every output is listed once."""
        streams = outputs["residual_out"]
        mixes = reference.coefficients(streams, inputs["fn"], inputs["scale"], inputs["base"], problem)
        old = inputs["residual"], inputs["x"], inputs["post_mix"], inputs["comb_mix"]
        exact, slack = reference.post(*old), reference.post_slack(*old)
        layer_input = reference.layer_input_use(
            outputs["layer_input"],
            streams,
            inputs["pre_mix"] if problem.carried else None,
            inputs["norm_weight"] if problem.norm else None,
            problem.norm_eps,
        )
        nans = stray_nans(outputs)

        def found(name: str, error: torch.Tensor, bound: float) -> Deviation:
            worst = float(error.max()) if error.numel() else 0.0
            where = f" ({nans[name]} NaN)" if name in nans else ""
            return Deviation(name, worst, bound, unwritten(outputs[name]), where)

        return [
            found("residual_out", reference.rounding_use(streams, exact, slack), 1.0),
            found("next_post_mix", (outputs["next_post_mix"] - mixes.post).abs(), COEFFICIENT_BOUND),
            found("next_comb_mix", (outputs["next_comb_mix"] - mixes.comb).abs(), COEFFICIENT_BOUND),
            found("layer_input", layer_input, 1.0),
            found("next_pre_mix", (outputs["next_pre_mix"] - mixes.pre).abs(), COEFFICIENT_BOUND),
        ]
