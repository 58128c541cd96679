"""The global top-k of a group: pack, one all-gather, merge, in memory that the caller owns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from mhctune.kernels import serving
from mhctune.kernels.argument import Expected, check
from mhctune.kernels.buffers import BufferSpec, torch_dtype
from mhctune.kernels.group import Group
from mhctune.kernels.registry import seam
from mhctune.kernels.seam import Problem
from mhctune.kernels.topk_arm import TopkLaunch

SEAM = "topk_merge"
Storages = Mapping[str, torch.Tensor]
"""Flat tensors by the names of `TopkPlan.specs`."""


def empty_chunk(local_ids: torch.Tensor, scores: torch.Tensor) -> None:
    """Fill the local top-k [T, K] of a rank whose chunk of the KV cache is empty; it still takes part."""
    local_ids.fill_(-1)
    scores.fill_(-math.inf)


@dataclass(frozen=True, slots=True)
class TopkPlan:
    """One rank's part in the global top-k. Holds no tensors: every call brings the caller's.

    Which calls of `merge` are made, and with how many rows, must be the same on every rank: each is one
    collective call. It depends on the batch, never on what a rank's chunk holds. The result depends neither
    on the table nor on the batch, so that ranks with different choices would still agree.

    Attributes:
        problem: K, W and S.
        target: `c` or `cuda`.
        table: Digest of a served table; empty for the built-in choice.
    """

    problem: Problem
    target: str
    table: str = ""

    def specs(self, max_rows: int) -> tuple[BufferSpec, ...]:
        """Return what the caller allocates for up to `max_rows` rows, whatever the table chooses.

        Flat: `torch.empty(spec.numel, dtype=torch_dtype(spec.dtype))`. `scores` is a caller's own: a draft
        layer brings one besides the target model's.
        """
        owner, found = seam(SEAM), dict[str, BufferSpec]()
        for choice in serving.choices(self.table, SEAM, self.problem, self.target):
            for spec in owner.arm(self.target, choice.arm).plan(self.problem, dict(choice.config), max_rows):
                known = found.get(spec.name)
                if known is None or known.bytes < spec.bytes:
                    found[spec.name] = spec
        return (*found.values(), self._gathered(max_rows), self.score_spec(max_rows))

    def score_spec(self, max_rows: int) -> BufferSpec:
        """Return the scores' buffer [T, K] fp32."""
        return BufferSpec("scores", (max_rows, self.problem.top_k), "float32")

    def merge(
        self, local_ids: torch.Tensor, scores: torch.Tensor, storages: Storages, group: Group
    ) -> torch.Tensor:
        """Return the global top-k ids [T, K] of every rank's local ones: a view of the storage `ids`.

        Allocates nothing. `local_ids` int32 and `scores` fp32 are [T, K]; T = 0, which is 0 on every rank,
        calls nothing.

        Raises:
            ValueError: a tensor does not fit, or the group has another size than the problem.
        """
        rows = local_ids.shape[0]
        self._check(local_ids, scores, group)
        self._check_storages(storages, rows)
        if rows:
            self.pack(local_ids, scores, storages, group.rank)
            self.gather(storages, rows, group)
            self.finish(storages, rows)
        return self._view("ids", storages, rows)

    def convert(self, local_ids: torch.Tensor, ids: torch.Tensor, rank: int) -> None:
        """Write the global ids of one rank's local ones [T, K] without a merge; no collective call.

        Raises:
            ValueError: a tensor does not fit.
        """
        rows, shape = local_ids.shape[0], (local_ids.shape[0], self.problem.top_k)
        nbytes = math.prod(shape) * 4
        if ids.data_ptr() != local_ids.data_ptr():
            both = {"local_ids": local_ids, "ids": ids}
            wanted = [Expected(name, shape, torch.int32, nbytes, name == "ids") for name in both]
            check("topk_convert", wanted, both, "local_ids")
        if rows:
            self._launch(rows).convert(local_ids, ids, rank)

    # The steps of `merge`; the warm-up takes them one by one.

    def pack(self, local_ids: torch.Tensor, scores: torch.Tensor, storages: Storages, rank: int) -> None:
        """Write what a rank sends."""
        rows = local_ids.shape[0]
        self._launch(rows).pack(local_ids, scores, self._view("packed", storages, rows), rank)

    def gather(self, storages: Storages, rows: int, group: Group) -> None:
        """Exchange what every rank sends: the one collective call."""
        gathered = self._gathered(rows).view(storages["gathered"], rows)
        group.gather(gathered, self._view("packed", storages, rows))

    def finish(self, storages: Storages, rows: int) -> None:
        """Merge what was gathered."""
        views = {spec.name: spec.view(storages[spec.name], rows) for spec in self._plan(rows)}
        self._launch(rows).merge(views["gathered"], views)

    def _launch(self, rows: int) -> TopkLaunch:
        launch = serving.dispatch_canonical(self.table, SEAM, self.problem, self.target, rows).launch
        assert isinstance(launch, TopkLaunch)
        return launch

    def _plan(self, rows: int) -> tuple[BufferSpec, ...]:
        found = serving.dispatch_canonical(self.table, SEAM, self.problem, self.target, rows)
        plan = found.arm.plan(self.problem, dict(found.answer.choice.config), rows)
        return (*plan, self._gathered(rows))

    def _gathered(self, rows: int) -> BufferSpec:
        return BufferSpec(
            "gathered", (self.problem.ranks, rows, 2, self.problem.top_k), "int32", token_axis=1
        )

    def _view(self, name: str, storages: Storages, rows: int) -> torch.Tensor:
        spec = next(spec for spec in seam(SEAM).outputs(self.problem, rows) if spec.name == name)
        return spec.view(storages[name], rows)

    def _check(self, local_ids: torch.Tensor, scores: torch.Tensor, group: Group) -> None:
        if group.size != self.problem.ranks:
            raise ValueError(
                f"{SEAM}: the group has {group.size} ranks, the problem {self.problem.ranks}; plan for the "
                "group that shares the KV cache"
            )
        shape, nbytes = (local_ids.shape[0], self.problem.top_k), local_ids.numel() * 4
        given = {"local_ids": local_ids, "scores": scores}
        wanted = [
            Expected("local_ids", shape, torch.int32, nbytes),
            Expected("scores", shape, torch.float32, nbytes),
        ]
        check(SEAM, wanted, given, "local_ids")

    def _check_storages(self, storages: Storages, rows: int) -> None:
        for spec in self._plan(rows):
            storage = storages.get(spec.name)
            if storage is None or storage.numel() < spec.numel or storage.dtype != torch_dtype(spec.dtype):
                has = "missing" if storage is None else f"{storage.numel()} elements of {storage.dtype}"
                raise ValueError(
                    f"{SEAM}: storage {spec.name} is {has}, {spec.numel} of {spec.dtype} are needed for "
                    f"{rows} rows; allocate TopkPlan.specs(max_rows)"
                )


def plan_of(problem: Problem, target: str, table: str = "") -> TopkPlan:
    """Return a plan with the problem reduced to what the seam depends on."""
    return replace(TopkPlan(problem, target, table), problem=seam(SEAM).canonical(problem))
