"""The field: who takes part in the next round of a batch, from the samples of that batch alone.

Nothing else enters a decision (no clock, no order of events), so that a race that was killed and resumed
decides as one that was not. Three tests decide, each a sign test on the ratios of paired rounds, as
`mhctune.autotuner.stats.regret` explains it:

- Leaving. At each of k looks a candidate leaves whose lower limit against the best so far is above the
  regret bound: it can neither win nor be let into a band. Each limit holds at 1 - 0.05 / k, so that, looks
  together, a candidate that is within the bound leaves with a chance of at most 5 % (Bonferroni's
  inequality, which asks for no independence of the looks). It is compared with a best that the same samples
  picked, which looks faster than it is: `benchmarks/races.py` counts what that does.
- Staying for the confirmation: whoever is not surely slower than the best by more than `PLACEMENT` (lower
  limit at 95 %), in further rounds that had no part in picking it, at other addresses.
- The twin of the best, timed in those rounds: the A/A pairs of the noise floor.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import Sample
from mhctune.autotuner.stats import CONFIDENCE, TooFewSamples, regret
from mhctune.kernels.space import Candidate

PLACEMENT = 0.03
"""A difference that where buffers lie can make or hide: the rounds of one placement tell nobody nearer to the
best from it. Two H200 sweeps ordered candidates differently within 2.2 %. At 3 % 3.6 of 290 candidates a cell
are confirmed there, at 0 % 1.4."""

Batch = Mapping[Candidate, Sequence[Sample]]
"""The samples of one batch by candidate; of those who failed since, too."""


@dataclass(frozen=True, slots=True)
class Field:
    """Who takes part in the next round.

    Attributes:
        racing: In the order in which they were given; empty when the batch is over.
        done: Who took part to the end of its race: losers, who is told from the best, and finalists.
        twin: Whose twin is timed beside them, in the confirmation.
        placement: Where they are timed: they move whenever it changes.
    """

    racing: tuple[Candidate, ...]
    done: frozenset[Candidate] = frozenset()
    twin: Candidate | None = None
    placement: int = 0


def counted(marks: Mapping[int, bool], repeats: int) -> list[int]:
    """Return the rounds that count, given which were throttled: the first `repeats` of those do not.

    The next round takes the place of one that does not count, and its samples are kept all the same.
    """
    rounds, skipped = [], 0
    for round, throttled in sorted(marks.items()):
        if throttled and skipped < repeats:
            skipped += 1
        else:
            rounds.append(round)
    return rounds


def marks_of(samples: Iterable[Sample]) -> dict[int, bool]:
    """Return, by round, whether it was throttled."""
    return {sample.round: sample.throttled for sample in samples}


def boundaries(protocol: Protocol) -> tuple[int, ...]:
    """Return after how many counted rounds the field changes."""
    places = [protocol.placement(confirmed) for confirmed in range(protocol.confirmation)]
    moves = (protocol.samples + n for n in range(1, len(places)) if places[n] != places[n - 1])
    return (*protocol.looks, protocol.samples, *moves, protocol.samples + protocol.confirmation)


def field_after(
    batch: Batch, protocol: Protocol, max_regret: float, keep: Collection[Candidate] = ()
) -> Field:
    """Return who takes part in the round after those in `batch`; keys without samples have not begun.

    Who is in `keep` is confirmed like a finalist whatever its rounds say.
    """
    rounds = counted(marks_of(s for taken in batch.values() for s in taken), protocol.repeats)
    racing, done = tuple(batch), set[Candidate]()
    near = PLACEMENT if protocol.placements else 0.0
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(protocol.looks))
    for look in protocol.looks:
        if len(rounds) < look:
            return Field(racing, frozenset(done))
        _, stay, left = _judged(batch, racing, rounds[:look], confidence, max(max_regret, near), keep)
        racing = stay
        done.update(left)
    if len(rounds) < protocol.samples:
        return Field(racing, frozenset(done))
    best, stay, left = _judged(batch, racing, rounds[: protocol.samples], CONFIDENCE, near, keep)
    done.update(left)
    if len(rounds) < protocol.samples + protocol.confirmation:
        placement = protocol.placement(len(rounds) - protocol.samples)
        return Field(stay, frozenset(done), best, placement)
    return Field((), frozenset(done.union(stay)))


def _judged(
    batch: Batch,
    racing: Sequence[Candidate],
    rounds: Sequence[int],
    confidence: float,
    bound: float,
    keep: Collection[Candidate],
) -> tuple[Candidate | None, tuple[Candidate, ...], tuple[Candidate, ...]]:
    """Return the best, who stays and who leaves; whoever missed the last round is none of them."""
    counting = set(rounds)
    sound = {
        c: [s for s in batch[c] if s.round in counting and not s.throttled]
        for c in racing
        if any(s.round == rounds[-1] for s in batch[c])
    }
    medians = {c: statistics.median(s.latency_us for s in taken) for c, taken in sound.items() if taken}
    if not medians:
        return None, tuple(sound), ()
    best = min(medians, key=lambda c: (medians[c], c))
    leave = [
        c for c, taken in sound.items() if c not in keep and _slower(taken, sound[best], confidence, bound)
    ]
    return best, tuple(c for c in sound if c not in leave), tuple(leave)


def _slower(mine: Sequence[Sample], best: Sequence[Sample], confidence: float, bound: float) -> bool:
    """Whether the pairs say so: too few of them say nothing."""
    try:
        return regret(mine, best, confidence).lower > bound
    except TooFewSamples:
        return False
