"""The seam `topk_merge` on one device: packing, merging and converting against the reference, to the bit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cover import pairwise

from mhctune.autotuner.bench import HostBench
from mhctune.autotuner.records import Cell, Footprint
from mhctune.kernels import topk_reference as reference
from mhctune.kernels.buffers import Role, poison, total_bytes, unwritten
from mhctune.kernels.c.topk_arms import ARMS
from mhctune.kernels.compiler import Compiler
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Arm, Problem
from mhctune.kernels.space import Candidate
from mhctune.kernels.topk_draw import REGIMES, draw_all

Run = Callable[..., dict[str, torch.Tensor]]
SEAM = SEAMS["topk_merge"]
ROWS = (0, 1, 2, 4, 7, 64)
GRID = pairwise(((512, 1024, 2048), (1, 2, 4, 8), (1, 16, 64), ROWS, tuple(REGIMES), ARMS))


def problem_of(top_k: int, ranks: int = 1, interleave: int = 1) -> Problem:
    return SEAM.canonical(Problem(1, top_k=top_k, ranks=ranks, interleave=interleave))


def config_of(arm: Arm, problem: Problem, index: int) -> dict[str, int]:
    """A legal config; another one for another index."""
    legal = arm.space(problem).candidates()
    return legal[index % len(legal)].config


def bits(score: float) -> int:
    return int(torch.tensor([score]).view(torch.int32))


def sent(rows: list[list[tuple[int, float]]]) -> torch.Tensor:
    """What all ranks send for one token: a list of (global id, score) a rank."""
    ids = torch.tensor([[entry[0] for entry in rank] for rank in rows], dtype=torch.int32)
    scores = torch.tensor([[entry[1] for entry in rank] for rank in rows])
    return torch.stack([ids, scores.view(torch.int32)], 1)[:, None].contiguous()


@pytest.mark.parametrize(("index", "row"), tuple(enumerate(GRID)), ids=[str(i) for i in range(len(GRID))])
def test_every_arm_matches_the_reference_to_the_bit(
    index: int, row: tuple[Any, ...], run_arm: Run, seed: int
) -> None:
    top_k, ranks, interleave, rows, regime, arm = row
    problem = problem_of(top_k, ranks, interleave)
    inputs = SEAM.inputs(problem, rows, seed, "cpu", regime)
    buffers = run_arm(arm, problem, config_of(arm, problem, index), inputs)
    found = SEAM.check(problem, inputs, {name: buffers[name] for name in ("packed", "ids")})
    assert [d.output for d in found] == ["packed", "ids"]
    assert all(d.ok for d in found), "; ".join(str(d) for d in found if not d.ok)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_config_gives_the_same_bits(arm: Arm, run_arm: Run, seed: int) -> None:
    """Also where the network's runs do not fill up: three ranks."""
    for ranks in (3, 8):
        problem = problem_of(64, ranks, 4)
        inputs = SEAM.inputs(problem, 3, seed, "cpu", "odd")
        for candidate in arm.space(problem).legal():
            buffers = run_arm(arm, problem, candidate.config, inputs)
            assert torch.equal(buffers["ids"], reference.merge(inputs["gathered"])), str(candidate)


@pytest.mark.parametrize("regime", REGIMES)
def test_the_reference_is_a_sort_by_score_and_id(regime: str, seed: int) -> None:
    problem = problem_of(24, 5, 3)
    gathered = draw_all(problem, 4, seed, regime)
    for row in range(4):
        ids = gathered[:, row, 0].flatten().tolist()
        scores = gathered[:, row, 1].contiguous().view(torch.float32).flatten().tolist()
        held = [(-s, i) for i, s in zip(ids, scores, strict=True) if i >= 0 and s == s and s != -math.inf]
        expected = [i for _, i in sorted(held)][:24]
        assert reference.merge(gathered)[row].tolist() == expected + [-1] * (24 - len(expected))


def test_ids_are_the_interleaved_ones_and_every_entry_has_one() -> None:
    problem = problem_of(8, 4, 16)
    local = torch.arange(64).view(8, 8).int()
    ids = torch.stack([reference.global_ids(local, rank, problem) for rank in range(4)])
    assert sorted(ids.flatten().tolist()) == list(range(256))
    owners = [(i // 16) % 4 for i in ids.flatten().tolist()]
    assert owners == [rank for rank in range(4) for _ in range(64)]
    back = [i // 64 * 16 + i % 16 for i in ids.flatten().tolist()]
    assert back == local.flatten().tolist() * 4


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([[(5, 1.0), (9, 1.0)], [(3, 1.0), (7, 1.0)]], [3, 5]),  # ties: the lower id
        ([[(5, 0.0), (9, -0.0)], [(3, -0.0), (7, 0.0)]], [3, 5]),  # both zeros are one score
        ([[(5, math.nan), (9, 1.0)], [(3, -math.nan), (7, -math.inf)]], [9, -1]),
        ([[(-1, 9.0), (-7, 8.0)], [(3, -3.4e38), (7, -math.inf)]], [3, -1]),  # a negative id is never found
        ([[(5, math.inf), (9, 1e-45)], [(3, -1e-45), (7, math.inf)]], [5, 7]),
        ([[(2**24, 1.0), (2**24 + 2, 1.0)], [(2**24 + 1, 1.0), (2**24 + 3, 1.0)]], [2**24, 2**24 + 1]),
        ([[(2**31 - 1, 2.0), (0, 1.0)], [(2**31 - 2, 2.0), (1, 1.0)]], [2**31 - 2, 2**31 - 1]),
        ([[(0, -1.0), (1, -2.0)], [(2, -0.5), (3, -3.0)]], [2, 0]),  # bits of negative floats run backwards
    ],
    ids=["ties", "zeros", "nan", "negative id", "infinity", "beyond 2^24", "largest id", "negative"],
)
def test_what_decides_between_entries(
    arm: Arm, entries: list[list[tuple[int, float]]], expected: list[int], run_arm: Run
) -> None:
    problem, gathered = problem_of(2, 2), sent(entries)
    inputs = {"local_ids": gathered[0, :, 0], "scores": gathered[0, :, 1], "gathered": gathered}
    inputs = {name: tensor.contiguous() for name, tensor in inputs.items()}
    assert reference.merge(gathered).tolist() == [expected]
    for candidate in arm.space(problem).legal():
        assert run_arm(arm, problem, candidate.config, inputs)["ids"].tolist() == [expected], str(candidate)


def merged_with_float_ids(gathered: torch.Tensor) -> torch.Tensor:
    """The planted implementation: ids travel as float32."""
    rounded = gathered.clone()
    rounded[:, :, 0] = gathered[:, :, 0].float().int()
    return reference.merge(rounded)


def test_ids_as_float32_fail_at_2_to_the_24_plus_1_and_not_before() -> None:
    problem = problem_of(2, 2)
    outputs: dict[str, torch.Tensor] = {}
    for first, right in ((2**24 - 4, True), (2**24, False)):
        gathered = sent([[(first, 2.0), (first + 2, 1.0)], [(first + 1, 2.0), (first + 3, 1.0)]])
        outputs = {"packed": torch.zeros(1, 2, 2).int(), "ids": merged_with_float_ids(gathered)}
        inputs = {"local_ids": torch.zeros(1, 2).int(), "scores": torch.zeros(1, 2), "gathered": gathered}
        (_, ids) = SEAM.check(problem, inputs, outputs)
        assert ids.ok == right, first
    assert outputs["ids"].tolist() == [[2**24, 2**24]]
    assert reference.merge(gathered).tolist() == [[2**24, 2**24 + 1]]


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_rank_packs_and_converts_its_own_ids(arm: Arm, compiler: Compiler, seed: int) -> None:
    problem = problem_of(512, 8, 16)
    config = dict(arm.preferred)
    launch = arm.bind(problem, config, [compiler.get(v).run for v in arm.variants(problem, config)])
    for rank in range(8):
        ids, scores = (SEAM.inputs(problem, 3, seed + rank, "cpu")[name] for name in ("local_ids", "scores"))
        ids[0, :100] = -1
        packed = torch.empty(3, 2, 512, dtype=torch.int32)
        launch.pack(ids, scores, packed, rank)  # type: ignore[attr-defined]
        assert torch.equal(packed, reference.pack(ids, scores, rank, problem))
        launch.convert(ids, ids, rank)  # type: ignore[attr-defined]
        assert torch.equal(ids, packed[:, 0])


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_row_does_not_depend_on_its_batch(arm: Arm, run_arm: Run, seed: int) -> None:
    problem = problem_of(512, 4, 16)
    inputs = SEAM.inputs(problem, 9, seed, "cpu", "ties")
    batch = run_arm(arm, problem, dict(arm.preferred), inputs)["ids"]
    for token in (0, 8):
        row = {name: t[token : token + 1] for name, t in inputs.items() if name != "gathered"}
        row["gathered"] = inputs["gathered"][:, token : token + 1].contiguous()
        assert torch.equal(run_arm(arm, problem, dict(arm.preferred), row)["ids"][0], batch[token])


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_the_bench_of_a_sweep_checks_and_times_every_arm(arm: Arm, compiler: Compiler, seed: int) -> None:
    bench, problem = HostBench(SEAM, compiler), problem_of(512, 8, 16)
    cell = Cell(SEAM.name, problem, 3)
    assert bench.enter(cell, seed) == bench.input_bytes(cell)
    candidate = Candidate.of(arm.name, arm.preferred)
    prepared = bench.prepare(candidate)
    assert isinstance(prepared, Footprint), prepared
    assert prepared.measured_bytes == total_bytes(arm.plan(problem, arm.preferred, 3))
    latency = bench.sample(candidate, 0, 0, 2)
    assert isinstance(latency, float)
    assert latency > 0


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_element_of_every_buffer_is_written_by_one_program(arm: Arm) -> None:
    problem, chance = problem_of(512, 3, 4), random.Random(1)
    for candidate in chance.sample(arm.space(problem).candidates(), 2):
        specs = arm.plan(problem, candidate.config, 2)
        counts = {spec.name: torch.zeros(spec.shape, dtype=torch.int32) for spec in specs}
        for region in arm.writes(problem, candidate.config, 2):
            counts[region.buffer][tuple(slice(*each) for each in region.ranges)] += 1
        assert all((count == 1).all() for count in counts.values()), str(candidate)


def test_poison_is_no_id_and_what_is_left_over_is_counted() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int32)
    poison(ids)
    assert unwritten(ids) == 6
    assert int(ids.max()) < -1
    ids[0] = -1
    assert unwritten(ids) == 3
    keys = torch.zeros(4, dtype=torch.int64)
    poison(keys)
    assert unwritten(keys) == 4


def test_a_problem_is_k_ranks_and_interleave_alone() -> None:
    assert SEAM.canonical(Problem(5120, aux=True)) == problem_of(2048)
    assert SEAM.label(problem_of(1024, 8, 64)) == "top 1024 of 8 ranks, interleave 64"
    digests = {problem_of(*each).digest for each in ((512, 1, 1), (512, 2, 1), (512, 1, 2), (1024, 1, 1))}
    assert len(digests) == 4
    for field, value in (("top_k", -1), ("ranks", 0), ("interleave", 0)):
        with pytest.raises(ValueError, match=f"{field} {value} must be at least"):
            replace(problem_of(512), **{field: value})  # type: ignore[arg-type]


def test_networks_are_of_powers_of_two_and_radix_takes_any_k() -> None:
    radix, bitonic = ARMS
    assert not radix.space(problem_of(1000, 3)).refusals(radix.preferred)
    assert bitonic.space(problem_of(1000, 3)).refusals(bitonic.preferred) == ("K 1000 is no power of two",)
    two = problem_of(1024, 2)
    assert bitonic.space(two).refusals({"run_k": 2}) == ()
    assert "no more than the 2 ranks' entries" in bitonic.space(two).refusals({"run_k": 4})[0]


def test_scratch_is_the_callers() -> None:
    for arm in ARMS:
        specs = arm.plan(problem_of(512, 8), arm.preferred, 4)
        assert [s.name for s in specs if s.role is Role.OUTPUT] == ["packed", "ids"]
        assert all(s.shape[0] == 4 for s in specs if s.role is Role.SCRATCH)
        assert arm.numerics(arm.preferred) == "exact/1"
