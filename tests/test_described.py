"""What ships as described: its epilogue computes the seam, and who is no reproduction is told."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cuda_on_host import OnHost  # type: ignore[import-not-found]

from mhctune.configs.loader import load_sweep
from mhctune.kernels import reference
from mhctune.kernels.buffers import OutputBuffers
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Problem, Tensors, Variant

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SEAM = find_seam("post_pre_delayed")
TOKENS = 2


@pytest.fixture(scope="module")
def made() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("described")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("on_host")


def partials(inputs: Tensors, views: dict[str, torch.Tensor]) -> None:
    """Write what the kernels ahead of the epilogue write: streams, and sums split by split."""
    old = inputs["residual"], inputs["x"], inputs["post_mix"], inputs["comb_mix"]
    views["residual_out"].copy_(reference.post(*old))
    splits, streams = views["mul"].shape[0], views["residual_out"].double()
    for at, (part, weights) in enumerate(
        zip(streams.chunk(splits, 2), inputs["fn"].double().chunk(splits, 2), strict=True)
    ):
        views["mul"][at] = torch.einsum("tjh,njh->tn", part, weights)
        views["sqrsum"][at] = part.square().sum((1, 2))


def ran(
    made: ModuleType, problem: Problem, way: int, folder: Path, seed: int
) -> tuple[Tensors, list[dict[str, torch.Tensor]]]:
    """Return the inputs and what a reproduction with the described epilogue left, in order and backwards."""
    reproduction = made.reproductions(SEAM, problem, 132, TOKENS)[way]
    kernel = OnHost(reproduction.epilogue, folder, factory=lambda _: made.described_epilogue)
    inputs, found = SEAM.inputs(problem, TOKENS, seed, "cpu"), []
    candidate = reproduction.candidate
    for backwards in (False, True):
        buffers = OutputBuffers(
            SEAM.arm("cuda", candidate.arm).plan(problem, candidate.config, TOKENS), "cpu"
        )
        buffers.poison()
        views = buffers.bind(TOKENS)
        first = [lambda *_, views=views: partials(inputs, views)]
        kernels = [*first, partial(kernel, backwards=backwards)]
        made.bind(SEAM, problem, reproduction, kernels)(inputs, views)
        found.append(views)
    return inputs, found


@pytest.mark.parametrize(
    ("problem", "way"),
    [(Problem(4096, sinkhorn_iters=7), 0), (Problem(1024, carried=False), 1)],
    ids=["a matrix a lane", "an element a lane"],
)
def test_the_described_epilogue_computes_the_seam(
    made: ModuleType, problem: Problem, way: int, folder: Path, seed: int
) -> None:
    """Four blocks of H through two stages, and one; whichever thread comes first."""
    inputs, (one, other) = ran(made, problem, way, folder, seed)
    reproduction = made.reproductions(SEAM, problem, 132, TOKENS)[way]
    assert dict(reproduction.epilogue.params)["lanes"] == made.LANES[way]
    made.check(SEAM, problem, reproduction, inputs, one)
    assert all(one[name].equal(other[name]) for name in one)
    one["next_comb_mix"][1, 2, 3] += 1e-3
    with pytest.raises(
        RuntimeError, match=r"fused\(.*\) \+ described_epilogue\(.*\) at 2 tokens is no reprod.*comb"
    ):
        made.check(SEAM, problem, reproduction, inputs, one)


def test_each_way_to_launch_what_ships_is_tried_once(made: ModuleType) -> None:
    """The splits are the rule's, no epilogue of ours is left, and what is open is the only difference."""
    for hidden, counts in (
        (4096, {1: 4, 64: 4}),
        (5120, {1: 2, 32: 2, 64: 4, 4096: 4}),
        (7168, {1: 2, 64: 4}),
    ):
        for count, ways in counts.items():
            found = made.reproductions(SEAM, Problem(hidden), 132, count)
            assert len({each.variants for each in found}) == len(found) == ways
            for each in found:
                *first, epilogue = each.variants
                assert [v.kernel for v in first] == (
                    ["post_pre"] if count <= 32 else ["post", first[-1].kernel]
                )
                splits = 8 if count <= 32 else 16 if count <= 1024 else 4
                assert dict(epilogue.params)["n_splits"] == splits
                assert dict(first[-1].params)["n_splits"] == splits
                assert "epilogue_thr" not in str(each)
    for problem in (Problem(5120, norm=False), Problem(5120, delayed=False)):
        with pytest.raises(ValueError, match="the described epilogue is delayed and has a norm"):
            made.reproductions(SEAM, problem, 132, 1)


class Compiled:
    """Stands in for a compiler: its kernels do nothing."""

    def get(self, variant: Variant) -> Compiled:
        return self

    def run(self, *arguments: Any) -> None:
        pass


class Graph:
    """Stands in for a graph: the one made first takes longest."""

    made = 0

    def __init__(self, run: Callable[[], None], launches: int) -> None:
        run()
        Graph.made += 1
        self._us = 100.0 * launches / Graph.made

    def time_us(self, replays: int) -> float:
        return self._us * replays + 7.0

    def close(self) -> None:
        pass


def test_the_fastest_of_what_is_open_counts_and_none_that_computes_something_else(
    made: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = made.Asked(SEAM.name, Problem(1024), (1, 64), 132, 3)
    with pytest.raises(RuntimeError, match=r"at 1 tokens is no .*residual_out: 4096 elements not written"):
        made.described_us(asked, Compiled(), lambda replays: 7.0, "cpu")
    monkeypatch.setattr(made, "check", lambda *_: None)
    monkeypatch.setattr(made, "CapturedGraph", Graph)
    taken, who = made.described_us(asked, Compiled(), lambda replays: 7.0, "cpu")
    ways = {count: list(map(str, made.reproductions(SEAM, asked.problem, 132, count))) for count in (1, 64)}
    assert who == {count: found[-1] for count, found in ways.items()}
    assert taken == pytest.approx({1: 100 / len(ways[1]), 64: 100 / (len(ways[1]) + len(ways[64]))})


def test_what_takes_long_is_timed_in_fewer_rounds(made: ModuleType) -> None:
    assert made.pace(160.0) == (10, 31)  # 8 us a launch, as they are unrolled
    assert made.pace(1000.0) == (3, 31)
    assert made.pace(5600.0) == (1, 17)
    assert made.pace(1e6) == (1, 9)


def test_all_token_counts_of_the_sweep_have_a_way_at_each_hidden_size(made: ModuleType) -> None:
    for hidden in (4096, 5120, 7168):
        for count in load_sweep(BENCHMARKS / "hopper.toml").token_counts:
            assert made.reproductions(SEAM, Problem(hidden), 132, count)
