"""The target table end to end on the CPU: sweeps with their baselines and yardsticks, kept and shown."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tilelang.backend.target import determine_target
from tilelang.engine.lower import lower
from tilelang.transform import PassContext

from mhctune.autotuner.probe import detect
from mhctune.configs.loader import load_gpu
from mhctune.db.repository import Repository
from mhctune.kernels.compiler import PASS_CONFIG
from mhctune.kernels.seam import Problem

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
HIDDEN = 1024
SWEEP = """
name = "short"
about = "The delayed seam, restricted to be short"
token_counts = [1, 2]
samples = 5
max_regret = 0.9

[space.c.fused]
tile_n = [24]
n_splits = [2]
block_h = [64]
block_m = [1]

[space.c.unfused]
tile_n = [24]
n_splits = [2]
block_h = [64]
block_m = [4]
"""


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


@pytest.fixture(scope="module")
def hopper() -> ModuleType:
    return importlib.import_module("hopper")


def test_two_runs_are_measured_once_and_make_the_table(
    hopper: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("hopper_baselines"), "SPLITS", (2,))  # fewer kernels
    db, sweep, yards = str(tmp_path / "x.db"), tmp_path / "short.toml", tmp_path / "x.db.yardsticks.json"
    sweep.write_text(SWEEP)
    plans = hopper.plans_of(load_gpu("cpu"), str(sweep), [HIDDEN], 2)
    assert [plan.problem for plan in plans] == [Problem(HIDDEN)] * 2
    assert plans[0].protocol.seed != plans[1].protocol.seed
    assert plans[0].candidates == plans[1].candidates
    free = detect().free_bytes
    hopper.measure(db, plans, free, yards)
    kept = json.loads(yards.read_text())
    assert set(kept) == {plan.record().digest for plan in plans}
    assert all(each["copy_us"].keys() == {"1", "2"} and each["ceiling_us"] > 0 for each in kept.values())
    assert all(each["described_us"] == {} for each in kept.values())  # nothing is described that ships here
    capsys.readouterr()
    hopper.measure(db, plans, free, yards)
    assert capsys.readouterr().out == "2 of 2 sweeps are complete\n"
    with Repository.open(db, readonly=True) as store:
        assert len(store.sweeps()) == 2

    data = hopper.tables(db, [HIDDEN, 4096], 3, yards)
    printed = capsys.readouterr().out
    assert f"hidden {HIDDEN}, {detect().name}: 2 runs, sweeps 1, 2, " in printed
    assert "hidden 4096: no sweep of post_pre_delayed has ended" in printed
    assert list(data) == [str(HIDDEN)]
    rows = json.loads(json.dumps(data))[str(HIDDEN)]["rows"]
    assert [row["num_tokens"] for row in rows] == [1, 2]
    for row in rows:
        # Nothing is recorded as shipped for a CPU, so that what is described is compared and not judged.
        assert (row["shipped_us"], row["counts"], row["verdict"]) == (None, None, "no record")
        assert (row["reproduced"], row["stands_in"]) == (None, True)
        assert row["structure_ratios"] == row["ratios"]
        assert row["structure"]["arm"] == "fused"
        assert row["structure"]["config"]["n_splits"] == 8
        assert row["own"]["arm"] == "unfused"
        assert len(row["ratios"]) == 2
        for ratio, ours, theirs in zip(
            row["ratios"], row["ours"]["each_us"], row["structure"]["each_us"], strict=True
        ):
            assert ratio == pytest.approx(theirs / ours)


EARLY = (
    SWEEP
    + """
[space.c.released]
tile_n = [24]
n_splits = [2]
block_h = [64]
block_m = [1]
"""
)


def test_the_time_to_the_layer_input_is_a_table_of_its_own(
    hopper: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db, sweep, yards = str(tmp_path / "x.db"), tmp_path / "early.toml", tmp_path / "x.db.yardsticks.json"
    sweep.write_text(EARLY)
    plans = hopper.plans_of(load_gpu("cpu"), str(sweep), [HIDDEN], 2, "layer_input")
    assert [plan.shipped for plan in plans] == [(), ()]  # baselines are complete at their end
    assert [plan.protocol.until for plan in plans] == ["layer_input"] * 2
    hopper.measure(db, plans, detect().free_bytes, yards)
    assert not yards.exists()
    assert f"hidden {HIDDEN}, seed {plans[0].protocol.seed}, to the layer input: 3 candidates" in (
        capsys.readouterr().out
    )
    data = json.loads(json.dumps(hopper.tables(db, [HIDDEN], 3, yards)))
    printed = capsys.readouterr().out
    assert f"hidden {HIDDEN}, {detect().name}, to the layer input: 2 runs, sweeps 1, 2" in printed
    assert f"hidden {HIDDEN}: no sweep of post_pre_delayed has ended" in printed  # to the end there is none
    assert list(data[str(HIDDEN)]) == ["layer_input"]
    rows = data[str(HIDDEN)]["layer_input"]["rows"]
    assert [(row["num_tokens"], row["ours"]["arm"]) for row in rows] == [(1, "released"), (2, "released")]
    assert [(row["target"], row["shipped_us"], row["verdict"]) for row in rows] == [
        (2.5, None, "no record")
    ] * 2
    with Repository.open(db, readonly=True) as store:
        assert hopper.alike(store.sweeps(), HIDDEN, 3) == []
        assert [s.id for s in hopper.alike(store.sweeps(), HIDDEN, 3, "layer_input")] == [1, 2]


def test_what_is_not_a_repeat_is_no_run_of_the_table(
    hopper: ModuleType, repository: Repository, make_sweep: object, make_fingerprint: object
) -> None:
    def begun(seed: int, **changes: object) -> int:
        protocol = {"version": 1, "samples": 5, "seed": seed}
        record = make_sweep(protocol=protocol, digest=f"{len(repository.sweeps()):064}", **changes)  # type: ignore[operator]
        sweep_id = repository.begin(record)
        repository.end(sweep_id, hopper.SweepState.COMPLETE)
        return sweep_id

    begun(1, fingerprint=make_fingerprint(source_hash="6" * 64))  # type: ignore[operator]
    begun(1, problem=Problem(4096))
    begun(2, token_counts=(1, 8))
    old, other, new = begun(1), begun(2), begun(1)
    unfinished = make_sweep(protocol={"version": 1, "samples": 5, "seed": 9}, digest="f" * 64)  # type: ignore[operator]
    repository.begin(unfinished)
    found = hopper.alike(repository.sweeps(), 5120, 3)
    assert [sweep.id for sweep in found] == [new, other]
    assert old not in [sweep.id for sweep in found]
    assert [sweep.id for sweep in hopper.alike(repository.sweeps(), 5120, 1)] == [new]
    assert hopper.alike(repository.sweeps(), 7168, 3) == []


def test_the_other_seams_are_told_beside_what_ships(
    hopper: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = importlib.import_module("shipped")
    data = hopper.seams(list(shipped.recorded()))
    printed = capsys.readouterr().out
    by_seam = {label.split(",")[0]: rows for label, rows in data.items()}
    assert set(by_seam) == set(importlib.import_module("hopper_seams").SEAMS)
    post = {row["num_tokens"]: row for row in by_seam["post"]}
    assert post[1]["shipped_us"] == 3.01  # recorded, of vLLM's own kernel
    assert post[1]["ratio"] == pytest.approx(3.01 / 0.94)  # unrolled, ours takes less than an empty kernel
    assert post[32]["ratio"] == pytest.approx(3.23 / post[32]["ours_us"])
    assert post[1024]["ratio"] is None  # not recorded
    assert all(row["ratio"] is None for row in by_seam["collapse"])
    assert printed.count("nothing to compare with") == 2
    assert {row["num_tokens"]: row["note"] for row in by_seam["pre"] if row["note"]} == {
        128: "66 splits are illegal here: 64 taken"
    }
    for row in by_seam["pre"]:
        assert row["limits"][0] <= row["ratio"] <= row["limits"][1]
        assert (row["ours_is"] == "faster") == (row["limits"][0] > 1) or row["ours_is"] == "the same"
    assert re.search(r"never slower at \d+ token counts; \d\.\d\d to \d\.\d\d times as fast", printed)


def test_the_empty_kernel_only_compares_an_argument() -> None:
    source = importlib.import_module("yardsticks").compile_empty().get_kernel_source()
    _, kernel = source.rsplit("__global__ void", 1)
    body = " ".join(kernel[kernel.index("{") :].split())
    assert re.fullmatch(r"\{ if \(0 < asked\) \{ out\[0\] = [^;]*; \} \}", body), body
    assert "__launch_bounds__(128, 1)" in kernel


def test_launches_of_the_empty_kernel_wait_for_one_another() -> None:
    # TileLang launches a kernel programmatically where its lowered function has this attribute.
    yardsticks = importlib.import_module("yardsticks")
    attributes = lowered(yardsticks.empty_program())
    assert not [name for name in attributes if "pdl" in name or "dependent_launch" in name]
    extents = {str(k): int(v) for k, v in attributes["thread_extent"].items()}
    assert (extents["blockIdx.x"], extents["threadIdx.x"]) == (60, 128)  # those of `fused` at one token
    assert "threadIdx.x" in map(str, attributes["tirx.kernel_launch_params"])
    post = importlib.import_module("mhctune.kernels.cuda.post").post
    assert "has_cuda_pdl_sync" in lowered(post(1024, 128, 4))  # the name is right: a kernel of ours has it


def lowered(program: Any) -> dict[str, Any]:
    """Return the attributes of a program's one device function, lowered for Hopper."""
    with determine_target({"kind": "cuda", "arch": "sm_90a"}, return_object=True) as target:
        with PassContext(config=PASS_CONFIG):
            made = lower(program, target=target, enable_host_codegen=False, enable_device_compile=False)
    (function,) = made.device_mod.functions.values()
    return dict(function.attrs)
