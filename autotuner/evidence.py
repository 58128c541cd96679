"""Evidence: what speaks for a table, of all its bands together and of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mhctune.autotuner.bands import Segment
from mhctune.autotuner.choose import Chosen
from mhctune.autotuner.edges import Edge
from mhctune.autotuner.incumbent import Incumbent
from mhctune.autotuner.records import Failure, Trial
from mhctune.autotuner.standings import Standing
from mhctune.autotuner.stats import NoiseFloor
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.terms import Terms
from mhctune.kernels.dispatch import Band
from mhctune.kernels.space import Candidate


@dataclass(frozen=True, slots=True)
class Evidence:
    """What bands were derived from and on which terms: enough to derive them again, and to defend them.

    `trials` are those of the sweep's grid; `wins` says who wins each cell by itself, ties broken.
    """

    sweep: SweepRecord
    sweep_id: int
    trials: Sequence[Trial]
    cells: Mapping[int, Sequence[Standing]]
    wins: Mapping[int, Candidate]
    floor: NoiseFloor | None
    chosen: Chosen
    terms: Terms
    incumbent: Incumbent | None
    edges: Sequence[Edge]

    def of_table(self, bands: Sequence[Band]) -> dict[str, Any]:
        """Return what speaks for the bands together: the grounds of a replay, and what they cost."""
        sweep, chosen, floor = self.sweep, self.chosen, self.floor
        edges = [edge.to_data() for edge in self.edges if edge.probes or edge.moved]
        return {
            "sweep": self.sweep_id,
            "sweep_digest": sweep.digest,
            "max_regret": chosen.max_regret,
            "raced_under": sweep.bound,
            "incumbent": self.incumbent.to_data() if self.incumbent else None,
            "worst_upper": round(chosen.derivation.worst_upper, 6),
            "mean_regret": round(_mean_regret(bands, self.terms.weights(chosen.counts)), 6),
            "noise_floor": [round(floor.lower, 6), round(floor.upper, 6), floor.n] if floor else None,
            "variants": sorted(chosen.derivation.variants),
            "candidates": len(sweep.variants),
            "protocol": dict(sweep.protocol),
            "sources": dict(sweep.sources),
            "failures": _failures(self.trials),
            **self.terms.to_evidence(),
            **({"held": chosen.held.to_data()} if chosen.held else {}),
            **({"search": sweep.search.summary()} if sweep.search else {}),
            **({"edges": edges} if edges else {}),
        }

    def of_band(self, segment: Segment) -> dict[str, Any]:
        """Return, for each measured token count of a band, what the choice costs and who else is as good."""
        choice = self.chosen.options[segment.option].candidate
        rows = [self._row(count, choice) for count in segment.token_counts]
        return {"measured": rows, "worst_upper": max(row["upper"] for row in rows)}

    def _row(self, count: int, choice: Candidate) -> dict[str, Any]:
        standing = next(s for s in self.cells[count] if s.candidate == choice)
        best = self.cells[count][0]
        return {
            "num_tokens": count,
            "latency_us": round(standing.latency_us, 4),
            "regret": round(standing.regret.point, 6),
            "upper": round(standing.regret.upper, 6),
            "rounds": standing.regret.n,
            "best": str(best.candidate),
            "best_us": round(best.latency_us, 4),
            "winner": str(self.wins[count]),
            "tie_set": sum(s.tied for s in self.cells[count]),
        }


def _mean_regret(bands: Sequence[Band], weights: Sequence[float]) -> float:
    """Return the mean of the regrets as measured, ties included, weighted by traffic."""
    regrets = [row["regret"] for band in bands for row in band.evidence["measured"]]
    return math.fsum(weight * regret for weight, regret in zip(weights, regrets, strict=True))


def _failures(trials: Sequence[Trial]) -> dict[str, int]:
    kinds = Counter(t.outcome.kind.value for t in trials if isinstance(t.outcome, Failure))
    return dict(sorted(kinds.items()))
