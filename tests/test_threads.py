"""Compilers run side by side as far as cores and free memory go."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from mhctune.autotuner import threads
from mhctune.autotuner.benches import make_bench
from mhctune.autotuner.threads import COMPILE_BYTES, compile_threads, threads_here
from mhctune.kernels.compiler import Compiled, Compiler
from mhctune.kernels.seam import Variant

GIB = 2**30


@pytest.mark.parametrize(
    ("target", "cores", "free_bytes", "expected"),
    [
        ("cuda", 16, 128 * GIB, 16),
        ("cuda", 128, 16 * GIB, 23),
        ("cuda", 16, 2 * GIB, 2),
        ("cuda", 16, GIB // 2, 1),
        ("c", 16, 2 * GIB, 5),
        ("c", 2, 0, 1),
    ],
)
def test_threads_are_bounded_by_cores_and_memory(
    target: str, cores: int, free_bytes: int, expected: int
) -> None:
    found = compile_threads(target, cores, free_bytes)
    assert found == expected
    assert found == 1 or found * COMPILE_BYTES[target] <= free_bytes


@pytest.fixture
def memory_for_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "cores", lambda: 8)
    monkeypatch.setattr(threads, "free_host_bytes", lambda: 2 * COMPILE_BYTES["c"] + 1)
    yield


def test_no_more_compilers_run_at_once_than_there_is_memory_for(memory_for_two: None) -> None:
    lock, both = threading.Lock(), threading.Barrier(2)
    running, most = 0, 0

    def compile_one(variant: Variant) -> Compiled:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait(30)  # nobody ends before a second one has begun
        with lock:
            running -= 1
        return Compiled(lambda *args: None, "")

    compiler = Compiler(threads_here("c"), compile_one)
    compiler.compile_all([Variant.of("post", "c", hidden_size=n) for n in range(8)], lambda done, total: None)
    compiler.close()
    assert most == 2


def test_the_bench_compiles_with_as_many(memory_for_two: None) -> None:
    _, compiler = make_bench("post_pre_delayed", "c", "warm")
    assert isinstance(compiler, Compiler)
    assert compiler.workers == 2
    compiler.close()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_cores_are_those_that_the_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert threads.cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
