"""Arms of one kernel on CUDA: the post block and the collapse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType

import torch

from mhctune.kernels.buffers import BufferSpec
from mhctune.kernels.forms import COLLAPSE, POST, Form
from mhctune.kernels.seam import Arm, Launch, Problem, Region, Tensors, Variant
from mhctune.kernels.space import Config, Constraint, SearchSpace, Tunable

POST_LOADS = {"n_thr": 128, "vec": 4}
"""The stand-alone post kernel: best of 6, or within 2 %, at 1 to 128 tokens on an H200 (hidden 5120)."""


def post_variant(hidden_size: int, n_thr: int, vec: int, **flags: int) -> Variant:
    """Return the post kernel."""
    return Variant.of("post", "cuda", hidden_size=hidden_size, n_thr=n_thr, vec=vec, **flags)


def run_post(
    kernel: Callable[..., None], inputs: Tensors, buffers: Tensors, layer_input: torch.Tensor
) -> None:
    """Launch the post kernel; the slot of what is not asked for gets a tensor of its shape."""
    kernel(
        inputs["x"], inputs["residual"], inputs["post_mix"], inputs["comb_mix"],
        inputs.get("pre_mix", inputs["post_mix"]), buffers["residual_out"], layer_input,
        buffers.get("aux", layer_input),
    )  # fmt: skip


class _OnePass(Arm):
    """An arm whose one launch writes the outputs block by block, without scratch."""

    name = "one_pass"
    target = "cuda"
    form: Form
    preferred: Config = MappingProxyType(POST_LOADS)

    def plan(self, problem: Problem, config: Config, max_tokens: int) -> tuple[BufferSpec, ...]:
        """Return the outputs."""
        return self.form.outputs(problem, max_tokens)

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        hidden = problem.hidden_size
        return SearchSpace(
            self.name,
            (
                Tunable("n_thr", (64, 128, 256, 512), "threads of a program"),
                Tunable("vec", (1, 2, 4, 8), "neighbouring elements a thread loads at once"),
            ),
            (
                Constraint(
                    "n_thr {n_thr} must be 32 to 1024 in whole warps",
                    lambda c: 32 <= c["n_thr"] <= 1024 and c["n_thr"] % 32 == 0,
                ),
                Constraint(
                    f"vec {{vec}} must be 1, 2, 4 or 8 (16 bytes at most) and divide hidden {hidden}",
                    lambda c: c["vec"] in (1, 2, 4, 8) and hidden % c["vec"] == 0,
                ),
            ),
        )

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes; the last one of a token ends with H."""
        width = config["n_thr"] * config["vec"]
        for spec in self.form.outputs(problem, num_tokens):
            middle = tuple((0, extent) for extent in spec.shape[1:-1])
            for token in range(num_tokens):
                for first in range(0, problem.hidden_size, width):
                    last = min(first + width, problem.hidden_size)
                    yield Region(spec.name, ((token, token + 1), *middle, (first, last)))


class OnePassPost(_OnePass):
    """The post block, with the mean over the new streams where it is asked for."""

    form = POST
    sources = ("forms.py", "tensors.py", "cuda/one_pass.py", "cuda/post.py", "cuda/widen.py")

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the post kernel."""
        flags = {"write_aux": 1} if problem.aux else {}
        return (post_variant(problem.hidden_size, config["n_thr"], config["vec"], collapse=0, **flags),)

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        """Return the launch."""
        (post,) = kernels

        def launch(inputs: Tensors, buffers: Tensors) -> None:
            run_post(post, inputs, buffers, inputs["x"])

        return launch


class OnePassCollapse(_OnePass):
    """The collapse with the carried pre-mix, of rows that may lie apart."""

    form = COLLAPSE
    sources = (
        "forms.py", "tensors.py", "cuda/one_pass.py", "cuda/collapse.py", "cuda/post.py", "cuda/widen.py",
    )  # fmt: skip

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the collapse kernel."""
        return (Variant.of("collapse", self.target, hidden_size=problem.hidden_size, **config),)

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        """Return the launch.

        Raises:
            ValueError: at a launch, where the rows do not lie a multiple of `vec` elements apart.
        """
        (collapse,) = kernels
        row, vec = 4 * problem.hidden_size, config["vec"]

        def launch(inputs: Tensors, buffers: Tensors) -> None:
            streams = inputs["residual"]
            stride = streams.stride(0)
            if stride % vec:
                raise ValueError(
                    f"collapse: the rows of residual lie {stride} elements apart; the config's loads need a "
                    f"multiple of vec {vec}. Pass rows that do, or serve a table with vec 1"
                )
            # Inside the storage: a whole last row would reach past it where rows lie apart.
            flat = streams.as_strided((max((streams.shape[0] - 1) * stride + row, 0),), (1,))
            collapse(flat, inputs["pre_mix"], buffers["collapsed"], stride)

        return launch
