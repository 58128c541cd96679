"""Repeated sweeps: what the benchmarks that compare real ones and simulate others say of known ones."""

from __future__ import annotations

import random
import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mhctune.autotuner.derive import derive
from mhctune.autotuner.recording import replay
from mhctune.autotuner.records import Cell, Footprint, Sample, SweepState, Trial
from mhctune.configs.recorded import load_recorded
from mhctune.db.repository import Repository

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def hold() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "hold.py"))


@pytest.fixture(scope="module")
def recorded() -> tuple[Any, Sequence[Trial]]:
    sweep, trials = replay(load_recorded("h200_seams_post_pre_hidden5120"))
    return sweep, sweep.without_probes(trials)


def sweep_into(store: Repository, record: Any, last: float) -> None:
    """One kernel is best at 1 and 8 tokens, and slower by `last` at 64, with half a per cent of noise."""
    sweep_id = store.begin(record, new=True)
    for count in record.token_counts:
        by = (last, 0.5, 0.0, 0.5) if count == 64 else (0.0, 0.5, 0.5, 0.5)
        for candidate, slower in zip(record.candidates, by, strict=True):
            cell = Cell(record.seam, record.problem, count)
            trial = store.open_trial(sweep_id, cell, candidate, Footprint(1, 1, 1))
            noise = [0.005 * (-1) ** n if slower else 0.0 for n in range(12)]
            taken = [Sample(0, n, 0, 20, 10.0 * (1 + slower + noise[n])) for n in range(12)]
            store.add_samples([(trial, sample) for sample in taken])
            store.finish_trial(trial)
    store.end(sweep_id, SweepState.COMPLETE)


def test_repeated_sweeps_are_shown_alone_and_as_they_are_served(
    repository: Repository, database: Path, make_sweep: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, last in enumerate((0.046, 0.046, 0.041, 0.046, 0.046)):
        protocol = {"version": 1, "samples": 12, "l2": "warm", "seed": seed}
        sweep_into(repository, make_sweep(protocol=protocol), last)
    sweep_into(repository, make_sweep(protocol={**protocol, "l2": "cold"}), 0.03)
    repository.close()
    runpy.run_path(str(ROOT / "benchmarks" / "repeats.py"))["main"](str(database))
    lines = capsys.readouterr().out.splitlines()
    assert lines[4:6] == [
        "seed 2, warm, alone: 1-64 fused; noise floor unknown",
        "seed 2, warm, served: 1-8 fused, 9-64 fused",
    ]
    assert "2 kernels in 1 band would do at a limit of 4.6 %" in lines[6]
    assert "warm: other choices alone in 2 of 4 after the first, served in 0 of 4 after the first" in lines
    assert "seed 4, cold, served: 1-64 fused" in lines  # a warm table is no incumbent of a cold one
    assert "  64 tokens: 1 argmins among the warm sweeps, loss 0.00% at most" in lines
    assert "  64 tokens, cold: +0.00 us; the warm winner loses 0.00% there" in lines


def test_sweeps_that_are_no_repeats_of_one_another_are_refused(
    repository: Repository, database: Path, make_sweep: Any
) -> None:
    main = runpy.run_path(str(ROOT / "benchmarks" / "repeats.py"))["main"]
    protocol = {"version": 1, "samples": 12, "l2": "warm", "seed": 0}
    sweep_into(repository, make_sweep(protocol=protocol), 0.04)
    with pytest.raises(SystemExit, match="holds 1 sweep that ended"):
        main(str(database))
    sweep_into(repository, make_sweep(protocol=protocol), 0.04)
    with pytest.raises(SystemExit, match="holds 2 warm sweeps of seed 0; each needs a --seed of its own"):
        main(str(database))
    sweep_into(repository, make_sweep(protocol={**protocol, "seed": 1}, token_counts=(1, 8)), 0.04)
    with pytest.raises(SystemExit, match="of 2 seams, problems, targets or token counts"):
        main(str(database))


def test_a_redrawn_sweep_keeps_rounds_and_placements_but_not_what_the_noise_said_in_them(
    hold: dict[str, Any], recorded: Any
) -> None:
    sweep, trials = recorded
    for count in sweep.token_counts:
        near = hold["near"]([trial for trial in trials if trial.cell.num_tokens == count])
        drawn = hold["redrawn"](near, random.Random(count))
        assert [t.candidate for t in drawn] == [t.candidate for t in near]
        for before, now in zip(near, drawn, strict=True):
            for kept, taken in ((before.samples, now.samples), (before.twins, now.twins)):
                assert set(map(hold["unit"], taken)) == set(map(hold["unit"], kept))
                assert {s.latency_us for s in taken} <= {s.latency_us for s in kept}
        assert drawn != near
        pairs = {(a.latency_us, b.latency_us) for a, b in zip(near[0].samples, near[1].samples, strict=False)}
        again = {
            (a.latency_us, b.latency_us) for a, b in zip(drawn[0].samples, drawn[1].samples, strict=False)
        }
        assert again <= pairs  # candidates of a round stay together


def test_a_cell_with_throttled_rounds_is_redrawn_from_the_others(hold: dict[str, Any]) -> None:
    sweep, trials = replay(load_recorded("h200_hopper_hidden7168"))
    found = [trial for trial in sweep.without_probes(trials) if trial.cell.num_tokens == 4096]
    assert sum(sample.throttled for trial in found for sample in trial.samples) > 100
    drawn = hold["redrawn"](hold["near"](found), random.Random(1))
    assert all(trial.samples for trial in drawn)
    assert not any(sample.throttled for trial in drawn for sample in (*trial.samples, *trial.twins))


def test_without_noise_no_rule_ever_changes_its_mind(hold: dict[str, Any], recorded: Any) -> None:
    sweep, trials = recorded
    quiet = [
        replace(t, samples=taken, outcome=replace(t.outcome, samples=taken), twins=())
        for t in trials
        for taken in [tuple(replace(s, latency_us=t.outcome.latency_us) for s in t.samples)]
    ]
    tallies = hold["simulate"](sweep, quiet, 1, 3, 1)
    assert {tally.changed for tally in tallies.values()} == {0}
    bounds = len(hold["BOUNDS"])
    assert {tally.sweeps for tally in tallies.values()} == {2 * bounds}
    kernels = sum(len(derive(sweep, 1, quiet, b).derivation.variants) for b in hold["BOUNDS"])
    assert {tally.kernels for tally in tallies.values()} == {3 * kernels}


def test_under_noise_what_is_held_changes_less(hold: dict[str, Any], recorded: Any) -> None:
    tallies = hold["simulate"](*recorded, 2, 4, 7, 0.005)
    assert tallies == hold["simulate"](*recorded, 2, 4, 7, 0.005)
    shares = [tallies[rule].changed for rule in ("alone", "incumbent", "held √2")]
    assert shares == sorted(shares, reverse=True)
    assert tallies["held √2"].freely < tallies["incumbent"].freely


def test_an_edge_inside_the_noise_moves_less_where_it_is_held_and_sure_ones_not(
    hold: dict[str, Any],
) -> None:
    moves = hold["edge_moves"](*replay(load_recorded("h200_decode_hidden5120")), 40, 3)
    noisy = moves.pop((64, 128))
    assert noisy[1] <= 2 < 10 < noisy[0]
    assert set(moves.values()) == {(0, 0)}
