"""Compiling: each variant once, failures kept, messages that name the variant."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_splits import compile_runtime_splits  # type: ignore[import-not-found]

from mhctune.configs.errors import ConfigError
from mhctune.kernels.compiler import (
    C_FLAGS,
    C_PASS_CONFIG,
    C_WITHOUT_HALF,
    PASS_CONFIG,
    Compiled,
    CompileError,
    Compiler,
    compile_variant,
    pass_config,
    quiet,
)
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Problem, Variant

VARIANTS = [Variant.of("post", "c", hidden_size=hidden, block_h=256) for hidden in (256, 512, 768, 1024)]
BROKEN = Variant.of("post", "c", hidden_size=1, block_h=1)


@pytest.mark.parametrize(
    ("body", "compiles"), [("return a[0] * a[1];", True), ("half x = half(a[0]); return float(x);", False)]
)
def test_without_tilelangs_half_a_kernel_that_holds_one_does_not_compile(body: str, compiles: bool) -> None:
    """And without the flags both compile, which shows that the flags are what refuses."""
    from tilelang.env import TILELANG_TEMPLATE_PATH

    text = f'#include <tl_templates/cpp/common.h>\nextern "C" float f(float* a) {{ {body} }}\n'
    command = ["g++", "-std=c++17", "-fsyntax-only", "-I", TILELANG_TEMPLATE_PATH, "-x", "c++", "-"]
    for flags, expected in (((*C_FLAGS, *C_WITHOUT_HALF), compiles), (C_FLAGS, True)):
        done = subprocess.run([*command, *flags], input=text, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == expected, done.stderr


class FakeCompiler:
    """Counts what it is asked to compile; the broken variant fails."""

    def __init__(self) -> None:
        self.asked: Counter[Variant] = Counter()
        self.threads: set[str] = set()
        self.lock = threading.Lock()

    def __call__(self, variant: Variant) -> Compiled:
        with self.lock:
            self.asked[variant] += 1
            self.threads.add(threading.current_thread().name)
        if variant == BROKEN:
            raise CompileError(f"{variant}: no")
        return Compiled(lambda *args: None, f"hash of {variant}")


@pytest.fixture
def fake() -> FakeCompiler:
    return FakeCompiler()


@pytest.fixture
def fake_compiler(fake: FakeCompiler) -> Iterator[Compiler]:
    compiler = Compiler(2, fake)
    yield compiler
    compiler.close()


def test_each_variant_is_compiled_once_however_often_it_is_asked_for(
    fake: FakeCompiler, fake_compiler: Compiler
) -> None:
    fake_compiler.request(VARIANTS)
    fake_compiler.request(reversed(VARIANTS))
    got = [fake_compiler.get(variant) for variant in VARIANTS * 2]
    fake_compiler.compile_all(VARIANTS, lambda done, total: None)
    assert fake.asked == Counter(VARIANTS)
    assert got[:4] == got[4:]
    assert all(a is b for a, b in zip(got[:4], got[4:], strict=True))


def test_equal_variants_are_one(fake: FakeCompiler, fake_compiler: Compiler) -> None:
    fake_compiler.get(Variant.of("post", "c", hidden_size=256, block_h=256))
    fake_compiler.get(Variant.of("post", "c", block_h=256, hidden_size=256))
    assert fake.asked.total() == 1


def test_compilation_happens_in_the_background(fake: FakeCompiler, fake_compiler: Compiler) -> None:
    fake_compiler.compile_all(VARIANTS, lambda done, total: None)
    assert fake.threads
    assert threading.current_thread().name not in fake.threads


def test_a_failure_stays_for_get_and_is_not_tried_again(fake: FakeCompiler, fake_compiler: Compiler) -> None:
    told: list[tuple[int, int]] = []
    fake_compiler.compile_all([*VARIANTS, BROKEN], lambda done, total: told.append((done, total)))
    assert told == [(done, 5) for done in range(6)]
    for _ in range(2):
        with pytest.raises(CompileError, match="post"):
            fake_compiler.get(BROKEN)
    assert fake_compiler.get(VARIANTS[0]).code_hash == f"hash of {VARIANTS[0]}"
    assert fake.asked[BROKEN] == 1


def test_progress_reaches_its_total_when_variants_repeat(fake_compiler: Compiler) -> None:
    told: list[tuple[int, int]] = []
    fake_compiler.compile_all(VARIANTS * 3, lambda done, total: told.append((done, total)))
    assert told == [(done, 4) for done in range(5)]


def test_nothing_to_compile_is_done_at_once(fake: FakeCompiler, fake_compiler: Compiler) -> None:
    told: list[tuple[int, int]] = []
    fake_compiler.compile_all([], lambda done, total: told.append((done, total)))
    assert told == [(0, 0)]
    assert not fake.asked


def test_a_wait_ends_with_what_it_waits_for_and_tells_of_all_that_was_asked_for() -> None:
    go_on = threading.Event()

    def compile_one(variant: Variant) -> Compiled:
        if variant != VARIANTS[0]:
            go_on.wait(30)
        return Compiled(lambda *args: None, "")

    compiler, told = Compiler(2, compile_one), list[tuple[int, int]]()
    compiler.request(VARIANTS)
    compiler.wait(VARIANTS[:1], lambda done, total: told.append((done, total)))
    assert told[-1] == (1, 4)
    go_on.set()
    compiler.wait(VARIANTS, lambda done, total: told.append((done, total)))
    assert told[-1] == (4, 4)
    assert told == sorted(told)
    compiler.close()


def test_closing_cancels_what_has_not_begun() -> None:
    started, go_on = threading.Event(), threading.Event()
    asked: list[Variant] = []

    def compile_one(variant: Variant) -> Compiled:
        asked.append(variant)
        started.set()
        go_on.wait(10)
        return Compiled(lambda *args: None, "")

    compiler = Compiler(1, compile_one)
    compiler.request(VARIANTS)
    assert started.wait(10)
    closing = threading.Thread(target=compiler.close)
    closing.start()
    while not all(future.cancelled() for future in list(compiler._futures.values())[1:]):
        assert closing.is_alive()
    go_on.set()
    closing.join(10)
    assert asked == VARIANTS[:1]


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (Variant.of("post", "abacus", hidden_size=256), "^abacus:post.*target 'abacus' has no kernel 'post'"),
        (Variant.of("sieve", "c", hidden_size=256), "^c:sieve.*target 'c' has no kernel 'sieve'"),
        (Variant.of("post", "c", hidden_size=256), "c:post.*TypeError.*block_h"),
        (Variant.of("post", "c", hidden_size=256, block_h=0), r"c:post\(block_h=0, hidden_size=256\)"),
    ],
    ids=str,
)
def test_a_variant_that_does_not_compile_is_named_with_the_reason(variant: Variant, message: str) -> None:
    quiet()
    with pytest.raises(CompileError, match=message):
        compile_variant(variant)


def test_a_real_kernel_runs_and_its_code_hash_is_of_its_source(compiler: Compiler) -> None:
    arm, problem = find_seam("post_pre_delayed").arm("c", "unfused"), Problem(768)
    post, projection, _ = arm.variants(problem, dict(arm.preferred))
    compiled, other = compiler.get(post), compiler.get(projection)
    assert len(compiled.code_hash) == 64
    assert compiled.code_hash != other.code_hash
    assert compile_variant(post).code_hash == compiled.code_hash


@pytest.mark.parametrize("wrong", ["dtype", "shape", "stride"])
def test_a_compiled_kernel_refuses_a_tensor_it_would_misread(compiler: Compiler, wrong: str) -> None:
    arm, hidden = find_seam("post_pre_delayed").arm("c", "unfused"), 768
    run = compiler.get(arm.variants(Problem(hidden), dict(arm.preferred))[0]).run
    bits: dict[str, Any] = {"dtype": torch.uint16}
    x = torch.zeros(3, hidden, **bits)
    if wrong == "dtype":
        x = torch.zeros(3, hidden, dtype=torch.float32)
    elif wrong == "shape":
        x = torch.zeros(3, hidden + 1, **bits)
    else:
        x = torch.zeros(3, 2 * hidden, **bits)[:, ::2]
    residual = torch.zeros(3, 4, hidden, **bits)
    with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
        run(x, residual, torch.zeros(3, 4), torch.zeros(3, 4, 4), torch.empty_like(residual), x)
    assert f"{wrong} mismatch for parameter x" in str(caught.value)


def test_other_passes_are_compiled_with_and_an_unknown_one_is_refused() -> None:
    changed = pass_config("cuda", {"tl.disable_safe_memory_legalize": False})
    assert changed == {**PASS_CONFIG, "tl.disable_safe_memory_legalize": False}
    assert pass_config("c") == C_PASS_CONFIG
    with pytest.raises(
        ConfigError, match=r"unknown pass option of target c 'tl.disable_tma_lower'.*known: tl"
    ):
        pass_config("c", {"tl.disable_tma_lower": False})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc; the GPU tests compile everywhere else")
def test_run_time_splits_are_guarded_only_under_safe_memory_legalization() -> None:
    """The kernel of the gate's real case: vector loads as they are, each with a condition when legalized."""
    config = {"tile_n": 2, "n_splits": 10, "n_thr": 128, "vec": 4, "block_m": 1, "ahead": 2, "collapse": 1}
    variant = Variant.of("post_pre", "cuda", hidden_size=5120, **config)
    sources = [
        compile_runtime_splits(variant, passes).run.get_kernel_source()  # type: ignore[attr-defined]
        for passes in (None, {"tl.disable_safe_memory_legalize": False})
    ]
    assert all("n_splits" in source and "*(float4*)" in source for source in sources)
    plain, guarded = (source.count("condval") for source in sources)
    assert plain == 0
    assert guarded > 10


_FINISHED = """
from tilelang import tvm
from mhctune.kernels.compiler import compile_variant, quiet
from mhctune.kernels.seam import Variant

quiet()
compiled = compile_variant(Variant.of("post", "cuda", hidden_size=1024, n_thr=128, vec=4, collapse=0))
executable = compiled.run.adapter.get_exportable_executable()
fresh = isinstance(executable, tvm.runtime.Executable)
print("fresh" if fresh else "cached", compiled.code_hash, not fresh or executable._jitted_mod is not None)
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc; the GPU tests compile everywhere else")
def test_a_cuda_kernel_is_finished_before_its_first_launch_and_comes_back_from_the_cache(
    tmp_path: Path,
) -> None:
    """Host code and all, so that no launch compiles; no GPU is needed for either."""
    answers = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _FINISHED], env={**os.environ, "TILELANG_CACHE_DIR": str(tmp_path)},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout.split())
    assert [answer[0] for answer in answers] == ["fresh", "cached"]
    assert answers[0][1] == answers[1][1]
    assert [answer[2] for answer in answers] == ["True", "True"]
