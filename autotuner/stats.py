"""Statistics: what paired rounds say about two candidates, and how surely.

One test does all of it, the sign test, whose inversion gives limits of a median: `regret` says why it holds
for paired rounds. Means, variances and t-tests are not used: a few rounds in a hundred are interrupted, and
one of them moves a mean by more than what is looked for. Nor is Wilcoxon's signed-rank test, which would
tell more from as many rounds but asks for ratios that lie symmetrically, which timings do not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from mhctune.autotuner.records import PLACEMENT_ROUNDS, Sample, Trial
from mhctune.kernels.space import Candidate

CONFIDENCE = 0.95
"""Of each limit of a regret."""


class TooFewSamples(ValueError):
    """Too few paired rounds for a limit at the asked confidence."""


@dataclass(frozen=True, slots=True)
class RegretInterval:
    """A regret with a lower and an upper limit, each one-sided, and the number of pairs behind it."""

    point: float
    lower: float
    upper: float
    n: int


def paired_ratios(samples: Sequence[Sample], best: Sequence[Sample]) -> tuple[float, ...]:
    """Return latency / best latency of every (batch, round) that both have, in that order.

    A round that only one of them ran (losers leave early) has no pair and is left out; so is a throttled one.

    Raises:
        ValueError: a latency that is not a positive finite number, or two samples of one round.
    """
    return tuple(_ratios(samples, best).values())


def _ratios(samples: Sequence[Sample], best: Sequence[Sample]) -> dict[tuple[int, int], float]:
    mine, others = _by_round(samples), _by_round(best)
    return {key: mine[key] / others[key] for key in sorted(mine.keys() & others.keys())}


def _independent(values: Mapping[tuple[int, int], float]) -> list[float]:
    """Return, of values by (batch, round), the median of each placement; the values where nobody moved.

    Where buffers lie moves all rounds of a placement alike: these medians are independent and not the rounds.
    """
    if all(round < PLACEMENT_ROUNDS for _, round in values):
        return list(values.values())
    places: dict[tuple[int, int], list[float]] = {}
    for (batch, round), value in values.items():
        places.setdefault((batch, round // PLACEMENT_ROUNDS), []).append(value)
    return [statistics.median(found) for found in places.values()]


def regret(
    samples: Sequence[Sample], best_samples: Sequence[Sample], confidence: float = CONFIDENCE
) -> RegretInterval:
    """Return the regret of `samples` against `best_samples`: the median of the paired ratios - 1.

    Of a pair that was timed in enough placements together (finalists) it is the median over these of each
    one's median ratio, and so are the limits: rounds at the same addresses are no independent evidence.

    The limits are order statistics of the paired ratios: those medians that the one-sided quantile test
    (the sign test when the quantile is the median; `scipy.stats.quantile_test`) does not reject. Each limit
    holds at `confidence`, so the two together hold at 2 `confidence` - 1 (90 % for 95 %).

    The test is valid for paired rounds because both candidates of a round run within the same moments:
    drift and clocks multiply both latencies and cancel in the ratio. It assumes that the ratios of
    different rounds are independent and have one median. It assumes no distribution and no symmetry, so
    the long upper tail of GPU timings does no harm; ties only make it more careful. It is exact for
    any number of pairs, so the smallest number is known: 5 at 95 %. A best that was picked by the same
    samples looks faster than it is, which raises the regret of all others: their upper limits err on the
    safe side, while its own regret is 0 by definition and not by evidence.

    Raises:
        TooFewSamples: no order statistic reaches `confidence` with so few pairs.
        ValueError: see `paired_ratios`; or `confidence` does not lie between 0.5 and 1.
    """
    if not 0.5 <= confidence < 1:
        raise ValueError(f"confidence is {confidence}; it must lie between 0.5 and 1 (0.95 is 95 %)")
    by_round = _ratios(samples, best_samples)
    ratios, placed, needed = list(by_round.values()), _independent(by_round), pairs_needed(confidence)
    if len(ratios) < needed:
        raise TooFewSamples(
            f"{len(ratios)} paired rounds give no limit at {confidence:.4g} confidence; {needed} are needed. "
            "Measure more rounds or lower the confidence."
        )
    return _limits(placed if len(placed) >= needed else ratios, confidence, len(ratios))


def _limits(ratios: Sequence[float], confidence: float, pairs: int) -> RegretInterval:
    ordered, (low, high) = sorted(ratios), _limit_places(len(ratios), confidence)
    return RegretInterval(statistics.median(ratios) - 1, ordered[low] - 1, ordered[high] - 1, pairs)


def steady(samples: Mapping[Candidate, Sequence[Sample]]) -> dict[Candidate, float]:
    """Return the median latency of each candidate without the drift that all of a round share.

    A round's level is the median, over those who ran the most rounds of its batch, of latency / own median in
    that batch; a latency over its round's level has no drift left in it (one step of Tukey's median polish).
    A plain median would not do: who left early was measured at a time of its own, when the machine may have
    been faster. Against the ratio to one other candidate it has the smaller noise. The median of who
    was moved is that of its placements' medians. Throttled samples are left out; a candidate that has no
    others is left out, too.
    """
    sound = {c: [s for s in taken if not s.throttled] for c, taken in samples.items()}
    by_batch: dict[int, dict[Candidate, dict[int, float]]] = {}
    for candidate, taken in sound.items():
        for s in taken:
            by_batch.setdefault(s.batch, {}).setdefault(candidate, {})[s.round] = s.latency_us
    levels: dict[tuple[int, int], float] = {}
    for batch, ran in by_batch.items():
        most = max(map(len, ran.values()))
        shares: dict[int, list[float]] = {}
        for latencies in (found for found in ran.values() if len(found) == most):
            middle = statistics.median(_independent({(batch, r): us for r, us in latencies.items()}))
            for round, latency in latencies.items():
                shares.setdefault(round, []).append(latency / middle)
        levels |= {(batch, round): statistics.median(found) for round, found in shares.items()}
    level = {
        c: {(s.batch, s.round): s.latency_us / levels.get((s.batch, s.round), 1.0) for s in taken}
        for c, taken in sound.items()
    }
    return {c: statistics.median(_independent(taken)) for c, taken in level.items() if taken}


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """What candidates differ by from themselves: limits of the median A/A ratio - 1, and the pairs behind."""

    lower: float
    upper: float
    n: int

    @property
    def width(self) -> float:
        """The largest regret that is none: the farther of the two limits from 0."""
        return max(self.upper, -self.lower, 0.0)


def noise_floor(trials: Sequence[Trial], confidence: float = CONFIDENCE) -> NoiseFloor | None:
    """Return the noise floor of a sweep from the twins in its trials; None with too few pairs for limits.

    A twin has buffers, and a graph, of its own and another place in the round: what keeps its ratio to the
    original away from 1, round after round, is what pairing cannot cancel, and no difference of that size
    says that one candidate is faster. The limits are those of `regret`, of the ratios of all cells together,
    which have one median if the two differ by nothing; of a cell with several placements, of each one's
    median, because a twin lies elsewhere each time. One cell has so few pairs that its limits are wider
    than what it tells apart (1-3 % on an H200, 6-9 % on a CPU); each regret's own allow for that already.
    """
    by_trial = [_ratios(trial.twins, trial.samples) for trial in trials]
    values = [value for ratios in by_trial for value in _independent(ratios)]
    if len(values) < pairs_needed(confidence):
        return None
    found = _limits(values, confidence, sum(map(len, by_trial)))
    return NoiseFloor(found.lower, found.upper, found.n)


def pairs_needed(confidence: float) -> int:
    """Return the fewest pairs n with 0.5ⁿ < 1 - `confidence`.

    0.5ⁿ is the chance that all n ratios lie on one side of their median: only when it is smaller can even
    the largest ratio be a limit.
    """
    # Not ≤: where both sides are equal (confidence 0.9375 and 4 pairs) scipy has an upper limit but no lower.
    return math.floor(-math.log2(1 - confidence)) + 1


@cache
def _limit_places(n: int, confidence: float) -> tuple[int, int]:
    """Return which of `n` ordered values are the lower and the upper limit of their median.

    The places do not depend on the values, and the test takes 1.5 ms: 4 s for 264 options at 10 token counts.
    """
    from scipy.stats import quantile_test  # 0.5 s that most commands need not wait for

    upper = quantile_test(range(n), p=0.5, alternative="less").confidence_interval(confidence).high
    lower = quantile_test(range(n), p=0.5, alternative="greater").confidence_interval(confidence).low
    return int(lower), int(upper)


def _by_round(samples: Sequence[Sample]) -> dict[tuple[int, int], float]:
    latencies: dict[tuple[int, int], float] = {}
    seen: set[tuple[int, int]] = set()
    for sample in samples:
        key = (sample.batch, sample.round)
        if not (math.isfinite(sample.latency_us) and sample.latency_us > 0):
            raise ValueError(
                f"sample of batch {sample.batch}, round {sample.round} is {sample.latency_us} us; a latency "
                "is a positive finite number"
            )
        if key in seen:
            raise ValueError(f"batch {sample.batch}, round {sample.round} holds two samples of one candidate")
        seen.add(key)
        if not sample.throttled:
            latencies[key] = sample.latency_us
    return latencies
