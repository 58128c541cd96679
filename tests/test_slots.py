"""Slots of a cold protocol: together more than twice the cache, whole rounds of them in a graph."""

from __future__ import annotations

import pytest

from mhctune.autotuner.bench import tensor_bytes
from mhctune.autotuner.slots import cold_slots, unroll
from mhctune.kernels.buffers import total_bytes
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Problem

SEAM, PROBLEM = find_seam("post_pre_delayed"), Problem(5120)
H200_L2 = 60 * 2**20


@pytest.mark.parametrize("tokens", [1, 2, 7, 128, 1000, 4096])
def test_the_slots_outgrow_twice_the_cache_and_none_is_too_many(tokens: int) -> None:
    slot = tensor_bytes(SEAM, PROBLEM, tokens) + total_bytes(SEAM.outputs(PROBLEM, tokens))
    slots = cold_slots(SEAM, PROBLEM, tokens, H200_L2)
    assert slots * slot > 2 * H200_L2 >= (slots - 1) * slot


def test_the_bytes_of_a_set_are_those_of_its_tensors() -> None:
    for tokens in (1, 3, 50):
        tensors = SEAM.inputs(PROBLEM, tokens, 0, "cpu").values()
        assert tensor_bytes(SEAM, PROBLEM, tokens) == sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize(("slots", "launches"), [(1, 20), (2, 20), (7, 21), (20, 20), (21, 21), (60, 60)])
def test_a_graph_takes_every_slot_equally_often(slots: int, launches: int) -> None:
    assert unroll(slots) == launches


@pytest.mark.parametrize("l2_bytes", [0, -1])
def test_a_cache_of_unknown_size_is_refused(l2_bytes: int) -> None:
    with pytest.raises(
        ValueError, match=f"the L2 cache has {l2_bytes} bytes; a cold protocol needs its size"
    ):
        cold_slots(SEAM, PROBLEM, 1, l2_bytes)
