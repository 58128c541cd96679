"""The generated code of every CUDA arm of the mHC seams, run on the processor against the reference.

Tensor cores included: see `support/cuda_on_host.h`. What is left to a GPU are the instructions themselves,
the order in which blocks and kernels run, and the large sizes (`gpu/test_cuda_seams.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cuda_on_host import OnHost, once  # type: ignore[import-not-found]

from mhctune.kernels.buffers import OutputBuffers
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Problem, Seam, Variant
from mhctune.kernels.space import Candidate

HIDDEN = 1024
EARLY = {"epilogue_thr": 128, "collapse": 1}


WS = {"n_splits": 4, "cache": 2, "mix_lanes": 1} | EARLY
MMA = {"n_thr": 128} | EARLY
FUSED = {"tile_n": 12, "n_splits": 2, "n_thr": 64, "vec": 8, "block_m": 2, "ahead": 2} | EARLY
RELEASED = {"n_splits": 16, "block_k": 64, "epilogue_thr": 128}
UNFUSED = {"n_splits": 32, "block_k": 128} | EARLY
WAYS = (
    # Beside every arm as it is served without a table: the other ways through its kernels.
    Candidate.of("fused", FUSED),
    Candidate.of("fused_mma", {**MMA, "n_splits": 32, "block_h": 32, "block_m": 16}),
    Candidate.of("fused_mma", {**MMA, "n_splits": 8, "block_h": 128, "block_m": 32}),
    Candidate.of("fused_ws", WS),
    Candidate.of("fused_ws", {**WS, "cache": 0, "collapse": 0}),
    Candidate.of("unfused_mma", UNFUSED),
)


def served(seam: Seam) -> Iterator[Any]:
    """Every arm of the delayed seam; of the others those whose kernels are not its tensor cores' again."""
    problem = seam.canonical(Problem(HIDDEN))
    for arm in seam.arms("cuda"):
        if arm.name.endswith(("_mma", "_ws")) and seam.name in ("post_pre", "pre", "pre_delayed"):
            continue
        space = arm.space(problem)
        fits = not space.refusals(arm.preferred)
        candidate = Candidate.of(arm.name, arm.preferred) if fits else next(space.legal())
        yield pytest.param(seam, problem, candidate, id=f"{seam.name}-{arm.name}")


def flagged(seam: Seam) -> Iterator[Any]:
    """What a problem may ask for or leave out, by arms whose kernels together do all of it."""
    bare, entry = Problem(HIDDEN, aux=True, norm=False), Problem(HIDDEN, carried=False)
    late = {**WS, "collapse": 0}
    for problem, name, config in (
        (bare, "fused_ws", WS), (bare, "released", RELEASED), (entry, "fused_ws", late),
    ):  # fmt: skip
        flags = "aux-no-norm" if problem.aux else "no-pre-mix"
        yield pytest.param(seam, problem, Candidate.of(name, config), id=f"{name}-{flags}")


def cases() -> Iterator[Any]:
    for seam in SEAMS.values():
        if seam.name != "topk_merge":  # tests/test_cuda_topk.py
            yield from served(seam)
    delayed = SEAMS["post_pre_delayed"]
    for candidate in WAYS:
        yield pytest.param(delayed, Problem(HIDDEN), candidate, id=str(candidate))
    yield from flagged(delayed)


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], OnHost]:
    return once(tmp_path_factory.mktemp("on_host"))


def token_counts(candidate: Candidate) -> tuple[int, int]:
    """One, and one that leaves the last program rows to leave alone: a tile of the tensor cores has 64."""
    if candidate.arm in ("fused_mma", "fused_ws", "unfused_mma"):
        return 1, candidate.config.get("block_m", 64) + 1
    return 1, 3


@pytest.mark.parametrize(("seam", "problem", "candidate"), list(cases()))
def test_the_generated_code_computes_the_seam(
    seam: Seam, problem: Problem, candidate: Candidate, on_host: Callable[[Variant], OnHost], seed: int
) -> None:
    """With threads and blocks in order and backwards: to the bit the same, nothing left unwritten."""
    arm, config = seam.arm("cuda", candidate.arm), candidate.config
    assert arm.space(problem).refusals(config) == ()
    kernels = [on_host(variant) for variant in arm.variants(problem, config)]
    for at, tokens in enumerate(token_counts(candidate)):
        inputs = seam.inputs(problem, tokens, seed + at, "cpu", seam.regimes[at % len(seam.regimes)])
        found = []
        for backwards in (False, True) if tokens > 1 else (True,):
            buffers = OutputBuffers(arm.plan(problem, config, tokens), "cpu")
            buffers.poison()
            views = buffers.bind(tokens)
            arm.bind(problem, config, [partial(k, backwards=backwards) for k in kernels])(inputs, views)
            found.append(buffers.storages())
        deviations = seam.check(problem, inputs, views)
        assert all(d.ok for d in deviations), (tokens, [str(d) for d in deviations])
        assert all(one.equal(other) for one, other in zip(found[0], found[-1], strict=True)), tokens
        if released := arm.releases(problem, config):
            first = OutputBuffers(arm.plan(problem, config, tokens), "cpu")
            first.poison()
            early = first.bind(tokens)
            arm.bind_until(problem, config, kernels, "layer_input")(inputs, early)
            assert all(early[name].equal(views[name]) for name in released), tokens


def test_who_releases_the_layer_input_early_says_so() -> None:
    seam, bare = SEAMS["post_pre_delayed"], Problem(HIDDEN, aux=True, norm=False)
    late = {**WS, "collapse": 0}
    for name, problem, config, known in (
        ("released", Problem(HIDDEN), RELEASED, True), ("fused_ws", Problem(HIDDEN), WS, False),
        ("fused_ws", bare, WS, True), ("fused_ws", bare, late, False), ("unfused_mma", bare, UNFUSED, True),
    ):  # fmt: skip
        released = seam.arm("cuda", name).releases(problem, config)
        assert ("layer_input" in released) == known, (name, config)


def test_one_lane_for_coefficients_needs_a_second_warp_and_a_delayed_layer_input() -> None:
    """With 32 threads nobody would write pre and post."""
    for name, config, refused in (
        ("post_pre_delayed", {**WS, "epilogue_thr": 32}, True),
        ("post_pre_delayed", {**WS, "epilogue_thr": 64}, False),
        ("post_pre_delayed", {**WS, "epilogue_thr": 32, "mix_lanes": 32}, False),
        ("post_pre", {k: v for k, v in WS.items() if k != "collapse"}, True),
    ):
        seam = SEAMS[name]
        space = seam.arm("cuda", "fused_ws").space(seam.canonical(Problem(HIDDEN)))
        assert any("mix_lanes" in why for why in space.refusals(config)) == refused, (name, config)


def without(text: str) -> Callable[[str], str]:
    """Take one statement out of a kernel's source."""

    def change(source: str) -> str:
        assert text in source
        return source.replace(text, "", 1)

    return change


@pytest.mark.parametrize(
    ("kernel", "fault", "said"),
    [
        # Who adds the warps' sums of squares does not wait for them.
        ("epilogue", "tl::__sync_thread_partial(1, 128);", "layer_input"),
        # The streamers do not wait for the multipliers, which wait for them.
        ("post_pre_ws", "tl::__sync_thread_partial(1, 384);", "wait for ever"),
        # The upper of two bf16 keeps the bits of the lower one.
        ("post_pre_ws", "& 0xFFFF0000u", "next_"),
        # Terms are written before the product of those ahead has read them (a barrier of TileLang's own).
        ("post_pre_ws", "tl::__sync_thread_partial(3, 128);", "next_comb_mix"),
    ],
)
def test_what_is_missing_from_a_kernel_is_found(
    kernel: str, fault: str, said: str, on_host: Callable[[Variant], OnHost], tmp_path: Path, seed: int
) -> None:
    seam, problem = SEAMS["post_pre_delayed"], Problem(HIDDEN)
    arm, config = seam.arm("cuda", "fused_ws"), {**WS, "cache": 0, "collapse": 0, "mix_lanes": 32}
    kernels = [
        OnHost(v, tmp_path, without(fault)) if v.kernel == kernel else on_host(v)
        for v in arm.variants(problem, config)
    ]
    inputs = seam.inputs(problem, 3, seed, "cpu")
    found: set[str] = set()
    for backwards in (False, True):
        buffers = OutputBuffers(arm.plan(problem, config, 3), "cpu")
        buffers.poison()
        views = buffers.bind(3)
        try:
            arm.bind(problem, config, [partial(k, backwards=backwards) for k in kernels])(inputs, views)
        except RuntimeError as error:
            found.add(str(error))
        else:
            found |= {d.output for d in seam.check(problem, inputs, views) if not d.ok}
    assert any(said in each for each in found), found
