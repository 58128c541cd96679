"""What a search loses against enumeration, on recorded times: `python benchmarks/search.py` (two minutes).

The 264 candidates of the recorded H200 prototype are searched as a sweep searches an arm, 20 seeds each.
First in one cell: the regret of the best point that N proposals found, beside the best of N drawn at random.
Then as a whole sweep: explored at anchors, the shortlist raced at every token count, the regret of the best
of those there, beside candidates drawn at random and raced everywhere, in as many trials.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from mhctune.autotuner.exploration import Exploration, SearchSettings
from mhctune.autotuner.explorer import Explorer
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import Cell, Footprint, Measurement, Sample, Trial
from mhctune.autotuner.search import Search
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.words import percent
from mhctune.configs.recorded import load_recorded
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate, SearchSpace, Tunable

RECORDING = "h200_post_pre_hidden5120_prototype"
ARM, TUNABLES = "fused", ("tile_n", "n_splits", "n_thr", "vec")
SEEDS, NUMBERS, ANCHORS = range(20), (32, 64, 96, 128), (2, 3, 4)
SETTINGS = SearchSettings()

Times = dict[int, dict[Candidate, float]]
"""Token count → candidate → microseconds per launch."""


def recorded_times(name: str = RECORDING) -> Times:
    """Return the times of a recording that holds one a row."""
    times: Times = {}
    for row in load_recorded(name).rows:
        config = {tunable: int(row[tunable]) for tunable in TUNABLES}  # type: ignore[arg-type]
        times.setdefault(int(row["num_tokens"]), {})[Candidate.of(ARM, config)] = float(row["latency_us"])  # type: ignore[arg-type]
    return dict(sorted(times.items()))


def tunables_of(candidates: Sequence[Candidate]) -> tuple[Tunable, ...]:
    """Return the tunables with the values that candidates have."""
    return tuple(Tunable(n, tuple(sorted({c.config[n] for c in candidates})), "") for n in TUNABLES)


def regret(found: Mapping[Candidate, float], everyone: Mapping[Candidate, float]) -> float:
    """Return what the best of some loses against the best of all."""
    return min(found.values()) / min(everyone.values()) - 1


def searched(times: Mapping[Candidate, float], number: int, seed: int) -> list[Candidate]:
    """Return the first `number` proposals in one cell."""
    search, known = Search(tuple(times), tunables_of(tuple(times))), dict[Candidate, float | None]()
    while len(known) < number:
        fresh = search.propose(known, min(SETTINGS.proposals, number - len(known)), seed + len(known) * 1000)
        known |= {candidate: times[candidate] for candidate in fresh}
    return list(known)


def drawn(times: Mapping[Candidate, float], number: int, seed: int) -> list[Candidate]:
    """Return `number` candidates drawn at random in one cell."""
    return random.Random(seed).sample(sorted(times), number)


def explored(times: Times, settings: SearchSettings, seed: int) -> Exploration:
    """Run the search of a sweep over recorded times."""
    counts, everyone = tuple(times), tuple(next(iter(times.values())))
    plan: Any = SimpleNamespace(
        legal={ARM: everyone},
        spaces={ARM: SearchSpace(ARM, tunables_of(everyone))},
        protocol=Protocol(1, seed=seed),
        search=settings,
        target="cuda",
        seam=SimpleNamespace(arm=lambda target, arm: SimpleNamespace(preferred={})),
        variants_of=lambda candidate: (str(candidate),),
    )
    problem, nowhere = Problem(5120), Fingerprint("", 0, 0, "", "", "", "", "", "", "", "", 0, "")
    search = Exploration(settings.anchors_of(counts), {ARM: len(everyone)}, settings.generations)
    record = SweepRecord(
        "", "post_pre_delayed", problem, "cuda", counts, 0, {}, {}, {}, nowhere, {}, 0.05, search
    )
    explorer = Explorer(plan)
    while record.search is not None and not record.search.finished:
        trials = [
            Trial(
                Cell(record.seam, problem, n), c, Footprint(0, 0, 0), Measurement((Sample(0, 0, 0, 1, us),))
            )
            for n in search.anchors
            for c, us in times[n].items()
            if c in record.search.expected(n)
        ]
        record = explorer.extend(record, trials)
    assert record.search is not None
    return record.search


def sweep_regrets(times: Times, settings: SearchSettings, seed: int) -> tuple[list[float], list[float], int]:
    """Return the regrets of a searched sweep and of random ones at every token count, and the trials."""
    search = explored(times, settings, seed)
    raced = {n: search.expected(n) for n in times}
    trials = sum(map(len, raced.values()))
    anyone = random.Random(seed).sample(sorted(next(iter(times.values()))), round(trials / len(times)))
    ours = [regret({c: found[c] for c in raced[n]}, found) for n, found in times.items()]
    return ours, [regret({c: found[c] for c in anyone}, found) for found in times.values()], trials


def _row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    """Print both tables."""
    times = recorded_times()
    print(f"{len(next(iter(times.values())))} candidates, tokens {', '.join(map(str, times))}\n")
    _row("points raced in a cell", "TPE: mean", "worst", "best found", "random: mean", "worst", "best found")
    _row(*["---"] * 7)
    runs = [[(cell, find(cell, max(NUMBERS), seed)) for cell in times.values() for seed in SEEDS]
            for find in (searched, drawn)]  # fmt: skip
    for number in NUMBERS:
        cells: list[object] = [number]
        for run in runs:
            found = [regret({c: cell[c] for c in order[:number]}, cell) for cell, order in run]
            hits = sum(each == 0 for each in found) / len(found)
            cells += [percent(statistics.mean(found)), percent(max(found)), f"{hits:.0%}"]
        _row(*cells)
    print()
    _row("anchors", "trials", "search: mean", "worst", "random: mean", "worst")
    _row(*["---"] * 6)
    for anchors in ANCHORS:
        settings = SearchSettings(anchors=anchors)
        sweeps = [sweep_regrets(times, settings, seed) for seed in SEEDS]
        ours = [each for mine, _, _ in sweeps for each in mine]
        anyones = [each for _, others, _ in sweeps for each in others]
        trials = round(statistics.mean(number for _, _, number in sweeps))
        _row(
            " ".join(map(str, settings.anchors_of(tuple(times)))), trials,
            percent(statistics.mean(ours)), percent(max(ours)),
            percent(statistics.mean(anyones)), percent(max(anyones)),
        )  # fmt: skip


if __name__ == "__main__":
    main()
