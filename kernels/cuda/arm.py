"""What the CUDA arms of `post_pre_delayed` share: tunables, rules and the epilogue."""

from __future__ import annotations

from collections.abc import Callable

from mhctune.kernels.post_pre_arm import MIX_SIZE, PostPreArm
from mhctune.kernels.seam import Problem, Tensors, Variant
from mhctune.kernels.space import Config, Constraint, Tunable

N_SPLITS = Tunable(
    "n_splits", (1, 2, 4, 5, 7, 8, 10, 14, 16, 20, 28, 32, 40, 64, 80, 160), "ranges that are summed apart"
)
EPILOGUE_THR = Tunable(
    "epilogue_thr", (128, 160, 224, 256, 320, 448, 512, 640, 896), "threads that collapse a token"
)
COLLAPSE = Tunable(
    "collapse", (0, 1), "0: the epilogue collapses the streams it reads again; 1: who writes the streams does"
)
TILE = ("tile_n", "n_splits", "n_thr", "vec", "block_m")


def epilogue_rules(problem: Problem) -> tuple[Constraint, ...]:
    """Return the rules of the epilogue's own tunables."""
    hidden = problem.hidden_size
    return (
        Constraint(
            f"hidden {hidden} is not a multiple of 8 x epilogue_thr {{epilogue_thr}}, or that is no "
            "multiple of 32 up to 960 (two warps of 1024 threads are the coefficients')",
            lambda c: (
                c["epilogue_thr"] % 32 == 0
                and 0 < c["epilogue_thr"] <= 960
                and hidden % (8 * c["epilogue_thr"]) == 0
            ),
        ),
        Constraint(
            "collapse {collapse} must be 0 or 1, and 0 without a carried pre-mix: stream 0 is taken then",
            lambda c: 0 <= c["collapse"] <= int(problem.carried),
        ),
    )


def tile_rules(size: int, what: str) -> tuple[Constraint, ...]:
    """Return the rules of programs that own `block_m` tokens, `tile_n` columns and a range of `size`."""
    return (
        Constraint(
            f"{MIX_SIZE} columns are not a multiple of tile_n {{tile_n}}: the last columns would be dropped",
            lambda c: c["tile_n"] > 0 and MIX_SIZE % c["tile_n"] == 0,
        ),
        Constraint(
            f"{what} {size} is not a multiple of n_splits {{n_splits}} x n_thr {{n_thr}} x vec {{vec}}: "
            "a slice of k would be dropped",
            lambda c: min(c["n_splits"], c["n_thr"], c["vec"]) > 0
            and size % (c["n_splits"] * c["n_thr"] * c["vec"]) == 0,
        ),
        Constraint(
            "n_thr {n_thr} must be 32 to 1024 in whole warps",
            lambda c: 32 <= c["n_thr"] <= 1024 and c["n_thr"] % 32 == 0,
        ),
        Constraint(
            "vec {vec} must be 1, 2, 4 or 8: 8 elements are one 16-byte load of bf16, two of fp32 weights",
            lambda c: c["vec"] in (1, 2, 4, 8),
        ),
        Constraint("block_m {block_m} must be positive", lambda c: c["block_m"] > 0),
    )  # fmt: skip


class CudaArm(PostPreArm):
    """What the CUDA arms share: the epilogue."""

    target = "cuda"
    _shared_sources = (
        "post_pre_arm.py", "cuda/arm.py", "cuda/post.py", "cuda/reduction.py", "cuda/epilogue.py",
    )  # fmt: skip

    def _epilogue(self, problem: Problem, config: Config) -> Variant:
        return Variant.of(
            "epilogue", self.target, hidden_size=problem.hidden_size, n_splits=config["n_splits"],
            sinkhorn_iters=problem.sinkhorn_iters, carried=int(problem.carried), norm=int(problem.norm),
            collapsed=config["collapse"], n_thr=config["epilogue_thr"], vec=8,
        )  # fmt: skip

    def _tiled(self, kernel: str, problem: Problem, config: Config, *names: str) -> Variant:
        params = {name: config[name] for name in names}
        return Variant.of(kernel, self.target, hidden_size=problem.hidden_size, **params)

    @staticmethod
    def _run_epilogue(
        kernel: Callable[..., None], problem: Problem, inputs: Tensors, buffers: Tensors
    ) -> None:
        kernel(
            buffers["mul"], buffers["sqrsum"], buffers["residual_out"], inputs["pre_mix"],
            inputs["scale"], inputs["base"], inputs["norm_weight"],
            buffers["next_post_mix"], buffers["next_comb_mix"], buffers["layer_input"],
            buffers["next_pre_mix"],
            problem.rms_eps, problem.hc_pre_eps, problem.sinkhorn_eps, problem.post_mult, problem.norm_eps,
        )  # fmt: skip
