"""Bands of the recorded sweeps under bounds of 1, 2, 5 and 10 %: `python benchmarks/bands.py`.

For each: variants (compiled kernels), bands and the worst regret by the upper confidence limit; then, under
the sweep's own bound, the naive cut-overs beside the derived ones. The H200 prototype has one time a
candidate and no samples, so that its limits are its points.
"""

from __future__ import annotations

from mhctune.autotuner.bands import BandDeriver, NoBands, Option
from mhctune.autotuner.derive import derive
from mhctune.autotuner.naive import naive_cutovers, note
from mhctune.autotuner.recording import replay
from mhctune.configs.recorded import Recorded, load_recorded, recorded_names
from mhctune.kernels.space import Candidate

BOUNDS = (0.01, 0.02, 0.05, 0.10)


def single_timings(recorded: Recorded) -> tuple[list[int], list[Option]]:
    """Return token counts and options of a recording with one time a row."""
    tunables = [c for c in recorded.columns if c not in ("hidden_size", "num_tokens", "latency_us")]
    times: dict[Candidate, dict[int, float]] = {}
    for row in recorded.rows:
        config = {name: int(row[name]) for name in tunables}  # type: ignore[arg-type]
        times.setdefault(Candidate.of("fused", config), {})[int(row["num_tokens"])] = float(row["latency_us"])  # type: ignore[arg-type]
    counts = sorted({n for found in times.values() for n in found})
    best = {n: min(found[n] for found in times.values() if n in found) for n in counts}
    options = []
    for candidate, found in sorted(times.items()):
        regret = tuple(found[n] / best[n] - 1 if n in found else None for n in counts)
        options.append(Option(candidate, frozenset([str(candidate)]), 0, regret, regret))
    return counts, options


def main() -> None:
    """Print one table a recording."""
    for name in recorded_names():
        recorded = load_recorded(name)
        if {"label", "set"} & set(recorded.columns):
            continue  # what ships, and published medians of several runs (benchmarks/gb300.py)
        print(f"\n{name}\n  bound  variants  bands  worst regret")
        for bound in BOUNDS:
            try:
                if recorded.sweep is None:
                    derivation = BandDeriver(bound).derive(*single_timings(recorded))
                else:
                    sweep, trials = replay(recorded)
                    derivation = derive(sweep, 1, trials, bound).derivation
            except NoBands as error:
                print(f"  {bound:4.0%}   {error}")
                continue
            variants, segments = len(derivation.variants), len(derivation.segments)
            print(f"  {bound:4.0%}   {variants:8}  {segments:5}  {derivation.worst_upper:11.2%}")
        if recorded.sweep is not None:
            sweep, trials = replay(recorded)
            for each in naive_cutovers(derive(sweep, 1, trials, sweep.bound)):
                costs = ", ".join(f"{cost:.1%} at {count}" for count, cost in each.costs.items())
                print(f"  cut-over {each.lower} | {each.upper} {each.edge}; {note(each)}: costs {costs}")


if __name__ == "__main__":
    main()
