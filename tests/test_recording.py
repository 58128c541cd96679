"""A recorded sweep gives its bands back anywhere; those that are shipped say what their makers saw."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mhctune.autotuner.beside import beside
from mhctune.autotuner.derive import Derived, derive
from mhctune.autotuner.recording import Unfinished, recording, replay
from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint, Measurement, Sample, SweepState
from mhctune.configs.errors import ConfigError
from mhctune.configs.recorded import RECORDED, load_recorded
from mhctune.db.export import export
from mhctune.db.manifest import manifests_beside
from mhctune.db.replay import replay_recording
from mhctune.db.repository import Repository
from mhctune.db.tables import load_table
from mhctune.kernels.legality import refusals
from mhctune.kernels.serving import serve, withdraw
from mhctune.kernels.space import Candidate
from mhctune.kernels.until import LAYER_INPUT, until_of

ROOT = Path(__file__).resolve().parents[1]

SEAMS: dict[str, list[tuple[int, int, str]]] = {
    "post_pre_delayed": [
        (1, 3, "fused"),
        (4, 20, "fused"),
        (21, 80, "fused_mma"),
        (81, 317, "fused_mma"),
        (318, 1024, "unfused_mma"),
    ],
    "pre_delayed": [
        (1, 12, "unfused"),
        (13, 44, "unfused"),
        (45, 576, "unfused_mma"),
        (577, 1024, "unfused_mma"),
    ],
    "pre_broadcast": [(1, 56, "unfused"), (57, 384, "unfused_mma"), (385, 1024, "unfused_mma")],
    "post_pre": [
        (1, 4, "fused"),
        (5, 17, "fused"),
        (18, 80, "fused_mma"),
        (81, 744, "fused_mma"),
        (745, 1024, "fused_mma"),
    ],
    "post_pre_bf16": [(1, 1, "fused"), (2, 8, "fused"), (9, 32, "fused"), (33, 1024, "unfused")],
    "pre": [
        (1, 8, "unfused"),
        (9, 32, "unfused"),
        (33, 128, "unfused_mma"),
        (129, 1024, "unfused_mma"),
    ],
    "post": [(1, 1, "one_pass"), (2, 8, "one_pass"), (9, 1024, "one_pass")],
    "hc_head": [(1, 32, "unfused"), (33, 128, "unfused"), (129, 1024, "unfused")],
    "collapse": [(1, 4, "one_pass"), (5, 149, "one_pass"), (150, 1024, "one_pass")],
}
"""The bands that each seam's sweep printed on the H200, by the seam's name."""

SWEEPS = (
    "cpu_quick_hidden5120",
    "h200_decode_hidden5120",
    "h200_hopper_hidden4096",
    "h200_hopper_hidden5120",
    "h200_hopper_hidden7168",
    "h200_early_hidden4096",
    "h200_early_hidden5120",
    "h200_early_hidden7168",
    *(f"h200_seams_{seam}_hidden5120" for seam in SEAMS),
)
# Whole seam as vLLM 0.33 ships it on one H200, hidden 5120, us (shared project data, 2026-11-29).
AS_SHIPPED = {
    1: 7.99,
    2: 8.08,
    4: 8.42,
    8: 8.96,
    16: 9.82,
    24: 10.69,
    32: 12.82,
    48: 14.44,
    64: 14.50,
    128: 14.86,
}


def derived(name: str, bound: float) -> Derived:
    sweep, trials = replay(load_recorded(name))
    return derive(sweep, 1, trials, bound)


def test_floors_are_recorded_where_there_are_any(make_sweep: Any, tmp_path: Path) -> None:
    for floors in ({}, {1: 1.25, 8: 1.5}):
        sweep = replace(make_sweep(), floors=floors)
        path = tmp_path / f"{len(floors)}.jsonl"
        path.write_text("\n".join(recording(sweep, [], "what", "where")) + "\n")
        assert ("floors" in path.read_text()) == bool(floors)
        assert replay(load_recorded(path))[0].floors == floors


def test_a_recording_holds_every_trial_failures_included(
    repository: Repository, make_sweep: Any, tmp_path: Path
) -> None:
    sweep = make_sweep()
    sweep_id = repository.begin(sweep)
    cell = Cell(sweep.seam, sweep.problem, 8)
    good, bad = (Candidate.of("fused", {"tile_n": 24, "n_splits": n}) for n in (1, 4))
    trial = repository.open_trial(sweep_id, cell, good, Footprint(10, 20, 30, 40, 50))
    taken = [Sample(0, round, 0, 40, 3.125 + round, throttled=round == 3) for round in range(5)]
    twins = [Sample(0, 4, 1, 40, 7.25)]
    repository.add_samples([(trial, s) for s in taken], [(trial, s) for s in twins])
    repository.finish_trial(trial)
    failure = Failure(FailureKind.MISMATCH, "layer_input: 3 elements not written")
    repository.fail_trial(sweep_id, cell, bad, Footprint(10, 20, 30), failure)
    path = tmp_path / "sweep.jsonl"
    lines = recording(sweep, repository.trials(sweep_id), "what", "where")
    path.write_text("\n".join(lines) + "\n")

    again, trials = replay(load_recorded(path))

    assert again == sweep
    assert again.candidates == sweep.candidates
    assert [t.candidate for t in trials] == [good, bad]
    outcome = trials[0].outcome
    assert isinstance(outcome, Measurement)
    assert [(s.round, s.launches, s.latency_us, s.throttled) for s in outcome.samples] == [
        (round, 40, 3.125 + round, round == 3) for round in range(5)
    ]
    assert [(s.round, s.latency_us) for s in trials[0].twins] == [(4, 7.25)]
    assert trials[1].twins == ()
    assert trials[1].outcome == failure
    assert [t.footprint for t in trials] == [Footprint(10, 20, 30, 40, 50), Footprint(10, 20, 30)]


def test_a_sample_that_does_not_follow_the_one_before_says_where_it_stands(
    repository: Repository, make_sweep: Any, tmp_path: Path
) -> None:
    sweep = make_sweep()
    sweep_id = repository.begin(sweep)
    cell = Cell(sweep.seam, sweep.problem, 8)
    at = [(0, 0, 40), (0, 1, 40), (0, 3, 40), (0, 4, 60), (1, 5, 60), (1, 6, 60), (1, 7, 60), (1, 8, 60)]
    taken = [Sample(b, r, 0, n, 2.5 + r, throttled=r == 6) for b, r, n in at]
    trial = repository.open_trial(sweep_id, cell, sweep.candidates[0], Footprint(10, 20, 30))
    repository.add_samples([(trial, sample) for sample in taken])
    repository.finish_trial(trial)
    path = tmp_path / "sweep.jsonl"
    path.write_text("\n".join(recording(sweep, repository.trials(sweep_id), "what", "where")) + "\n")
    compact = "0:0:40:2.5000 3.5000 0:3:40:5.5000 0:4:60:6.5000 1:5:60:7.5000 1:6:60:8.5000:throttled 9.5000"
    assert f'"{compact} 10.5000"' in path.read_text()
    assert list(replay(load_recorded(path))[1][0].samples) == taken


def test_a_candidate_that_the_header_does_not_list_is_refused(make_sweep: Any, tmp_path: Path) -> None:
    sweep, path = make_sweep(), tmp_path / "sweep.jsonl"
    for place in (len(sweep.candidates), -1):
        row = f'[8,{place},10,20,30,0,0,null,null,"0:0:40:2.5",""]'
        path.write_text(recording(sweep, (), "what", "where")[0] + f"\n{row}\n")
        with pytest.raises(ConfigError, match=f"'what' does not hold what a sweep needs: {place}"):
            replay(load_recorded(path))


def test_a_trial_that_still_races_is_not_recorded_as_a_measurement(
    repository: Repository, make_sweep: Any
) -> None:
    sweep = make_sweep()
    sweep_id = repository.begin(sweep)
    cell = Cell(sweep.seam, sweep.problem, 8)
    trial = repository.open_trial(sweep_id, cell, sweep.candidates[0], Footprint(10, 20, 30))
    repository.add_samples([(trial, Sample(0, round, 0, 40, 3.0)) for round in range(5)])
    with pytest.raises(Unfinished, match="1 trial of 1 still race"):
        recording(sweep, repository.trials(sweep_id), "what", "where")


@pytest.fixture
def record(database: Path, tmp_path: Path) -> Callable[[], Path]:
    """Run `benchmarks/record.py` on sweep 1."""

    def run() -> Path:
        out = tmp_path / "out.jsonl"
        runpy.run_path(str(ROOT / "benchmarks" / "record.py"))["main"](database, "1", out, "what", "where")
        return out

    return run


@pytest.mark.parametrize("state", [SweepState.RUNNING, SweepState.INTERRUPTED])
def test_only_a_sweep_that_has_ended_is_recorded(
    repository: Repository, make_sweep: Any, record: Callable[[], Path], state: SweepState, tmp_path: Path
) -> None:
    repository.end(repository.begin(make_sweep()), state)
    with pytest.raises(SystemExit, match=f"sweep 1 of .* is {state}; run it to its end"):
        record()
    assert not (tmp_path / "out.jsonl").exists()
    repository.end(1, SweepState.INCOMPLETE)
    assert replay(load_recorded(record()))[0] == make_sweep()


def test_a_recording_that_lacks_what_a_sweep_needs_is_refused(make_sweep: Any, tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    path.write_text(recording(make_sweep(), (), "what", "where")[0] + "\n")
    whole = load_recorded(path)
    assert whole.sweep is not None
    without = {name: value for name, value in whole.sweep.items() if name != "variants"}
    with pytest.raises(ConfigError, match="'what' does not hold what a sweep needs: 'variants'"):
        replay(replace(whole, sweep=without))


@pytest.mark.parametrize("name", SWEEPS)
def test_the_shipped_sweeps_were_measured_on_the_whole_grid_that_they_name(name: str) -> None:
    sweep, trials = replay(load_recorded(name))
    grid = [trial for trial in trials if trial.cell.num_tokens in sweep.token_counts]
    assert sweep.grid == len(grid) == len(sweep.candidates) * len(sweep.token_counts)
    assert {trial.candidate for trial in grid} == set(sweep.candidates)
    assert all(sweep.variants.values())
    assert all(t.footprint.input_bytes > 0 and t.footprint.measured_bytes > 0 for t in trials)
    assert all(isinstance(t.outcome, Measurement) for t in trials)


@pytest.mark.parametrize("name", SWEEPS)
def test_the_shipped_sweeps_name_each_config_once(name: str) -> None:
    text = (RECORDED / f"{name}.jsonl").read_text(encoding="utf-8")
    assert text.count('"tile_n"', text.index("\n")) == 0
    sweep, trials = replay(load_recorded(name))
    recorded = load_recorded(name)
    assert "\n".join(recording(sweep, trials, recorded.about, recorded.source)) + "\n" == text


def test_single_timings_are_no_sweep() -> None:
    with pytest.raises(ConfigError, match="single timings, not of a sweep"):
        replay(load_recorded("h200_post_pre_hidden5120_prototype"))


def test_the_h200_sweep_cuts_over_from_fused_to_tensor_cores_at_probed_edges() -> None:
    found = derived("h200_decode_hidden5120", 0.05)
    bands = [(band.first, band.last, band.choice.arm) for band in found.table.bands]
    fused = [(1, 1, "fused"), (2, 6, "fused"), (7, 16, "fused"), (17, 26, "fused")]
    assert bands == [*fused, (27, 88, "fused_mma"), (89, 128, "fused_mma")]
    assert found.derivation.worst_upper < 0.05
    assert found.missing == {}


@pytest.mark.parametrize("seam", SEAMS)
def test_each_seam_of_the_h200_gives_the_bands_that_its_sweep_printed(seam: str) -> None:
    found = derived(f"h200_seams_{seam}_hidden5120", 0.05)
    assert found.table.seam == seam
    assert [(b.first, b.last, b.choice.arm) for b in found.table.bands] == SEAMS[seam]
    assert found.derivation.worst_upper < 0.05


def test_what_ships_is_nowhere_ahead_of_the_bands_of_the_seams_on_the_h200() -> None:
    ratios = {
        (seam, row.num_tokens): row.ratio
        for seam in SEAMS
        for row in beside(derived(f"h200_seams_{seam}_hidden5120", 0.05))
        if row.ratio is not None
    }
    assert len(ratios) == 27  # six seams have a baseline; three times its 66 splits are illegal at 128 tokens
    assert all(ratio >= 1 for ratio in ratios.values()), ratios
    assert max(ratios, key=lambda at: ratios[at]) == ("pre_delayed", 1)


def test_the_h200_winners_beat_what_is_shipped_at_every_token_count() -> None:
    cells = derived("h200_decode_hidden5120", 0.05).cells
    assert set(cells) == set(AS_SHIPPED)
    faster = {count: AS_SHIPPED[count] / rows[0].latency_us for count, rows in cells.items()}
    assert all(ratio > 1.2 for ratio in faster.values()), faster
    assert faster[1] > 2


@pytest.mark.parametrize(
    ("name", "bands"),
    [
        (
            "h200_hopper_hidden4096",
            [(1, 1), (2, 4), (5, 8), (9, 64), (65, 256), (257, 512), (513, 1024), (1025, 4096)],
        ),
        ("h200_hopper_hidden5120", [(1, 1), (2, 8), (9, 256), (257, 1024), (1025, 4096)]),
        ("h200_hopper_hidden7168", [(1, 4), (5, 16), (17, 128), (129, 256), (257, 1024), (1025, 4096)]),
    ],
)
def test_from_one_to_4096_tokens_the_fused_arm_ends_by_eight(name: str, bands: list[tuple[int, int]]) -> None:
    found = derived(name, 0.05)
    assert [(band.first, band.last) for band in found.table.bands] == bands
    assert [band.choice.arm == "fused" for band in found.table.bands] == [last <= 8 for _, last in bands]


shipped = runpy.run_path(str(ROOT / "benchmarks" / "shipped.py"))["shipped"]


@pytest.mark.parametrize(
    ("hidden", "few", "middle", "many"),
    [(4096, 1.95, 1.5, 1.41), (5120, 1.99, 1.29, 1.48), (7168, 2.12, 1.72, 1.39)],
)
def test_what_ships_is_far_behind_at_every_token_count(
    hidden: int, few: float, middle: float, many: float
) -> None:
    """To 64 tokens, at 128 and 256, and above, where the warp-specialised arm leads."""
    found = derived(f"h200_hopper_hidden{hidden}", 0.05)
    best = {n: rows[0].latency_us for n, rows in found.cells.items()}
    faster = {n: us / best[n] for n, us in shipped(hidden).items() if n in best}
    assert faster.keys() == best.keys()
    least = {n: few if n <= 64 else middle if n <= 256 else many for n in faster}
    assert all(ratio > least[n] for n, ratio in faster.items()), faster
    assert {rows[0].candidate.arm for n, rows in found.cells.items() if n >= 512} == {"fused_ws"}


@pytest.mark.parametrize(
    ("hidden", "bands"),
    [
        (4096, [(1, 16, "released")]),
        (5120, [(1, 16, "released")]),
        (7168, [(1, 16, "released")]),
    ],
)
def test_the_layer_input_is_released_before_the_fused_arm_ends(
    hidden: int, bands: list[tuple[int, int, str]]
) -> None:
    sweep, trials = replay(load_recorded(f"h200_early_hidden{hidden}"))
    found = derive(sweep, 1, trials, 0.05)
    assert until_of(sweep.protocol) == LAYER_INPUT
    assert [(b.first, b.last, b.choice.arm) for b in found.table.bands] == bands
    best = {n: rows[0].latency_us for n, rows in found.cells.items()}
    assert all(shipped(hidden)[n] / us > 2.2 for n, us in best.items()), best


TABLES = sorted(path for path in (ROOT / "configs/tables").glob("*.json") if "manifest" not in path.name)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_an_exported_table_follows_from_its_recording_to_the_byte(path: Path, tmp_path: Path) -> None:
    table = load_table(path)
    digest = table.evidence["sweep_digest"]
    (name,) = (n for n in SWEEPS if replay(load_recorded(n))[0].digest == digest)
    finding = replay_recording(name, table).finding
    assert finding is not None
    assert "to the byte" in finding.sentence
    assert export(table, "json", tmp_path).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_an_exported_table_is_served_by_the_kernels_of_now(path: Path) -> None:
    """Every choice is legal, and the keys that its manifest lists are those that it reaches."""
    table = load_table(path)
    assert refusals(table) == {}
    withdraw(serve(table))
    (finding,) = manifests_beside(path, table)
    assert finding.ok, finding.sentence


def test_the_readme_of_the_exported_tables_names_each_and_no_other() -> None:
    text = (ROOT / "configs/tables/README.md").read_text()
    assert TABLES
    assert set(re.findall(r"`(\S+\.json)`", text)) == {path.name for path in TABLES}


@pytest.mark.parametrize("bound", [0.01, 0.02, 0.05, 0.10])
def test_the_cpu_sweep_has_a_cut_over_and_several_variants_under_every_bound(bound: float) -> None:
    found = derived("cpu_quick_hidden5120", bound)
    assert {band.choice.arm for band in found.table.bands} == {"fused", "unfused"}
    assert len(found.derivation.variants) >= 2
    assert found.derivation.worst_upper <= bound
