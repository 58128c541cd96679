"""What every arm of `topk_merge` shares, on every target: buffers and the three steps of a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mhctune.kernels.buffers import BufferSpec, Role, torch_dtype
from mhctune.kernels.seam import Arm, Problem, Region, ScratchLayout, Tensors, Variant
from mhctune.kernels.space import Config


def outputs_of(problem: Problem, max_tokens: int) -> tuple[BufferSpec, ...]:
    """Return what a rank sends and the global top-k ids."""
    return (
        BufferSpec("packed", (max_tokens, 2, problem.top_k), "int32"),
        BufferSpec("ids", (max_tokens, problem.top_k), "int32"),
    )


@dataclass(frozen=True)
class TopkLaunch:
    """The steps of one config; each allocates nothing and can be captured. As a whole it is a `Launch`."""

    ranks: int
    kernels: tuple[Callable[..., None], Callable[..., None], Callable[..., None]]
    scratch: tuple[str, ...]
    scalars: tuple[int, ...] = ()
    """What the merge takes after its tensors."""

    def pack(self, local_ids: torch.Tensor, scores: torch.Tensor, packed: torch.Tensor, rank: int) -> None:
        """Write what a rank sends [T, 2, K] from its local ids and scores [T, K]."""
        self.kernels[0](local_ids, scores.view(torch.int32), packed, rank, self.ranks)

    def merge(self, gathered: torch.Tensor, buffers: Tensors) -> None:
        """Write `ids` [T, K] of what all ranks sent [W, T, 2, K]."""
        self.kernels[1](gathered, *(buffers[name] for name in self.scratch), buffers["ids"], *self.scalars)

    def convert(self, local_ids: torch.Tensor, ids: torch.Tensor, rank: int) -> None:
        """Write the global ids of a rank's local ones [T, K]; in place is allowed."""
        self.kernels[2](local_ids, ids, rank, self.ranks)

    def __call__(self, inputs: Tensors, buffers: Tensors) -> None:
        """Pack as the last rank and merge what all ranks sent: everything but the all-gather."""
        self.pack(inputs["local_ids"], inputs["scores"], buffers["packed"], self.ranks - 1)
        self.merge(inputs["gathered"], buffers)


class TopkArm(Arm):
    """An arm whose kernels pack, merge and convert; its result does not depend on arm, config or batch."""

    rounding = "exact"

    def scratch_specs(self, problem: Problem, config: Config, max_tokens: int) -> tuple[BufferSpec, ...]:
        """Return the scratch of the merge, in the order in which its kernel takes it."""
        raise NotImplementedError

    def merge_variant(self, problem: Problem, config: Config) -> Variant:
        """Return the kernel that merges."""
        raise NotImplementedError

    def entry_params(self, problem: Problem) -> dict[str, int]:
        """Return the parameters of packing and converting: K and W only bound their loops."""
        return {"interleave": problem.interleave}

    def scalars(self, problem: Problem, config: Config) -> tuple[int, ...]:
        """Return what the merge takes after its tensors."""
        return ()

    def plan(self, problem: Problem, config: Config, max_tokens: int) -> tuple[BufferSpec, ...]:
        """Return what a rank sends, the ids, and the merge's scratch; no arm keeps memory of its own."""
        return *outputs_of(problem, max_tokens), *self.scratch_specs(problem, config, max_tokens)

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the kernels that pack, merge and convert; who does not merge needs the last alone."""
        entries = self.entry_params(problem)
        return (
            Variant.of("topk_pack", self.target, **entries),
            self.merge_variant(problem, config),
            Variant.of("topk_convert", self.target, **entries),
        )

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes: a row of every buffer."""
        for spec in self.plan(problem, config, num_tokens):
            rest = tuple((0, extent) for extent in spec.shape[1:])
            for token in range(num_tokens):
                yield Region(spec.name, ((token, token + 1), *rest))

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> TopkLaunch:
        """Return the launch."""
        pack, merge, convert = kernels
        scratch = tuple(spec.name for spec in self.scratch_specs(problem, config, 1))
        return TopkLaunch(problem.ranks, (pack, merge, convert), scratch, self.scalars(problem, config))

    def scratch_layout(self, problem: Problem, config: Config, num_tokens: int) -> ScratchLayout:
        """Return nothing: its scratch is of integers and is taken by name, not from a float32 tensor."""
        return ScratchLayout(0, ())

    def scratch_words(self, problem: Problem, config: Config, rows: int) -> int:
        """Return the int64 elements that hold the scratch of so many rows, each buffer on a 256-byte line."""
        return sum(_words(spec) for spec in self.scratch_specs(problem, config, rows))

    def scratch_views(self, problem: Problem, config: Config, rows: int, flat: torch.Tensor) -> Tensors:
        """Cut a flat int64 tensor up into the scratch of so many rows; allocates nothing."""
        found, first = dict[str, torch.Tensor](), 0
        for spec in self.scratch_specs(problem, config, rows):
            found[spec.name] = spec.view(flat[first:].view(torch_dtype(spec.dtype)), rows)
            first += _words(spec)
        return found


def _words(spec: BufferSpec) -> int:
    return -(-spec.bytes // 256) * 32


def scratch(name: str, width: int, dtype: str, max_tokens: int) -> BufferSpec:
    """Return scratch of `width` elements a row."""
    return BufferSpec(name, (max_tokens, width), dtype, role=Role.SCRATCH)
