"""The torch ops of `topk_merge`: what lies before its all-gather and after it, two forms each.

`mhctune::topk_pack` makes what a rank sends, `mhctune::topk_merge` the ids of what all ranks sent; between
them the caller gathers. The `_out` forms write their arguments, allocate nothing and are what graphs capture.
`table` is the digest of a served table, or empty for the built-in choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mhctune.kernels import serving
from mhctune.kernels.argument import Expected, check, check_devices
from mhctune.kernels.registry import seam
from mhctune.kernels.seam import Problem
from mhctune.kernels.topk_arm import TopkArm, TopkLaunch
from mhctune.kernels.topk_group import SEAM

_TARGETS = {"cpu": "c", "cuda": "cuda"}


def scratch_words(table: str, problem: Problem, target: str, max_rows: int) -> int:
    """Return the int64 elements of scratch that `topk_merge_out` needs for up to `max_rows` rows.

    Raises:
        NotServed, TableError: as `serving.lookup`.
    """
    owner, problem = seam(SEAM), seam(SEAM).canonical(problem)
    words = [0]
    for choice in serving.choices(table, SEAM, problem, target):
        arm = owner.arm(target, choice.arm)
        assert isinstance(arm, TopkArm)
        words.append(arm.scratch_words(problem, dict(choice.config), max_rows))
    return max(words)


def _target(op: str, tensor: Tensor, name: str, axes: str) -> str:
    if tensor.dim() != axes.count(",") + 1:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {axes}")
    if tensor.device.type not in _TARGETS:
        raise ValueError(f"{op}: {name} is on {tensor.device}; this op runs on {' and '.join(_TARGETS)}")
    return _TARGETS[tensor.device.type]


def _expected(name: str, shape: tuple[int, ...], dtype: torch.dtype, written: bool = False) -> Expected:
    numel = torch.Size(shape).numel()
    return Expected(name, shape, dtype, numel * dtype.itemsize, written)


def _pack_out(
    local_ids: Tensor, scores: Tensor, packed: Tensor, rank: int, ranks: int, interleave: int, table: str = ""
) -> None:
    op = "mhctune::topk_pack_out"
    target = _target(op, local_ids, "local_ids", "[rows, K]")
    rows, top_k = local_ids.shape
    if not 0 <= rank < ranks:
        raise ValueError(f"{op}: rank {rank} is none of {ranks} ranks; ranks are 0 to {ranks - 1}")
    expected = (
        _expected("local_ids", (rows, top_k), torch.int32),
        _expected("scores", (rows, top_k), torch.float32),
        _expected("packed", (rows, 2, top_k), torch.int32, True),
    )
    check(op, expected, {"local_ids": local_ids, "scores": scores, "packed": packed}, "local_ids")
    if rows:
        problem = seam(SEAM).canonical(Problem(1, top_k=top_k, ranks=ranks, interleave=interleave))
        launch = serving.dispatch_canonical(table, SEAM, problem, target, rows).launch
        assert isinstance(launch, TopkLaunch)
        launch.pack(local_ids, scores, packed, rank)


def _pack(
    local_ids: Tensor, scores: Tensor, rank: int, ranks: int, interleave: int, table: str = ""
) -> Tensor:
    packed = _pack_fake(local_ids, scores, rank, ranks, interleave, table)
    _pack_out(local_ids, scores, packed, rank, ranks, interleave, table)
    return packed


def _pack_fake(
    local_ids: Tensor, scores: Tensor, rank: int, ranks: int, interleave: int, table: str = ""
) -> Tensor:
    check_devices("mhctune::topk_pack", ("local_ids", "scores"), (local_ids, scores))
    return local_ids.new_empty((local_ids.shape[0], 2, local_ids.shape[-1]))


def _merge_out(gathered: Tensor, ids: Tensor, scratch: Tensor, interleave: int, table: str = "") -> None:
    op = "mhctune::topk_merge_out"
    target = _target(op, gathered, "gathered", "[ranks, rows, 2, K]")
    ranks, rows, _, top_k = gathered.shape
    expected = (
        _expected("gathered", (ranks, rows, 2, top_k), torch.int32),
        _expected("ids", (rows, top_k), torch.int32, True),
        _expected("scratch", (scratch.numel(),), torch.int64, True),
    )
    check(op, expected, {"gathered": gathered, "ids": ids, "scratch": scratch}, "gathered")
    if not rows:
        return
    problem = seam(SEAM).canonical(Problem(1, top_k=top_k, ranks=ranks, interleave=interleave))
    found = serving.dispatch_canonical(table, SEAM, problem, target, rows)
    arm, launch, config = found.arm, found.launch, dict(found.answer.choice.config)
    assert isinstance(arm, TopkArm)
    assert isinstance(launch, TopkLaunch)
    needed = arm.scratch_words(problem, config, rows)
    if scratch.numel() < needed:
        raise ValueError(
            f"{op}: scratch has {scratch.numel()} elements, {rows} rows need {needed}; size it once with "
            "topk_ops.scratch_words(table, problem, target, max_rows)"
        )
    launch.merge(gathered, {"ids": ids, **arm.scratch_views(problem, config, rows, scratch)})


def _merge(gathered: Tensor, interleave: int, table: str = "") -> Tensor:
    op = "mhctune::topk_merge"
    target = _target(op, gathered, "gathered", "[ranks, rows, 2, K]")
    ranks, rows, _, top_k = gathered.shape
    problem = Problem(1, top_k=top_k, ranks=ranks, interleave=interleave)
    words = scratch_words(table, problem, target, rows) if rows else 0
    ids, scratch = _merge_fake(gathered, interleave, table), gathered.new_empty(words, dtype=torch.int64)
    _merge_out(gathered, ids, scratch, interleave, table)
    return ids


def _merge_fake(gathered: Tensor, interleave: int, table: str = "") -> Tensor:
    return gathered.new_empty((gathered.shape[1], gathered.shape[-1]))


def _pack_out_fake(local_ids: Tensor, scores: Tensor, packed: Tensor, *rest: Any) -> None:
    names = ("local_ids", "scores", "packed")
    check_devices("mhctune::topk_pack_out", names, (local_ids, scores, packed))


def _merge_out_fake(gathered: Tensor, ids: Tensor, scratch: Tensor, *rest: Any) -> None:
    check_devices("mhctune::topk_merge_out", ("gathered", "ids", "scratch"), (gathered, ids, scratch))


_library: Any = torch.library.Library("mhctune", "FRAGMENT")  # type: ignore[no-untyped-call]
_PACKED = "SymInt rank, SymInt ranks, SymInt interleave"
_TABLE = 'str table=""'


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register an op and return it; as the other seams' `_out` ops, without a wrapper for autograd."""
    _library.define(f"{name}{schema}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mhctune::{name}", fake, lib=_library)
    return getattr(torch.ops.mhctune, name).default


topk_pack = _define(
    "topk_pack", f"(Tensor local_ids, Tensor scores, {_PACKED}, {_TABLE}) -> Tensor", _pack, _pack_fake
)
topk_pack_out = _define(
    "topk_pack_out",
    f"(Tensor local_ids, Tensor scores, Tensor(a0!) packed, {_PACKED}, {_TABLE}) -> ()",
    _pack_out,
    _pack_out_fake,
)
topk_merge = _define(
    "topk_merge", f"(Tensor gathered, SymInt interleave, {_TABLE}) -> Tensor", _merge, _merge_fake
)
topk_merge_out = _define(
    "topk_merge_out",
    f"(Tensor gathered, Tensor(a0!) ids, Tensor(a1!) scratch, SymInt interleave, {_TABLE}) -> ()",
    _merge_out,
    _merge_out_fake,
)
