"""An explanation: why a choice is served at a token count, and what would change that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mhctune.autotuner.beside import beside
from mhctune.autotuner.derive import Derived
from mhctune.autotuner.edges import Edge
from mhctune.autotuner.front import Point
from mhctune.autotuner.hold import held_note
from mhctune.autotuner.other_times import OtherTimes
from mhctune.autotuner.records import Failure, Footprint, Trial
from mhctune.autotuner.report import Sheet, config_text, edge_notes, floor_note
from mhctune.autotuner.standings import Standing
from mhctune.autotuner.stats import NoiseFloor
from mhctune.autotuner.words import counted, percent, token_range
from mhctune.kernels.dispatch import Answer, DispatchTable
from mhctune.kernels.space import Candidate
from mhctune.kernels.until import brief, told


@dataclass(frozen=True)
class Explanation:
    """Why a choice is served at a token count.

    `measured_at` is the measured token count that speaks for it: the next one of its band, or its last.
    `floor_us` is what a copy of the cell's fewest bytes takes there, where it was timed. `edge` was probed
    between the measured token counts around `num_tokens`.
    """

    num_tokens: int
    answer: Answer
    measured_at: int
    standings: Sequence[Standing]
    footprint: Footprint
    failures: Mapping[Candidate, Failure]
    table: DispatchTable
    winner: Candidate
    floor: NoiseFloor | None
    front: Sequence[Point]
    shipped: Candidate | None = None
    """What a runtime ships there, if that was measured."""
    floor_us: float | None = None
    edge: Edge | None = None
    others: OtherTimes | None = None
    """What the candidates took until the other moment, where a sweep timed that."""

    @property
    def _other_us(self) -> Mapping[Candidate, float]:
        """Microseconds of that other number in this cell; empty where it was not measured."""
        return self.others.at(self.measured_at) if self.others else {}

    @property
    def floor_share(self) -> float | None:
        """The floor over the choice's latency: 1 is as fast as a copy."""
        return None if self.floor_us is None else self.floor_us / self.standings[self._place].latency_us

    @property
    def _place(self) -> int:
        """Where the choice stands among the measured candidates, from 0."""
        return next(i for i, s in enumerate(self.standings) if str(s.candidate) == str(self.answer.choice))

    def _shown(self, limit: int) -> list[Standing]:
        """Return the first `limit` candidates, and the served and the shipped one if they are not there."""
        wanted = (str(self.answer.choice), str(self.shipped))
        rest = [s for s in self.standings[limit:] if str(s.candidate) in wanted]
        return [*self.standings[:limit], *rest]

    def to_dict(self, limit: int) -> dict[str, Any]:
        """Return it as JSON-able data, with the first `limit` candidates."""
        return {
            "choice": str(self.answer.choice),
            "place": self._place + 1,
            "table": self.table.digest,
            "gpu": self.table.fingerprint.gpu_name,
            "sweep": self.table.evidence["sweep"],
            "max_regret": self.table.evidence["max_regret"],
            "measured_at": self.measured_at,
            "winner": str(self.winner),
            "evidence": self.evidence_id,
            "would_change": self.would_change(),
            "noise_floor": asdict(self.floor) if self.floor else None,
            "bytes": asdict(self.footprint),
            "floor_us": self.floor_us,
            "floor_share": self.floor_share,
            "edge": self.edge.to_data() if self.edge else None,
            "until": self.table.until,
            "other": (
                {"until": self.others.until, "sweep": self.others.sweep}
                if self.others and self._other_us
                else None
            ),
            "candidates": [
                {
                    "candidate": str(s.candidate),
                    "latency_us": s.latency_us,
                    **asdict(s.regret),
                    "tied": s.tied,
                    **({"shipped": True} if s.candidate == self.shipped else {}),
                    **({"other_us": self._other_us.get(s.candidate)} if self._other_us else {}),
                }
                for s in self._shown(limit)
            ],
            "failures": [{"candidate": str(c), **asdict(failure)} for c, failure in self.failures.items()],
        }

    def sheet(self, limit: int) -> Sheet:
        """Show the first `limit` candidates with their regret and its limits, the bytes and the failures."""
        served = self.standings[self._place]
        rows = tuple(
            (
                s.candidate.arm,
                config_text(s.candidate.items),
                round(s.latency_us, 1),
                *([_rounded(self._other_us.get(s.candidate))] if self._other_us else ()),
                percent(s.regret.point),
                percent(s.regret.lower),
                percent(s.regret.upper),
                ("served" if s is served else "tied" if s.tied else "")
                + (" shipped" if s.candidate == self.shipped else ""),
            )
            for s in self._shown(limit)
        )
        columns: tuple[str, ...] = ("arm", "config", "us", "regret", "lower", "upper", "")
        if self.others and self._other_us:
            columns = (*columns[:2], _column(self.table.until), _column(self.others.until), *columns[3:])
        return Sheet(self._title(), columns, rows, tuple(self._notes()))

    def _title(self) -> str:
        title = f"{counted(self.num_tokens, 'token')}: {self.answer.choice}"
        title += f", for {token_range(self.answer.first, self.answer.last)}"
        if self.measured_at != self.num_tokens:
            title += f"; measured at {self.measured_at}"
        return title

    def _notes(self) -> Iterator[str]:
        tied, footprint = sum(s.tied for s in self.standings), self.footprint
        evidence, held = self.table.evidence, held_note(self.table.evidence)
        if self._place == 0:
            yield "served: the best here"
        else:
            bound = percent(evidence["max_regret"])
            why = (
                f"kept within the bound of {bound}"
                if held
                else f"chosen so that all bands together need the fewest kernels under the bound of {bound}"
            )
            yield f"served: {self._place + 1} of {len(self.standings)} here, {why}"
        if held:
            yield held
        yield (
            f"{counted(len(self.standings), 'candidate')} measured at {counted(self.measured_at, 'token')}, "
            f"{tied} tied with the best: their lower 95 % limit is not above 0{self._or_floor}"
        )
        yield floor_note(evidence.get("noise_floor"))
        yield f"timed {told(self.table.until)}"
        yield from self._other_notes()
        yield f"winner of this token count by itself, by the rule for ties: {self.winner}"
        yield (
            f"bytes there: inputs {footprint.input_bytes:,}, outputs {footprint.output_bytes:,}, "
            f"scratch {footprint.scratch_bytes:,}, graph {footprint.graph_bytes:,}"
        )
        if self.floor_us is not None and self.floor_share is not None:
            yield (
                f"byte floor: a copy of the fewest bytes takes {self.floor_us:.2f} us, "
                f"{percent(self.floor_share)} of what is served"
            )
        yield from edge_notes(self.edge) if self.edge else ()
        gpu, digest = self.table.fingerprint.gpu_name, self.table.digest[:12]
        yield f"{gpu}, sweep {evidence['sweep']}, table {digest}; evidence {self.evidence_id}"
        yield from (f"would change it: {line}" for line in self.would_change())
        for candidate, failure in self.failures.items():
            yield f"failed: {candidate}: {failure.kind}: {failure.detail}"

    def _other_notes(self) -> Iterator[str]:
        """Say what the other number of this cell is and where it is from, and who is fastest by it."""
        if not self.others or not (taken := self._other_us):
            return
        best = min(taken, key=lambda candidate: (taken[candidate], candidate))
        own, column = _column(self.table.until), _column(self.others.until)
        yield f"{column}: by sweep {self.others.sweep}, timed {told(self.others.until)}"
        yield f"least {column}: {taken[best]:.1f}, {best}; regret and limits are of {own}"

    @property
    def evidence_id(self) -> str:
        """The id of the cell that speaks for the choice, as exports name it."""
        return f"{self.table.evidence['sweep_digest'][:12]}@{self.measured_at}"

    def would_change(self) -> list[str]:
        """Return what would change the decision: a bound, the number of kernels, more rounds."""
        served, lines = self.standings[self._place], []
        upper, bound = served.regret.upper, self.table.evidence["max_regret"]
        if self._place:
            lines.append(
                f"a bound below {percent(upper)}, this choice's upper limit here (now {percent(bound)})"
            )
        # Where the bound would do already, other bands are held, and a note of its own says why.
        kernels = len(self.table.evidence["variants"])
        fewer = [p for p in self.front if p.variants < kernels and p.bound > bound]
        if fewer:
            lines.append(
                f"a bound of {percent(fewer[-1].bound)}: {counted(fewer[-1].variants, 'kernel')} would do"
            )
        tied = [s for s in self.standings if s.tied and s is not served]
        if tied:
            lines.append(
                f"more rounds, if they tell {counted(len(tied), 'other candidate')} from the best: now tied, "
                f"first {tied[0].candidate}"
            )
        return lines or ["nothing near: no other candidate is tied, and no bound gives fewer kernels"]

    @property
    def _or_floor(self) -> str:
        return f", or their regret not above the noise floor, {self.floor.width:.2%}" if self.floor else ""


def _column(until: str) -> str:
    """Return the heading of latencies that were timed until then, which is narrow: `us to input`."""
    return f"us to {brief(until).split()[-1]}"


def _rounded(value: float | None) -> float | str:
    return "-" if value is None else round(value, 1)


def explain(
    derived: Derived, trials: Sequence[Trial], num_tokens: int, others: OtherTimes | None = None
) -> Explanation:
    """Explain what derived bands serve at a token count, from the trials that they were derived from.

    `others` is what the same candidates took until another moment.
    """
    answer = derived.table.lookup(num_tokens)
    band = next((b for b in derived.table.bands if num_tokens <= b.last), derived.table.bands[-1])
    measured = [row["num_tokens"] for row in band.evidence["measured"]]
    count = next((n for n in measured if n >= num_tokens), measured[-1])
    told = [edge for edge in derived.edges if edge.probes or edge.moved]
    near = [edge for edge in told if edge.before < num_tokens < edge.above]
    here = [trial for trial in trials if trial.cell.num_tokens == count]
    return Explanation(
        num_tokens,
        answer,
        count,
        derived.cells[count],
        next(trial.footprint for trial in here if str(trial.candidate) == str(answer.choice)),
        {t.candidate: t.outcome for t in here if isinstance(t.outcome, Failure)},
        derived.table,
        derived.wins[count],
        derived.floor,
        derived.chosen.front(),
        next((row.candidate for row in beside(derived) if row.num_tokens == count and row.shipped), None),
        derived.floors.get(count),
        near[0] if near else None,
        others,
    )
