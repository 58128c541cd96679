"""Speed: a table's choices timed again, each beside what it is compared with, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mhctune.autotuner.bench import Bench
from mhctune.autotuner.check import Finding, Verdict, label, span
from mhctune.autotuner.gate import (
    Change,
    alpha_of,
    judge,
    paired_change,
    reason,
    rounds_taken,
    unpaired_change,
)
from mhctune.autotuner.probe import Device
from mhctune.autotuner.protocol import PROTOCOL_VERSION, Protocol
from mhctune.autotuner.records import UNMEASURED, Cell, Failure, Measurement, Sample, Trial
from mhctune.autotuner.runner import sampled
from mhctune.autotuner.stats import CONFIDENCE, paired_ratios, pairs_needed
from mhctune.autotuner.sweep import Watcher
from mhctune.autotuner.words import counted
from mhctune.kernels.dispatch import Choice, DispatchTable, Fingerprint, Status
from mhctune.kernels.legality import problem_of, refusals
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Variant
from mhctune.kernels.space import Candidate

CompileAll = Callable[[tuple[Variant, ...], Callable[[int, int], None]], None]
"""Compiles all variants; the callable hears how many are done."""

Taken = dict[Candidate, "list[float] | Failure"]


@dataclass(frozen=True)
class Then:
    """What is known of earlier: the samples of the table's sweep, and another table to compare with."""

    trials: Sequence[Trial] = ()
    baseline: DispatchTable | None = None

    def samples(self, num_tokens: int) -> dict[Candidate, tuple[Sample, ...]]:
        """Return the samples of every candidate that was measured at a token count."""
        return {
            t.candidate: t.outcome.samples
            for t in self.trials
            if t.cell.num_tokens == num_tokens and isinstance(t.outcome, Measurement)
        }


@dataclass(frozen=True)
class _Spot:
    """A measured token count of a band: what it serves there, how fast that was, and who runs beside it."""

    num_tokens: int
    choice: Choice
    latency_us: float
    then: Mapping[Candidate, tuple[Sample, ...]] = field(default_factory=dict)
    reference: Candidate | None = None
    """Was timed in the same rounds of the sweep: what both changed by alike is the machine's."""
    baseline: Choice | None = None

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.choice.arm, self.choice.config)

    @property
    def field(self) -> tuple[Candidate, ...]:
        """Everyone who is timed, the choice first."""
        others = (
            self.reference,
            Candidate(self.baseline.arm, self.baseline.config) if self.baseline else None,
        )
        return tuple(dict.fromkeys([self.candidate, *(each for each in others if each is not None)]))


class _Unable(Exception):
    """Why nothing can be said of a table's speed."""


def elsewhere(table: DispatchTable, device: Device) -> str:
    """Return why a table's speed cannot be measured on this device; empty where it can."""
    if (table.target, table.fingerprint.gpu_name) == (device.target, device.name):
        return ""
    return f"its device is {table.fingerprint.gpu_name}, this machine's is {device.name}"


def remeasure(
    table: DispatchTable,
    bench: Bench,
    compile_all: CompileAll,
    tolerance: float,
    watcher: Watcher | None = None,
    *,
    then: Then | None = None,
    here: Fingerprint | None = None,
) -> list[Finding]:
    """Time each band's choice again at the token counts it was measured at, by the protocol of its sweep.

    Beside the choice run, in the same rounds, forward and back: the candidate that shared most rounds of its
    sweep with it, the fastest of such, and the baseline's choice. `speed` compares with the sweep: the
    ratios to that other candidate, then and now, where it is the same code under the same toolchain (`here`),
    so that a machine which is slower today is no regression; else the latencies. `gate` compares with the
    baseline's choice, pair by pair.

    Regressed and improved are significant (`mhctune.autotuner.gate`) and beyond `tolerance`. A choice that
    is illegal here is left to `legal`.
    """
    watcher, name, wrong, then = watcher or Watcher(), label(table), refusals(table), then or Then()
    if None in wrong:
        return []
    try:
        protocol, spots = _protocol(table.evidence), _spots(table, then)
    except _Unable as error:
        return [Finding(name, "speed", Verdict.CANNOT_TELL, str(error))]
    findings = [
        Finding(
            name, f"speed, {span(b.first, b.last)}", Verdict.MISSING, "the table holds no latency to compare"
        )
        for b in table.bands
        if not b.evidence.get("measured")
    ]
    spots = [spot for spot in spots if spot.choice not in wrong]
    arms, problem = find_seam(table.seam), problem_of(table)
    fields = {c: None for spot in spots for c in spot.field if _launchable(table, c)}
    variants = (v for c in fields for v in arms.arm(table.target, c.arm).variants(problem, c.config))
    watcher.begun(table.evidence.get("sweep", 0), 0, len(spots))
    compile_all(tuple(dict.fromkeys(variants)), watcher.compiled)
    comparisons = len(spots) * (2 if then.baseline else 1)
    rounds = rounds_taken(comparisons)
    for index, spot in enumerate(spots):
        cell = Cell(table.seam, problem, spot.num_tokens)
        watcher.entered(cell, index, len(spots))
        taken = _time(bench, cell, [c for c in spot.field if c in fields], protocol, rounds)
        mine = taken[spot.candidate]
        watcher.told(cell, spot.candidate, mine if isinstance(mine, Failure) else statistics.median(mine))
        findings += _judged(table, spot, taken, tolerance, alpha_of(comparisons), here)
    return findings


def _launchable(table: DispatchTable, candidate: Candidate) -> bool:
    arms, problem = find_seam(table.seam), problem_of(table)
    try:
        return not arms.arm(table.target, candidate.arm).space(problem).refusals(candidate.config)
    except KeyError:
        return False


def l2_of(table: DispatchTable) -> str:
    """Return the L2 state that a table was measured with: `warm` where it does not say `cold`."""
    protocol = table.evidence.get("protocol")
    return "cold" if isinstance(protocol, Mapping) and protocol.get("l2") == "cold" else "warm"


def _protocol(evidence: Mapping[str, Any]) -> Protocol:
    try:
        protocol = Protocol(**evidence["protocol"])
    except (KeyError, TypeError):
        raise _Unable("the table does not say by which protocol it was measured; sweep again") from None
    if protocol.version != PROTOCOL_VERSION:
        raise _Unable(
            f"measured by protocol {protocol.version}, this mhctune has {PROTOCOL_VERSION}; sweep again"
        )
    if protocol.samples < pairs_needed(CONFIDENCE):
        rounds = counted(protocol.samples, "round")
        raise _Unable(f"{rounds} of the protocol say too little; {pairs_needed(CONFIDENCE)} are needed")
    return protocol


def _spots(table: DispatchTable, then: Then) -> list[_Spot]:
    spots = []
    try:
        for band in table.bands:
            for row in band.evidence.get("measured") or ():
                count, latency = int(row["num_tokens"]), float(row["latency_us"])
                spots.append(_spot(table, then, count, band.choice, latency))
    except (KeyError, TypeError, ValueError) as error:
        raise _Unable(f"the evidence of its bands cannot be read: {error}; sweep again") from error
    return spots


def _spot(table: DispatchTable, then: Then, count: int, choice: Choice, latency: float) -> _Spot:
    samples, mine = then.samples(count), Candidate(choice.arm, choice.config)
    pairs = {c: len(paired_ratios(taken, samples.get(mine, ()))) for c, taken in samples.items() if c != mine}
    others = [c for c, n in pairs.items() if n >= pairs_needed(CONFIDENCE) and _launchable(table, c)]
    # Who left the race early shares few rounds with the choice, and so tells little.
    reference = min(others, key=lambda c: (-pairs[c], Measurement(samples[c]).latency_us, c), default=None)
    against = then.baseline.lookup(count).choice if then.baseline else None
    return _Spot(count, choice, latency, samples, reference, against)


def _time(
    bench: Bench, cell: Cell, candidates: Sequence[Candidate], protocol: Protocol, rounds: int
) -> Taken:
    """Time candidates in interleaved rounds, forward and back; one that fails drops out and says why.

    Where not all find room at once, the first, which is the choice, is timed alone.
    """
    taken: Taken = {}
    entered = bench.enter(cell, protocol.seed + cell.num_tokens)
    try:
        if isinstance(entered, Failure):
            return dict.fromkeys(candidates, entered)
        launches = 0
        for candidate in candidates:
            prepared = bench.prepare(candidate)
            rough = prepared if isinstance(prepared, Failure) else bench.sample(candidate, 0, 0, 1)
            taken[candidate] = rough if isinstance(rough, Failure) else []
            if not isinstance(rough, Failure):
                launches = max(launches, protocol.launches(rough if rough > 0 else 1.0))
        for round in range(rounds):
            for candidate in candidates if round % 2 == 0 else reversed(candidates):
                so_far = taken[candidate]
                if isinstance(so_far, Failure):
                    continue
                latency = sampled(bench, candidate, 0, round, launches)
                if isinstance(latency, Failure):
                    taken[candidate] = latency
                else:
                    so_far.append(latency)
        for candidate in candidates:
            bench.release(candidate)
        return taken
    finally:
        bench.leave()


def _judged(
    table: DispatchTable, spot: _Spot, taken: Taken, tolerance: float, alpha: float, here: Fingerprint | None
) -> Iterator[Finding]:
    name, where, mine = label(table), counted(spot.num_tokens, "token"), taken[spot.candidate]
    if isinstance(mine, Failure):
        verdict = Verdict.CANNOT_TELL if mine.kind in UNMEASURED else Verdict.DISAGREES
        sentence = f"{spot.choice} failed, {spot.latency_us:.2f} us before: {mine.kind}: {mine.detail}"
        yield Finding(name, f"speed, {where}", verdict, sentence)
        return
    change, how = _since(table, spot, mine, taken, here)
    verdict = judge(change, tolerance, alpha)
    sentence = (
        f"{spot.choice} takes {statistics.median(mine):.2f} us, {spot.latency_us:.2f} us before{how}: "
        f"{reason(change, tolerance, alpha)}{_grounds(table, here) if verdict is not Verdict.PASSED else ''}"
    )
    yield Finding(name, f"speed, {where}", verdict, sentence)
    if spot.baseline is not None:
        yield _against(name, spot, mine, taken, tolerance, alpha)


def _since(
    table: DispatchTable, spot: _Spot, mine: list[float], taken: Taken, here: Fingerprint | None
) -> tuple[Change, str]:
    """Return the change since the sweep, and by what it was found."""
    reference, before = spot.reference, spot.then.get(spot.candidate)
    if before is None:
        return paired_change([latency / spot.latency_us for latency in mine]), " (median)"
    beside = taken.get(reference) if reference else None
    if reference is None or not isinstance(beside, list) or not _same_code(table, reference, here):
        return unpaired_change(mine, [s.latency_us for s in before if not s.throttled]), ""
    then = paired_ratios(before, spot.then[reference])
    now = [a / b for a, b in zip(mine, beside, strict=True)]
    pace = statistics.median(beside) / Measurement(spot.then[reference]).latency_us - 1
    return unpaired_change(now, then), f" (beside {reference}, itself {pace:+.1%})"


def _same_code(table: DispatchTable, reference: Candidate, here: Fingerprint | None) -> bool:
    """Say whether a candidate is what it was: the same device, driver, toolchain and source of its arm."""
    if here is None:
        return False
    changed = set(table.fingerprint.differences(here)) - {"source_hash"}
    known = dict(table.evidence.get("sources") or {})
    arm = find_seam(table.seam).arm(table.target, reference.arm)
    return not changed and known.get(reference.arm) == arm.source_hash


def _grounds(table: DispatchTable, here: Fingerprint | None) -> str:
    """Name what differs from where the table was measured; empty where nothing does, or nothing is known."""
    if here is None or (status := table.fingerprint.status(here)) is Status.EXACT:
        return ""
    parts = [f"{name} {a!r}, now {b!r}" for name, (a, b) in table.fingerprint.differences(here).items()]
    return f"; {status}: {'; '.join(parts)}"


def _against(
    name: str, spot: _Spot, mine: list[float], taken: Taken, tolerance: float, alpha: float
) -> Finding:
    what, against = f"gate, {counted(spot.num_tokens, 'token')}", spot.baseline
    assert against is not None
    if against == spot.choice:
        return Finding(name, what, Verdict.PASSED, f"{spot.choice}, as in the baseline")
    theirs = taken.get(Candidate(against.arm, against.config))
    if not isinstance(theirs, list):
        why = f"{theirs.kind}: {theirs.detail}" if theirs else "it cannot be launched here"
        return Finding(name, what, Verdict.CANNOT_TELL, f"the baseline's {against} was not timed: {why}")
    change = paired_change([a / b for a, b in zip(mine, theirs, strict=True)])
    sentence = f"{spot.choice} against the baseline's {against}: {reason(change, tolerance, alpha)}"
    return Finding(name, what, judge(change, tolerance, alpha), sentence)


def stored_gate(
    table: DispatchTable,
    baseline: DispatchTable,
    trials: Sequence[Trial],
    grid: Sequence[int],
    tolerance: float,
) -> list[Finding]:
    """Compare a table's choices with a baseline's by the samples of the table's sweep; needs no device.

    Every token count of `grid` is compared, or is `missing`: outside the bands, or a choice of the baseline
    that the sweep did not measure.
    """
    then, name, alpha = Then(trials), label(table), alpha_of(len(grid))
    findings = []
    for count in grid:
        what, mine, theirs = f"gate, {counted(count, 'token')}", table.lookup(count), baseline.lookup(count)
        samples = then.samples(count)
        pair = [samples.get(Candidate(each.choice.arm, each.choice.config)) for each in (mine, theirs)]
        if mine.last is None:
            sentence = f"the bands end at {table.max_tokens}; sweep what is missing"
            findings.append(Finding(name, what, Verdict.MISSING, sentence))
        elif mine.choice == theirs.choice:
            findings.append(Finding(name, what, Verdict.PASSED, f"{mine.choice}, as in the baseline"))
        elif pair[0] is None or pair[1] is None:
            absent = mine.choice if pair[0] is None else theirs.choice
            sentence = f"the sweep did not measure {absent}; sweep with it, or check where the device is"
            findings.append(Finding(name, what, Verdict.MISSING, sentence))
        else:
            change = paired_change(paired_ratios(pair[0], pair[1]))
            sentence = (
                f"{mine.choice} against the baseline's {theirs.choice}: {reason(change, tolerance, alpha)}"
            )
            findings.append(Finding(name, what, judge(change, tolerance, alpha), sentence))
    return findings
