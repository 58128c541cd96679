"""The gate's real case on a GPU: the same source, slower under another pass configuration."""

from __future__ import annotations

import time
from functools import partial

import torch
from cuda_configs import BASE  # type: ignore[import-not-found]
from runtime_splits import compile_runtime_splits  # type: ignore[import-not-found]

from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.check import Finding, Verdict
from mhctune.autotuner.cuda_bench import CudaBench
from mhctune.autotuner.nvidia import conditions_reader
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.planner import spaces_of
from mhctune.autotuner.probe import fingerprint
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.speed import Then, remeasure
from mhctune.autotuner.sweep import Sweep
from mhctune.db.derivation import derive_stored
from mhctune.db.repository import Repository
from mhctune.kernels.compiler import Compiler, Passes, quiet
from mhctune.kernels.dispatch import DispatchTable
from mhctune.kernels.registry import seam
from mhctune.kernels.seam import Problem

SEAM = seam("post_pre_delayed")
PROBLEM = SEAM.canonical(Problem(5120))
LEGALIZED = {"tl.disable_safe_memory_legalize": False}
AMPLE = VramBudget(2**34, 2**34)
TUNED = {"tile_n": 2, "n_splits": 10, "n_thr": 128, "vec": 4, "block_m": 1, "ahead": 2, "collapse": 1,
         "epilogue_thr": 128}  # fmt: skip


def opened(passes: Passes | None) -> tuple[CudaBench, Compiler]:
    compiler = Compiler(2, partial(compile_runtime_splits, passes=passes))
    return CudaBench(SEAM, compiler), compiler


def gate(table: DispatchTable, then: Then, passes: Passes | None) -> list[Finding]:
    bench, compiler = opened(passes)
    here = fingerprint(SEAM, "cuda", passes)
    found = remeasure(table, bench, compiler.compile_all, 0.1, then=then, here=here)
    compiler.close()
    return found


def test_safe_memory_legalization_is_a_regression_and_is_named(repository: Repository) -> None:
    """With run-time n_splits TileLang's guards cannot be proved away: 3.1 against 31.1 us once (facts)."""
    quiet()
    begin = time.monotonic()
    # tile_n 4 is somebody to run beside the choice.
    limits = {"fused": {**{name: [value] for name, value in TUNED.items()}, "tile_n": [2, 4]}}
    assert set(TUNED) == set(BASE)
    plan = SweepPlan(
        seam=SEAM, problem=PROBLEM, target="cuda", token_counts=(1, 8),
        spaces=spaces_of(SEAM, "cuda", PROBLEM, limits), protocol=Protocol.of("cuda", 15),
        fingerprint=fingerprint(SEAM, "cuda"), max_regret=0.05,
    )  # fmt: skip
    bench, compiler = opened(None)
    with conditions_reader("cuda") as read:
        result = Sweep(plan, repository, bench, AMPLE, compiler.compile_all, read=read).run()
    compiler.close()
    assert result.state == "complete", result.missing
    table = derive_stored(repository, repository.sweep(1)).table
    then = Then(repository.trials(1))
    torch.cuda.empty_cache()
    same, other = gate(table, then, None), gate(table, then, LEGALIZED)
    for finding in (*same, *other):
        print(f"\n{finding.verdict}: {finding.what}: {finding.sentence}", end="")
    print(f"\n{time.monotonic() - begin:.0f} s")
    assert [f.verdict for f in same] == [Verdict.PASSED] * 2
    assert [f.verdict for f in other] == [Verdict.REGRESSED] * 2
    for finding in other:
        assert "other_toolchain: pass_config" in finding.sentence
        assert "tl.disable_safe_memory_legalize" in finding.sentence
