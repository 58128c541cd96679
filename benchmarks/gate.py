"""How often the gate finds what it should: `python benchmarks/gate.py [RUNS]`, from recorded H200 noise.

A run compares all ten token counts of the recorded sweep, then and now, each drawn from the paired rounds of
its best and another candidate. Planted are 5 % at one token count, and 1 % at all of them.
"""

from __future__ import annotations

import random
import sys

from mhctune.autotuner.check import Verdict
from mhctune.autotuner.gate import ROUNDS, alpha_of, judge, unpaired_change
from mhctune.autotuner.recording import replay
from mhctune.autotuner.records import Measurement
from mhctune.autotuner.stats import paired_ratios
from mhctune.configs.recorded import load_recorded

TOLERANCE, THEN = 0.03, 30
"""What may be lost, and the rounds that a sweep took; the gate takes `ROUNDS`."""

Ratios = dict[int, list[list[float]]]


def recorded_ratios() -> Ratios:
    """Return, for each token count, ratios of the best to eleven others, as a gate's rounds would pair."""
    sweep, trials = replay(load_recorded("h200_decode_hidden5120"))
    cells: dict[int, list[Measurement]] = {count: [] for count in sweep.token_counts}  # probes have two each
    for t in trials:
        if isinstance(t.outcome, Measurement) and t.cell.num_tokens in cells:
            cells[t.cell.num_tokens].append(t.outcome)
    found = {}
    for count, measured in cells.items():
        measured.sort(key=lambda m: m.latency_us)
        best = measured[0]
        found[count] = [list(paired_ratios(best.samples, m.samples)) for m in measured[1:12]]
    return found


def run(ratios: Ratios, slower: dict[int, float], draw: random.Random) -> dict[int, Verdict]:
    """Return the verdicts of one run in which token counts are slower now by the given shares."""
    came = {}
    for count, recorded in ratios.items():
        rounds = draw.choice(recorded)
        then, now = ([draw.choice(rounds) for _ in range(n)] for n in (THEN, ROUNDS))
        planted = [ratio * (1 + slower.get(count, 0.0)) for ratio in now]
        came[count] = judge(unpaired_change(planted, then), TOLERANCE, alpha_of(len(ratios)))
    return came


def tally(ratios: Ratios, runs: int, draw: random.Random) -> tuple[int, int]:
    """Return in how many of `runs` 5 % at one token count is found, and 1 % at all of them raised."""
    found = raised = 0
    for _ in range(runs):
        at = draw.choice(list(ratios))
        found += run(ratios, {at: 0.05}, draw)[at] is Verdict.REGRESSED
        raised += Verdict.REGRESSED in run(ratios, dict.fromkeys(ratios, 0.01), draw).values()
    return found, raised


def main(runs: int = 1000) -> None:
    """Print both counts."""
    found, raised = tally(recorded_ratios(), runs, random.Random(1))
    print(f"{runs} runs, tolerance {TOLERANCE:.0%}: 5 % found in {found}, 1 % raised in {raised}")


if __name__ == "__main__":
    main(*(int(text) for text in sys.argv[1:2]))
