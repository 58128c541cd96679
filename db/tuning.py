"""Tuning: plans are raced one after another into one database, and the bands of each derived and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from mhctune.autotuner import report
from mhctune.autotuner.ahead import AheadBench
from mhctune.autotuner.bands import NoBands
from mhctune.autotuner.bench import Bench
from mhctune.autotuner.benches import open_bench
from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.conditions import Reader
from mhctune.autotuner.derive import Derived
from mhctune.autotuner.nvidia import conditions_reader
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.planner import require_same
from mhctune.autotuner.probe import Device
from mhctune.autotuner.prober import Prober
from mhctune.autotuner.race import Stopped
from mhctune.autotuner.records import SweepState
from mhctune.autotuner.stats import TooFewSamples
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.sweep import CompileAll, Sweep, SweepResult, Watcher, require_room
from mhctune.autotuner.worker import RemoteBench
from mhctune.db.counts import Counts
from mhctune.db.derivation import chosen_sweep, derive_stored, keep
from mhctune.db.engine import Place
from mhctune.db.lock import exclusive
from mhctune.db.repository import Repository
from mhctune.kernels.dispatch import DispatchTable
from mhctune.kernels.until import until_of

Stop = Callable[[], bool]
Tools = tuple[Repository, Bench, VramBudget, CompileAll]
"""What sweep and prober measure with."""
Watch = tuple[Stop, Watcher, Reader]
"""What sweep and prober listen to and tell."""


class Incomplete(Exception):
    """A sweep that could not measure its whole grid: what is missing. The same command goes on with it."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The bands of a sweep that ended, kept in the database.

    Attributes:
        result: How the sweep ended.
        derived: Its bands.
        counts: Its trials by outcome.
        seconds: Wall seconds that it waited for its worker, by call.
        where: The database: its absolute path, or its URL.
    """

    result: SweepResult
    derived: Derived
    counts: Counts
    seconds: Mapping[str, float]
    where: str

    @property
    def notes(self) -> tuple[str, str]:
        """What to show of its trials and of its time."""
        return report.outcomes(self.counts.measured, self.counts.failures), report.phases(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        result, table = self.result, self.derived.table.to_dict()
        return {
            "sweep": result.sweep_id,
            "state": result.state.value,
            "db": self.where,
            "seconds": dict(self.seconds),
            "missing": result.missing,
            "table": table,
        }


@dataclass(frozen=True)
class Racing:
    """What races plans: a bench each, under one budget.

    Attributes:
        bench_of: Returns a plan's bench and what compiles for it.
        budget: Of all of them.
        seconds: Wall seconds, by call, that the worker adds to; emptied after each plan.
        publish: Gets the table of a complete sweep.
    """

    bench_of: Callable[[SweepPlan], tuple[Bench, CompileAll]]
    budget: VramBudget
    seconds: dict[str, float]
    publish: Callable[[DispatchTable], object] = lambda table: None

    @classmethod
    def alone(cls, plans: Sequence[SweepPlan], bench: RemoteBench, budget: VramBudget) -> Racing:
        """Race with one worker; on a GPU it compiles ahead.

        Raises:
            BudgetError: a plan for whose smallest cell there is no room, before anything is written.
        """
        for plan in plans:
            require_room(plan, bench, budget)

        def bench_of(plan: SweepPlan) -> tuple[Bench, CompileAll]:
            if plan.target == "c":
                return bench, bench.compile_all
            ahead = AheadBench(bench, bench, plan.variants_of)
            return ahead, ahead.compile_all

        return cls(bench_of, budget, bench.seconds)


@dataclass(frozen=True)
class Tuning:
    """Tunes into a database, which it holds against other sweeps; knows no terminal.

    Attributes:
        db: File or URL.
        listen: Yields the question whether to stop; entered once the database is held.
        watch: Yields what hears of the progress of one sweep.
        note: Hears what to warn of, a line, empty if nothing.
        tell: Hears of each sweep that gave bands.
    """

    db: str
    listen: Callable[[], AbstractContextManager[Stop]]
    watch: Callable[[], AbstractContextManager[Watcher]]
    note: Callable[[str], object]
    tell: Callable[[Tuned], object] = lambda tuned: None

    def check(self) -> None:
        """Refuse a database that cannot be tuned into, before a worker starts for it (8 s on a GPU's host).

        Raises:
            DatabaseError: why.
        """
        place = Place.of(self.db)
        place.require_writable()
        if not place.awaits_writing:  # a journal to roll back, which only a writer may
            Repository.open(self.db, readonly=True).close()

    def run(
        self, plans: Sequence[SweepPlan], racing: Racing, *, new: bool = False, probe: bool | None = None
    ) -> None:
        """Run plans one after another; a seam without bands does not keep those after it from theirs.

        `probe` says whether edges are probed (None: on a GPU). What is complete is left out, unless `new`.

        Raises:
            Stopped: asked to; every finished round is kept.
            Incomplete, NoBands, TooFewSamples: of the first seam that ended so, once all had their turn.
        """
        failed: list[Exception] = []
        with Repository.open(self.db) as store, exclusive(self.db), self.listen() as stop:
            for plan in plans if new else self._left(store, plans):
                probed = plan.target != "c" if probe is None else probe
                result = self._sweep(store, plan, racing, stop, new, probed)
                try:
                    self._finish(store, plan, result, racing)
                except (Incomplete, NoBands, TooFewSamples) as error:
                    if stop() or len(plans) == 1:
                        raise
                    failed.append(error)
                    name, some = plan.seam.name, isinstance(error, Incomplete)
                    what = f"{name}: {error}" if some else f"no bands of {name} ({error})"
                    self.note(f"{what}; the seams after it go on")
                racing.seconds.clear()  # each seam's own
        if failed:
            raise failed[0]

    def probe(
        self, device: Device, sweep_id: int | None, max_regret: float | None, vram_budget: str
    ) -> tuple[int, Derived]:
        """Probe the edges of a stored sweep (default: the newest); return its number and the bands kept.

        Raises:
            Stopped: asked to; every finished round is kept.
            OtherDevice: `device` is not the sweep's: samples of two machines are not mixed.
            NoBands, TooFewSamples: as `derive`.
        """
        with Repository.open(self.db) as store, exclusive(self.db), self.listen() as stop:
            stored = chosen_sweep(store, sweep_id)
            record = require_same(stored.record, device)
            budget = VramBudget.parse(vram_budget, device.free_bytes)
            with (
                _bench_of(record) as bench,
                self.watch() as watcher,
                conditions_reader(record.target) as read,
            ):
                tools = store, bench, budget, bench.compile_all
                probe_edges(tools, (stop, watcher, read), max_regret, stored.id)
            derived = derive_stored(store, store.sweep(stored.id), max_regret)
            self.note(keep(store, derived.table))
        return stored.id, derived

    def _left(self, store: Repository, plans: Sequence[SweepPlan]) -> Sequence[SweepPlan]:
        """Return the seams of a family whose newest sweep is not complete; once all are, all seams again."""
        # The store tells the newest first.
        states = {sweep.record.digest: sweep.state for sweep in reversed(store.sweeps())}
        left = [plan for plan in plans if states.get(plan.record().digest) is not SweepState.COMPLETE]
        if left and len(left) < len(plans):
            done = len(plans) - len(left)
            self.note(f"{done} of {len(plans)} seams are complete; --new sweeps them again")
        return left or plans

    def _sweep(
        self, store: Repository, plan: SweepPlan, racing: Racing, stop: Stop, new: bool, probed: bool
    ) -> SweepResult:
        with self.watch() as watcher, conditions_reader(plan.target) as read:
            bench, compile_all = racing.bench_of(plan)
            tools, watch = (store, bench, racing.budget, compile_all), (stop, watcher, read)
            probe = partial(probe_edges, tools, watch, plan.max_regret) if probed else None
            return Sweep(plan, *tools, *watch).run(new=new, probe=probe)

    def _finish(self, store: Repository, plan: SweepPlan, result: SweepResult, racing: Racing) -> None:
        """Derive, keep, publish and tell the bands of a sweep that ended."""
        if result.state is SweepState.INTERRUPTED:
            raise Stopped
        where = store.place.location
        try:
            derived = derive_stored(store, store.sweep(result.sweep_id), plan.max_regret)
        except (NoBands, TooFewSamples) as error:
            self.note(f"the measurements are kept in {where}")
            if result.state is SweepState.INCOMPLETE:
                raise Incomplete(f"the sweep is incomplete: {error}") from error
            raise
        self.note(keep(store, derived.table))
        if result.state is SweepState.COMPLETE:
            racing.publish(derived.table)
        self.tell(Tuned(result, derived, store.counts(result.sweep_id), dict(racing.seconds), where))
        if result.state is SweepState.INCOMPLETE:
            missing = "; ".join(result.missing)
            raise Incomplete(f"the sweep is incomplete, run it again; no band covers {missing}")


def _bench_of(record: SweepRecord) -> AbstractContextManager[RemoteBench]:
    """Start a worker with the bench that a sweep was measured on."""
    l2, until = str(record.protocol.get("l2", "warm")), until_of(record.protocol)
    return open_bench(record.seam, record.target, l2, until=until)


def probe_edges(tools: Tools, watch: Watch, max_regret: float | None, sweep_id: int) -> None:
    """Measure the edges between the bands of a stored sweep, which are derived anew from the store.

    Raises:
        Stopped: asked to; every finished round is kept.
    """
    store = tools[0]

    def derived() -> Derived:
        return derive_stored(store, store.sweep(sweep_id), max_regret)

    Prober(store.record(sweep_id), *tools, derived, *watch).run(sweep_id)
