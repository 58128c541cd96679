"""What one rank of a group does: `python cuda_ranks.py RANK SIZE PORT FOLDER DEVICE`; prints a line of JSON.

On `cuda` a GPU a rank and NCCL, on `cpu` gloo. In order: merge against the reference, warm up, compare
tables, capture and replay a merge with its all-gather, tune in the group. Every rank prints the same.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mhctune.autotuner.bench import Bench, HostBench
from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.group_bench import GroupBench, Station, follow
from mhctune.autotuner.mail import Mail
from mhctune.autotuner.probe import fingerprint
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.sweep import Sweep, SweepPlan
from mhctune.db.derivation import derive_stored
from mhctune.db.repository import Repository
from mhctune.kernels import topk_reference as reference
from mhctune.kernels.agreement import require_agreement
from mhctune.kernels.buffers import torch_dtype
from mhctune.kernels.compiler import Compiler, quiet
from mhctune.kernels.group import Group, GroupError
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Problem
from mhctune.kernels.topk_draw import REGIMES, draw_all, draw_rank
from mhctune.kernels.topk_group import TopkPlan, plan_of
from mhctune.kernels.topk_warm_up import TopkWarmUp

SEAM = SEAMS["topk_merge"]
MAX_ROWS = 33
SPACES = {
    "c": {"radix": {"select_bits": [11], "digit_bits": [8, 11]}, "bitonic": {"run_k": [1]}},
    "cuda": {
        "radix": {"n_thr": [1024, 512], "digit_bits": [11], "held": [1]},
        "bitonic": {"n_thr": [512], "run_k": [1]},
    },
}


class Rank:
    def __init__(self, rank: int, size: int, device: str) -> None:
        self.rank, self.size = rank, size
        self.target = "c" if device == "cpu" else "cuda"
        self.device = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
        self.group = Group(self.device)

    def plan(self, top_k: int, interleave: int = 1) -> TopkPlan:
        return plan_of(Problem(1, top_k=top_k, ranks=self.size, interleave=interleave), self.target)

    def storages(self, plan: TopkPlan) -> dict[str, torch.Tensor]:
        return {
            spec.name: torch.full((spec.numel,), -123456, dtype=torch_dtype(spec.dtype), device=self.device)
            for spec in plan.specs(MAX_ROWS)
        }

    def draw(self, plan: TopkPlan, rows: int, seed: int, regime: str) -> tuple[torch.Tensor, torch.Tensor]:
        ids, scores = draw_rank(plan.problem, rows, seed, regime, self.rank)
        return ids.to(self.device), scores.to(self.device)

    def merge(self) -> str:
        done, seed = 0, 0
        for top_k, interleave in ((512, 16), (2048, 1), (2048, 64)):
            plan = self.plan(top_k, interleave)
            storages = self.storages(plan)
            for rows in (1, 2, 4, MAX_ROWS):
                for regime in REGIMES:
                    seed += 1
                    found = plan.merge(*self.draw(plan, rows, seed, regime), storages, self.group)
                    expected = reference.merge(draw_all(plan.problem, rows, seed, regime))
                    assert torch.equal(found.cpu(), expected), (top_k, interleave, rows, regime)
                    done += 1
        return f"{done} merges equal to the bit"

    def warm_up(self) -> str:
        plan, warm = self.plan(2048), TopkWarmUp()
        storages = self.storages(plan)
        runs = [warm.run(plan, self.group, storages, MAX_ROWS) for _ in range(2)]
        assert runs == [(1, 2, 4, MAX_ROWS), ()], runs
        return f"warmed up {runs[0]}"

    def agree(self) -> str:
        require_agreement(self.group, ["ab" * 32])
        try:
            require_agreement(self.group, [f"{self.rank:02x}" * 32])
        except GroupError as error:
            assert "rank 0: table 000000000000" in str(error), error
            return "other tables are an error"
        raise AssertionError("different tables were accepted")

    def capture(self) -> str:
        if self.target == "c":
            return "capture does not apply"
        plan, rows = self.plan(2048, 16), MAX_ROWS
        storages, live = self.storages(plan), self.draw(plan, rows, 1, "served")
        plan.merge(*live, storages, self.group)
        self.group.synchronize("before capture")
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks for events meanwhile: in another mode that ends the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = plan.merge(*live, storages, self.group)
        for seed, regime in enumerate(REGIMES, start=100):
            for tensor, other in zip(live, self.draw(plan, rows, seed, regime), strict=True):
                tensor.copy_(other)
            storages["ids"].fill_(-123456)
            graph.replay()
            torch.cuda.synchronize()
            expected = reference.merge(draw_all(plan.problem, rows, seed, regime))
            assert torch.equal(found.cpu(), expected), regime
        graph.reset()
        self.group.synchronize("after capture")
        return f"captured, {len(REGIMES)} replays equal to the bit"

    def tune(self, port: int, folder: str) -> str:
        store = dist.TCPStore("127.0.0.1", port, self.size, self.rank == 0, timedelta(seconds=30))
        mail = Mail(store, self.rank, self.size)
        compiler = Compiler()
        bench = self._bench(compiler)
        station = Station(fingerprint(SEAM, self.target), 2**32)
        try:
            if self.rank:
                data = follow(bench, compiler, mail, station)
            else:
                with GroupBench(bench, compiler, mail) as lead:
                    data = self._lead(lead, station, folder)
        finally:
            mail.close()
            compiler.close()
        return f"table {hashlib.sha256(data).hexdigest()[:12]} of {len(data)} bytes"

    def _bench(self, compiler: Compiler) -> Bench:
        if self.target == "c":
            return HostBench(SEAM, compiler)
        from mhctune.autotuner.cuda_bench import CudaBench

        return CudaBench(SEAM, compiler, device=self.rank)

    def _lead(self, lead: GroupBench, station: Station, folder: str) -> bytes:
        free, problem = lead.meet(station), self.plan(2048).problem
        spaces = {
            arm.name: arm.space(problem).restricted(SPACES[self.target][arm.name])
            for arm in SEAM.arms(self.target)
        }
        protocol = Protocol.of(self.target, 5)
        plan = SweepPlan(SEAM, problem, self.target, (1, 4), spaces, protocol, station.fingerprint, 1.0)
        with Repository.open(f"{folder}/mhctune.db") as store:
            result = Sweep(plan, store, lead, VramBudget(free, free), lead.compile_all).run()
            assert not result.missing, result.missing
            return lead.publish(derive_stored(store, store.sweep(result.sweep_id), 1.0).table)


def main(rank: int, size: int, port: int, folder: str, device: str) -> None:
    quiet()
    here = Rank(rank, size, device)
    if device == "cuda":
        torch.cuda.set_device(here.device)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", store=dist.FileStore(f"{folder}/store", size), rank=rank,
        world_size=size, timeout=timedelta(seconds=60),
        device_id=here.device if device == "cuda" else None,
    )  # fmt: skip
    said: dict[str, str] = {}
    deeds: dict[str, Callable[[], Any]] = {
        "merge": here.merge, "warm up": here.warm_up, "agree": here.agree, "capture": here.capture,
        "tune": lambda: here.tune(port, folder),
    }  # fmt: skip
    for name, deed in deeds.items():
        begin = time.monotonic()
        said[name] = deed()
        print(f"rank {rank}: {said[name]}, {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    print(json.dumps(said))


if __name__ == "__main__":
    main(*(int(text) for text in sys.argv[1:4]), *sys.argv[4:])  # type: ignore[arg-type]
