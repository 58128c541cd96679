"""Three sets of inputs: the live one lies elsewhere at every placement, and whoever stays is understood."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from mhctune.autotuner.bench import SPARE_SETS, input_bytes, tensor_bytes
from mhctune.autotuner.inputs import MOST_PLACES, SLACK_BYTES, InputSets, offset_of
from mhctune.autotuner.protocol import Protocol
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Problem

PROBLEM = Problem(256)
CPU = torch.device("cpu")
Values = Mapping[str, torch.Tensor]


def draw(seed: int) -> dict[str, torch.Tensor]:
    """Long enough that neighbouring places overlap: two floats and bytes that no two seeds share."""
    values = torch.arange(30_000) + 1_000_000 * seed
    return {"x": values.to(torch.float64).view(100, 300), "ids": values.to(torch.int32)}


def sets_of(slots: int = 1) -> InputSets:
    return InputSets(draw, (1, 2), CPU, slots)


def same(found: Values, expected: Values) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected)


def test_after_so_many_moves_the_live_inputs_lay_at_as_many_addresses() -> None:
    sets, seen, held = sets_of(), [], sets_of().bytes
    for placement in range(MOST_PLACES + 1):
        if placement:
            sets.turn(placement)
        seen.append(tuple(tensor.data_ptr() for tensor in sets.live[0].values()))
        assert sets.bytes == held
        assert same(sets.live[0], draw(2 if placement else 1))
        assert all(tensor.is_contiguous() for tensor in sets.live[0].values())
    for name in range(2):
        assert len({addresses[name] for addresses in seen}) == MOST_PLACES + 1
        bases = {addresses[name] - offset_of(at) for at, addresses in enumerate(seen)}
        assert len(bases) == 3  # in three storages, each time farther in
    sets.turn(MOST_PLACES + 5)  # beyond them it begins again, and stays within its storage
    assert same(sets.live[0], draw(2))


def test_a_race_has_fewer_placements_than_there_are_places() -> None:
    protocol = Protocol.of("cuda", 15)
    assert protocol.placements + protocol.further <= MOST_PLACES


def test_both_values_can_be_shown_wherever_the_sets_lie() -> None:
    sets = sets_of()
    for placement in range(1, 8):
        sets.turn(placement)
        for index in (0, 1):
            sets.change(index)
            assert same(sets.live[0], draw(1 + index))


@pytest.mark.parametrize("stays", range(1, 8))
@pytest.mark.parametrize("first", [0, 1, 2, 5])
def test_whoever_stayed_for_any_number_of_moves_is_compared_on_equal_values(first: int, stays: int) -> None:
    """From the fourth on its place in a storage overlaps with where that set lies by then."""
    sets = sets_of()
    for placement in range(1, first + 1):
        sets.turn(placement)
    old = sets.live[0]
    for placement in range(first + 1, first + stays + 1):
        sets.turn(placement)
        assert same(sets.live[0], draw(2))
    for _ in range(2):
        with sets.showing(old) as restore:
            read = {name: tensor.clone() for name, tensor in old.items()}
            restore()
            assert same(sets.live[0], read)
        assert any(same(read, draw(seed)) for seed in (1, 2))
        assert same(sets.live[0], draw(2))
        for index in (0, 1):  # and each set has its own values again
            sets.change(index)
            assert same(sets.live[0], draw(1 + index))
        sets.change(1)


def test_who_was_prepared_beside_moved_ones_is_compared_though_another_failed_its_check() -> None:
    sets = sets_of()
    sets.turn(1)
    old = sets.live[0]
    sets.change(0)  # a check that failed leaves the first values live
    with sets.showing(old) as restore:
        restore()
        assert same(old, draw(2))


def test_timed_cold_the_first_slot_moves_and_the_others_stay() -> None:
    sets = sets_of(slots=3)
    before = [[t.data_ptr() for t in live.values()] for live in sets.live]
    sets.turn(1)
    after = [[t.data_ptr() for t in live.values()] for live in sets.live]
    assert [a == b for a, b in zip(after, before, strict=True)] == [False, True, True]
    assert all(same(live, draw(2)) for live in sets.live)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("name", sorted(SEAMS))
def test_the_bytes_of_all_sets_are_those_that_are_forecast(name: str, slots: int) -> None:
    seam = SEAMS[name]
    problem = seam.canonical(PROBLEM)
    for tokens in (1, 3):

        def drawn(seed: int, tokens: int = tokens) -> dict[str, torch.Tensor]:
            return seam.inputs(problem, tokens, seed, "cpu")

        sets = InputSets(drawn, (1, 2), CPU, slots)
        assert sets.bytes == input_bytes(seam, problem, tokens, "cuda", slots)
        slack = sets.bytes - (slots + SPARE_SETS["cuda"]) * tensor_bytes(seam, problem, tokens)
        assert slack == 3 * SLACK_BYTES * len(sets.live[0])
        assert input_bytes(seam, problem, tokens, "c") == tensor_bytes(seam, problem, tokens)
