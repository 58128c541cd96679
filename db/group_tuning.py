"""Tuning in a group of ranks: rank 0 leads and owns the database, the others follow in silence."""

from __future__ import annotations

from collections.abc import Sequence

from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.group_bench import GroupBench, Station, follow
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.ranks import Ranks, open_mail
from mhctune.autotuner.sweep import require_room
from mhctune.autotuner.worker import RemoteBench
from mhctune.configs.errors import ConfigError
from mhctune.db.tuning import Racing, Tuning


def tune(
    tuning: Tuning,
    plans: Sequence[SweepPlan],
    bench: RemoteBench,
    free_bytes: int,
    vram_budget: str,
    *,
    ranks: Ranks,
    new: bool = False,
    probe: bool | None = None,
) -> None:
    """Tune plans with this rank's bench, alone or as one of a group; the budget is a share of what is free.

    In a group the fewest bytes that are free on a rank count.

    Raises:
        ConfigError: a group and several seams; or no size.
        BudgetError: no room for any candidate of a plan's smallest cell, before anything is written.
        OtherDevice, RankLost: ranks that differ, or one that is lost.
        Stopped, Incomplete, NoBands, TooFewSamples: as `Tuning.run`.
    """
    if ranks.size == 1:
        budget = VramBudget.parse(vram_budget, free_bytes)
        tuning.run(plans, Racing.alone(plans, bench, budget), new=new, probe=probe)
        return
    if len(plans) > 1:
        names = ", ".join(plan.seam.name for plan in plans)
        raise ConfigError(
            f"{ranks.size} ranks tune one seam together, not {len(plans)}; add --seam with one of {names}"
        )
    station = Station(plans[0].fingerprint, free_bytes)
    with open_mail(ranks) as mail:
        if ranks.rank:
            with tuning.listen():  # rank 0 hears a signal too and decides
                follow(bench, bench, mail, station)
            return
        with GroupBench(bench, bench, mail) as lead:
            budget = VramBudget.parse(vram_budget, lead.meet(station))
            require_room(plans[0], lead, budget)
            racing = Racing(lambda plan: (lead, lead.compile_all), budget, bench.seconds, lead.publish)
            tuning.run(plans, racing, new=new, probe=probe)
