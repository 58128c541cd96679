"""Choices timed again: each beside what it is compared with, so that the machine's pace is no verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fake_bench import FUSED, LATENCIES, PROBLEM, SEAM, UNFUSED, VALUES, FakeBench

from mhctune.autotuner.check import Finding, Verdict
from mhctune.autotuner.derive import derive
from mhctune.autotuner.gate import rounds_taken
from mhctune.autotuner.probe import Device
from mhctune.autotuner.protocol import PROTOCOL_VERSION, Protocol
from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint, Measurement, Sample, Trial
from mhctune.autotuner.speed import Then, elsewhere, remeasure, stored_gate
from mhctune.autotuner.sweep import SweepPlan
from mhctune.kernels.dispatch import Choice, DispatchTable, Fingerprint
from mhctune.kernels.space import Candidate

WRONG = Failure(FailureKind.MISMATCH, "layer_input: 3 elements not written")
NO_ROOM = Failure(FailureKind.OUT_OF_MEMORY, "the device is full")
ROUNDS = rounds_taken(3)


@dataclass
class PacedBench(FakeBench):
    """Runs one candidate at another pace than the rest, and notes who was timed in which order."""

    slow: Candidate | None = None
    by: float = 1.0

    def __post_init__(self) -> None:
        self.order: list[tuple[int, Candidate]] = []

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        if launches > 1:
            self.order.append((round, candidate))
        found = super().sample(candidate, batch, round, launches)
        slowed = candidate == self.slow and not isinstance(found, Failure)
        return found * self.by if slowed and not isinstance(found, Failure) else found


@pytest.fixture
def plan(make_fingerprint: Callable[..., Fingerprint]) -> SweepPlan:
    here = make_fingerprint(gpu_name="this processor", source_hash=SEAM.source_hash("c"))
    spaces = {arm.name: arm.space(PROBLEM).restricted(VALUES) for arm in SEAM.arms("c")[:2]}
    return SweepPlan(SEAM, PROBLEM, "c", tuple(LATENCIES), spaces, Protocol(5), here, 0.05)


@pytest.fixture
def trials() -> list[Trial]:
    found = []
    for count, row in LATENCIES.items():
        for candidate, latency in zip((FUSED, UNFUSED), row, strict=True):
            samples = tuple(Sample(0, n, 0, 20, latency * (1 + 0.001 * n)) for n in range(9))
            cell = Cell(SEAM.name, PROBLEM, count)
            found.append(Trial(cell, candidate, Footprint(10, 100, 0), Measurement(samples), samples))
    return found


@pytest.fixture
def table(plan: SweepPlan, trials: list[Trial]) -> DispatchTable:
    """Fused for 1 to 4 tokens, unfused for 5 to 16."""
    return derive(plan.record(), 1, trials, 0.05).table


def timed(table: DispatchTable, bench: FakeBench, tolerance: float = 0.1, **known: Any) -> list[Finding]:
    return remeasure(table, bench, bench.compile_all, tolerance, **known)


def verdicts(findings: Sequence[Finding]) -> dict[str, Verdict]:
    return {finding.what: finding.verdict for finding in findings}


def swapped(table: DispatchTable) -> DispatchTable:
    """The same bands, each with the other's choice."""
    first, second = table.bands
    return table.replace(bands=(first.replace(choice=second.choice), second.replace(choice=first.choice)))


def test_each_choice_is_timed_again_as_its_sweep_was(table: DispatchTable) -> None:
    bench = FakeBench()
    findings = timed(table, bench)
    assert verdicts(findings) == dict.fromkeys(
        ("speed, 1 token", "speed, 4 tokens", "speed, 16 tokens"), Verdict.PASSED
    )
    protocol = Protocol(5)
    assert bench.entered == [(count, protocol.seed + count) for count in LATENCIES]
    assert bench.launched == [n for us in (10, 10, 20) for n in (1, *[protocol.launches(us)] * ROUNDS)]
    assert len(bench.compiled) == len(set(bench.compiled)) > 0
    assert bench.resident == set()


@pytest.mark.parametrize(
    ("pace", "verdict"),
    [(1.2, Verdict.REGRESSED), (1.09, Verdict.PASSED), (0.5, Verdict.IMPROVED)],
)
def test_slower_than_the_tolerance_is_regressed(table: DispatchTable, pace: float, verdict: Verdict) -> None:
    assert set(verdicts(timed(table, FakeBench(pace))).values()) == {verdict}


def test_a_regression_says_its_numbers(table: DispatchTable) -> None:
    (*_, last) = timed(table, FakeBench(pace=1.5))
    assert last.sentence == (
        f"{table.bands[1].choice} takes 30.12 us, 20.08 us before (median): 50.0 % slower "
        f"(p 9e-19 of 0.0033, {ROUNDS} rounds; 10.0 % is tolerated)"
    )


@pytest.mark.parametrize(("failure", "verdict"), [(WRONG, Verdict.DISAGREES), (NO_ROOM, Verdict.CANNOT_TELL)])
@pytest.mark.parametrize("when", ["refused", "broken"])
def test_a_choice_that_fails_is_named_with_its_kind_and_the_rest_is_timed(
    table: DispatchTable, failure: Failure, verdict: Verdict, when: str
) -> None:
    findings = timed(table, FakeBench(**{when: {FUSED: failure}}))  # type: ignore[arg-type]
    assert list(verdicts(findings).values()) == [verdict, verdict, Verdict.PASSED]
    assert f"failed, 10.04 us before: {failure.kind}: {failure.detail}" in findings[0].sentence


def test_a_time_that_cannot_be_is_a_failure(table: DispatchTable) -> None:
    (first, *_) = timed(table, FakeBench(broken={FUSED: 0.0}))
    assert first.verdict is Verdict.DISAGREES
    assert "implausible: 0.0 us per launch, twice in a row" in first.sentence


@pytest.mark.parametrize(
    ("protocol", "reason"),
    [
        ({"samples": 4}, "4 rounds of the protocol say too little; 5 are needed"),
        ({"version": PROTOCOL_VERSION + 1}, f"this mhctune has {PROTOCOL_VERSION}"),
        ({"moon": "full"}, "does not say by which protocol"),
    ],
)
def test_what_cannot_be_compared_is_not_measured(
    table: DispatchTable, protocol: dict[str, Any], reason: str
) -> None:
    evidence = {**table.evidence, "protocol": {**table.evidence["protocol"], **protocol}}
    bench = FakeBench()
    (found,) = timed(table.replace(evidence=evidence), bench)
    assert found.verdict is Verdict.CANNOT_TELL
    assert reason in found.sentence
    assert bench.entered == []


def test_bands_without_a_latency_are_missing(table: DispatchTable) -> None:
    first, second = table.bands
    bare = table.replace(bands=(first.replace(evidence={}), second))
    assert verdicts(timed(bare, FakeBench())) == {
        "speed, tokens 1 to 4": Verdict.MISSING,
        "speed, 16 tokens": Verdict.PASSED,
    }
    broken = table.replace(bands=(first.replace(evidence={"measured": [{"num_tokens": 1}]}), second))
    (found,) = timed(broken, FakeBench())
    assert found.verdict is Verdict.CANNOT_TELL


def test_only_the_device_that_was_measured_is_measured_again(table: DispatchTable) -> None:
    assert elsewhere(table, Device("this processor", "c", 1)) == ""
    assert "this machine's is NVIDIA H200" in elsewhere(table, Device("NVIDIA H200", "cuda", 1))
    assert elsewhere(table, Device("another processor", "c", 1))


# Beside others, in the same rounds.


def test_the_choice_runs_beside_another_of_its_sweep_forward_and_back(
    table: DispatchTable, trials: list[Trial]
) -> None:
    bench = PacedBench()
    timed(table, bench, then=Then(trials), here=table.fingerprint)
    cell = bench.order[: 2 * ROUNDS]
    assert cell[:4] == [(0, FUSED), (0, UNFUSED), (1, UNFUSED), (1, FUSED)]
    assert bench.resident == set()


@pytest.mark.parametrize("pace", [0.5, 1.3, 2.0])
def test_a_machine_that_is_slower_or_faster_today_is_no_verdict(
    table: DispatchTable, trials: list[Trial], pace: float
) -> None:
    findings = timed(table, PacedBench(pace), then=Then(trials), here=table.fingerprint)
    assert set(verdicts(findings).values()) == {Verdict.PASSED}
    assert f"itself {pace - 1:+.1%})" in findings[0].sentence


def test_a_choice_that_alone_is_slower_is_regressed_whatever_the_machines_pace(
    table: DispatchTable, trials: list[Trial]
) -> None:
    bench = PacedBench(0.5, slow=FUSED, by=1.3)
    findings = timed(table, bench, then=Then(trials), here=table.fingerprint)
    assert verdicts(findings) == {
        "speed, 1 token": Verdict.REGRESSED,
        "speed, 4 tokens": Verdict.REGRESSED,
        "speed, 16 tokens": Verdict.IMPROVED,  # beside the fused one, which became slower
    }


def test_under_another_toolchain_what_became_slower_together_is_regressed_and_the_cause_named(
    table: DispatchTable, trials: list[Trial], make_fingerprint: Callable[..., Fingerprint]
) -> None:
    """3.1 us became 31 us when one pass was switched: both arms may have it, so nothing is divided out."""
    here = table.fingerprint.replace(pass_config='{"tl.disable_safe_memory_legalize":false}')
    findings = timed(table, PacedBench(10.0), then=Then(trials), here=here)
    assert set(verdicts(findings).values()) == {Verdict.REGRESSED}
    assert "other_toolchain: pass_config '{}', now '{\"tl.disable_safe_memory_legalize\":false}'" in (
        findings[0].sentence
    )


def test_a_reference_whose_own_source_changed_is_none(table: DispatchTable, trials: list[Trial]) -> None:
    sources = {**table.evidence["sources"], "unfused": "0" * 64}
    stale = table.replace(evidence={**table.evidence, "sources": sources})
    findings = timed(stale, PacedBench(1.3), then=Then(trials), here=table.fingerprint)
    assert [f.verdict for f in findings][:2] == [Verdict.REGRESSED] * 2  # beside unfused
    assert findings[2].verdict is Verdict.PASSED  # beside fused, which is what it was


def test_a_reference_that_finds_no_room_leaves_the_choice_by_itself(
    table: DispatchTable, trials: list[Trial]
) -> None:
    bench = FakeBench(1.3, refused={UNFUSED: NO_ROOM})
    first, *_ = timed(table, bench, then=Then(trials), here=table.fingerprint)
    assert first.verdict is Verdict.REGRESSED
    assert "beside" not in first.sentence


def test_a_baseline_is_compared_pair_by_pair(table: DispatchTable, trials: list[Trial]) -> None:
    findings = timed(table, PacedBench(3.0), then=Then(trials, swapped(table)), here=table.fingerprint)
    came = verdicts(findings)
    assert {what: v for what, v in came.items() if what.startswith("gate")} == {
        "gate, 1 token": Verdict.IMPROVED,
        "gate, 4 tokens": Verdict.IMPROVED,
        "gate, 16 tokens": Verdict.IMPROVED,
    }
    worse = timed(swapped(table), PacedBench(3.0), then=Then(trials, table), here=table.fingerprint)
    assert {v for what, v in verdicts(worse).items() if what.startswith("gate")} == {Verdict.REGRESSED}
    alike = timed(table, PacedBench(3.0), then=Then(trials, table), here=table.fingerprint)
    assert {v for what, v in verdicts(alike).items() if what.startswith("gate")} == {Verdict.PASSED}


def test_a_baseline_that_cannot_be_launched_cannot_be_told(table: DispatchTable, trials: list[Trial]) -> None:
    mega = Choice.of("mega", {})
    baseline = table.replace(bands=tuple(band.replace(choice=mega) for band in table.bands))
    findings = timed(table, PacedBench(), then=Then(trials, baseline), here=table.fingerprint)
    gate = [f for f in findings if f.what.startswith("gate")]
    assert {f.verdict for f in gate} == {Verdict.CANNOT_TELL}
    assert "the baseline's mega() was not timed: it cannot be launched here" in gate[0].sentence


# By stored samples, without a device.


def test_stored_samples_judge_a_new_table_against_a_baseline(
    table: DispatchTable, trials: list[Trial]
) -> None:
    counts = tuple(LATENCIES)
    few = [replace(t, outcome=Measurement(t.samples[:5])) for t in trials]
    assert {f.verdict for f in stored_gate(table, swapped(table), few, counts, 0.1)} == {Verdict.CANNOT_TELL}
    better = stored_gate(table, swapped(table), trials, counts, 0.1)
    assert [(f.what, f.verdict) for f in better] == [
        ("gate, 1 token", Verdict.IMPROVED),
        ("gate, 4 tokens", Verdict.IMPROVED),
        ("gate, 16 tokens", Verdict.IMPROVED),
    ]
    assert {f.verdict for f in stored_gate(swapped(table), table, trials, counts, 0.1)} == {Verdict.REGRESSED}
    assert {f.verdict for f in stored_gate(table, table, (), counts, 0.1)} == {Verdict.PASSED}


def test_less_than_the_declared_grid_is_missing(table: DispatchTable, trials: list[Trial]) -> None:
    short = table.replace(bands=table.bands[:1])
    (*_, last) = stored_gate(short, table, trials, (1, 4, 16), 0.1)
    assert last.verdict is Verdict.MISSING
    assert last.sentence == "the bands end at 4; sweep what is missing"
    strange = Choice.of("fused", {**FUSED.config, "tile_n": 12})
    baseline = table.replace(bands=tuple(band.replace(choice=strange) for band in table.bands))
    found = stored_gate(table, baseline, trials, (1, 4, 16), 0.1)
    assert {f.verdict for f in found} == {Verdict.MISSING}
    assert "the sweep did not measure fused(" in found[0].sentence


def test_who_left_the_race_early_is_passed_over_for_who_stayed(
    table: DispatchTable, trials: list[Trial]
) -> None:
    """A faster one that shares 6 rounds with the choice tells less than a slower one that shares 9."""
    early = Candidate.of("fused", {**FUSED.config, "tile_n": 12})
    samples = tuple(Sample(0, n, 0, 20, 11.0) for n in range(6))
    left = [replace(t, candidate=early, outcome=Measurement(samples)) for t in trials[::2]]
    first, *_ = timed(table, PacedBench(), then=Then([*left, *trials]), here=table.fingerprint)
    assert f"beside {UNFUSED}" in first.sentence
