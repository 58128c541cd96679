"""Repeated sweeps of one database compared: `python benchmarks/repeats.py DB`.

The sweeps differ in seed (and so in inputs and order) or in the L2 state. Printed are each one's bands and
noise floor; how many argmins of medians there are among the warm ones, and what the argmin of one loses by
the medians of another at most; and for a cold sweep, against the warm one of its seed, how much longer the
best takes and what the warm winner loses.
"""

from __future__ import annotations

import sys

from mhctune.autotuner.records import Measurement
from mhctune.db.derivation import derive_stored
from mhctune.db.repository import Repository
from mhctune.kernels.space import Candidate
from mhctune.kernels.until import END, until_of

Medians = dict[int, dict[Candidate, float]]


def best(medians: dict[Candidate, float]) -> Candidate:
    """Return the candidate of the lowest median."""
    return min(medians, key=lambda candidate: (medians[candidate], candidate))


def main(db: str) -> None:
    """Print the comparison."""
    by_state: dict[str, dict[int, Medians]] = {"warm": {}, "cold": {}}
    with Repository.open(db, readonly=True) as store:
        for sweep in (s for s in store.sweeps() if until_of(s.record.protocol) == END):
            protocol, derived = sweep.record.protocol, derive_stored(store, sweep, None)
            medians: Medians = {count: {} for count in sweep.record.token_counts}
            for trial in sweep.record.without_probes(store.trials(sweep.id)):
                if isinstance(trial.outcome, Measurement):
                    medians[trial.cell.num_tokens][trial.candidate] = trial.outcome.latency_us
            by_state[protocol["l2"]][protocol["seed"]] = medians
            bands = ", ".join(f"{b.first}-{b.last} {b.choice.arm}" for b in derived.table.bands)
            floor = f"{derived.floor.width:.2%}" if derived.floor else "unknown"
            print(f"seed {protocol['seed']}, {protocol['l2']}: {bands}; noise floor {floor}")
    warm = list(by_state["warm"].values())
    for count in warm[0]:
        argmins = {best(medians[count]) for medians in warm}
        losses = [m[count][c] / m[count][best(m[count])] - 1 for m in warm for c in argmins]
        print(
            f"{count:4} tokens: {len(argmins)} argmins among the warm sweeps, loss {max(losses):.2%} at most"
        )
    for seed, cold in by_state["cold"].items():
        for count, medians in cold.items():
            mine, other = best(medians), best(by_state["warm"][seed][count])
            longer = medians[mine] - by_state["warm"][seed][count][other]
            loss = medians[other] / medians[mine] - 1
            print(f"{count:4} tokens, cold: {longer:+.2f} us; the warm winner loses {loss:.2%} there")


if __name__ == "__main__":
    main(sys.argv[1])
