"""Arms of one kernel on the C backend: the post block and the collapse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType

import torch

from mhctune.kernels.buffers import BufferSpec
from mhctune.kernels.forms import COLLAPSE, POST, Form
from mhctune.kernels.seam import Arm, Launch, Problem, Region, Tensors, Variant
from mhctune.kernels.space import Config, Constraint, SearchSpace, Tunable

_BLOCK_H = Tunable("block_h", (64, 128, 256, 512, 1024), "elements of H a program holds at a time")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a bfloat16 tensor's bits; a view."""
    return tensor.view(torch.uint16)


def post_variant(hidden_size: int, block_h: int, write_aux: bool = False) -> Variant:
    """Return the post kernel."""
    flags = {"write_aux": 1} if write_aux else {}
    return Variant.of("post", "c", hidden_size=hidden_size, block_h=block_h, **flags)


def run_post(
    kernel: Callable[..., None], inputs: Tensors, buffers: Tensors, aux: torch.Tensor | None
) -> None:
    """Launch the post kernel; the slot of an aux that is not asked for gets a tensor of its shape."""
    x = bits(inputs["x"])
    kernel(
        x, bits(inputs["residual"]), inputs["post_mix"], inputs["comb_mix"], bits(buffers["residual_out"]),
        x if aux is None else bits(aux),
    )  # fmt: skip


class _OnePass(Arm):
    """An arm whose one launch writes the outputs block by block, without scratch."""

    name = "one_pass"
    target = "c"
    form: Form
    preferred: Config = MappingProxyType({"block_h": 256})

    def plan(self, problem: Problem, config: Config, max_tokens: int) -> tuple[BufferSpec, ...]:
        """Return the outputs."""
        return self.form.outputs(problem, max_tokens)

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes."""
        for spec in self.form.outputs(problem, num_tokens):
            middle = tuple((0, extent) for extent in spec.shape[1:-1])
            for token in range(num_tokens):
                for first, last in self._blocks(problem.hidden_size, config["block_h"]):
                    yield Region(spec.name, ((token, token + 1), *middle, (first, last)))

    @staticmethod
    def _blocks(hidden_size: int, block_h: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of H that the kernel's blocks cover."""
        for block in range(hidden_size // block_h):
            yield block * block_h, (block + 1) * block_h


class OnePassPost(_OnePass):
    """The post block, with the mean over the new streams where it is asked for."""

    form = POST
    preferred: Config = MappingProxyType({"block_h": 64})
    sources = ("forms.py", "tensors.py", "c/one_pass.py", "c/bf16.py", "c/post.py")

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        hidden = problem.hidden_size
        rule = Constraint(
            f"hidden {hidden} is not a multiple of block_h {{block_h}}: the last elements would be dropped",
            lambda c: c["block_h"] > 0 and hidden % c["block_h"] == 0,
        )
        return SearchSpace(self.name, (_BLOCK_H,), (rule,))

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the post kernel."""
        return (post_variant(problem.hidden_size, config["block_h"], problem.aux),)

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        """Return the launch."""
        (post,) = kernels

        def launch(inputs: Tensors, buffers: Tensors) -> None:
            run_post(post, inputs, buffers, buffers.get("aux"))

        return launch


class OnePassCollapse(_OnePass):
    """The collapse with the carried pre-mix, of rows that may lie apart."""

    form = COLLAPSE
    sources = ("forms.py", "tensors.py", "c/one_pass.py", "c/bf16.py", "c/collapse.py")

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem: a last, shorter block takes what is left of H."""
        rule = Constraint("block_h {block_h} must be positive", lambda c: c["block_h"] > 0)
        return SearchSpace(self.name, (_BLOCK_H,), (rule,))

    @staticmethod
    def _blocks(hidden_size: int, block_h: int) -> Iterator[tuple[int, int]]:
        yield from _OnePass._blocks(hidden_size, block_h)
        if hidden_size % block_h:
            yield hidden_size // block_h * block_h, hidden_size

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the collapse kernel."""
        size = {"hidden_size": problem.hidden_size, "block_h": config["block_h"]}
        return (Variant.of("collapse", self.target, **size),)

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        """Return the launch."""
        (collapse,) = kernels
        row = 4 * problem.hidden_size

        def launch(inputs: Tensors, buffers: Tensors) -> None:
            streams = bits(inputs["residual"])
            # Inside the storage: a whole last row would reach past it where rows lie apart.
            extent = (streams.shape[0] - 1) * streams.stride(0) + row
            flat = streams.as_strided((max(extent, 0),), (1,))
            collapse(flat, inputs["pre_mix"], bits(buffers["collapsed"]), streams.stride(0))

        return launch
