"""The seams built from a form: their inputs, outputs and the staged comparison with the reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from mhctune.kernels import arms, reference
from mhctune.kernels.buffers import BufferSpec, stray_nans, unwritten
from mhctune.kernels.draw import REGIMES, draw
from mhctune.kernels.forms import Form
from mhctune.kernels.seam import Arm, Deviation, Problem, Seam, Tensors
from mhctune.kernels.until import LAYER_INPUT

COEFFICIENT_BOUND = 1e-5
"""Absolute error of pre, post and comb: fp32 sums of 4 H products, sigmoids and Sinkhorn (design)."""

OWN_PRE_SLACK = 1e-6
"""Absolute error of a pre-mix that is used and not stored. A mix of scale 1 sums 4 H products in chains of
at most H / 4: about sqrt(1792) * 2^-24 = 2.5e-6 off at H = 7168, of which a sigmoid passes a quarter."""


@dataclass
class _Findings:
    """Collects a deviation an output."""

    outputs: Tensors
    nans: dict[str, int]
    rows: list[Deviation] = field(default_factory=list)

    def add(self, name: str, error: torch.Tensor, bound: float) -> None:
        worst = float(error.max()) if error.numel() else 0.0
        where = f" ({self.nans[name]} NaN)" if name in self.nans else ""
        self.rows.append(Deviation(name, worst, bound, unwritten(self.outputs[name]), where))


class FormSeam(Seam):
    """A seam whose tensors are those of a form."""

    regimes = tuple(REGIMES)
    form: Form

    def __init__(self, form: Form | None = None) -> None:
        """Take the form, or keep the class's own."""
        self.form = form or self.form
        self.name, self.about = self.form.name, self.form.about
        self.depends_on = frozenset(self.form.free)

    def arms(self, target: str) -> tuple[Arm, ...]:
        """Return the arms of a target, in the order ties are broken."""
        return arms.ARMS.get(target, {}).get(self.form.name, ())

    def preference(self, target: str) -> tuple[Arm, ...]:
        """Return the arms in the order in which the choice served without a table is sought."""
        known = arms.PREFERENCE.get(target, {}).get(self.form.name)
        return self.arms(target) if known is None else tuple(self.arm(target, name) for name in known)

    def canonical(self, problem: Problem) -> Problem:
        """Return the problem with what this seam does not depend on at its one value."""
        return self.form.canonical(problem)

    def inputs(
        self, problem: Problem, num_tokens: int, seed: int, device: str, regime: str = ""
    ) -> dict[str, torch.Tensor]:
        """Return fresh random inputs by name; drawn on the CPU, so the same seed gives the same values."""
        drawn = draw(self.form.reads, problem, num_tokens, seed, regime or self.regimes[0])
        return {name: tensor.to(device) for name, tensor in drawn.items()}

    def outputs(self, problem: Problem, max_tokens: int) -> tuple[BufferSpec, ...]:
        """Return the seam's outputs, whatever the arm."""
        return self.form.outputs(problem, max_tokens)

    def check(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> list[Deviation]:
        """Compare with the staged reference, stage by stage; every output is listed once."""
        findings = _Findings(outputs, stray_nans(outputs))
        self._compare(problem, inputs, outputs, findings)
        return findings.rows

    def _compare(self, problem: Problem, inputs: Tensors, outputs: Tensors, findings: _Findings) -> None:
        raise NotImplementedError


class MixSeam(FormSeam):
    """Post block, pre block or both: streams, then coefficients, then the layer input."""

    def reads_for(self, problem: Problem, until: str) -> Iterable[str]:
        """Return what an output depends on; a delayed layer input needs no projection."""
        free = {"fn", "scale", "base"} if until == LAYER_INPUT and problem.delayed else set()
        return [spec.name for spec in self.form.reads if spec.exists(problem) and spec.name not in free]

    def _compare(self, problem: Problem, inputs: Tensors, outputs: Tensors, findings: _Findings) -> None:
        streams = self._streams(inputs, outputs, findings)
        if self.form.weights is not None:
            self._compare_pre(problem, inputs, outputs, streams, findings)
        if problem.aux:
            mean = streams.mean(1)
            error = (outputs["aux"].double() - mean.double()).abs()
            findings.add("aux", torch.where(outputs["aux"] == mean, 0.0, error), 0.0)

    def _streams(self, inputs: Tensors, outputs: Tensors, findings: _Findings) -> torch.Tensor:
        """Return the streams as stored [T, 4, H]; compare those that the seam makes."""
        if self.form.has_post:
            streams = outputs["residual_out"]
            old = inputs["residual"], inputs["x"], inputs["post_mix"], inputs["comb_mix"]
            use = reference.rounding_use(streams, reference.post(*old), reference.post_slack(*old))
            findings.add("residual_out", use, 1.0)
            return streams
        if self.form.broadcast:
            streams = inputs["x"][:, None].expand(-1, 4, -1)
            findings.add("residual_out", (outputs["residual_out"].double() - streams.double()).abs(), 0.0)
            return streams
        return inputs["residual"]

    def _compare_pre(
        self, problem: Problem, inputs: Tensors, outputs: Tensors, streams: torch.Tensor, findings: _Findings
    ) -> None:
        projected = inputs["x"][:, None] if self.form.broadcast else streams
        mixes = reference.coefficients(projected, inputs["fn"], inputs["scale"], inputs["base"], problem)
        findings.add("next_post_mix", (outputs["next_post_mix"] - mixes.post).abs(), COEFFICIENT_BOUND)
        findings.add("next_comb_mix", (outputs["next_comb_mix"] - mixes.comb).abs(), COEFFICIENT_BOUND)
        carried = inputs["pre_mix"] if problem.carried else None
        layer_input = reference.layer_input_use(
            outputs["layer_input"],
            streams,
            carried if problem.delayed else mixes.pre,
            inputs["norm_weight"] if problem.norm else None,
            problem.norm_eps,
            pre_slack=0.0 if problem.delayed else OWN_PRE_SLACK,
            squares_rounded=problem.delayed,
        )
        findings.add("layer_input", layer_input, 1.0)
        if "next_pre_mix" in outputs:
            findings.add("next_pre_mix", (outputs["next_pre_mix"] - mixes.pre).abs(), COEFFICIENT_BOUND)


class CollapseSeam(FormSeam):
    """A weighted sum of the streams: by gates that are projected from them, or by the carried pre-mix."""

    def _compare(self, problem: Problem, inputs: Tensors, outputs: Tensors, findings: _Findings) -> None:
        streams = inputs["residual"]
        if self.form.weights is None:
            weights, slack = inputs["pre_mix"], 0.0
        else:
            weights = reference.gates(streams, inputs["fn"], inputs["scale"], inputs["base"], problem)
            slack = OWN_PRE_SLACK
        use = reference.layer_input_use(
            outputs["collapsed"], streams, weights, None, problem.norm_eps, pre_slack=slack
        )
        findings.add("collapsed", use, 1.0)
