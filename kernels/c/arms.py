"""The arms of every seam on the C backend: their spaces, buffers and launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType

import torch

from mhctune.kernels import forms
from mhctune.kernels.c import tiles
from mhctune.kernels.c.one_pass import OnePassCollapse, OnePassPost, bits, post_variant, run_post
from mhctune.kernels.forms import Form
from mhctune.kernels.post_pre_arm import PostPreArm
from mhctune.kernels.seam import Arm, Launch, Problem, Region, Tensors, Variant
from mhctune.kernels.space import Config, Constraint, SearchSpace

POST_BLOCK_H = 256
"""Block of the stand-alone post kernel; 256 and 1024 were equal within noise at T = 1 to 64 (hidden 5120)."""


class _Projecting(PostPreArm):
    """What the arms with a projection share: tunables, the projection's flags and the epilogue."""

    target = "c"
    writes_aux = True
    preferred: Config = MappingProxyType({"tile_n": 24, "n_splits": 1, "block_h": 64, "block_m": 4})
    _shared_sources = (
        "forms.py", "tensors.py", "post_pre_arm.py", "c/arms.py", "c/tiles.py", "c/one_pass.py", "c/bf16.py",
        "c/lanes.py", "c/post.py", "c/projection.py", "c/epilogue.py",
    )  # fmt: skip

    def __init__(self, form: Form = forms.POST_PRE_DELAYED) -> None:
        """Compute the seam of a form."""
        self.form = form

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        rules = tiles.constraints(problem.hidden_size, self.columns)
        return SearchSpace(self.name, tiles.tunables(self.columns), rules)

    def _tiled(self, kernel: str, problem: Problem, config: Config) -> Variant:
        flags = {
            "n_columns": 0 if self.columns == 24 else self.columns,
            "n_streams": int(self.form.broadcast),
            "bf16_weights": int(self.form.weights is not None and self.form.weights.dtype == "bfloat16"),
        }
        given = {name: value for name, value in flags.items() if value}
        return Variant.of(kernel, self.target, hidden_size=problem.hidden_size, **config, **given)

    def _tiles(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        return self._partials(config["n_splits"], config["block_m"], config["tile_n"], num_tokens)

    def _epilogue(self, problem: Problem) -> Variant:
        flags = {
            "broadcast": int(self.form.broadcast),
            "write_aux": int(problem.aux),
        }
        given = {name: value for name, value in flags.items() if value}
        if not problem.delayed:
            given["delayed"] = 0
        return Variant.of(
            "epilogue", self.target, hidden_size=problem.hidden_size, sinkhorn_iters=problem.sinkhorn_iters,
            carried=int(problem.carried), norm=int(problem.norm), **given,
        )  # fmt: skip

    def _run_epilogue(
        self, kernel: Callable[..., None], problem: Problem, inputs: Tensors, buffers: Tensors
    ) -> None:
        post_mix, layer_input = buffers["next_post_mix"], bits(buffers["layer_input"])
        streams = bits(buffers["residual_out"] if "residual_out" in buffers else inputs["residual"])
        projected = bits(inputs["x"])[:, None] if self.form.broadcast else streams
        kernel(
            buffers["mul"], buffers["sqrsum"], projected, inputs.get("pre_mix", post_mix),
            inputs["scale"], inputs["base"], bits(inputs["norm_weight"]),
            post_mix, buffers["next_comb_mix"], layer_input, buffers.get("next_pre_mix", post_mix),
            streams, bits(buffers["aux"]) if problem.aux else layer_input,
            problem.rms_eps, problem.hc_pre_eps, problem.sinkhorn_eps, problem.post_mult, problem.norm_eps,
        )  # fmt: skip


class Fused(_Projecting):
    """Post folded into the projection, then the epilogue: two launches."""

    name = "fused"
    sources = (*_Projecting._shared_sources, "c/post_pre.py")

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the fused kernel and the epilogue."""
        return self._tiled("post_pre", problem, config), self._epilogue(problem)

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes, by the same floor divisions as the kernel."""
        split_h, block_h = problem.hidden_size // config["n_splits"], config["block_h"]
        for split in range(config["n_splits"]):
            for block in range(split_h // block_h):
                first = split * split_h + block * block_h
                yield Region("residual_out", ((0, num_tokens), (0, 4), (first, first + block_h)))
        yield from self._tiles(problem, config, num_tokens)
        yield from self._epilogue_writes(problem, num_tokens)

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        """Return the launch."""
        post_pre, epilogue = kernels

        def launch(inputs: Tensors, buffers: Tensors) -> None:
            post_pre(
                bits(inputs["x"]), bits(inputs["residual"]), inputs["post_mix"], inputs["comb_mix"],
                weights_of(inputs), bits(buffers["residual_out"]), buffers["mul"], buffers["sqrsum"],
            )  # fmt: skip
            self._run_epilogue(epilogue, problem, inputs, buffers)

        return launch


class Unfused(_Projecting):
    """Post where the seam has one, split-k projection of the stored streams, epilogue: a launch each."""

    name = "unfused"
    sources = _Projecting._shared_sources

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the post kernel, the projection and the epilogue."""
        post = (post_variant(problem.hidden_size, POST_BLOCK_H),) if self.form.has_post else ()
        return *post, self._tiled("projection", problem, config), self._epilogue(problem)

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes."""
        for token in range(num_tokens if self.form.has_post else 0):
            for block in range(problem.hidden_size // POST_BLOCK_H):
                columns = (block * POST_BLOCK_H, (block + 1) * POST_BLOCK_H)
                yield Region("residual_out", ((token, token + 1), (0, 4), columns))
        yield from self._tiles(problem, config, num_tokens)
        yield from self._epilogue_writes(problem, num_tokens)

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem; a post kernel's block must divide H as well."""
        space = super().space(problem)
        if not self.form.has_post:
            return space
        rule = Constraint(
            f"hidden {problem.hidden_size} is not a multiple of the post kernel's block of {POST_BLOCK_H}",
            lambda c: problem.hidden_size % POST_BLOCK_H == 0,
        )
        return SearchSpace(space.arm, space.tunables, (*space.constraints, rule))

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        """Return the launch."""
        *post, projection, epilogue = kernels

        def launch(inputs: Tensors, buffers: Tensors) -> None:
            for kernel in post:
                run_post(kernel, inputs, buffers, None)
            projection(
                self._projected(inputs, buffers), weights_of(inputs), buffers["mul"], buffers["sqrsum"]
            )
            self._run_epilogue(epilogue, problem, inputs, buffers)

        return launch

    def _projected(self, inputs: Tensors, buffers: Tensors) -> torch.Tensor:
        """Return the bits of what is projected: the streams, or the embedding as one of them."""
        if self.form.broadcast:
            return bits(inputs["x"])[:, None]
        return bits(buffers["residual_out"] if self.form.has_post else inputs["residual"])


class UnfusedHead(Unfused):
    """Projection to four gates, then the streams' weighted sum: two launches."""

    preferred: Config = MappingProxyType({"tile_n": 4, "n_splits": 1, "block_h": 64, "block_m": 4})
    sources = (*_Projecting._shared_sources, "c/head.py")

    def _epilogue(self, problem: Problem) -> Variant:
        return Variant.of("head", self.target, hidden_size=problem.hidden_size)

    def _run_epilogue(
        self, kernel: Callable[..., None], problem: Problem, inputs: Tensors, buffers: Tensors
    ) -> None:
        kernel(
            buffers["mul"], buffers["sqrsum"], bits(inputs["residual"]), inputs["scale"], inputs["base"],
            bits(buffers["collapsed"]), problem.rms_eps, problem.hc_pre_eps,
        )  # fmt: skip


def weights_of(inputs: Tensors) -> torch.Tensor:
    """Return the projection's weights as the kernels take them."""
    fn = inputs["fn"]
    return bits(fn) if fn.dtype == torch.bfloat16 else fn


ARMS: dict[str, tuple[Arm, ...]] = {
    **{form.name: (Fused(form), Unfused(form))
       for form in (forms.POST_PRE_DELAYED, forms.POST_PRE, forms.POST_PRE_BF16)},
    **{form.name: (Unfused(form),) for form in (forms.PRE_DELAYED, forms.PRE, forms.PRE_BROADCAST)},
    forms.POST.name: (OnePassPost(),),
    forms.HC_HEAD.name: (UnfusedHead(forms.HC_HEAD),),
    forms.COLLAPSE.name: (OnePassCollapse(),),
}  # fmt: skip
