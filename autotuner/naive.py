"""The naive cut-over: a tuned arm against another route as a runtime ships it, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mhctune.autotuner.cutover import cutover
from mhctune.autotuner.derive import Derived
from mhctune.autotuner.report import Sheet
from mhctune.autotuner.shipped import streams_of
from mhctune.autotuner.standings import Standing
from mhctune.autotuner.words import counted, percent
from mhctune.configs.baseline import Baseline, BaselineChoice
from mhctune.configs.loader import load_baseline, names
from mhctune.kernels.dispatch import Band


@dataclass(frozen=True)
class Naive:
    """What a cut-over would be if only the arm below it had been tuned.

    Attributes:
        lower, upper: The arms of the derived cut-over.
        edge: Its last token count of the lower arm.
        baselines: The baselines that ship the compared config, by name.
        shipped: That config, and its arm, by token count where it was measured.
        last: The last measured token count up to which the lower arm's best leads it: the naive cut-over.
        costs: What is lost by it, by token count: the regret of what would be served there.
    """

    lower: str
    upper: str
    edge: int
    baselines: tuple[str, ...]
    shipped: Mapping[int, BaselineChoice]
    last: int
    costs: Mapping[int, float]


def naive_cutovers(derived: Derived) -> list[Naive]:
    """Return, for each cut-over between arms, the naive ones against what runtimes ship for the other route.

    A baseline fixes some tunables of a route. It stands for the best measured candidate of that route, with
    either projection, with those values, which favours it: the cost is not overstated. Compared are medians
    (`mhctune.autotuner.cutover`). A baseline whose config the sweep did not measure is left out; and all are
    on the target `c`, as what ships is made for GPUs.
    """
    if derived.table.target != "cuda":
        return []
    found = []
    for below, above in pairwise(derived.table.bands):
        if below.choice.arm == above.choice.arm:
            continue
        by_config: dict[tuple[str, ...], list[str]] = {}
        compared: dict[tuple[str, ...], tuple[dict[int, BaselineChoice], dict[int, Standing]]] = {}
        for baseline in map(load_baseline, names("baseline")):
            shipped = _shipped(derived, baseline, below.choice.arm)
            if shipped[1]:
                key = tuple(f"{count} {choice}" for count, choice in shipped[0].items())
                compared[key] = shipped
                by_config.setdefault(key, []).append(baseline.name)
        found += [_naive(derived, below, above, by_config[key], *compared[key]) for key in compared]
    return found


def _shipped(
    derived: Derived, baseline: Baseline, lower: str
) -> tuple[dict[int, BaselineChoice], dict[int, Standing]]:
    """Return what a baseline launches on the route that the lower arm is not of, where it was measured."""
    choices: dict[int, BaselineChoice] = {}
    standing: dict[int, Standing] = {}
    hidden, sms = int(derived.table.problem["hidden_size"]), derived.table.fingerprint.sm_count
    streams = streams_of(derived.table.seam)
    for count, rows in derived.cells.items():
        choice = baseline.choice(count, hidden, sms, streams)
        if lower.startswith("fused"):
            splits = baseline.split.splits(count, streams * hidden, sms)
            choice = BaselineChoice("unfused", {"n_splits": splits})
        fixed, arms = choice.config.items(), (choice.arm, f"{choice.arm}_mma")
        same = (s for s in rows if s.candidate.arm in arms and fixed <= s.candidate.config.items())
        best = next(same, None)
        if best is not None and not lower.startswith(choice.arm):
            choices[count], standing[count] = choice, best
    return choices, standing


def _naive(
    derived: Derived,
    below: Band,
    above: Band,
    baselines: list[str],
    shipped: Mapping[int, BaselineChoice],
    theirs: Mapping[int, Standing],
) -> Naive:
    arm = below.choice.arm
    mine = {n: s for n, rows in derived.cells.items() if (s := _best(rows, arm)) is not None and n in theirs}
    floor = derived.floor.width if derived.floor else 0.0
    last = cutover(_medians(mine), _medians(theirs), floor).last
    served = {n: mine[n] if n <= last else theirs[n] for n in mine}
    between = range(min(last, below.last) + 1, max(last, below.last) + 1)
    costs = {n: standing.regret.point for n, standing in served.items() if n in between}
    return Naive(arm, above.choice.arm, below.last, tuple(baselines), shipped, last, costs)


def _best(rows: Sequence[Standing], arm: str) -> Standing | None:
    return next((s for s in rows if s.candidate.arm == arm), None)


def _medians(standings: Mapping[int, Standing]) -> dict[int, float]:
    return {count: standing.latency_us for count, standing in standings.items()}


def naive_sheet(found: list[Naive]) -> Sheet:
    """Show the naive cut-over beside each derived one, and what it would cost."""
    rows = tuple(
        (
            f"{each.lower} | {each.upper}",
            each.edge,
            each.last,
            percent(max(each.costs.values(), default=0.0)),
            " ".join(f"{count}:{percent(cost)}" for count, cost in each.costs.items()) or "-",
        )
        for each in found
    )
    notes = (
        *(note(each) for each in found),
        "naive: the tuned arm below against the other route as shipped; costs: what that would lose",
    )
    return Sheet("cut-overs between arms", ("arms", "edge", "naive", "worst", "costs"), rows, notes)


def note(naive: Naive) -> str:
    """Say what a naive cut-over was compared with."""
    kinds = dict.fromkeys(
        f"{choice.arm}({', '.join(f'{k}={v}' for k, v in choice.config.items())})"
        for choice in naive.shipped.values()
    )
    where = counted(len(naive.shipped), "token count")
    shipped, owners = ", ".join(kinds), ", ".join(naive.baselines)
    return f"naive {naive.last}: {naive.lower} against {shipped} of {owners}, at {where}"
