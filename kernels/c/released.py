"""The arm `released` on the C backend: the layer input first, the coefficients in later launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mhctune.kernels.c.arms import POST_BLOCK_H, Unfused, weights_of
from mhctune.kernels.c.one_pass import bits
from mhctune.kernels.seam import Launch, Problem, Tensors, Variant
from mhctune.kernels.space import Config


class Released(Unfused):
    """Post, collapse and norm of a token's row; projection of the stored streams; coefficients.

    The layer input needs the carried pre-mix alone, so that the first launch completes it. For seams that
    delay their pre block.
    """

    name = "released"
    sources = (*Unfused.sources, "c/released.py", "c/post_norm.py", "c/coefficients.py")

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the kernel that releases the layer input, the projection and the coefficients."""
        flags = {"write_aux": 1} if problem.aux else {}
        release = Variant.of(
            "post_norm", self.target, hidden_size=problem.hidden_size, block_h=POST_BLOCK_H,
            carried=int(problem.carried), norm=int(problem.norm), **flags,
        )  # fmt: skip
        coefficients = Variant.of(
            "coefficients", self.target, hidden_size=problem.hidden_size,
            sinkhorn_iters=problem.sinkhorn_iters,
        )  # fmt: skip
        return release, self._tiled("projection", problem, config), coefficients

    def releases(self, problem: Problem, config: Config) -> Mapping[str, int]:
        """Return what the first launch completes: the streams, their mean and the layer input."""
        return dict.fromkeys(("residual_out", "layer_input", *(("aux",) if problem.aux else ())), 1)

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        """Return the launch."""
        release, projection, coefficients = kernels

        def launch(inputs: Tensors, buffers: Tensors) -> None:
            post_mix, streams, layer_input = (
                inputs["post_mix"], bits(buffers["residual_out"]), bits(buffers["layer_input"])
            )  # fmt: skip
            release(
                bits(inputs["x"]), bits(inputs["residual"]), post_mix, inputs["comb_mix"],
                inputs.get("pre_mix", post_mix), bits(inputs["norm_weight"]), streams, layer_input,
                bits(buffers["aux"]) if problem.aux else layer_input, problem.norm_eps,
            )  # fmt: skip
            projection(streams, weights_of(inputs), buffers["mul"], buffers["sqrsum"])
            coefficients(
                buffers["mul"], buffers["sqrsum"], inputs["scale"], inputs["base"], buffers["next_post_mix"],
                buffers["next_comb_mix"], buffers["next_pre_mix"], problem.rms_eps, problem.hc_pre_eps,
                problem.sinkhorn_eps, problem.post_mult,
            )  # fmt: skip

        return launch
