"""What the target table compares with: the described structure in our kernels, and its own best split.

What ships is a fused band to 32 tokens, and above it `post`, a projection whose splits follow a rule, and an
epilogue that collapses. It fixes the splits and the fused tile; of what it leaves open for our kernels
some is tried (`OPEN`), so that a reproduction is not much slower than it need be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mhctune.configs.baseline import BaselineChoice
from mhctune.configs.loader import baseline_of
from mhctune.kernels.seam import Arm, Problem, Seam
from mhctune.kernels.space import Candidate

_EPILOGUE = (256, 320, 448)
OPEN: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "fused": {"vec": (1, 4), "epilogue_thr": (128, *_EPILOGUE)},
    "unfused": {"vec": (4,)},
    "unfused_mma": {"block_k": (256,), "epilogue_thr": _EPILOGUE},
}
"""By arm the values that are tried of what the description leaves open, not all that are legal."""

SPLITS = (2, 64)
"""Splits beside those of the rule: as shipped 64 were best, from 512 tokens on 16, 4 and 2."""

_OWN: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "unfused": {"vec": (4,)},
    "unfused_mma": {"block_k": (64, 256)},
}


@dataclass(frozen=True, slots=True)
class Described:
    """What a runtime launches at a token count, as candidates of ours; `note` says what had to differ."""

    choice: BaselineChoice
    candidates: tuple[Candidate, ...]
    note: str = ""


def described(seam: Seam, problem: Problem, target: str, sm_count: int, num_tokens: int) -> Described:
    """Return the reproductions of what ships for a seam at a token count on a GPU with `sm_count` SMs.

    A split count that none of our kernels can take gives way to the nearest that one can.

    Raises:
        ValueError: nothing ships for the seam, or no config of ours comes near.
    """
    baseline = baseline_of(seam.name)
    if baseline is None:
        raise ValueError(f"seam {seam.name}: nothing with tunables is shipped")
    choice = baseline.choice(num_tokens, problem.hidden_size, sm_count)
    names = ("fused",) if choice.arm == "fused" else ("unfused", "unfused_mma")
    arms = [arm for arm in seam.arms(target) if arm.name in names]
    asked = choice.config["n_splits"]
    for splits in _nearest(asked):
        fixed = {**choice.config, "n_splits": splits}
        found = tuple(c for arm in arms for c in _legal(arm, problem, fixed, OPEN[arm.name]))
        if found:
            note = "" if splits == asked else f"{asked} splits are illegal here: {splits} taken"
            return Described(choice, found, note)
    raise ValueError(f"no legal config of {', '.join(names)} is near {choice} at {problem}")


def own_splits(seam: Seam, problem: Problem, target: str) -> tuple[Candidate, ...]:
    """Return the unfused route with other splits than the rule's."""
    return tuple(
        candidate
        for arm in seam.arms(target)
        if arm.name in _OWN
        for splits in SPLITS
        for candidate in _legal(arm, problem, {"n_splits": splits}, _OWN[arm.name])
    )


def is_unfused(candidate: Candidate) -> bool:
    """Whether it has the structure of the shipped unfused route: an epilogue that collapses."""
    return candidate.arm in _OWN and not candidate.config.get("collapse", 0)


def baselines(
    seam: Seam, problem: Problem, target: str, sm_count: int, token_counts: Iterable[int]
) -> tuple[Candidate, ...]:
    """Return all candidates that the table compares with, each once."""
    found = [
        c for n in token_counts for c in described(seam, problem, target, sm_count, n).candidates
    ]  # fmt: skip
    return tuple(dict.fromkeys((*found, *own_splits(seam, problem, target))))


def _nearest(asked: int, most: int = 256) -> list[int]:
    """Return split counts, the asked one first, then by their ratio to it; of equal ones the smaller."""
    return sorted(range(1, most + 1), key=lambda n: (abs(math.log(n / asked)), n))


def _legal(
    arm: Arm, problem: Problem, fixed: Mapping[str, int], open_: Mapping[str, tuple[int, ...]]
) -> Iterator[Candidate]:
    """Yield an arm's legal configs with what is fixed of its tunables, for every value of the open ones."""
    known = {name: value for name, value in fixed.items() if name in arm.preferred}
    free = {name: values for name, values in open_.items() if name in arm.preferred and name not in known}
    space = arm.space(problem)
    for values in itertools.product(*free.values()):
        config = {**arm.preferred, **dict(zip(free, values, strict=True)), **known}
        if not space.refusals(config):
            yield Candidate.of(arm.name, config)
