"""Fixtures that several test files share. The `make_*` ones are constructors with sensible defaults."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mhctune.autotuner.store import SweepRecord
from mhctune.db.repository import Repository
from mhctune.kernels import serving
from mhctune.kernels.buffers import OutputBuffers
from mhctune.kernels.compiler import Compiled, Compiler, quiet
from mhctune.kernels.dispatch import Band, Choice, DispatchTable, Fingerprint
from mhctune.kernels.seam import Arm, Problem, Variant
from mhctune.kernels.space import Candidate

# Workers import their hostile candidates from here by name: spawned processes get this path as well.
sys.path.insert(0, str(Path(__file__).parent / "support"))

if "PYTEST_XDIST_WORKER" in os.environ:
    # As many workers as cores: torch's threads would wait for one another. 23 tests of the planted faults
    # took 10.0 s of processor time with two threads and 6.9 with one, imports included.
    torch.set_num_threads(1)

FINGERPRINT: dict[str, Any] = {
    "gpu_name": "NVIDIA H200",
    "sm_count": 132,
    "memory_gib": 140,
    "mig": "",
    "driver": "570.86",
    "cuda": "12.8",
    "compiler": "nvcc 12.8",
    "torch": "2.11.0",
    "tilelang": "0.1.15",
    "pass_config": "{}",
    "compile_flags": "",
    "protocol": 1,
    "source_hash": "5" * 64,
}


@pytest.fixture
def make_fingerprint() -> Callable[..., Fingerprint]:
    return lambda **changes: Fingerprint(**{**FINGERPRINT, **changes})


# By processor time from an empty kernel cache, on one Xeon core 190 s to 20; no other file takes as long.
LONG = (
    "test_kill.py", "test_seams.py", "test_post_pre_delayed.py", "test_cli.py", "test_ranks.py",
    "test_worker.py",
    "test_chain.py", "test_seam_ops.py", "test_kernel_cache.py", "test_story.py", "test_ranks_sweep.py",
    "test_topk_merge.py", "test_ops.py", "test_cuda_topk.py", "test_compiler.py", "test_ahead.py",
)  # fmt: skip

VARIANTS = {
    Candidate.of("fused", {"tile_n": tile_n, "n_splits": splits}): (
        f"cuda:post_pre(tile_n={tile_n})",
        "cuda:end()",
    )
    for tile_n in (32, 24)
    for splits in (1, 4)
}


@pytest.fixture
def make_sweep(make_fingerprint: Callable[..., Fingerprint]) -> Callable[..., SweepRecord]:
    def make(**changes: Any) -> SweepRecord:
        values: dict[str, Any] = {
            "digest": "d" * 64,
            "seam": "post_pre_delayed",
            "problem": Problem(hidden_size=5120),
            "target": "cuda",
            "token_counts": (1, 8, 64),
            "grid": 12,
            "space": {"fused": {"tile_n": [32, 24], "n_splits": [1, 4]}},
            "variants": VARIANTS,
            "protocol": {"version": 1, "samples": 5},
            "fingerprint": make_fingerprint(),
            "sources": {"fused": "a" * 64, "unfused": "b" * 64},
            "bound": 0.05,
        }
        return SweepRecord(**{**values, **changes})

    return make


@pytest.fixture
def make_table(make_fingerprint: Callable[..., Fingerprint]) -> Callable[..., DispatchTable]:
    def make(**changes: Any) -> DispatchTable:
        fused = Choice.of("fused", {"tile_n": 24, "n_splits": 4, "n_thr": 128})
        unfused = Choice.of("unfused", {"tile_n": 32, "n_splits": 1})
        values: dict[str, Any] = {
            "seam": "post_pre_delayed",
            "problem": Problem(hidden_size=5120).to_dict(),
            "target": "cuda",
            "numerics": "rounded/1",
            "fingerprint": make_fingerprint(),
            "bands": (
                Band(1, 1, fused, {"regret": 0.0, "tie_set": ['fused "a"', "it's"]}),
                Band(2, 17, unfused, {"regret": 0.0125, "probed": True}),
                Band(18, 64, fused, {"regret": 0.04, "interval_us": [3.1, 3.4], "note": None}),
            ),
            "default": unfused,
            "evidence": {"bound": 0.05, "sweep": 1, "measured": [1, 8, 64]},
        }
        return DispatchTable(**{**values, **changes})

    return make


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A path where no database is yet."""
    return tmp_path / "mhctune.db"


@pytest.fixture
def repository(database: Path) -> Iterator[Repository]:
    """An open repository on `database`."""
    with Repository.open(database) as opened:
        yield opened


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of the test's own: the same in every run, another in every test."""
    return int.from_bytes(hashlib.sha256(request.node.nodeid.encode()).digest()[:4], "big")


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    """The session's compiler: each kernel is compiled once, whichever test asks for it first."""
    quiet()
    shared = Compiler()
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def run_arm(compiler: Compiler) -> Callable[..., dict[str, torch.Tensor]]:
    """Launch an arm into poisoned buffers and return all of them, scratch included."""

    def run(arm: Arm, problem: Problem, config: dict[str, int], inputs: Any) -> dict[str, torch.Tensor]:
        variants = arm.variants(problem, config)
        compiler.request(variants)
        launch = arm.bind(problem, config, [compiler.get(variant).run for variant in variants])
        num_tokens = next(iter(inputs.values())).shape[0]
        buffers = OutputBuffers(arm.plan(problem, config, num_tokens), "cpu")
        buffers.poison()
        views = buffers.bind(num_tokens)
        launch(inputs, views)
        return views

    return run


@pytest.fixture
def fresh_serving(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """Serving as in a fresh process, with the session's kernels; the list grows with each one it compiles."""
    asked: list[Variant] = []

    def compile_one(variant: Variant) -> Compiled:
        asked.append(variant)
        return compiler.get(variant)

    for name in ("_tables", "_kernels", "_launches"):
        monkeypatch.setattr(serving, name, {})
    monkeypatch.setattr(serving, "_fitting", set())
    monkeypatch.setattr(serving, "compile_variant", compile_one)
    return asked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no process is left alone with it at the end."""
    rank = {name: at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give `pytest -n` whole files, unless another `--dist` is asked for."""
    from spread import ByFile  # type: ignore[import-not-found]  # only where there is pytest-xdist

    return ByFile(config, log) if config.getoption("dist") == "load" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the worst error of each output of the kernels and, with -v, what caught each planted fault."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    properties = [entry for report in reports for entry in getattr(report, "user_properties", ())]
    cells = [value for name, value in properties if name == "cell"]
    faults = [value for name, value in properties if name == "fault"]
    ranks = [value for name, value in properties if name == "rank"]
    if ranks and terminalreporter.verbosity > 0:
        terminalreporter.section(
            "what each rank reports when something is planted, and after how long", sep="-"
        )
        for what, rank, said in ranks:
            for text, seconds in said:
                terminalreporter.line(f"{what:32} rank {rank} {seconds:5.2f} s  {text[:200]}")
    worst: dict[str, tuple[float, float]] = {}
    for cell in cells:
        for output, error, bound in cell:
            worst[output] = max(worst.get(output, (0.0, bound)), (error, bound))
    if cells:
        terminalreporter.section(f"{len(cells)} cells against the reference", sep="-")
        for output, (error, bound) in worst.items():
            terminalreporter.line(f"{output:14} worst error {error:.3g}, bound {bound:.3g}")
        tested = Counter((seam, arm) for name, value in properties if name == "arm" for seam, arm in [value])
        for seam in dict.fromkeys(seam for seam, _ in tested):
            arms = ", ".join(f"{arm} {cells}" for (of, arm), cells in tested.items() if of == seam)
            ours = [found for output, found in worst.items() if output.split()[0] == seam]
            # A bound of 0 asks for equal bits.
            found = [error / bound if bound else error and math.inf for error, bound in ours]
            terminalreporter.line(f"{seam:17} cells of {arms}: worst error {max(found):.2f} of its bound")
    if faults and terminalreporter.verbosity > 0:
        terminalreporter.section(f"{len(faults)} planted faults", sep="-")
        for fault, inputs, output, times in faults:
            terminalreporter.line(f"{fault:44} {inputs:34} {output:14} {times}")
