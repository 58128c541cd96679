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
- Going on to further placements, where the protocol has them: whoever those placements do not tell from the
  leader, the lowest median of placements, by more than `APART` (lower limit at `LOOK`), the nearest `NEAREST`
  of them. Alone, nobody goes on. It is one planned look. A limit of 19 placements is exact at 96.8 %, and one
  of the eight before at 96.5 %; a candidate leaves by the least of eight, which is above its median with a
  chance of 0.4 %. So, look and end together, a lower limit is wrong with at most 3.2 + 0.4 %, and an upper
  one with at most 3.5 %: whoever leaves looks slow, and an upper limit is too low where it looks fast. Both
  are below 5 % (`tests/test_field.py` adds them up). Who leaves as the seventh nearest looks slow, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import Sample
from mhctune.autotuner.stats import CONFIDENCE, TooFewSamples, regret, steady
from mhctune.kernels.space import Candidate

PLACEMENT = 0.03
"""A difference that where buffers lie can make or hide: the rounds of one placement tell nobody nearer to the
best from it. Two H200 sweeps ordered candidates differently within 2.2 %. At 3 % 3.6 of 290 candidates a cell
are confirmed there, at 0 % 1.4."""

APART, LOOK = 0.01, 0.99
"""What a winner may lose, and how surely somebody loses more who leaves before the further placements."""

NEAREST = 6
"""The most that go on, which bounds what it costs: a placement takes each of them a move (3 ms on an H200)
and three samples of 0.3 ms. At 12 token counts there 1 to 9 were not told apart, and who won a long race was
third at most."""

Batch = Mapping[Candidate, Sequence[Sample]]
"""The samples of one batch by candidate; of those who failed since, too."""


@dataclass(frozen=True, slots=True)
class Field:
    """Who takes part in the next round.

    Attributes:
        racing: In the order in which they were given; empty when the batch is over.
        done: Who took part to the end of its race: losers, who is told from the best, and finalists.
        twin: Whose twin is timed beside them, in the confirmation and not after it.
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
    last = protocol.confirmation + protocol.extension
    places = [protocol.placement(confirmed) for confirmed in range(last)]
    moves = (protocol.samples + n for n in range(1, len(places)) if places[n] != places[n - 1])
    return (*protocol.looks, protocol.samples, *moves, protocol.samples + last)


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
    confirmed = len(rounds) - protocol.samples
    onward = (
        _onward(batch, stay, rounds[: protocol.samples + protocol.confirmation]) if protocol.further else ()
    )
    if not onward or confirmed >= protocol.confirmation + protocol.extension:
        return Field((), frozenset(done.union(stay)))
    return Field(onward, frozenset(done.union(stay).difference(onward)), None, protocol.placement(confirmed))


def _onward(batch: Batch, racing: Sequence[Candidate], rounds: Sequence[int]) -> tuple[Candidate, ...]:
    """Return who is not told from the leader by what was confirmed, the nearest; nobody if it leads alone."""
    sound = _sound(batch, racing, rounds)
    middles = steady(sound)
    order = sorted(middles, key=lambda c: (middles[c], c))
    near = [c for c in order if not _slower(sound[c], sound[order[0]], LOOK, APART)][:NEAREST]
    return tuple(c for c in racing if c in near) if len(near) > 1 else ()


def _judged(
    batch: Batch,
    racing: Sequence[Candidate],
    rounds: Sequence[int],
    confidence: float,
    bound: float,
    keep: Collection[Candidate],
) -> tuple[Candidate | None, tuple[Candidate, ...], tuple[Candidate, ...]]:
    """Return the best, who stays and who leaves; whoever missed the last round is none of them."""
    sound = _sound(batch, racing, rounds)
    medians = {c: statistics.median(s.latency_us for s in taken) for c, taken in sound.items() if taken}
    if not medians:
        return None, tuple(sound), ()
    best = min(medians, key=lambda c: (medians[c], c))
    leave = [
        c for c, taken in sound.items() if c not in keep and _slower(taken, sound[best], confidence, bound)
    ]
    return best, tuple(c for c in sound if c not in leave), tuple(leave)


def _sound(batch: Batch, racing: Sequence[Candidate], rounds: Sequence[int]) -> dict[Candidate, list[Sample]]:
    """Return the samples that count, not throttled, of who ran the last of these rounds."""
    counting = set(rounds)
    return {
        c: [s for s in batch[c] if s.round in counting and not s.throttled]
        for c in racing
        if any(s.round == rounds[-1] for s in batch[c])
    }


def _slower(mine: Sequence[Sample], best: Sequence[Sample], confidence: float, bound: float) -> bool:
    """Whether the pairs say so: too few of them say nothing."""
    try:
        return regret(mine, best, confidence).lower > bound
    except TooFewSamples:
        return False
