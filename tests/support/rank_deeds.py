"""What the ranks of a test do: each deed is run by every rank of a group in a process of its own."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mhctune.autotuner.bench import HostBench
from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.group_bench import GroupBench, Station, follow
from mhctune.autotuner.mail import Mail
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import Cell, Failure, FailureKind, Measurement
from mhctune.autotuner.sweep import Sweep, SweepPlan
from mhctune.autotuner.timer import HostTimer, Slot
from mhctune.db.derivation import derive_stored
from mhctune.db.repository import Repository
from mhctune.kernels import serving, topk_draw
from mhctune.kernels.agreement import require_agreement
from mhctune.kernels.buffers import torch_dtype
from mhctune.kernels.c.topk_arms import Bitonic, Radix
from mhctune.kernels.compiler import Compiler, compile_variant, quiet
from mhctune.kernels.dispatch import Band, Choice, DispatchTable, Fingerprint
from mhctune.kernels.group import Group
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate, SearchSpace
from mhctune.kernels.topk_arm import TopkLaunch
from mhctune.kernels.topk_group import TopkPlan, empty_chunk, plan_of
from mhctune.kernels.topk_warm_up import TopkWarmUp

INTERLEAVES = (1, 16, 64)
SEAM = SEAMS["topk_merge"]
HERE = Fingerprint("test", 1, 1, "", "", "", "", "", "", "", "", 1, "")
VALUES = {"select_bits": [0, 11], "digit_bits": [11], "run_k": [1, 2]}


def problem_of(top_k: int, ranks: int, interleave: int = 1) -> Problem:
    return SEAM.canonical(Problem(1, top_k=top_k, ranks=ranks, interleave=interleave))


def table_of(problem: Problem, edge: int = 2) -> DispatchTable:
    """Two bands, so that both arms are served."""
    choices = [Choice.of(arm.name, arm.preferred) for arm in (Radix(), Bitonic())]
    bands = (Band(1, edge, choices[0]), Band(edge + 1, 64, choices[1]))
    return DispatchTable(SEAM.name, problem.to_dict(), "c", "exact/1", HERE, bands, choices[0])


def compile_all() -> None:
    """Load every kernel that the deeds launch; forked ranks inherit them."""
    quiet()
    for interleave in INTERLEAVES:
        problem = problem_of(512, 2, interleave)
        for rows in (1, 3):
            serving.dispatch(serving.serve(table_of(problem)), SEAM.name, problem, "c", rows)
    for arm, space in spaces_of(problem_of(64, 2)).items():
        for candidate in space.candidates():
            for variant in SEAM.arm("c", arm).variants(problem_of(64, 2), candidate.config):
                compile_variant(variant)


def spaces_of(problem: Problem) -> dict[str, SearchSpace]:
    """Two candidates of either arm."""
    found = {arm.name: arm.space(problem) for arm in SEAM.arms("c")[:2]}
    return {
        name: space.restricted({t.name: VALUES[t.name] for t in space.tunables})
        for name, space in found.items()
    }


def group_of(rank: int, order: dict[str, Any], folder: str) -> Group:
    store = dist.FileStore(f"{folder}/store", order["size"])
    wait = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=order["size"], timeout=wait)
    return Group(torch.device("cpu"), timeout_s=order.get("timeout_s", 10.0))


def storages_of(plan: TopkPlan, max_rows: int) -> dict[str, torch.Tensor]:
    """Poisoned storages, one element longer than needed."""
    found = {}
    for spec in plan.specs(max_rows):
        found[spec.name] = torch.full((spec.numel,), -123456, dtype=torch_dtype(spec.dtype))
    return found


def count_collectives() -> list[str]:
    """Note every collective call that this process makes from now on."""
    made: list[str] = []
    for name in ("all_gather_into_tensor", "barrier"):
        real: Callable[..., Any] = getattr(dist, name)

        def noted(*args: Any, name: str = name, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            made.append(name)
            return real(*args, **kwargs)

        setattr(dist, name, noted)
    return made


class Allocating(TorchDispatchMode):
    """Notes the operations of torch that are no view and no collective: what makes a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not func.is_view and not name.startswith(("c10d.", "aten.copy_", "aten.detach")):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


# --- Merging ----------------------------------------------------------------------------------------------


def merge(rank: int, order: dict[str, Any], folder: str) -> dict[str, Any]:
    """Merge case after case; return the hash of each answer and the number of collective calls."""
    group = group_of(rank, order, folder)
    made, hashes, allocating = count_collectives(), list[str](), Allocating()
    for index, (top_k, interleave, rows, regime) in enumerate(order["cases"]):
        problem = problem_of(top_k, order["size"], interleave)
        plan = plan_of(problem, "c", serving.serve(table_of(problem)) if index % 2 else "")
        storages = storages_of(plan, max(rows, 1))
        ids, scores = topk_draw.draw_rank(problem, rows, index, regime, rank)
        with allocating:
            found = plan.merge(ids, scores, storages, group)
        assert rows == 0 or found.data_ptr() == storages["ids"].data_ptr()
        assert bool((storages["scores"] == -123456).all()), "a draft caller's own scores were touched"
        hashes.append(digest(found))
    return {"hashes": hashes, "collectives": made, "allocating": sorted(allocating.names)}


def merge_and_convert(rank: int, order: dict[str, Any], folder: str) -> dict[str, Any]:
    """An empty chunk on all ranks but one, through buffers of the callers; conversion alone; misfits."""
    group, problem = group_of(rank, order, folder), problem_of(512, order["size"], 16)
    made, plan = count_collectives(), plan_of(problem, "c")
    storages = storages_of(plan, 4)
    target, draft = storages["scores"].view(4, 512), torch.empty(plan.score_spec(4).shape)
    answers = []
    for scores in (target, draft):
        ids = torch.arange(512).int().expand(4, -1).contiguous()
        scores.copy_(torch.arange(512.0).expand(4, -1))
        if rank != 1:
            empty_chunk(ids, scores)
        answers.append(plan.merge(ids, scores, storages, group)[0, :3].tolist())
    calls = len(made)
    ids = torch.arange(512).int().expand(2, -1).contiguous()
    plan.convert(ids, ids, rank)
    misfits = []
    for bad in (
        lambda: plan.merge(ids, target[:2].double(), storages, group),
        lambda: plan.merge(ids, target[:2, :100].contiguous(), storages, group),
        lambda: plan.merge(ids, target[:2], {**storages, "keys": storages["keys"][:9]}, group),
        lambda: plan_of(problem_of(512, 5), "c").merge(ids, target[:2], storages, group),
    ):
        try:
            bad()
        except ValueError as error:
            misfits.append(str(error))
    return {"answers": answers, "calls": calls, "after": len(made), "ids": ids[0, 14:18].tolist(),
            "misfits": misfits}  # fmt: skip


# --- Warming up -------------------------------------------------------------------------------------------


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """What one call came to, and how long it took."""
    begin = time.monotonic()
    try:
        found: dict[str, Any] = {"result": call()}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    return {**found, "seconds": time.monotonic() - begin}


def warm_up(rank: int, order: dict[str, Any], folder: str) -> dict[str, Any]:
    """Warm up again and again: `order["batches"]`, with what is planted on one rank."""
    group, problem = group_of(rank, order, folder), problem_of(512, order["size"], 1)
    digest = serving.serve(table_of(problem)) if order.get("table") else ""
    plan, warm = plan_of(problem, "c", digest), TopkWarmUp()
    storages, made, found = storages_of(plan, 64), count_collectives(), []
    if rank == order.get("culprit"):
        plant(order["plant"])
    for batch in order["batches"]:
        size = batch[rank] if isinstance(batch, list) else batch
        found.append(attempt(lambda size=size: warm.run(plan, group, storages, size)))
        if "GroupError" in found[-1].get("error", "") and "differ" not in order["deed"]:
            break  # the group is not to be used after that
    return {"runs": found, "collectives": made}


def plant(what: str) -> None:
    """Let one thing fail in this process: the barrier always, a kernel once."""
    if what == "barrier":

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("planted: the barrier fails")

        dist.barrier = fail
        return
    real, times = getattr(TopkLaunch, what), []

    def fail_once(*args: Any) -> None:
        times.append(1)
        if len(times) == 1:
            raise RuntimeError(f"planted: {what} fails once")
        real(*args)

    setattr(TopkLaunch, what, fail_once)


# --- Agreement --------------------------------------------------------------------------------------------


def agree(rank: int, order: dict[str, Any], folder: str) -> dict[str, Any]:
    """Serve the tables of this rank (by band edge) and compare; a rank with None does not call."""
    group, edges = group_of(rank, order, folder), order["edges"][rank]
    made = count_collectives()
    for digest in serving.served():
        serving.withdraw(digest)
    if edges is None:
        time.sleep(order["timeout_s"] + 1)
        return {"collectives": made}
    for edge in edges:
        serving.serve(table_of(problem_of(512, 4), edge))
    return {**attempt(lambda: require_agreement(group)), "collectives": made}


# --- Tuning -----------------------------------------------------------------------------------------------


class Slow(HostTimer):
    """The host's clock, on a rank that takes a hundred microseconds longer."""

    def time(self, slot: Slot, run: Callable[[], None], launches: int) -> float:
        return super().time(slot, run, launches) + 100.0


class Planted(HostBench):
    """A real bench that notes what it is asked for, and may fail or die at one trial."""

    def __init__(self, rank: int, order: dict[str, Any]) -> None:
        super().__init__(SEAM, Compiler(workers=1), Slow() if rank == order.get("slow") else None)
        self.made: list[str] = []
        self.seen: list[str] = []
        self._plants = {p["candidate"]: p for p in order.get("plants", ()) if p["rank"] == rank}

    def enter(self, cell: Cell, seed: int) -> Any:
        entered = super().enter(cell, seed)
        self.seen.append(digest(self._inputs["gathered"]))
        self.made.append(f"enter {cell.num_tokens} {seed}")
        return entered

    def prepare(self, candidate: Candidate) -> Any:
        self.made.append(f"prepare {candidate}")
        return self._planted("prepare", candidate) or super().prepare(candidate)

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> Any:
        self.made.append(f"sample {candidate} {batch} {round} {launches}")
        return self._planted("sample", candidate) or super().sample(candidate, batch, round, launches)

    def _planted(self, where: str, candidate: Candidate) -> Failure | None:
        plant = self._plants.get(str(candidate))
        if plant is None or plant["where"] != where:
            return None
        if plant["kind"] == "dies":
            os._exit(9)
        if plant["kind"] == "hangs":
            time.sleep(5)  # longer than its limit
            return Failure(FailureKind.TIMEOUT, "planted")
        return Failure(FailureKind(plant["kind"]), "planted")


def tune(rank: int, order: dict[str, Any], folder: str) -> dict[str, Any]:
    """Tune a small seam in a group; rank 0 leads and keeps the samples."""
    store = dist.TCPStore("127.0.0.1", order["port"], order["size"], rank == 0, timedelta(seconds=30))
    mail = Mail(store, rank, order["size"], order.get("silence_s", 10.0), order.get("limit_s", 40.0))
    bench, compiler = Planted(rank, order), Compiler(workers=1)
    fingerprint = Fingerprint(*("other" if rank in order.get("other", ()) else "test", *list(_rest(HERE))))
    station = Station(fingerprint, 10**9 - rank)
    found: dict[str, Any] = {}
    try:
        if rank:
            found.update(attempt(lambda: digest_of(follow(bench, compiler, mail, station))))
        else:
            lead = GroupBench(bench, compiler, mail)
            found.update(attempt(lambda: run_sweep(lead, station, f"{folder}/mhctune.db", found)))
    finally:
        mail.close()
    return {**found, "made": bench.made, "seen": bench.seen}


def _rest(fingerprint: Fingerprint) -> list[Any]:
    return list(fingerprint.as_dict().values())[1:]


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def run_sweep(lead: GroupBench, station: Station, path: str, found: dict[str, Any]) -> str:
    """Sweep, derive and publish."""
    with lead:
        return run_led(lead, station, path, found)


def run_led(lead: GroupBench, station: Station, path: str, found: dict[str, Any]) -> str:
    free, problem = lead.meet(station), problem_of(64, 2)
    spaces = spaces_of(problem)
    protocol = Protocol(5, replay_us=100.0)
    plan = SweepPlan(SEAM, problem, "c", (1, 2), spaces, protocol, station.fingerprint, 1.0)
    found["free"] = free
    with Repository.open(path) as store:
        result = Sweep(plan, store, lead, VramBudget(free, free), lead.compile_all).run()
        found["state"], found["missing"] = result.state.value, list(result.missing)
        trials = store.trials(result.sweep_id)
        found["outcomes"] = {
            f"{t.cell.num_tokens} {t.candidate}": said(t.outcome) for t in trials if t.outcome is not None
        }
        found["seed"] = store.sweep(result.sweep_id).record.protocol["seed"]
        if result.missing:
            lead.end(result.missing[0])
            return f"no table: {result.missing[0]}"
        return digest_of(lead.publish(derive_stored(store, store.sweep(result.sweep_id), 1.0).table))


def said(outcome: Measurement | Failure) -> str | float:
    return f"{outcome.kind}: {outcome.detail}" if isinstance(outcome, Failure) else outcome.latency_us
