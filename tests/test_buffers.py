"""Output-buffer sets: the same storage for every use, and a poison that nothing computes."""

from __future__ import annotations

import pytest
import torch

from mhctune.kernels.buffers import (
    POISON,
    BufferSpec,
    OutputBuffers,
    Role,
    poison,
    stray_nans,
    torch_dtype,
    total_bytes,
    unwritten,
)
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Problem

SPECS = (
    BufferSpec("streams", (8, 4, 32), "bfloat16"),
    BufferSpec("mixes", (8, 4), "float32"),
    BufferSpec("partial", (3, 8, 24), "float32", 1, Role.SCRATCH),
)
DTYPES = ("bfloat16", "float32")
# Neighbours of the poison, and the NaN that arithmetic produces, by integer bits.
OTHER_NANS = {
    "bfloat16": (0x7FC0, 0xFFC0, 0xFFA4, 0xFFA6, 0x7FA5),
    "float32": (0x7FC00000, 0xFFA5A5A4, 0x7FA5A5A5),
}


def integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def signed(bits: int, dtype: str) -> int:
    width = 16 if dtype == "bfloat16" else 32
    return bits - (1 << width) if bits >> (width - 1) else bits


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_poison_is_a_nan_with_its_documented_payload(dtype: str) -> None:
    tensor = torch.zeros(5, dtype=torch_dtype(dtype))
    poison(tensor)
    assert tensor.isnan().all()
    assert set(integers(tensor).tolist()) == {signed(POISON[dtype], dtype)}
    assert unwritten(tensor) == 5
    assert (POISON["bfloat16"], POISON["float32"]) == (0xFFA5, 0xFFA5A5A5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_written_is_no_longer_counted(dtype: str) -> None:
    tensor = torch.zeros(3, 4, dtype=torch_dtype(dtype))
    poison(tensor)
    tensor[1, 2] = 0.0
    tensor[0, 0] = torch.inf
    assert unwritten(tensor) == 10
    assert stray_nans({"t": tensor}) == {}


@pytest.mark.parametrize(("dtype", "bits"), [(d, b) for d, several in OTHER_NANS.items() for b in several])
def test_another_nan_is_not_poison(dtype: str, bits: int) -> None:
    tensor = torch.zeros(4, dtype=torch_dtype(dtype))
    poison(tensor)
    integers(tensor)[2] = signed(bits, dtype)
    assert tensor.isnan().all()
    assert unwritten(tensor) == 3
    assert stray_nans({"written": torch.zeros(2), "mixed": tensor}) == {"mixed": 1}


def test_arithmetic_on_the_poison_leaves_another_nan() -> None:
    for dtype in DTYPES:
        tensor = torch.zeros(4, dtype=torch_dtype(dtype))
        poison(tensor)
        assert unwritten(tensor + 1) == 0


def test_an_empty_tensor_has_nothing_unwritten() -> None:
    assert unwritten(torch.zeros(0)) == 0
    assert stray_nans({"empty": torch.zeros(0)}) == {}


def test_poison_fills_every_slot() -> None:
    buffers = OutputBuffers(SPECS, "cpu", slots=3)
    buffers.poison()
    for slot in range(3):
        assert {n: unwritten(t) for n, t in buffers.bind(8, slot).items()} == {
            spec.name: spec.numel for spec in SPECS
        }


def test_bytes_are_the_sum_over_specs_and_slots() -> None:
    per_slot = 8 * 4 * 32 * 2 + 8 * 4 * 4 + 3 * 8 * 24 * 4
    assert total_bytes(SPECS) == per_slot
    assert total_bytes(SPECS, Role.SCRATCH) == 3 * 8 * 24 * 4
    assert total_bytes(SPECS, Role.OUTPUT) == per_slot - 3 * 8 * 24 * 4
    for slots in (1, 2, 5):
        buffers = OutputBuffers(SPECS, "cpu", slots)
        assert buffers.slots == slots
        assert buffers.bytes == slots * per_slot
        storages = [t.untyped_storage().nbytes() for s in range(slots) for t in buffers.bind(8, s).values()]
        assert sum(storages) == buffers.bytes


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 7, 8])
def test_bind_returns_contiguous_views_of_the_token_count(num_tokens: int) -> None:
    views = OutputBuffers(SPECS, "cpu").bind(num_tokens)
    assert {name: tuple(view.shape) for name, view in views.items()} == {
        "streams": (num_tokens, 4, 32),
        "mixes": (num_tokens, 4),
        "partial": (3, num_tokens, 24),
    }
    assert all(view.is_contiguous() for view in views.values())
    assert [str(view.dtype) for view in views.values()] == [
        "torch.bfloat16",
        "torch.float32",
        "torch.float32",
    ]


def test_bind_allocates_nothing_and_pointers_stay() -> None:
    buffers = OutputBuffers(SPECS, "cpu", slots=2)
    before = buffers.pointers()
    bound = [
        tuple(view.data_ptr() for slot in range(2) for view in buffers.bind(tokens, slot).values())
        for tokens in (8, 1, 8, 5)
    ]
    assert set(bound) == {before}
    assert buffers.pointers() == before
    assert len(set(before)) == 2 * len(SPECS)


def test_slots_do_not_share_storage() -> None:
    buffers = OutputBuffers(SPECS, "cpu", slots=2)
    buffers.poison()
    for view in buffers.bind(8, 1).values():
        view.zero_()
    assert all(unwritten(view) == view.numel() for view in buffers.bind(8, 0).values())
    assert all(unwritten(view) == 0 for view in buffers.bind(8, 1).values())


def test_more_tokens_than_planned_are_refused() -> None:
    with pytest.raises(RuntimeError):
        OutputBuffers(SPECS, "cpu").bind(9)


def test_the_outputs_of_4096_tokens_at_hidden_4096_take_168_million_bytes() -> None:
    """The number of the report that seeded this project: an output set of one seam."""
    specs = {spec.name: spec for spec in find_seam("post_pre_delayed").outputs(Problem(4096), 4096)}
    named = ("residual_out", "layer_input", "next_post_mix", "next_comb_mix")
    assert sum(specs[name].bytes for name in named) == 168_099_840
    assert specs["residual_out"].bytes == 134_217_728
    assert total_bytes(tuple(specs.values())) == 168_099_840 + 4096 * 4 * 4


def test_an_offset_moves_every_storage_and_changes_nothing_else() -> None:
    specs = [BufferSpec("a", (3, 4), "bfloat16"), BufferSpec("b", (3,), "float32")]
    plain, moved = OutputBuffers(specs, "cpu"), OutputBuffers(specs, "cpu", offset_bytes=512)
    moved.poison()
    assert plain.bytes == moved.bytes
    assert {name: view.shape for name, view in plain.bind(2).items()} == {
        name: view.shape for name, view in moved.bind(2).items()
    }
    assert [t.storage_offset() * t.element_size() for t in moved.storages()] == [512, 512]
    assert all(unwritten(view) == view.numel() for view in moved.bind(3).values())
    for wrong in (-256, 100):
        with pytest.raises(ValueError, match=f"offset_bytes is {wrong}; it must be a multiple of 256"):
            OutputBuffers(specs, "cpu", offset_bytes=wrong)
