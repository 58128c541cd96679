"""The gate: has a latency changed, and is that more than the noise and more than is tolerated?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mhctune.autotuner.check import Verdict
from mhctune.autotuner.stats import pairs_needed
from mhctune.autotuner.words import counted, percent

ALPHA = 0.01
"""Chance that a gate run which compares equal things calls any of them regressed; shared by its
comparisons (Bonferroni)."""

ROUNDS = 60
"""A sample takes 0.2 ms on a GPU, so there is no need to be sparing. Drawn from an H200's recorded rounds,
with 30 of its sweep, ten comparisons and a tolerance of 3 % (`benchmarks/gate.py`): 5 % slower at one is
found in 1,000 of 1,000 runs, 1 % at all ten raised in 9. With 15 rounds of each it is 899 and 30."""


@dataclass(frozen=True, slots=True)
class Change:
    """A relative change of a latency and how surely it has a direction.

    Attributes:
        point: Median ratio less 1; 0.05 is 5 % slower.
        slower_p: Chance of so much evidence for `slower` where nothing changed; `faster_p` alike.
        smallest_p: The smallest chance that so many samples can give: above alpha they can tell nothing.
        n: Pairs, or samples of the smaller side.
    """

    point: float
    slower_p: float
    faster_p: float
    smallest_p: float
    n: int


def paired_change(ratios: Sequence[float]) -> Change:
    """Return what the ratios of paired rounds say, by the sign test (`scipy.stats.binomtest`).

    Both of a round run within the same moments, so that drift cancels. No distribution and no symmetry is
    assumed; a ratio of exactly 1 counts for neither side.
    """
    from scipy.stats import binomtest  # 0.5 s that most commands need not wait for

    slower, faster = sum(r > 1 for r in ratios), sum(r < 1 for r in ratios)
    told = slower + faster
    slower_p, faster_p = (
        float(binomtest(k, told, 0.5, alternative="greater").pvalue) if told else 1.0
        for k in (slower, faster)
    )
    point = statistics.median(ratios) - 1 if ratios else 0.0
    return Change(point, slower_p, faster_p, 0.5 ** len(ratios), len(ratios))


def unpaired_change(now: Sequence[float], then: Sequence[float]) -> Change:
    """Return what two independent sets of samples say, by Mann and Whitney's test.

    It is `scipy.stats.mannwhitneyu`: exact for few samples without ties.

    It assumes that samples of a set are independent. Across time they drift, so give it ratios to something
    that was timed in the same rounds wherever there is such a thing.
    """
    from scipy.stats import mannwhitneyu

    if not now or not then:
        return Change(0.0, 1.0, 1.0, 1.0, 0)
    slower_p, faster_p = (
        float(mannwhitneyu(now, then, alternative=side).pvalue) for side in ("greater", "less")
    )
    # Hodges and Lehmann's: the median of all ratios of one to the other. It has a smaller noise than the
    # ratio of the medians, and belongs to this test.
    point = statistics.median(a / b for a in now for b in then) - 1
    smallest = 1 / math.comb(len(now) + len(then), len(now))
    return Change(point, slower_p, faster_p, smallest, min(len(now), len(then)))


def alpha_of(comparisons: int) -> float:
    """Return what is left of `ALPHA` for each of so many comparisons."""
    return ALPHA / max(1, comparisons)


def rounds_needed(comparisons: int) -> int:
    """Return the fewest paired rounds that can tell a change in one of so many comparisons."""
    return pairs_needed(1 - alpha_of(comparisons))


def rounds_taken(comparisons: int) -> int:
    """Return the rounds that a gate takes where it can."""
    return max(ROUNDS, rounds_needed(comparisons))


def judge(change: Change, tolerance: float, alpha: float) -> Verdict:
    """Return the verdict: regressed and improved are both significant and beyond the tolerance.

    Too few samples to be significant, or beyond the tolerance and not significant, is `cannot_tell`.
    """
    if change.smallest_p >= alpha:
        return Verdict.CANNOT_TELL
    if change.point > tolerance:
        return Verdict.REGRESSED if change.slower_p < alpha else Verdict.CANNOT_TELL
    if change.point < -tolerance and change.faster_p < alpha:
        return Verdict.IMPROVED
    return Verdict.PASSED


def reason(change: Change, tolerance: float, alpha: float) -> str:
    """Return the numbers behind a verdict: how much, how surely, by how many samples."""
    p = min(change.slower_p, change.faster_p)
    if change.smallest_p >= alpha:
        return f"{counted(change.n, 'round')} can show nothing at {alpha:.2g}; measure more"
    pace = f"{percent(abs(change.point))} {'slower' if change.point > 0 else 'faster'}"
    return f"{pace} (p {p:.1g} of {alpha:.2g}, {change.n} rounds; {percent(tolerance)} is tolerated)"
