"""Optional arms: what another project must bring, where it may run, and why it is absent.

DeepGEMM's TF32 projection would be an `unfused` arm, its `mega_mhc` the arm `mega`. The rules are those of
its documented contracts. Neither could be run by this project yet, so neither is offered as an arm: an arm is
offered on an architecture only after a sweep there.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

from mhctune.kernels.seam import Problem

_TILE_K = 64
"""Elements of K of DeepGEMM's tile; a split without a tile is undefined there."""

_MEGA_TOKENS = 2**20


@dataclass(frozen=True, slots=True)
class OptionalArm:
    """An arm that needs another project.

    Attributes:
        name: The arm's name for people.
        module, function: What must be importable.
        majors: Major compute capabilities that it is written for.
        condition: What a caller must do that no rule here can check; empty for nothing.
    """

    name: str
    module: str
    function: str
    majors: tuple[int, ...]
    condition: str = ""

    def absence(self, capability: tuple[int, int] | None) -> str:
        """Return why it is absent on a GPU of this compute capability (None: no GPU); empty if it is not."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        if capability is None:
            return "needs an NVIDIA GPU"
        if capability[0] not in self.majors:
            wanted = " or ".join(f"{major}.x" for major in self.majors)
            return f"needs compute capability {wanted}, this GPU has {capability[0]}.{capability[1]}"
        try:
            module = importlib.import_module(self.module)
        except (ImportError, OSError, RuntimeError) as error:  # what a missing library or driver raises
            return f"{self.module} does not import: {error}"
        if not hasattr(module, self.function):
            return f"this {self.module} has no {self.function}"
        return ""


PROJECTION = OptionalArm("unfused (DeepGEMM projection)", "deep_gemm", "tf32_hc_prenorm_gemm", (9, 10))
MEGA = OptionalArm(
    "mega (DeepGEMM mega_mhc)", "deep_gemm", "mega_mhc", (10,),
    "the first call on a stream allocates its barriers: make it outside any capture",
)  # fmt: skip
OPTIONAL_ARMS = (PROJECTION, MEGA)


def projection_refusals(problem: Problem, n_splits: int) -> tuple[str, ...]:
    """Return why DeepGEMM's projection may not be called for a problem and a split count; empty if it may."""
    k_size = problem.hc_mult * problem.hidden_size
    found = []
    if k_size % _TILE_K:
        found.append(f"K {k_size} is not a multiple of {_TILE_K}")
    if not 1 <= n_splits <= k_size // _TILE_K:
        found.append(f"n_splits {n_splits} is not 1 to {k_size // _TILE_K}, the tiles of K {k_size}")
    return tuple(found)


def mega_refusals(problem: Problem, num_tokens: int) -> tuple[str, ...]:
    """Return why DeepGEMM's mega_mhc may not be called for a problem and a token count; empty if it may."""
    rules = (
        (problem.hidden_size % 1024 == 0, f"hidden {problem.hidden_size} is not a multiple of 1024"),
        (problem.hc_mult == 4, f"hc_mult {problem.hc_mult} is not 4"),
        (problem.delayed and problem.carried, "it collapses with a carried pre-mix alone"),
        (problem.norm, "it always applies RMSNorm"),
        (not problem.aux, "it does not write aux"),
        (num_tokens <= _MEGA_TOKENS, f"{num_tokens} tokens are more than {_MEGA_TOKENS}"),
    )
    return tuple(reason for holds, reason in rules if not holds)
