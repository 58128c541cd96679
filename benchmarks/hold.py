"""Repeated sweeps simulated from a recorded one: `python benchmarks/hold.py [OPTIONS] [RECORDING ...]`.

Each simulated sweep draws the recorded rounds of a cell again, with replacement, all candidates of a round
together; a placement counts as one. So the truth stays, and only noise differs between sweeps. With
`--bias 0.005` each candidate is also up to 0.5 % faster or slower at each token count, in each sweep anew:
what no round of one sweep tells. Sweeps follow one another, and bands are chosen under many bounds by five
rules: by each sweep alone, with what was served before as the incumbent, and with it held (1, √2, 2 spreads).

With `--edges` the probed edges of each recording instead: in how many of so many repeated sweeps one moved,
by each sweep alone and held. Only the recorded token counts are known.

Printed for each: how often a sweep's choices differ from those before; how often they do although those were
within the bound; and the kernels of a table.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mhctune.autotuner.bands import NoBands, Option
from mhctune.autotuner.choose import choose
from mhctune.autotuner.derive import derive, options_of
from mhctune.autotuner.edges import edge_of
from mhctune.autotuner.hold import stands
from mhctune.autotuner.incumbent import HOLD
from mhctune.autotuner.recording import replay
from mhctune.autotuner.records import PLACEMENT_ROUNDS, Measurement, Sample, Trial
from mhctune.autotuner.standings import standings
from mhctune.autotuner.stats import noise_floor
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.terms import Terms
from mhctune.configs.recorded import load_recorded
from mhctune.kernels.space import Candidate

RECORDINGS = (
    "h200_decode_hidden5120",
    "h200_hopper_hidden5120",
    "h200_hopper_hidden7168",
    "cpu_quick_hidden5120",
)
BOUNDS = tuple(0.01 + 0.0025 * step for step in range(37))
"""1 to 10 %: how near a limit lies to a bound is chance."""
RULES: Mapping[str, float | None] = {
    "alone": None, "incumbent": 0.0, "held 1": 1.0, "held √2": HOLD, "held 2": 2.0,
}  # fmt: skip
NEAR = 1.25
"""Who is slower than the best by a quarter is chosen under none of the bounds, and left out."""

Unit = tuple[int, int]
"""What is drawn as one: a round (batch, number), or a placement (batch, its first round)."""


def unit(sample: Sample) -> Unit:
    """Return what a sample is drawn with."""
    placed = sample.round - sample.round % PLACEMENT_ROUNDS
    return sample.batch, placed or sample.round


def near(trials: Sequence[Trial]) -> list[Trial]:
    """Return the measured trials of a cell that come near the best, without their throttled samples.

    No verdict uses these, and a draw that repeats them would leave too few of the others.
    """
    found = [trial for trial in trials if isinstance(trial.outcome, Measurement)]
    latency = {
        trial.id: trial.outcome.latency_us for trial in found if isinstance(trial.outcome, Measurement)
    }
    return [
        replace(trial, samples=_steady(trial.samples), twins=_steady(trial.twins))
        for trial in found
        if latency[trial.id] <= NEAR * min(latency.values())
    ]


def _steady(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    return tuple(sample for sample in samples if not sample.throttled)


def redrawn(trials: Sequence[Trial], rng: random.Random, bias: float = 0.0) -> list[Trial]:
    """Return the trials of a cell as if its sweep had been repeated.

    Units are drawn among those that the same candidates ran: who left early has as many rounds as before.
    """
    ran: dict[Unit, list[int]] = {}
    for place, trial in enumerate(trials):
        for one in {unit(sample) for sample in trial.samples}:
            ran.setdefault(one, []).append(place)
    stages: dict[tuple[int, bool, tuple[int, ...]], list[Unit]] = {}
    for one, places in sorted(ran.items()):
        stages.setdefault((one[0], one[1] >= PLACEMENT_ROUNDS, tuple(places)), []).append(one)
    source = {one: rng.choice(units) for units in stages.values() for one in units}

    def again(samples: Sequence[Sample], factor: float) -> tuple[Sample, ...]:
        kept: dict[Unit, list[Sample]] = {}
        for sample in samples:
            kept.setdefault(unit(sample), []).append(sample)
        drawn = []
        for one in kept:
            for place, sample in enumerate(kept.get(source.get(one, one), ())):
                number = one[1] + (place if one[1] >= PLACEMENT_ROUNDS else 0)
                drawn.append(replace(sample, round=number, latency_us=sample.latency_us * factor))
        return tuple(drawn)

    found = []
    for trial in trials:
        mine, twins = (1 + rng.uniform(-bias, bias) for _ in range(2))
        taken = again(trial.samples, mine)
        found.append(
            replace(trial, samples=taken, outcome=Measurement(taken), twins=again(trial.twins, twins))
        )
    return found


@dataclass
class Tally:
    """What came of one rule.

    Attributes:
        kernels: Over all tables together.
        changed: Sweeps whose choices are not those before.
        freely: Of these the ones where those before were within the bound.
    """

    sweeps: int = 0
    tables: int = 0
    kernels: int = 0
    changed: int = 0
    freely: int = 0


def simulate(
    sweep: SweepRecord, trials: Sequence[Trial], sequences: int, length: int, seed: int, bias: float = 0.0
) -> dict[str, Tally]:
    """Repeat a sweep `length` times, in so many sequences, and tally what each rule serves."""
    rng, tallies = random.Random(seed), {rule: Tally() for rule in RULES}
    rows = {
        count: near([trial for trial in trials if trial.cell.num_tokens == count])
        for count in sweep.token_counts
    }
    for _ in range(sequences):
        served: dict[tuple[str, float], dict[int, Candidate]] = {}
        for options in (_options(sweep, rows, rng, bias) for _ in range(length)):
            for rule, bound in ((rule, bound) for rule in RULES for bound in BOUNDS):
                before = served.get((rule, bound))
                now = _choose(rule, list(rows), options, bound, before, tallies[rule])
                if now is not None:
                    served[rule, bound] = now
    return tallies


def _options(
    sweep: SweepRecord, rows: Mapping[int, Sequence[Trial]], rng: random.Random, bias: float
) -> list[Option]:
    drawn = {count: redrawn(found, rng, bias) for count, found in rows.items()}
    every = [trial for found in drawn.values() for trial in found]
    floor = noise_floor(every)
    width = floor.width if floor else 0.0
    return options_of(sweep, every, {count: standings(found, width) for count, found in drawn.items()})


def _choose(
    rule: str,
    counts: list[int],
    options: Sequence[Option],
    bound: float,
    before: dict[int, Candidate] | None,
    tally: Tally,
) -> dict[int, Candidate] | None:
    """Choose bands, count what changed, and return the choices; None where no bands are within the bound."""
    hold = RULES[rule]
    try:
        found = choose(
            counts, options, bound, (before or {}) if hold is not None else {}, Terms(), hold or 0.0
        )
    except NoBands:
        return None
    now = dict(zip(counts, found.candidates, strict=True))
    tally.tables += 1
    tally.kernels += len(found.derivation.variants)
    if before is not None:
        tally.sweeps += 1
        tally.changed += now != before
        tally.freely += now != before and stands(counts, options, bound, before, Terms())
    return now


def edge_moves(
    sweep: SweepRecord, trials: Sequence[Trial], repeats: int, seed: int, bias: float = 0.0
) -> dict[tuple[int, int], tuple[int, int]]:
    """Repeat a sweep and its probes; return how often each edge moved, alone and held, by its neighbours."""
    rng, derived = random.Random(seed), derive(sweep, 1, trials, sweep.bound)
    floor = derived.floor.width if derived.floor else 0.0
    moves: dict[tuple[int, int], tuple[int, int]] = {}
    for edge in derived.edges:
        pair, between = (edge.lower, edge.upper), (edge.before, edge.above)
        by_count: dict[int, list[Trial]] = {}
        for trial in trials:
            if trial.candidate in pair and between[0] <= trial.cell.num_tokens <= between[1]:
                by_count.setdefault(trial.cell.num_tokens, []).append(trial)
        alone, held = [edge.last], [edge.last]
        for _ in range(repeats):
            drawn = [trial for found in by_count.values() for trial in redrawn(found, rng, bias)]
            known = {(trial.cell.num_tokens, trial.candidate): trial for trial in drawn}
            alone.append(edge_of(*pair, between, known, floor).last)
            held.append(edge_of(*pair, between, known, floor, held[-1]).last)
        moves[between] = (_changes(alone), _changes(held))
    return moves


def _changes(lasts: Sequence[int]) -> int:
    return sum(before != now for before, now in pairwise(lasts))


def main() -> None:
    """Print one table a recording."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recordings", nargs="*", default=RECORDINGS)
    parser.add_argument("--sequences", type=int, default=20)
    parser.add_argument("--length", type=int, default=5, help="sweeps, one after the other")
    parser.add_argument("--bias", type=float, default=0.0, help="0.005 is up to 0.5 %% a sweep")
    parser.add_argument("--edges", action="store_true", help="how often probed edges move instead")
    given = parser.parse_args()
    if given.length < 2 or given.sequences < 1:
        parser.error(
            f"--sequences {given.sequences} --length {given.length} repeats nothing; give at least 1 and 2"
        )
    if given.edges:
        repeats = given.sequences * given.length
        for name in given.recordings:
            for (before, above), (alone, held) in edge_moves(
                *replay(load_recorded(name)), repeats, 20261130, given.bias
            ).items():
                print(f"{name}  {before:4} | {above:4}  moved in {alone} of {repeats} alone, {held} held")
        return
    print("recording               rule       sweeps  changed  within the bound  kernels")
    for name in given.recordings:
        sweep, trials = replay(load_recorded(name))
        kept = sweep.without_probes(trials)
        for rule, tally in simulate(sweep, kept, given.sequences, given.length, 20261130, given.bias).items():
            changed, freely = tally.changed / tally.sweeps, tally.freely / tally.sweeps
            print(
                f"{name[:22]:22}  {rule:9}  {tally.sweeps:6}  {changed:7.1%}  {freely:16.1%}"
                f"  {tally.kernels / tally.tables:7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
