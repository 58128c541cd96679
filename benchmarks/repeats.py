"""Repeated sweeps of one database compared: `python benchmarks/repeats.py DB`.

The sweeps differ in seed (and so in inputs and order) or in the L2 state. Printed are each one's bands and
noise floor, first by that sweep alone, then as they would be served: each sweep's incumbent is the table
before, of the same L2 state; and how often the choices are not those before, either way. Then how many
argmins of medians there are among the warm ones, and what the argmin of one loses by the medians of another
at most; and for a cold sweep, against the warm one of its seed, how much longer the best takes and what the
warm winner loses.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from mhctune.autotuner.derive import Derived, derive
from mhctune.autotuner.hold import held_note
from mhctune.autotuner.incumbent import Incumbent
from mhctune.autotuner.records import Measurement
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.words import counted
from mhctune.db.derivation import ENDED
from mhctune.db.repository import Repository
from mhctune.kernels.dispatch import DispatchTable
from mhctune.kernels.space import Candidate
from mhctune.kernels.until import END, until_of

Medians = dict[int, dict[Candidate, float]]


def best(medians: dict[Candidate, float]) -> Candidate:
    """Return the candidate of the lowest median."""
    return min(medians, key=lambda candidate: (medians[candidate], candidate))


def bands(table: DispatchTable) -> str:
    """Return the bands of a table as a line."""
    return ", ".join(f"{band.first}-{band.last} {band.choice.arm}" for band in table.bands)


def changed(sequence: Sequence[Derived]) -> str:
    """Say in how many sweeps the choices at the measured token counts are not those of the sweep before."""
    other = sum(a.chosen.candidates != b.chosen.candidates for a, b in pairwise(sequence))
    return f"{other} of {len(sequence) - 1} after the first"


def require_repeated(db: str, records: Sequence[SweepRecord]) -> None:
    """End with a sentence where there is nothing to compare, or sweeps that are no repeats of one another."""
    kinds = {(r.seam, r.target, str(r.problem.to_dict()), r.token_counts) for r in records}
    if len(records) < 2 or len(kinds) > 1:
        raise SystemExit(
            f"{db} holds {counted(len(records), 'sweep')} that ended and timed to the end, of {len(kinds)} "
            "seams, problems, targets or token counts; two of one are needed: sweep with another --seed"
        )
    runs = Counter((r.protocol["l2"], r.protocol["seed"]) for r in records)
    (l2, seed), times = runs.most_common(1)[0]
    if times > 1:
        raise SystemExit(f"{db} holds {times} {l2} sweeps of seed {seed}; each needs a --seed of its own")


def main(db: str) -> None:
    """Print the comparison."""
    by_state: dict[str, dict[int, Medians]] = {"warm": {}, "cold": {}}
    alone: dict[str, list[Derived]] = {"warm": [], "cold": []}
    served: dict[str, list[Derived]] = {"warm": [], "cold": []}
    with Repository.open(db, readonly=True) as store:
        whole = [s for s in store.sweeps() if s.state in ENDED and until_of(s.record.protocol) == END]
        require_repeated(db, [sweep.record for sweep in whole])
        for sweep in reversed(whole):  # the store tells the newest first
            record, trials = sweep.record, store.trials(sweep.id)
            l2, seed = record.protocol["l2"], record.protocol["seed"]
            medians: Medians = {count: {} for count in record.token_counts}
            for trial in record.without_probes(trials):
                if isinstance(trial.outcome, Measurement):
                    medians[trial.cell.num_tokens][trial.candidate] = trial.outcome.latency_us
            by_state[l2][seed] = medians
            before = Incumbent.of(served[l2][-1].table) if served[l2] else None
            for kept, incumbent in ((alone, None), (served, before)):
                kept[l2].append(derive(record, sweep.id, trials, record.bound, incumbent))
            mine, now = alone[l2][-1], served[l2][-1]
            floor = f"{mine.floor.width:.2%}" if mine.floor else "unknown"
            print(f"seed {seed}, {l2}, alone: {bands(mine.table)}; noise floor {floor}")
            print(f"seed {seed}, {l2}, served: {bands(now.table)}")
            if note := held_note(now.table.evidence):
                print(f"  {note}")
    for l2 in (state for state, found in alone.items() if found):
        print(f"{l2}: other choices alone in {changed(alone[l2])}, served in {changed(served[l2])}")
    warm = list(by_state["warm"].values())
    for count in warm[0] if warm else ():
        argmins = {best(medians[count]) for medians in warm}
        losses = [m[count][c] / m[count][best(m[count])] - 1 for m in warm for c in argmins]
        print(
            f"{count:4} tokens: {len(argmins)} argmins among the warm sweeps, loss {max(losses):.2%} at most"
        )
    for seed, cold in by_state["cold"].items():
        for count, here in cold.items() if seed in by_state["warm"] else ():
            fastest, other = best(here), best(by_state["warm"][seed][count])
            longer = here[fastest] - by_state["warm"][seed][count][other]
            loss = here[other] / here[fastest] - 1
            print(f"{count:4} tokens, cold: {longer:+.2f} us; the warm winner loses {loss:.2%} there")


if __name__ == "__main__":
    main(sys.argv[1])
