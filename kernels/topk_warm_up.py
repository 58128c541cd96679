"""Warming up the global top-k of a group: the real path, for representative row counts, once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mhctune.kernels import serving
from mhctune.kernels.group import Group, GroupError, ranks_text
from mhctune.kernels.topk_group import SEAM, Storages, TopkPlan

_FEW_ROWS = (1, 2, 4)
"""Decode batches; beside them the largest batch and the first row count of every band below it."""


class WarmUpFailed(RuntimeError):
    """A warm-up that failed somewhere: every rank raises it and it names the ranks; it may be tried again."""


class TopkWarmUp:
    """Warms up a process's plans and remembers which succeeded on every rank.

    Every call makes the same collective calls on every rank, whatever fails on one: it first compares what
    is to be warmed up and who has done so before, and goes to work if one rank has not.
    """

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._done: set[tuple[object, ...]] = set()

    def run(self, plan: TopkPlan, group: Group, storages: Storages, max_rows: int) -> tuple[int, ...]:
        """Run the merge for representative row counts up to `max_rows`; return them, or () if done before.

        Then the device, the group and the device again are waited for. `storages` hold `max_rows` rows.

        Raises:
            WarmUpFailed: a kernel failed on some rank; tried again by the next call.
            GroupError: ranks differ in what they warm up, or a rank did not join in time.
        """
        counts = row_counts(plan, max_rows)
        key = (plan, group.members, group.rank, str(group.device), max_rows, counts)
        shared = (plan.problem.digest, plan.target, plan.table, group.members, max_rows, counts)
        told = group.exchange((key in self._done, _number(shared)), "the start of the top-k warm-up")
        _require_equal([rank[1] for rank in told], max_rows, plan.table)
        if all(rank[0] for rank in told):
            return ()
        errors: list[Exception] = []
        ids = torch.arange(plan.problem.top_k, dtype=torch.int32, device=group.device)
        for rows in counts:
            local_ids = ids.expand(rows, -1).contiguous()
            scores = torch.zeros(rows, plan.problem.top_k, device=group.device)
            with _noting(errors):
                plan.pack(local_ids, scores, storages, group.rank)
            plan.gather(storages, rows, group)  # by every rank, whatever came of its own work
            with _noting(errors):
                plan.finish(storages, rows)
        with _noting(errors):
            group.settle()
        failed = [rank for rank, (bad,) in enumerate(group.exchange((bool(errors),), "its verdict")) if bad]
        if failed:
            own = f"; here: {type(errors[0]).__name__}: {errors[0]}" if errors else ""
            raise WarmUpFailed(
                f"rank {group.rank}: the top-k warm-up failed on {ranks_text(failed)}{own}; call it again "
                "once the cause is gone"
            ) from (errors[0] if errors else None)
        group.synchronize("the barrier after the top-k warm-up")
        self._done.add(key)
        return counts


def row_counts(plan: TopkPlan, max_rows: int) -> tuple[int, ...]:
    """Return the row counts that stand for all up to `max_rows`: every choice of the table among them.

    Raises:
        ValueError: `max_rows` is not positive.
    """
    if max_rows < 1:
        raise ValueError(f"max_rows {max_rows} is not positive; give the largest batch that is served")
    firsts = serving.first_counts(plan.table)
    return tuple(sorted({min(rows, max_rows) for rows in (*_FEW_ROWS, *firsts, max_rows)}))


@contextmanager
def _noting(errors: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # kernels run here: all ranks are told before this one raises
        errors.append(error)


def _number(value: object) -> int:
    """Return 63 bits of a hash that is the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big") >> 1


def _require_equal(numbers: list[int], max_rows: int, table: str) -> None:
    usual = max(set(numbers), key=lambda number: (numbers.count(number), -numbers.index(number)))
    others = [rank for rank, number in enumerate(numbers) if number != usual]
    if others:
        mine = f"here {max_rows} rows at most, table {table[:12] or 'none'}"
        raise GroupError(
            f"{ranks_text(others)} would warm up {SEAM} for another problem, table or largest batch than the "
            f"other ranks ({mine}); give every rank the same"
        )
