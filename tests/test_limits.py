"""What limits a winner: reading what Nsight Compute prints, and saying what is wrong with it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mhctune.autotuner.records import Cell, Footprint, Sample, SweepState
from mhctune.autotuner.store import SweepRecord
from mhctune.db.repository import Repository
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
NAMES = ("ID", "Process ID", "Kernel Name", "Block Size")
CONFIG = {
    "tile_n": 2, "n_splits": 10, "n_thr": 128, "vec": 4, "block_m": 1, "ahead": 2, "epilogue_thr": 128,
    "collapse": 1,
}  # fmt: skip
FUSED = Candidate.of("fused", CONFIG)


@pytest.fixture(scope="module")
def limits() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("limits")


def printed(limits: ModuleType, *kernels: tuple[str, ...], unit: str = "ns") -> str:
    """Write what `ncu --csv --page raw` prints: names, units, a row a kernel, its own lines between."""
    stalls = [STALL.format(name) for name in ("long_scoreboard", "barrier", "selected")]
    names = [*NAMES, *limits.METRICS.values(), *stalls, STALL.format("barrier_not_issued")]
    units = ["", "", "", "", unit, "%", "%", "%", "%", "register/thread", *["inst"] * 4]
    rows = [[str(at), "77", *kernel] for at, kernel in enumerate(kernels)]
    table = [",".join(f'"{value}"' for value in row) for row in (names, units, *rows)]
    noise = "==PROF== Connected to process 77 (/usr/bin/python3)"
    return "\n".join(
        [noise, '==PROF== Profiling "mhctune_post_pre_kernel": 0%....100% - 3 passes', *table, ""]
    )


FIRST = ("mhctune_post_pre_kernel", "(128, 1, 1)", "2,144", "3.5", "11.25", "20", "12.5", "168",
         "6.0", "2.0", "2.0", "9")  # fmt: skip
LAST = ("mhctune_epilogue_kernel", "(192, 1, 1)", "105,600", "88.1", "61.5", "30", "70", "40",
        "1.0", "8.0", "1.0", "9")  # fmt: skip


def test_what_ncu_prints_is_read(limits: ModuleType) -> None:
    first, last = limits.parse(printed(limits, FIRST, LAST))
    assert (first.kernel, first.duration_us, first.registers) == ("mhctune_post_pre_kernel", 2.144, 168)
    assert (first.dram, first.l2, first.sm, first.occupancy) == (3.5, 11.25, 20.0, 12.5)
    # Shares of all states; `selected` is the one in which a warp issues and no reason not to.
    assert first.stalls == pytest.approx({"long_scoreboard": 0.6, "barrier": 0.2})
    assert (first.limit, last.limit) == ("latency", "dram")
    assert last.duration_us == pytest.approx(105.6)
    assert str(last).split()[:4] == ["mhctune_epilogue_kernel", "105.60", "us", "dram"]
    assert str(last).endswith("40 registers  dram; barrier 80%, long_scoreboard 10%")
    (slow,) = limits.parse(printed(limits, FIRST, unit="usecond"))
    assert slow.duration_us == 2144


def test_what_cannot_be_read_is_said(limits: ModuleType) -> None:
    refused = "==ERROR== ERR_NVGPUCTRPERM - the user does not have permission\n==PROF== Disconnected"
    with pytest.raises(limits.NoProfile, match=r"(?s)printed no kernel.*ERR_NVGPUCTRPERM"):
        limits.parse(refused)
    with pytest.raises(limits.NoProfile, match="printed no kernel"):
        limits.parse(printed(limits))
    with pytest.raises(limits.NoProfile, match="printed no launch__registers_per_thread"):
        limits.parse(printed(limits, FIRST).replace("launch__registers_per_thread", "launch__registers"))
    with pytest.raises(limits.NoProfile, match="durations in 'fortnight'"):
        limits.parse(printed(limits, FIRST, unit="fortnight"))
    with pytest.raises(limits.NoProfile, match=r"gave 'n/a' as gpu__dram_throughput.* of mhctune_post_pre"):
        limits.parse(printed(limits, tuple("n/a" if value == "3.5" else value for value in FIRST)))


def test_each_winner_gets_the_kernels_it_launched(limits: ModuleType) -> None:
    two = limits.Launch(Problem(5120), 1, FUSED, 2)
    assert limits.Launch.of(json.loads(json.dumps(two.to_data()))) == two
    profiles = limits.parse(printed(limits, FIRST, LAST, FIRST, LAST))
    shared = limits.shared_out([two, two], profiles)
    assert [[each.kernel for each in of] for of in shared] == [[FIRST[0], LAST[0]]] * 2
    said = list(limits.lines([two, two], profiles))
    assert said[0] == f"hidden 5120, 1 tokens: {FUSED}"
    assert len(said) == 6
    with pytest.raises(limits.NoProfile, match="profiled 4 kernels, the winners launch 2"):
        limits.shared_out([two], profiles)


def test_the_profiler_leaves_clocks_and_caches_alone(limits: ModuleType) -> None:
    options = limits.options("ncu", "log")
    for name, value in (
        ("--clock-control", "none"),
        ("--cache-control", "none"),
        ("--profile-from-start", "off"),
    ):
        assert options[options.index(name) + 1] == value


def test_winners_come_from_the_database_and_a_missing_ncu_is_one_error(
    limits: ModuleType, make_sweep: Callable[..., SweepRecord], repository: Repository, database: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    slow = Candidate.of("fused", {**CONFIG, "tile_n": 8, "ahead": 8})
    arm = find_seam("post_pre_delayed").arm("cuda", "fused")
    names = {c: tuple(map(str, arm.variants(Problem(5120), c.config))) for c in (FUSED, slow)}
    protocol = {"version": 1, "samples": 5, "seed": 1}
    record = make_sweep(variants=names, token_counts=(1, 8), grid=4, protocol=protocol)
    sweep_id = repository.begin(record)
    for count in (1, 8):
        for candidate, us in ((FUSED, 4.0), (slow, 5.0 if count == 1 else 3.0)):
            cell = Cell(record.seam, record.problem, count)
            trial = repository.open_trial(sweep_id, cell, candidate, Footprint(0, 1, 0))
            for n in range(5):
                repository.add_samples([(trial, Sample(0, n, 0, 20, us))])
            repository.finish_trial(trial)
    repository.end(sweep_id, SweepState.COMPLETE)
    found = [launch for launch, _ in limits.winners(str(database), [5120, 4096], None, 3)]
    assert [(each.num_tokens, each.candidate, each.kernels) for each in found] == [
        (1, FUSED, 2),
        (8, slow, 2),
    ]
    assert [each.num_tokens for each, _ in limits.winners(str(database), [5120], [8], 3)] == [8]
    monkeypatch.setattr(sys, "argv", ["limits.py", str(database), "--ncu", str(tmp_path / "ncu")])
    with pytest.raises(SystemExit) as left:
        limits.main()
    assert str(left.value).endswith("ncu (Nsight Compute): put it on the PATH, or name it with --ncu")


def test_what_ncu_itself_says_is_shown_when_it_fails(limits: ModuleType, tmp_path: Path) -> None:
    ncu = tmp_path / "ncu"
    ncu.write_text("#!/bin/sh\necho '==ERROR== The driver is too old' >&2\nexit 9\n")
    ncu.chmod(0o755)
    with pytest.raises(limits.NoProfile, match=r"ncu left with 9:\n==ERROR== The driver is too old"):
        limits.profile([limits.Launch(Problem(5120), 1, FUSED, 2)], str(ncu))
