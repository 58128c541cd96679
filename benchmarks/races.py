"""Simulated races from recorded noise: `python benchmarks/races.py [OPTIONS] [RECORDING.jsonl | DB ...]`.

Real races (`mhctune.autotuner.race`) of candidates whose true latencies are known: one is the best, seven
are truly slower by 1, 2 or 5 %, in random order. Their noise is recorded: a sample is its candidate's truth,
times a drift that all samples of a moment share, times a residual. A race draws the residuals of eight
recorded candidates, and its drift, in blocks of three rounds, since noise lasts longer than a round. Beside
it stands what most tuners do with as many samples: each candidate by itself, one after the other, and the
lowest median wins. A second table asks how often the argmin of medians changes its mind on the same samples.

With `--placement 0.02` a sample is also times a bias of where its candidate lies, uniform within 2 % and
drawn anew whenever it moves; races are then run by three rules: finalists that stay (protocol 2), that move
(3 and 4), and that, where they are not told apart, move on to further placements (5).

The defaults are the recordings that are shipped; databases and further recordings can be named.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.conditions import Conditions
from mhctune.autotuner.protocol import FURTHER, Protocol
from mhctune.autotuner.race import Race
from mhctune.autotuner.recording import replay
from mhctune.autotuner.records import (
    Cell,
    Failure,
    Footprint,
    Measurement,
    Outcome,
    Sample,
    SweepState,
    Trial,
)
from mhctune.autotuner.standings import standings, winner
from mhctune.autotuner.stats import noise_floor
from mhctune.autotuner.store import SweepRecord
from mhctune.configs.errors import ConfigError
from mhctune.configs.recorded import load_recorded
from mhctune.db.repository import Repository
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

RULES = ("stay", "move", "further")
RECORDINGS = ("h200_decode_hidden5120", "cpu_quick_hidden5120")
FIELD, BLOCK, CELLS = 8, 3, 10
NEAR = 1.10
"""Noise is taken from candidates within 10 % of a cell's best: slow ones are quieter than fast ones."""

CELL = Cell("post_pre_delayed", Problem(hidden_size=5120), 1)
Sweep = tuple[str, SweepRecord, Sequence[Trial]]


def sweeps(places: Sequence[str]) -> Iterator[Sweep]:
    """Yield the sweep of each recording, or the newest ended one of each database, without its probes."""
    for place in places:
        if not place.endswith(".db"):
            sweep, trials = replay(load_recorded(place))
            yield Path(place).stem, sweep, sweep.without_probes(trials)
            continue
        with Repository.open(place, readonly=True) as store:
            ended = (SweepState.COMPLETE, SweepState.INCOMPLETE)
            found = next(sweep for sweep in store.sweeps() if sweep.state in ended)
            yield Path(place).name, found.record, found.record.without_probes(store.trials(found.id))


def cells(trials: Sequence[Trial], samples: int) -> dict[int, dict[Candidate, list[float]]]:
    """Return, by token count, the latencies of the first `samples` rounds of who ran them all in batch 0.

    Losers, who left before, are not among them, nor are the rounds in which finalists were confirmed.
    """
    found: dict[int, dict[Candidate, list[float]]] = {}
    for trial in trials:
        taken = sorted((s for s in trial.samples if s.batch == 0 and not s.throttled), key=lambda s: s.round)
        if isinstance(trial.outcome, Measurement) and len(taken) >= samples:
            row = [s.latency_us for s in taken[:samples]]
            found.setdefault(trial.cell.num_tokens, {})[trial.candidate] = row
    return found


@dataclass(frozen=True)
class Noise:
    """What one cell's samples differ from their medians by: a drift by round, and a residual by candidate."""

    drift: Sequence[float]
    residuals: Sequence[Sequence[float]]

    @classmethod
    def of(cls, rows: dict[Candidate, list[float]]) -> Noise | None:
        """Split the samples of a cell; None if fewer than four candidates are near the best."""
        middles = {candidate: statistics.median(row) for candidate, row in rows.items()}
        near = [c for c, middle in middles.items() if middle <= NEAR * min(middles.values())]
        if len(near) < 4:
            return None
        shares = [[us / middles[c] for us in rows[c]] for c in near]
        drift = [statistics.median(column) for column in zip(*shares, strict=True)]
        return cls(drift, [[x / d for x, d in zip(row, drift, strict=True)] for row in shares])


def blocks(values: Sequence[float], rng: random.Random) -> Iterator[float]:
    """Draw values for ever, in blocks that were neighbours."""
    while True:
        first = rng.randrange(len(values))
        yield from (values[(first + place) % len(values)] for place in range(BLOCK))


@dataclass
class SimulatedBench:
    """Answers with truth x drift x residual x bias; the drift is the round's, the bias the placement's."""

    truth: dict[Candidate, float]
    noise: Noise
    rng: random.Random
    bias: float = 0.0
    spent: int = 0
    _drift: dict[tuple[int, int], float] = field(default_factory=dict)
    _residuals: dict[Candidate, Iterator[float]] = field(default_factory=dict)
    _biases: dict[Candidate, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pace = blocks(self.noise.drift, self.rng)

    def input_bytes(self, cell: Cell) -> int:
        """No inputs."""
        return 0

    def enter(self, cell: Cell, seed: int) -> int:
        """Nothing to make."""
        return 0

    def floor_us(self) -> float:
        """No floor."""
        return 0.0

    def forecast(self, candidate: Candidate) -> Footprint:
        """One byte each."""
        return Footprint(0, 1, 0)

    def prepare(self, candidate: Candidate) -> Footprint:
        """Give a candidate the noise of a recorded one."""
        self._residuals[candidate] = blocks(self.rng.choice(self.noise.residuals), self.rng)
        self._biases[candidate] = self._placed()
        return self.forecast(candidate)

    def move(self, candidate: Candidate, placement: int) -> Failure | None:
        """Give a candidate another bias."""
        self._biases[candidate] = self._placed()
        return None

    def _placed(self) -> float:
        return 1 + self.rng.uniform(-self.bias, self.bias) if self.bias else 1.0

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        """Return a time in a moment that all of the round share."""
        if (batch, round) not in self._drift:
            self._drift[batch, round] = next(self._pace)
        self.spent += launches > 1
        true = self.truth[Candidate(candidate.arm, candidate.items)]
        return true * self._drift[batch, round] * next(self._residuals[candidate]) * self._biases[candidate]

    def release(self, candidate: Candidate) -> None:
        """Nothing is held."""

    def leave(self) -> None:
        """Nothing is held."""

    def alone(self, candidate: Candidate, rounds: int) -> float:
        """Return the median of samples that are taken one after the other, in moments of their own."""
        residuals = blocks(self.rng.choice(self.noise.residuals), self.rng)
        true = self.truth[candidate] * self._placed()
        return statistics.median(true * next(self._pace) * next(residuals) for _ in range(rounds))


@dataclass
class ListStore:
    """The trials of one race, in memory."""

    rows: dict[Candidate, Trial] = field(default_factory=dict)

    def begin(self, sweep: SweepRecord, *, new: bool = False) -> int:
        """One sweep only."""
        return 1

    def keep_floor(self, sweep_id: int, cell: Cell, floor_us: float) -> None:
        """Nothing to keep: what is simulated has no floor."""

    def trials(self, sweep_id: int, num_tokens: int | None = None) -> Sequence[Trial]:
        """Return all trials."""
        return list(self.rows.values())

    def open_trial(self, sweep_id: int, cell: Cell, candidate: Candidate, footprint: Footprint) -> int:
        """Keep a trial that races."""
        return self._put(candidate, footprint, None)

    def add_samples(
        self,
        samples: Sequence[tuple[int, Sample]],
        twins: Sequence[tuple[int, Sample]] = (),
        conditions: Conditions | None = None,
    ) -> None:
        """Keep the samples of a round."""
        by_id = {trial.id: candidate for candidate, trial in self.rows.items()}
        for number, sample in samples:
            trial = self.rows[by_id[number]]
            self.rows[by_id[number]] = replace(trial, samples=(*trial.samples, sample))
        for number, sample in twins:
            trial = self.rows[by_id[number]]
            self.rows[by_id[number]] = replace(trial, twins=(*trial.twins, sample))

    def finish_trial(self, trial_id: int) -> None:
        """Make a trial a measurement."""
        candidate = next(c for c, trial in self.rows.items() if trial.id == trial_id)
        trial = self.rows[candidate]
        self.rows[candidate] = replace(trial, outcome=Measurement(trial.samples))

    def fail_trial(
        self, sweep_id: int, cell: Cell, candidate: Candidate, footprint: Footprint, failure: Failure
    ) -> int:
        """Keep a failure."""
        return self._put(candidate, footprint, failure)

    def end(self, sweep_id: int, state: SweepState) -> None:
        """Nothing to keep."""

    def _put(self, candidate: Candidate, footprint: Footprint, outcome: Outcome | None) -> int:
        self.rows[candidate] = Trial(CELL, candidate, footprint, outcome, (), len(self.rows) + 1)
        return len(self.rows)


@dataclass
class Tally:
    """What came of the races of one kind."""

    races: int = 0
    slower_best: int = 0
    """A slower one has the lowest median."""
    told_wrongly: int = 0
    """The truly best is not among the tied."""
    lost: int = 0
    """A slower one is served although the truly best is the incumbent."""
    fresh: int = 0
    """A slower one is served; there is no incumbent."""
    kept: int = 0
    """A slower incumbent is still served."""
    bands: int = 0
    """A slower one has the least regret beyond the noise floor, as bands are chosen; no incumbent."""
    spent: int = 0
    slower_alone: int = 0


def simulate(
    noises: Sequence[Noise],
    slower: float,
    samples: int,
    races: int,
    seed: int,
    bias: float = 0.0,
    rule: str = "move",
) -> Tally:
    """Race so often, and tally what comes of it; every `CELLS` races are a sweep, with one noise floor.

    A candidate is up to `bias` faster or slower by where it lies; `rule` says what finalists do (`RULES`).
    """
    protocol = Protocol.of("c", samples)
    protocol = replace(protocol, placements=0) if rule == "stay" else protocol
    protocol = replace(protocol, further=FURTHER) if rule == "further" else protocol
    rng, tally = random.Random(seed), Tally(races)
    runners = [Candidate.of("fused", {"n": n}) for n in range(FIELD)]
    same, equal = dict.fromkeys(runners, ("kernel",)), dict.fromkeys(runners, 1)
    for first in range(0, races, CELLS):
        run: list[tuple[Candidate, Sequence[Trial]]] = []
        for _ in range(min(CELLS, races - first)):
            best = rng.choice(runners)
            truth = {c: 100.0 if c == best else 100.0 * (1 + slower) for c in runners}
            bench, store = SimulatedBench(truth, rng.choice(noises), rng, bias), ListStore()
            race = Race(1, CELL, store, bench, VramBudget(100, 100), protocol)  # type: ignore[arg-type]
            race.run(rng.sample(runners, FIELD), ())
            run.append((best, store.trials(1)))
            tally.spent += bench.spent
            each = round(bench.spent / FIELD)
            tally.slower_alone += min(runners, key=lambda c: (bench.alone(c, each), c)) != best
        floor = noise_floor([trial for _, trials in run for trial in trials])
        for best, trials in run:
            rows = standings(trials, floor.width if floor else 0.0)
            old = rng.choice([c for c in runners if c != best])
            tally.slower_best += rows[0].candidate != best
            tally.told_wrongly += not next(row.tied for row in rows if row.candidate == best)
            tally.lost += winner(rows, same, equal, best) != best
            tally.fresh += winner(rows, same, equal) != best
            tally.kept += winner(rows, same, equal, old) == old
            beyond = {s.candidate: s.regret.point if s.regret.point > s.floor else 0.0 for s in rows}
            tally.bands += min(runners, key=lambda c: (beyond[c], c)) != best
    return tally


def minds(rows: dict[Candidate, list[float]], draws: int, rng: random.Random) -> tuple[int, int, int]:
    """Return draws, and how often argmin of medians and the tie rule chose another than on all samples.

    A draw takes as many of the recorded rounds with replacement. The rule has the choice on all samples as
    its incumbent, as the next sweep has.
    """

    def argmin(rounds: Sequence[int]) -> Candidate:
        return min(rows, key=lambda c: (statistics.median(rows[c][r] for r in rounds), c))

    count = len(next(iter(rows.values())))
    everything = argmin(range(count))
    changed = kept_not = 0
    for _ in range(draws):
        rounds = [rng.randrange(count) for _ in range(count)]
        changed += argmin(rounds) != everything
        trials = [
            Trial(CELL, c, Footprint(0, 1, 0), Measurement(taken), taken)
            for c, row in rows.items()
            for taken in [tuple(Sample(0, n, 0, 1, row[r]) for n, r in enumerate(rounds))]
        ]
        found = winner(standings(trials), dict.fromkeys(rows, ("k",)), dict.fromkeys(rows, 1), everything)
        kept_not += found != everything
    return draws, changed, kept_not


def across(found: Sequence[Sweep]) -> Iterator[str]:
    """Yield, for each kind of sweep that several places hold, in how many cells their choices differ."""
    groups: dict[tuple[object, ...], list[Sweep]] = {}
    for each in found:
        record = each[1]
        kind = (record.fingerprint.gpu_name, record.problem, record.token_counts, record.candidates)
        groups.setdefault(kind, []).append(each)
    for group in (g for g in groups.values() if len(g) > 1):
        record, total, argmin_flips, rule_flips = group[0][1], 0, 0, 0
        floors = [f.width if (f := noise_floor(trials)) else 0.0 for _, _, trials in group]
        for count in record.token_counts:
            here = [[t for t in trials if t.cell.num_tokens == count] for _, _, trials in group]
            medians = [
                {t.candidate: t.outcome.latency_us for t in trials if isinstance(t.outcome, Measurement)}
                for trials in here
            ]
            choices = {min(m, key=lambda c, m=m: (m[c], c)) for m in medians}  # type: ignore[misc]
            served: list[Candidate] = []
            for trials in here:
                bytes_of = {t.candidate: t.footprint.forecast_bytes for t in trials}
                before = served[-1] if served else None
                rows = standings(trials, floors[len(served)])
                served.append(winner(rows, record.variants, bytes_of, before))
            total += 1
            argmin_flips += len(choices) > 1
            rule_flips += len(set(served)) > 1
        names = ", ".join(name for name, _, _ in group)
        yield (
            f"{len(group)} sweeps ({names}): the argmin of medians differs in {argmin_flips} of {total} "
            f"cells, the choice by the rule for ties in {rule_flips}"
        )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--races", type=int, default=400)
    parser.add_argument("--placement", type=float, default=0.0, help="bias of where a candidate lies (0.02)")
    parser.add_argument("places", nargs="*", default=RECORDINGS)
    given = parser.parse_args()
    try:
        found = list(sweeps(given.places))
    except ConfigError as error:
        parser.error(str(error))
    print(f"{FIELD} candidates, seven of them truly slower; {given.races} races each; a slower one ...")
    print("noise                  slower  leads  told  lost  fresh   kept  bands  samples  alone")
    for name, record, trials in found:
        samples = int(record.protocol["samples"])
        noises = [noise for rows in cells(trials, samples).values() if (noise := Noise.of(rows))]
        if not noises:
            print(f"{name[:21]:21}  in no cell do four candidates come within 10 % of the best")
        rules = RULES if given.placement else ("move",)
        for slower, rule in product((0.01, 0.02, 0.05) if noises else (), rules):
            tally = simulate(noises, slower, samples, given.races, 20261129, given.placement, rule)
            n = tally.races
            wrong = f"{tally.slower_best / n:5.1%}  {tally.told_wrongly / n:4.1%}  {tally.lost / n:4.1%}"
            ties = f"{tally.fresh / n:5.1%}  {tally.kept / n:5.1%}  {tally.bands / n:5.1%}"
            cost = f"{tally.spent / n:7.0f}  {tally.slower_alone / n:5.1%}"
            named = f"  {rule}" if given.placement else ""
            print(f"{name[:21]:21}  {slower:6.0%}  {wrong}  {ties}  {cost}{named}")
    print(
        "leads: has the lowest median; told: the truly best is not among the tied; by the rule for ties:\n"
        "lost: is served though the truly best is the incumbent, fresh: is served, no incumbent, kept: is\n"
        "served, being the incumbent; bands: is served as bands are chosen; alone: has the lowest median\n"
        "of as many samples, each candidate timed by itself"
    )
    print("\nrecorded               cells  draws  argmin of medians changed  rule for ties changed")
    rng = random.Random(20261129)
    for name, record, trials in found:
        kept = cells(trials, int(record.protocol["samples"]))
        counts = [minds(rows, 50, rng) for rows in kept.values()]
        draws, changed, kept_not = (sum(column) for column in zip(*counts, strict=True))
        shares = f"{changed / draws:25.1%}  {kept_not / draws:21.1%}"
        print(f"{name[:21]:21}  {len(counts):5}  {draws:5}  {shares}")
    print("".join(f"\n{line}" for line in across(found)))


if __name__ == "__main__":
    main()
