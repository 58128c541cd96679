"""As shipped: what a runtime serves today, as candidates of ours, and beside what was tuned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mhctune.configs.loader import baseline_of
from mhctune.kernels.seam import Problem, Seam
from mhctune.kernels.space import Candidate

_AS_SHIPPED = {"vec": 1}
"""The shipped fused kernel walks H in steps of its threads, an element each."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """What a baseline serves at a token count, as a candidate, or why it is none."""

    baseline: str
    candidate: Candidate | None
    reason: str = ""


def streams_of(seam: str) -> int:
    """Return how many streams a seam projects: one where an embedding enters, all four elsewhere."""
    return 1 if seam == "pre_broadcast" else 4


def shipped(seam: Seam, problem: Problem, target: str, sm_count: int, num_tokens: int) -> Shipped | None:
    """Return what a runtime serves for a seam on a GPU with `sm_count` SMs; None without a baseline.

    The shipped constants in our kernels: what they leave open (threads of the epilogue, tokens of a program)
    stays as our arm prefers it. The shipped unfused route projects on tensor cores, and so does ours where
    the seam has such an arm.
    """
    baseline = baseline_of(seam.name)
    if baseline is None or target != "cuda":
        return None
    choice = baseline.choice(num_tokens, problem.hidden_size, sm_count, streams_of(seam.name))
    arms = {arm.name: arm for arm in seam.arms(target)}
    arm = arms.get(f"{choice.arm}_mma", arms[choice.arm]) if choice.arm == "unfused" else arms[choice.arm]
    fixed = choice.config if choice.arm == "unfused" else {**_AS_SHIPPED, **choice.config}
    config = {**arm.preferred, **fixed}
    wrong = arm.space(problem).refusals(config)
    if wrong:
        return Shipped(baseline.name, None, f"{arm.name}: {wrong[0]}")
    return Shipped(baseline.name, Candidate.of(arm.name, config))


def shipped_candidates(
    seam: Seam, problem: Problem, target: str, sm_count: int, token_counts: Iterable[int]
) -> tuple[Candidate, ...]:
    """Return the distinct candidates that a runtime serves at some token counts."""
    found = (shipped(seam, problem, target, sm_count, count) for count in token_counts)
    return tuple(dict.fromkeys(each.candidate for each in found if each and each.candidate))
