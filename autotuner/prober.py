"""The prober: measures the integers between two bands until their edge is exact or inside the noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mhctune.autotuner.bands import NoBands
from mhctune.autotuner.bench import Bench
from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.conditions import Reader, not_applicable
from mhctune.autotuner.derive import Derived
from mhctune.autotuner.edges import Edge, edge_of
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.race import Race
from mhctune.autotuner.records import Cell, Trial
from mhctune.autotuner.stats import TooFewSamples
from mhctune.autotuner.store import Store, SweepRecord
from mhctune.autotuner.sweep import CompileAll, Watcher
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.space import Candidate


class Prober:
    """Races the two choices of each edge, and nobody else, at the integers between, by the sweep's protocol.

    Its trials are the sweep's own, at token counts that the sweep did not declare: no band is chosen by them,
    and the noise floor knows nothing of them. They only say where the edge between two chosen bands lies.
    """

    def __init__(
        self,
        record: SweepRecord,
        store: Store,
        bench: Bench,
        budget: VramBudget,
        compile_all: CompileAll,
        derive: Callable[[], Derived],
        stop: Callable[[], bool] = lambda: False,
        watcher: Watcher | None = None,
        read: Reader = not_applicable,
    ) -> None:
        """Probe what `derive` returns, bands of the sweep that `record` is of."""
        self._record, self._store, self._bench, self._budget = record, store, bench, budget
        self._compile_all, self._derive, self._stop = compile_all, derive, stop
        self._watcher, self._read = watcher or Watcher(), read

    def run(self, sweep_id: int) -> tuple[Edge, ...]:
        """Measure until no edge asks for more; return the edges. Bands that cannot be derived have none.

        Raises:
            Stopped: `stop` answered yes; the samples taken so far are committed.
        """
        try:
            derived = self._derive()
        except (NoBands, TooFewSamples):
            return ()  # whoever asks for the bands next is told why
        asking = [edge for edge in derived.edges if edge.next is not None]
        if asking:
            self._compile(asking)
        floor = derived.floor.width if derived.floor else 0.0
        found = []
        for index, edge in enumerate(derived.edges):
            found.append(self._settled(sweep_id, edge, floor, (index, len(derived.edges))))
        return tuple(found)

    def _compile(self, edges: list[Edge]) -> None:
        seam, record = find_seam(self._record.seam), self._record
        chosen = dict.fromkeys(c for edge in edges for c in (edge.lower, edge.upper))
        variants = (
            v for c in chosen for v in seam.arm(record.target, c.arm).variants(record.problem, c.config)
        )
        self._compile_all(tuple(dict.fromkeys(variants)), self._watcher.compiled)

    def _settled(self, sweep_id: int, edge: Edge, floor: float, place: tuple[int, int]) -> Edge:
        """Measure one edge; where a token count gives no answer (both failed, no memory) it stays open."""
        pair, between = (edge.lower, edge.upper), (edge.before, edge.above)
        known = {(n, t.candidate): t for n in self._between(edge) for t in self._trials(sweep_id, n, pair)}
        while edge.next is not None:
            count = edge.next
            self._race(sweep_id, count, pair, place)
            known |= {(count, t.candidate): t for t in self._trials(sweep_id, count, pair)}
            edge = edge_of(*pair, between, known, floor, edge.served)
            if edge.next == count:
                return replace(edge, next=None)
        return edge

    def _between(self, edge: Edge) -> set[int]:
        return {edge.before, *(probe.num_tokens for probe in edge.probes)}

    def _trials(self, sweep_id: int, count: int, pair: tuple[Candidate, ...]) -> list[Trial]:
        return [t for t in self._store.trials(sweep_id, count) if t.candidate in pair]

    def _race(self, sweep_id: int, count: int, pair: tuple[Candidate, ...], place: tuple[int, int]) -> None:
        record = self._record
        cell = Cell(record.seam, record.problem, count)
        self._watcher.entered(cell, *place)
        race = Race(
            sweep_id, cell, self._store, self._bench, self._budget, Protocol(**record.protocol), self._stop,
            max_regret=record.bound, read=self._read,
        )  # fmt: skip
        # Under another bound another pair of choices may have been probed here.
        taken = (s.batch for t in self._store.trials(sweep_id, count) for s in t.samples)
        race.run(pair, self._trials(sweep_id, count, pair), max(taken, default=-1))
