"""The CUDA arms of `topk_merge`: their generated code run on the processor, and what their spaces refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from cuda_on_host import OnHost, once  # type: ignore[import-not-found]

from mhctune.kernels.buffers import OutputBuffers
from mhctune.kernels.cuda.topk_arms import ARMS
from mhctune.kernels.cuda.topk_network import merge_steps, sort_steps
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Problem, Variant

SEAM = SEAMS["topk_merge"]
RADIX, BITONIC = ARMS
CASES = (
    # arm, config, K, W, S: held and read again; whole and ragged ends; one key a thread and eight
    (RADIX, {"n_thr": 128, "digit_bits": 11, "held": 1}, 1024, 4, 16),
    (RADIX, {"n_thr": 512, "digit_bits": 8, "held": 1}, 512, 4, 1),
    (RADIX, {"n_thr": 64, "digit_bits": 8, "held": 0}, 100, 3, 64),
    (RADIX, {"n_thr": 32, "digit_bits": 5, "held": 1}, 33, 1, 1),
    (BITONIC, {"n_thr": 128, "run_k": 1}, 512, 3, 16),
    (BITONIC, {"n_thr": 64, "run_k": 2}, 33, 3, 4),
)


def problem_of(top_k: int, ranks: int = 1, interleave: int = 1) -> Problem:
    return SEAM.canonical(Problem(1, top_k=top_k, ranks=ranks, interleave=interleave))


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], OnHost]:
    return once(tmp_path_factory.mktemp("on_host"))


@pytest.mark.parametrize(("arm", "config", "top_k", "ranks", "interleave"), CASES)
def test_the_generated_code_finds_the_references_ids_to_the_bit(
    arm: Any, config: dict[str, int], top_k: int, ranks: int, interleave: int,
    on_host: Callable[[Variant], OnHost], seed: int,
) -> None:  # fmt: skip
    """In every regime, with threads and blocks in order and backwards: no result depends on it."""
    problem = problem_of(top_k, ranks, interleave)
    assert arm.space(problem).refusals(config) == ()
    kernels = [on_host(variant) for variant in arm.variants(problem, config)]
    for at, regime in enumerate(SEAM.regimes):
        rows = 1 + at % 2
        inputs = SEAM.inputs(problem, rows, seed + at, "cpu", regime)
        for backwards in (False, True):
            buffers = OutputBuffers(arm.plan(problem, config, rows), "cpu")
            buffers.poison()
            views = buffers.bind(rows)
            launch = arm.bind(problem, config, [partial(k, backwards=backwards) for k in kernels])
            launch(inputs, views)
            found = SEAM.check(problem, inputs, views)
            assert all(d.ok for d in found), (regime, backwards, [str(d) for d in found])
            ids = inputs["local_ids"].clone()
            launch.convert(ids, ids, ranks - 1)
            assert ids.equal(views["packed"][:, 0])


def test_a_network_sorts_and_merges() -> None:
    assert len(sort_steps(2048)) == 66
    assert len([1 for _, apart in sort_steps(2048) if apart < 8]) == 30
    assert len([1 for _, apart in sort_steps(2048) if apart >= 256]) == 6
    for length, steps in ((64, sort_steps(64)), (64, merge_steps(64))):
        keys = [(i * 37) % 64 for i in range(64)]
        if steps == merge_steps(64):
            keys = sorted(keys[:40]) + sorted(keys[40:], reverse=True)  # bitonic
        for run, apart in steps:
            for i in range(length):
                if not i & apart:
                    falling = run == length or not i & run
                    pair = sorted((keys[i], keys[i + apart]), reverse=falling)
                    keys[i], keys[i + apart] = pair
        assert keys == sorted(keys, reverse=True)


def test_every_k_and_w_has_a_legal_arm_and_what_is_refused_has_a_reason() -> None:
    for top_k in (1, 24, 512, 1000, 1024, 2048, 4096):
        for ranks in (1, 2, 3, 8, 16, 72):
            problem = problem_of(top_k, ranks)
            assert list(RADIX.space(problem).legal()), (top_k, ranks)
    eight = problem_of(2048, 8)
    assert [arm.space(eight).refusals(arm.preferred) for arm in ARMS] == [(), ()]
    assert [len(arm.space(eight).candidates()) for arm in ARMS] == [10, 6]
    refused = (
        (RADIX, problem_of(2048, 16), {"n_thr": 1024, "digit_bits": 11, "held": 1}, "32768 entries are more"),
        (RADIX, eight, {"n_thr": 1024, "digit_bits": 11, "held": 0}, "held 0 needs n_thr 1024 of 512"),
        (RADIX, eight, {"n_thr": 96, "digit_bits": 11, "held": 0}, "n_thr 96 must be a power of two"),
        (RADIX, eight, {"n_thr": 128, "digit_bits": 11, "held": 0}, "more than 8 a thread of n_thr 128"),
        (RADIX, eight, {"n_thr": 512, "digit_bits": 16, "held": 1}, "digit_bits 16 must be 4 to 13"),
        (RADIX, eight, {"n_thr": 512, "digit_bits": 8, "held": 2}, "held 2 must be 0 or 1"),
        (BITONIC, eight, {"n_thr": 1024, "run_k": 8}, "run_k 8 x K 2048, filled up to a power of two, are"),
        (BITONIC, problem_of(512, 2), {"n_thr": 512, "run_k": 4}, "run_k 4 must be 1 to the 2 ranks"),
    )
    for arm, problem, config, reason in refused:
        assert reason in "; ".join(arm.space(problem).refusals(config)), config
