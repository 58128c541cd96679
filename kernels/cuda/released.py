"""The arm `released` on CUDA: the layer input first, the coefficients in later launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from mhctune.kernels.cuda.arm import EPILOGUE_THR, CudaArm, thread_rule
from mhctune.kernels.cuda.unfused import UnfusedMma
from mhctune.kernels.seam import Launch, Problem, Region, Tensors, Variant
from mhctune.kernels.space import Config, Constraint, Tunable


class Released(UnfusedMma):
    """Post, collapse and norm of a token's row; projection of the stored streams; coefficients.

    The layer input needs the carried pre-mix alone, so that the first launch completes it, and the sublayer
    may begin. For seams that delay their pre block.
    """

    name = "released"
    sources = (
        *CudaArm._shared_sources, "cuda/released.py", "cuda/unfused.py", "cuda/post_norm.py",
        "cuda/projection_mma.py", "cuda/terms.py", "cuda/coefficients.py",
    )  # fmt: skip

    @property
    def preferred(self) -> Config:  # type: ignore[override]
        """Served without a table where it is legal."""
        return MappingProxyType({"n_splits": 16, "block_k": 64, "epilogue_thr": 128})

    @property
    def _epilogue_tunables(self) -> tuple[Tunable, ...]:
        return (EPILOGUE_THR,)

    def _epilogue_rules(self, problem: Problem) -> tuple[Constraint, ...]:
        return (thread_rule(problem.hidden_size),)

    def _post_rules(self, problem: Problem) -> tuple[Constraint, ...]:
        return ()

    def _post(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        flags = {"write_aux": 1} if problem.aux else {}
        release = Variant.of(
            "post_norm", self.target, hidden_size=problem.hidden_size, n_thr=config["epilogue_thr"], vec=8,
            carried=int(problem.carried), norm=int(problem.norm), **flags,
        )  # fmt: skip
        return (release,)

    def _post_writes(self, problem: Problem, num_tokens: int) -> Iterator[Region]:
        for token in range(num_tokens):
            yield Region("residual_out", ((token, token + 1), (0, 4), (0, problem.hidden_size)))

    def _epilogue(self, problem: Problem, config: Config) -> Variant:
        return Variant.of(
            "coefficients", self.target, hidden_size=problem.hidden_size, n_splits=config["n_splits"],
            sinkhorn_iters=problem.sinkhorn_iters,
        )  # fmt: skip

    def releases(self, problem: Problem, config: Config) -> Mapping[str, int]:
        """Return what the first launch completes: the streams, their mean and the layer input."""
        return dict.fromkeys(("residual_out", "layer_input", *(("aux",) if problem.aux else ())), 1)

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        """Return the launch."""
        release, projection, coefficients = kernels
        shape = (self.columns, 1, self._k_size(problem))

        def launch(inputs: Tensors, buffers: Tensors) -> None:
            layer_input = buffers["layer_input"]
            release(
                inputs["x"], inputs["residual"], inputs["post_mix"], inputs["comb_mix"],
                inputs.get("pre_mix", inputs["post_mix"]), inputs["norm_weight"], buffers["residual_out"],
                layer_input, buffers.get("aux", layer_input), problem.norm_eps,
            )  # fmt: skip
            streams = buffers["residual_out"].view(-1, shape[-1])
            projection(streams, inputs["fn"].view(shape), buffers["mul"], buffers["sqrsum"])
            coefficients(
                buffers["mul"], buffers["sqrsum"], inputs["scale"], inputs["base"], buffers["next_post_mix"],
                buffers["next_comb_mix"], buffers["next_pre_mix"], problem.rms_eps, problem.hc_pre_eps,
                problem.sinkhorn_eps, problem.post_mult,
            )  # fmt: skip

        return launch
