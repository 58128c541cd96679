"""What the CUDA arms with a projection share: tunables, rules and the epilogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from mhctune.kernels import forms
from mhctune.kernels.forms import Form
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
MIX_LANES = Tunable(
    "mix_lanes", (1, 32), "lanes that compute a token's coefficients: 32 for few tokens, 1 for many"
)
TILE = ("tile_n", "n_splits", "n_thr", "vec", "block_m")


def thread_rule(hidden_size: int) -> Constraint:
    """Return the rule of an epilogue whose `epilogue_thr` threads hold a token, 8 elements each at a time."""
    return Constraint(
        f"hidden {hidden_size} is not a multiple of 8 x epilogue_thr {{epilogue_thr}}, or that is no "
        "multiple of 32 up to 960 (where coefficients are computed beside, two warps of 1024 are theirs)",
        lambda c: (
            c["epilogue_thr"] % 32 == 0
            and 0 < c["epilogue_thr"] <= 960
            and hidden_size % (8 * c["epilogue_thr"]) == 0
        ),
    )


def collapse_rule(problem: Problem) -> Constraint:
    """Return the rule of who collapses."""
    return Constraint(
        "collapse {collapse} must be 0 or 1, and 0 without a carried pre-mix: stream 0 is taken then",
        lambda c: 0 <= c["collapse"] <= int(problem.carried),
    )


def tile_rules(size: int, what: str, columns: int = MIX_SIZE) -> tuple[Constraint, ...]:
    """Return the rules of programs that own `block_m` tokens, `tile_n` columns and a range of `size`."""
    return (
        Constraint(
            f"{columns} columns are not a multiple of tile_n {{tile_n}}: the last columns would be dropped",
            lambda c: c["tile_n"] > 0 and columns % c["tile_n"] == 0,
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
    """What the CUDA arms with a projection share: the flags of their kernels, and the epilogue."""

    target = "cuda"
    writes_aux = True
    _shared_sources = (
        "forms.py", "tensors.py", "post_pre_arm.py", "cuda/arm.py", "cuda/post.py", "cuda/reduction.py",
        "cuda/mixes.py", "cuda/sinkhorn.py", "cuda/row.py", "cuda/collapse.py", "cuda/widen.py",
        "cuda/epilogue.py",
    )  # fmt: skip

    def __init__(self, form: Form = forms.POST_PRE_DELAYED) -> None:
        """Compute the seam of a form."""
        self.form = form

    @property
    def _early(self) -> bool:
        """Whether who writes the streams may collapse them: with a pre-mix that is known by then."""
        return self.form.has_post and "carried" in self.form.free

    @property
    def _epilogue_tunables(self) -> tuple[Tunable, ...]:
        return (EPILOGUE_THR, COLLAPSE) if self._early else (EPILOGUE_THR,)

    def _epilogue_rules(self, problem: Problem) -> tuple[Constraint, ...]:
        threads = thread_rule(problem.hidden_size)
        return (threads, collapse_rule(problem)) if self._early else (threads,)

    def releases(self, problem: Problem, config: Config) -> Mapping[str, int]:
        """Return what the first launch completes: all it writes, where it collapses and nothing is normed."""
        if problem.norm or not config.get("collapse"):
            return {}
        return dict.fromkeys(("residual_out", "layer_input", *(("aux",) if problem.aux else ())), 1)

    def _preferred(self, **config: int) -> Config:
        """Return a config as served without a table, with the epilogue's own tunables."""
        early = {"collapse": 0} if self._early else {}
        return MappingProxyType({**config, "epilogue_thr": 128, **early})

    def _post_flags(self, problem: Problem, config: Config) -> dict[str, int]:
        """Return the flags of who writes the streams."""
        early = {"collapse": config["collapse"]} if self._early else {"collapse": 0}
        return {**early, **({"write_aux": 1} if problem.aux else {})}

    def _projection_flags(self) -> dict[str, int]:
        """Return what is not usual of the projected: columns, streams, and the type of the weights."""
        assert self.form.weights is not None
        flags = {
            "n_columns": 0 if self.columns == MIX_SIZE else self.columns,
            "n_streams": int(self.form.broadcast),
            "bf16_weights": int(self.form.weights.dtype == "bfloat16"),
        }
        return {name: value for name, value in flags.items() if value}

    def _epilogue(self, problem: Problem, config: Config) -> Variant:
        flags = {"broadcast": 1} if self.form.broadcast else {}
        if not problem.delayed:
            flags["delayed"] = 0
        return Variant.of(
            "epilogue", self.target, hidden_size=problem.hidden_size, n_splits=config["n_splits"],
            sinkhorn_iters=problem.sinkhorn_iters, carried=int(problem.carried), norm=int(problem.norm),
            collapsed=config.get("collapse", 0), n_thr=config["epilogue_thr"], vec=8, **flags,
        )  # fmt: skip

    def _tiled(self, kernel: str, problem: Problem, config: Config, *names: str, **flags: int) -> Variant:
        params = {name: config[name] for name in names}
        return Variant.of(kernel, self.target, hidden_size=problem.hidden_size, **params, **flags)

    def _run_epilogue(
        self, kernel: Callable[..., None], problem: Problem, inputs: Tensors, buffers: Tensors
    ) -> None:
        post_mix = buffers["next_post_mix"]
        streams = buffers["residual_out"] if "residual_out" in buffers else inputs["residual"]
        kernel(
            buffers["mul"], buffers["sqrsum"], inputs["x"][:, None] if self.form.broadcast else streams,
            inputs.get("pre_mix", post_mix), inputs["scale"], inputs["base"], inputs["norm_weight"],
            post_mix, buffers["next_comb_mix"], buffers["layer_input"],
            buffers.get("next_pre_mix", post_mix), streams,
            problem.rms_eps, problem.hc_pre_eps, problem.sinkhorn_eps, problem.post_mult, problem.norm_eps,
        )  # fmt: skip
