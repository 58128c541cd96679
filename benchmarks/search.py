"""What a search loses against enumeration: `python benchmarks/search.py [ALL.db SEARCHED.db [--measure]]`.

Without databases on recorded times (two minutes).
The 264 candidates of the recorded H200 prototype are searched as a sweep searches an arm, 20 seeds each.
First in one cell: the regret of the best point that N proposals found, beside the best of N drawn at random.
Then as a whole sweep: explored at anchors, the shortlist raced at every token count, the regret of the best
of those there, beside candidates drawn at random and raced everywhere, in as many trials.

With databases on a GPU's: `--measure` runs the sweep `benchmarks/search.toml` (`--sweep`) twice on this
device, into ALL.db every legal candidate, into SEARCHED.db 100 proposals of TPE at each anchor and a
shortlist of 32. For each token count: who was raced, what the winner of the searched sweep loses by the
samples of ALL.db, with 95 % limits, and what the best of as many candidates drawn at random loses by its
medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mhctune.autotuner.ahead import AheadBench
from mhctune.autotuner.benches import open_bench
from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.exploration import Exploration, SearchSettings
from mhctune.autotuner.explorer import Explorer
from mhctune.autotuner.nvidia import conditions_reader
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.planner import plan_sweep, target_of
from mhctune.autotuner.probe import detect
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import Cell, Footprint, Measurement, Sample, Trial
from mhctune.autotuner.search import Search
from mhctune.autotuner.standings import standings
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.sweep import Sweep
from mhctune.autotuner.words import percent
from mhctune.configs.recorded import load_recorded
from mhctune.db.derivation import chosen_sweep
from mhctune.db.repository import Repository
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate, SearchSpace, Tunable

RECORDING = "h200_post_pre_hidden5120_prototype"
ARM, TUNABLES = "fused", ("tile_n", "n_splits", "n_thr", "vec")
SEEDS, NUMBERS, ANCHORS = range(20), (32, 64, 96, 128), (2, 3, 4)
SETTINGS = SearchSettings()
EVERYONE = SearchSettings(enumerated=10**9)
ASKED = SearchSettings(generations=5, proposals=20)
DRAWS = 2000

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


def run(plan: SweepPlan, db: str) -> None:
    """Run a sweep on this device into a database, or go on with it, and print its seconds."""
    begin, budget = time.monotonic(), VramBudget.parse("60%", detect().free_bytes)
    with (
        open_bench(plan.seam.name, plan.target, plan.protocol.l2, until=plan.protocol.until) as bench,
        Repository.open(db) as store,
        conditions_reader(plan.target) as read,
    ):
        ahead = AheadBench(bench, bench, plan.variants_of)
        racing = bench if plan.target == "c" else ahead
        result = Sweep(plan, store, racing, budget, racing.compile_all, read=read).run()
        counts = store.counts(result.sweep_id)
    failed, taken = sum(counts.failures.values()), time.monotonic() - begin
    print(f"{db}: {result.state}, {counts.measured} measured, {failed} failed, {taken:.1f} s", flush=True)


def newest(db: str) -> tuple[SweepRecord, dict[int, list[Trial]]]:
    """Return the newest sweep of a database that ended, and its trials by token count."""
    with Repository.open(db, readonly=True) as store:
        sweep = chosen_sweep(store)
        trials: dict[int, list[Trial]] = {count: [] for count in sweep.record.token_counts}
        for trial in sweep.record.without_probes(store.trials(sweep.id)):
            trials[trial.cell.num_tokens].append(trial)
    return sweep.record, trials


def compared(everyone: Mapping[int, Sequence[Trial]], asked: Mapping[int, Sequence[Trial]]) -> Iterator[str]:
    """Yield a header and a line a token count."""
    yield "tokens   all raced  best us found us   the winner found loses     rank  random: mean  worst of 20"
    for count, trials in everyone.items():
        ordered = standings(trials)
        rows, mine = {s.candidate: s for s in ordered}, standings(asked[count])
        place = next((n for n, s in enumerate(ordered, 1) if s.candidate == mine[0].candidate), None)
        if place is None:
            loss = "not measured in ALL.db"
        else:
            found = rows[mine[0].candidate].regret
            loss = f"{found.point:6.2%} ({found.lower:+.2%}..{found.upper:+.2%})"
        times = {s.candidate: s.latency_us for s in ordered}
        number = min(len(mine), len(times))
        losses = [regret({c: times[c] for c in drawn(times, number, n)}, times) for n in range(DRAWS)]
        worst = statistics.quantiles(losses, n=20)[-1]
        best, winner = ordered[0].latency_us, mine[0].latency_us
        yield (
            f"{count:6} {len(times):5} {len(mine):5} {best:8.2f} {winner:8.2f}   {loss:25}  "
            f"{place or '-':>4}  {statistics.mean(losses):12.2%}  {worst:11.2%}"
        )


def on_device(everyone: str, asked: str, sweep: str, measure: bool) -> None:
    """Run both sweeps if asked, and compare them.

    Raises:
        ValueError: an arm of the searched sweep was enumerated, so that there is nothing to compare.
    """
    if measure:
        plan = plan_sweep(target_of("auto", detect()), sweep)
        for settings, db in ((EVERYONE, everyone), (ASKED, asked)):
            run(replace(plan, search=settings), db)
    (whole, by_all), (part, by_search) = newest(everyone), newest(asked)
    if part.search is None or whole.search is not None:
        raise ValueError(
            f"{everyone} has to hold an enumerated sweep and {asked} a searched one; run with --measure and "
            f"a sweep file with an arm of more than {ASKED.enumerated} legal candidates"
        )
    for arm, legal in part.search.legal.items():
        explored, where = part.search.explored(arm), ", ".join(map(str, part.search.anchors))
        print(f"{arm}: {explored} of {legal} legal candidates explored at {where} tokens")
    print("\n".join(compared(by_all, by_search)))


def main() -> None:
    """Print the tables of recorded times, or compare two databases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("databases", nargs="*", metavar="DB")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--sweep", default=str(Path(__file__).with_name("search.toml")))
    given = parser.parse_args()
    if len(given.databases) not in (0, 2):
        parser.error(f"{len(given.databases)} databases given; give none, or ALL.db and SEARCHED.db")
    if given.databases:
        on_device(*given.databases, given.sweep, given.measure)
    else:
        simulated()


def simulated() -> None:
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
