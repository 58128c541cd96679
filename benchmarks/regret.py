"""What a sweep's choices lose by a longer one: `python benchmarks/regret.py QUICK.db LONG.db`.

Both are the newest sweep of a database, over the same candidates and token counts; the long one has more
rounds and may have been stopped: cells that it did not finish are left out. For each token count: the winner
of the quick sweep and the choice its bands serve, with what each loses against the best of the long one, by
the long one's own medians.
"""

from __future__ import annotations

import sys
from collections import Counter

from mhctune.autotuner.records import Measurement
from mhctune.db.derivation import chosen_sweep, derive_stored
from mhctune.db.repository import Repository
from mhctune.kernels.space import Candidate


def main(quick: str, long: str) -> None:
    """Print one line a token count, and the worst."""
    with Repository.open(quick, readonly=True) as store:
        derived = derive_stored(store, chosen_sweep(store, None), None)
    with Repository.open(long, readonly=True) as store:
        sweep = store.sweeps()[-1]
        trials = store.trials(sweep.id)
    finished = Counter(trial.cell.num_tokens for trial in trials if trial.settled)
    times = {
        (trial.cell.num_tokens, trial.candidate): trial.outcome.latency_us
        for trial in trials
        if isinstance(trial.outcome, Measurement)
        and finished[trial.cell.num_tokens] == len(sweep.record.expected(trial.cell.num_tokens))
    }
    print(f"{'tokens':>6}  {'best us':>8}  {'winner':>7}  {'served':>7}")
    worst = [0.0, 0.0]
    for count in sorted({count for count, _ in times}):
        best = min(latency for (tokens, _), latency in times.items() if tokens == count)
        served = derived.table.lookup(count).choice
        chosen = (derived.cells[count][0].candidate, Candidate.of(served.arm, dict(served.config)))
        losses = [times[count, candidate] / best - 1 for candidate in chosen]
        worst = [max(pair) for pair in zip(worst, losses, strict=True)]
        print(f"{count:6}  {best:8.2f}  {losses[0]:7.2%}  {losses[1]:7.2%}")
    print(f"worst             {worst[0]:7.2%}  {worst[1]:7.2%}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
