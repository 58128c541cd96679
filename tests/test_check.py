"""A check tells whether a table is still true: of its file, its samples, its sources and this machine."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_bench import FUSED, LATENCIES, PROBLEM, SEAM, UNFUSED, VALUES, FakeBench
from typer.testing import CliRunner

from mhctune import cli
from mhctune.autotuner.check import Check, Finding, Verdict, agree, current, differences, legal
from mhctune.autotuner.probe import Device
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint, Sample, SweepState
from mhctune.autotuner.report import check_sheets
from mhctune.autotuner.speed import l2_of, remeasure
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.sweep import SweepPlan
from mhctune.configs.errors import ConfigError
from mhctune.db import derivation
from mhctune.db.checks import check_tables
from mhctune.db.derivation import derive_again, derive_stored
from mhctune.db.export import export
from mhctune.db.repository import Repository
from mhctune.kernels.dispatch import Band, Choice, DispatchTable, Fingerprint
from mhctune.kernels.seam import Problem

WRONG = Failure(FailureKind.MISMATCH, "layer_input: 3 elements not written")
NO_ROOM = Failure(FailureKind.OUT_OF_MEMORY, "the device is full")


@pytest.fixture
def plan(make_fingerprint: Callable[..., Fingerprint]) -> SweepPlan:
    here = make_fingerprint(gpu_name="this processor", source_hash=SEAM.source_hash("c"))
    spaces = {name: SEAM.arm("c", name).space(PROBLEM).restricted(VALUES) for name in ("fused", "unfused")}
    return SweepPlan(SEAM, PROBLEM, "c", tuple(LATENCIES), spaces, Protocol(5), here, 0.05)


def sweep(store: Repository, record: SweepRecord, latencies: dict[int, tuple[float, float]]) -> int:
    """Keep a complete sweep and its table; return the sweep's id."""
    sweep_id = store.begin(record, new=True)
    for count, row in latencies.items():
        for candidate, latency in zip((FUSED, UNFUSED), row, strict=True):
            cell = Cell(record.seam, record.problem, count)
            trial = store.open_trial(sweep_id, cell, candidate, Footprint(10, 100, 0))
            store.add_samples([(trial, Sample(0, n, 0, 20, latency)) for n in range(5)])
            store.finish_trial(trial)
    store.end(sweep_id, SweepState.COMPLETE)
    store.save_table(sweep_id, derive_stored(store, store.sweep(sweep_id)).table)
    return sweep_id


@pytest.fixture
def table(repository: Repository, plan: SweepPlan) -> DispatchTable:
    """The table of a stored sweep: fused for 1 to 4 tokens, unfused for 5 to 16."""
    sweep(repository, plan.record(), LATENCIES)
    (stored,) = repository.tables()
    return stored.table


def timed(table: DispatchTable, bench: FakeBench, tolerance: float = 0.1) -> list[Finding]:
    return remeasure(table, bench, bench.compile_all, tolerance)


def verdicts(findings: Sequence[Finding]) -> dict[str, Verdict]:
    return {finding.what: finding.verdict for finding in findings}


def only(repository: Repository, exported: DispatchTable | None = None) -> dict[str, Finding]:
    (checked,) = check_tables(repository, exported)
    return {finding.what: finding for finding in checked.findings}


def swap(table: DispatchTable, place: int, choice: Choice, **changes: Any) -> DispatchTable:
    bands = list(table.bands)
    bands[place] = bands[place].replace(choice=choice)
    return table.replace(bands=tuple(bands), **changes)


# What was kept.


def test_a_table_that_is_true_passes(repository: Repository, table: DispatchTable) -> None:
    found = only(repository)
    assert {what: f.verdict for what, f in found.items()} == dict.fromkeys(
        ("legal", "grid", "replay", "sources"), Verdict.PASSED
    )
    assert "2 bands contiguous from 1 to 16, 2 choices with the default, all legal" in found["legal"].sentence
    assert "are the same in table 1 and the samples of sweep 1" in found["replay"].sentence
    assert only(repository, table)["export"].sentence == (
        f"the file is stored table 1, digest {table.digest[:12]}"
    )


def test_a_band_that_differs_from_the_database_is_named_with_both_choices(
    repository: Repository, table: DispatchTable
) -> None:
    edited = swap(table, 0, table.bands[1].choice)
    found = only(repository, edited)
    assert found["export"].verdict is Verdict.DISAGREES
    assert found["export"].sentence == (
        f"tokens 1 to 4: {table.bands[1].choice} in the file, {table.bands[0].choice} in stored table 1"
    )
    assert verdicts(list(found.values()))["replay"] is Verdict.PASSED


def test_differing_ranges_reach_over_both_ends(table: DispatchTable) -> None:
    first, second = table.bands
    shorter = table.replace(bands=(first.replace(last=1), Band(2, 2, second.choice)), default=first.choice)
    assert differences(table, shorter) == [
        ("2 tokens", first.choice, second.choice),
        ("tokens 5 to 16", second.choice, first.choice),
        ("tokens 17 and up", second.choice, first.choice),
    ]
    longer = table.replace(bands=(first, second.replace(last=64)))
    assert differences(table, longer) == []
    assert agree(longer, table, "stored table 1").sentence == (
        "same choices, other edges: 1-4, 5-64 in the file, 1-4, 5-16 in stored table 1"
    )


def test_the_same_bands_of_another_sweep_are_a_disagreement(
    repository: Repository, plan: SweepPlan, table: DispatchTable
) -> None:
    sweep(repository, plan.record(), LATENCIES)
    found = only(repository, table)["export"]
    assert found.verdict is Verdict.DISAGREES
    assert "what they stand on differs (sweep 1, now 2); export again" in found.sentence


def test_a_table_that_the_database_does_not_hold_is_missing(
    repository: Repository, table: DispatchTable, make_fingerprint: Callable[..., Fingerprint]
) -> None:
    other = table.replace(fingerprint=make_fingerprint(gpu_name="NVIDIA B200"))
    found = only(repository, other)
    assert found["export"].verdict is Verdict.MISSING
    assert "replay" not in found


def test_bands_that_do_not_follow_from_the_samples_are_named(
    repository: Repository, table: DispatchTable
) -> None:
    repository.save_table(1, swap(table, 0, table.bands[1].choice))
    found = only(repository)["replay"]
    assert found.verdict is Verdict.DISAGREES
    assert found.sentence.startswith(f"tokens 1 to 4: {table.bands[1].choice} in table 2, ")


def test_a_table_short_of_its_declared_grid_is_missing_and_not_passed(
    repository: Repository, table: DispatchTable
) -> None:
    (stored,) = repository.tables()
    short = table.replace(bands=table.bands[:1], default=table.bands[0].choice)
    repository.save_table(stored.sweep_id, short)
    (checked,) = check_tables(repository)
    found = {finding.what: finding for finding in checked.findings}
    assert found["grid"].verdict is Verdict.MISSING
    assert "run `mhctune sweep` as before" in found["grid"].sentence


def test_a_replay_uses_the_bound_of_its_table(repository: Repository, table: DispatchTable) -> None:
    loose = derive_stored(repository, repository.sweep(1), 5.0).table
    assert len(loose.bands) < len(table.bands)
    repository.save_table(1, loose)
    assert only(repository)["replay"].verdict is Verdict.PASSED


def test_a_replay_knows_no_incumbent_that_was_kept_after_its_table(
    repository: Repository, plan: SweepPlan, table: DispatchTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(repository, plan.record(), LATENCIES)
    # As a version kept it that did not write its incumbent down.
    evidence = {key: value for key, value in table.evidence.items() if key != "incumbent"}
    old = repository.save_table(2, table.replace(evidence=evidence))
    repository.save_table(1, table.replace(numerics="other"))
    given: list[Sequence[DispatchTable]] = []
    monkeypatch.setattr(derivation, "incumbent_for", lambda fingerprint, tables: given.append(tables))
    derive_stored(repository, repository.sweep(2))
    assert [each.numerics for each in given.pop()] == ["other", "rounded"]
    derive_again(repository, next(each for each in repository.tables() if each.id == old))
    assert [each.numerics for tables in given for each in tables] == ["rounded"]


def test_samples_that_no_longer_carry_a_band_are_said(
    repository: Repository, table: DispatchTable, database: Path
) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("DELETE FROM samples WHERE round > 2")
    found = only(repository)["replay"]
    assert found.verdict is Verdict.CANNOT_TELL
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("DELETE FROM samples")
        connection.execute("DELETE FROM trials")
    found = only(repository)["replay"]
    assert found.verdict is Verdict.DISAGREES
    assert "nothing to derive bands from" in found.sentence


# What this version knows.


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (
            Choice.of("fused", {**FUSED.config, "tile_n": 7}),
            "is illegal: 24 columns are not a multiple of tile_n 7",
        ),
        (Choice.of("fussed", FUSED.config), "has no arm 'fussed'"),
        (Choice.of("fused", {"tile_m": 1}), "takes the tunables"),
    ],
)
def test_an_illegal_choice_is_named_and_not_timed(table: DispatchTable, choice: Choice, reason: str) -> None:
    for wrong in (swap(table, 0, choice), swap(table, 0, choice, default=choice)):
        found = legal(wrong)
        assert found.verdict is Verdict.DISAGREES
        assert reason in found.sentence
        assert list(verdicts(timed(wrong, FakeBench()))) == ["speed, 16 tokens"]


def test_an_illegal_default_is_named(table: DispatchTable) -> None:
    found = legal(table.replace(default=Choice.of("mega", {})))
    assert "has no arm 'mega'" in found.sentence


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"seam": "pots"}, "unknown seam 'pots'"), ({"problem": {"hidden_size": 0}}, "must be positive")],
)
def test_a_table_of_an_unknown_seam_or_problem_is_no_bug(
    table: DispatchTable, changes: dict[str, Any], reason: str
) -> None:
    wrong = table.replace(**changes)
    assert reason in legal(wrong).sentence
    assert timed(wrong, FakeBench()) == []
    assert current(wrong).verdict in (Verdict.DISAGREES, Verdict.PASSED)


def test_changed_sources_are_named_by_arm(table: DispatchTable) -> None:
    assert current(table).verdict is Verdict.PASSED
    sources = {**table.evidence["sources"], "fused": "0" * 64}
    stale = table.replace(
        fingerprint=table.fingerprint.replace(source_hash="1" * 64),
        evidence={**table.evidence, "sources": sources},
    )
    found = current(stale)
    assert found.verdict is Verdict.DISAGREES
    assert found.sentence.startswith("other_source: the sources of fused changed since they were measured")


# What it comes to.


@pytest.mark.parametrize(
    ("came", "verdict", "code"),
    [
        ((), "missing", 3),
        (("passed",), "passed", 0),
        (("passed", "cannot_tell"), "cannot_tell", 4),
        (("cannot_tell", "missing", "passed"), "missing", 3),
        (("missing", "disagrees"), "disagrees", 1),
        (("cannot_tell", "disagrees", "regressed", "missing"), "regressed", 1),
    ],
)
def test_the_gravest_verdict_decides(came: tuple[str, ...], verdict: str, code: int) -> None:
    done = Check([Finding("table", "what", Verdict(each), "so it is") for each in came])
    assert (done.verdict, done.exit_code) == (verdict, code)
    assert done.notes[-1].startswith(f"{verdict}: ")
    assert done.to_dict()["verdict"] == verdict
    assert check_sheets(done)[-1].notes == done.notes


# The command.


@pytest.fixture
def run(database: Path, table: DispatchTable, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run `mhctune check` on the machine of the table, whose candidates run at a pace of this machine's."""

    def check(*arguments: str, pace: float = 1.0, device: str = "this processor") -> Any:
        @contextmanager
        def open_fake(
            seam_name: str, target: str, l2: str, passes: Mapping[str, bool], until: str
        ) -> Iterator[FakeBench]:
            assert (seam_name, target, l2, until) == (table.seam, "c", "warm", "end")
            guarded = passes.get("tl.disable_safe_memory_legalize") is False
            yield FakeBench(10 * pace if guarded else pace)

        monkeypatch.setattr(cli, "open_bench", open_fake)
        monkeypatch.setattr(cli, "detect", lambda: Device(device, "c", 1))
        return CliRunner().invoke(cli.app, ["check", "--db", str(database), "--json", *arguments])

    return check


def test_the_command_passes_regresses_and_tolerates(run: Callable[..., Any]) -> None:
    ran = run()
    assert ran.exit_code == 0, ran.output
    data = json.loads(ran.stdout)
    assert (data["verdict"], data["left_out"]) == ("passed", [])
    assert [finding["what"] for finding in data["findings"]][-1] == "speed, 16 tokens"
    assert run(pace=1.2).exit_code == 1
    assert run("--tolerance", "0.3", pace=1.2).exit_code == 0
    assert run("--no-measure", pace=1.2).exit_code == 0
    elsewhere = run(pace=1.2, device="another processor")
    assert elsewhere.exit_code == 0
    (reason,) = json.loads(elsewhere.stdout)["left_out"]
    assert reason.startswith("not measured again: its device is this processor")


def test_a_pass_option_that_costs_ten_times_is_a_regression_and_is_named(run: Callable[..., Any]) -> None:
    ran = run("--pass-config", "tl.disable_safe_memory_legalize=false")
    assert ran.exit_code == 1, ran.output
    speed = [f for f in json.loads(ran.stdout)["findings"] if f["what"].startswith("speed")]
    assert [f["verdict"] for f in speed] == ["regressed"] * 3
    assert all("pass_config " in f["sentence"] for f in speed)
    assert all("now '{\"tl.disable_safe_memory_legalize\":false}'" in f["sentence"] for f in speed)
    refused = run("--pass-config", "tl.disable_tma_lower=false")
    assert isinstance(refused.exception, ConfigError)
    assert "unknown pass option of target c 'tl.disable_tma_lower'" in str(refused.exception)


def test_the_command_writes_junit_and_markdown_and_keeps_the_verdict(
    run: Callable[..., Any], repository: Repository, tmp_path: Path
) -> None:
    assert repository.gate_runs(1) == []
    files = [tmp_path / "out" / name for name in ("check.xml", "check.md")]
    ran = run("--junit", str(files[0]), "--markdown", str(files[1]), "--save", pace=1.2)
    assert ran.exit_code == 1, ran.output
    assert '<failure type="regressed"' in files[0].read_text()
    assert files[1].read_text().startswith("## mhctune check: regressed")
    (kept,) = repository.gate_runs(1)
    assert kept.verdict == "regressed"
    assert [f["verdict"] for f in kept.detail["findings"]].count("regressed") == 3
    assert run(pace=1.2).exit_code == 1
    assert len(repository.gate_runs(1)) == 1


@pytest.mark.parametrize("device", ["this processor", "another processor"])
def test_a_baseline_is_compared_here_by_timing_and_elsewhere_by_stored_samples(
    run: Callable[..., Any], table: DispatchTable, tmp_path: Path, device: str
) -> None:
    ran = run("--baseline", str(export(table, "json", tmp_path)), device=device)
    assert ran.exit_code == 0, ran.output
    gates = [f for f in json.loads(ran.stdout)["findings"] if f["what"].startswith("gate")]
    assert [f["verdict"] for f in gates] == ["passed"] * 3
    worse = swap(swap(table, 0, table.bands[1].choice), 1, table.bands[0].choice)
    ran = run("--baseline", str(export(worse, "json", tmp_path)), device=device)
    gates = [f for f in json.loads(ran.stdout)["findings"] if f["what"].startswith("gate")]
    # Five stored rounds can tell nothing; rounds that are timed now are as many as it takes.
    expected = "improved" if device == "this processor" else "cannot_tell"
    assert [f["verdict"] for f in gates] == [expected] * 3
    assert ran.exit_code == (0 if expected == "improved" else 4)


def test_a_baseline_of_another_problem_compares_nothing_and_is_no_pass(
    run: Callable[..., Any], table: DispatchTable, tmp_path: Path
) -> None:
    other = table.replace(problem=Problem(hidden_size=512).to_dict())
    for device in ("this processor", "another processor"):
        ran = run("--baseline", str(export(other, "json", tmp_path)), device=device)
        assert ran.exit_code == 3
        assert "nothing to compare" in ran.stdout


def test_the_command_finds_an_edited_export(
    run: Callable[..., Any], table: DispatchTable, tmp_path: Path
) -> None:
    path = export(table, "json", tmp_path)
    assert run("--table", str(path)).exit_code == 0
    edited = export(swap(table, 0, table.bands[1].choice), "json", tmp_path)
    ran = run("--table", str(edited), "--no-measure")
    assert ran.exit_code == 1
    assert json.loads(ran.stdout)["findings"][0]["verdict"] == "disagrees"


def test_a_database_without_a_table_is_missing(tmp_path: Path) -> None:
    Repository.open(tmp_path / "empty.db").close()
    ran = CliRunner().invoke(cli.app, ["check", "--db", str(tmp_path / "empty.db")])
    assert ran.exit_code == 3
    assert "nothing was compared" in ran.stdout


def test_a_table_is_timed_again_in_the_l2_state_it_was_measured_in(table: DispatchTable) -> None:
    assert l2_of(table) == "warm"
    assert l2_of(table.replace(evidence={"protocol": {"l2": "cold"}})) == "cold"
    assert l2_of(table.replace(evidence={"protocol": "unreadable"})) == "warm"
    assert l2_of(table.replace(evidence={})) == "warm"
