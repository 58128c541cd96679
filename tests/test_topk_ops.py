"""The torch ops of `topk_merge`: both forms, what they allocate and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mhctune.kernels import serving, topk_ops
from mhctune.kernels import topk_reference as reference
from mhctune.kernels.buffers import poison, unwritten
from mhctune.kernels.compiler import quiet
from mhctune.kernels.dispatch import Band, Choice, DispatchTable, Fingerprint
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Problem
from mhctune.kernels.topk_draw import draw_rank

SEAM = SEAMS["topk_merge"]
PROBLEM = SEAM.canonical(Problem(1, top_k=64, ranks=3, interleave=4))
HERE = Fingerprint("test", 1, 1, "", "", "", "", "", "", "", "", 1, "")


@pytest.fixture(scope="module")
def table() -> str:
    """Both arms, so that scratch differs by band."""
    quiet()
    radix, bitonic = (Choice.of(arm.name, arm.preferred) for arm in SEAM.arms("c"))
    bands = (Band(1, 2, radix), Band(3, 64, bitonic))
    return serving.serve(DispatchTable(SEAM.name, PROBLEM.to_dict(), "c", "exact/1", HERE, bands, bitonic))


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_pack_gather_merge_is_the_references(rows: int, served: bool, table: str, seed: int) -> None:
    digest, sent = table if served else "", []
    for rank in range(3):
        ids, scores = draw_rank(PROBLEM, rows, seed, "odd", rank)
        packed = torch.empty(rows, 2, 64, dtype=torch.int32)
        poison(packed)
        topk_ops.topk_pack_out(ids, scores, packed, rank, 3, 4, digest)
        assert torch.equal(packed, reference.pack(ids, scores, rank, PROBLEM))
        assert torch.equal(topk_ops.topk_pack(ids, scores, rank, 3, 4, digest), packed)
        sent.append(packed)
    gathered = torch.stack(sent)
    found = torch.empty(rows, 64, dtype=torch.int32)
    poison(found)
    words = topk_ops.scratch_words(digest, PROBLEM, "c", max(rows, 1))
    scratch = torch.full((words + 1,), -7)
    topk_ops.topk_merge_out(gathered, found, scratch, 4, digest)
    assert torch.equal(found, reference.merge(gathered))
    assert unwritten(found) == 0
    assert int(scratch[-1]) == -7
    assert torch.equal(topk_ops.topk_merge(gathered, 4, digest), found)


@pytest.mark.parametrize("rows", [0, 3])
def test_torch_checks_both_forms(rows: int, seed: int) -> None:
    inputs = SEAM.inputs(PROBLEM, rows, seed, "cpu")
    given = inputs["local_ids"], inputs["scores"]
    packed, ids = torch.zeros(rows, 2, 64).int(), torch.zeros(rows, 64).int()
    scratch = torch.zeros(topk_ops.scratch_words("", PROBLEM, "c", 3), dtype=torch.int64)
    torch.library.opcheck(topk_ops.topk_pack, (*given, 1, 3, 4))
    torch.library.opcheck(topk_ops.topk_pack_out, (*given, packed, 1, 3, 4))
    torch.library.opcheck(topk_ops.topk_merge, (inputs["gathered"], 4))
    torch.library.opcheck(topk_ops.topk_merge_out, (inputs["gathered"], ids, scratch, 4))


def test_what_would_be_misread_is_refused(seed: int) -> None:
    inputs = SEAM.inputs(PROBLEM, 3, seed, "cpu")
    ids, scores, gathered = inputs["local_ids"], inputs["scores"], inputs["gathered"]
    packed, found, few = torch.zeros(3, 2, 64).int(), torch.zeros(3, 64).int(), torch.zeros(9).long()
    pack: Any = topk_ops.topk_pack_out
    merge: Any = topk_ops.topk_merge_out
    wrong = (
        (lambda: pack(ids, scores.double(), packed, 0, 3, 4), "scores is torch.float64, expected"),
        (lambda: pack(ids, scores, packed, 3, 3, 4), "rank 3 is none of 3 ranks; ranks are 0 to 2"),
        (lambda: pack(ids[0], scores, packed, 0, 3, 4), r"local_ids has shape \(64,\), expected \[rows, K\]"),
        (lambda: merge(gathered, found, few, 4), "scratch has 9 elements, 3 rows need"),
        (lambda: merge(gathered, gathered[0, :, 0], few, 4), "ids has strides"),
        (lambda: merge(gathered[0], found, few, 4), r"gathered has shape \(3, 2, 64\), expected \[ranks"),
        (lambda: merge(gathered, found, few.float(), 4), "scratch is torch.float32, expected torch.int64"),
    )
    for call, said in wrong:
        with pytest.raises(ValueError, match=said):
            call()
