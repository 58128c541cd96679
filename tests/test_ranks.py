"""Ranks that agree: groups of real gloo processes merge, warm up, compare tables and tune together."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cover import pairwise

from mhctune.autotuner.records import FailureKind
from mhctune.kernels import topk_reference as reference
from mhctune.kernels.agreement import require_agreement
from mhctune.kernels.group import Group
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Problem
from mhctune.kernels.topk_draw import REGIMES, draw_all
from mhctune.kernels.topk_group import plan_of
from mhctune.kernels.topk_warm_up import row_counts

Reports = list[dict[str, Any]]
Ranks = Callable[..., Reports]
SUPPORT = Path(__file__).parent / "support"
CASES = pairwise(((512, 1024, 2048), (1, 16, 64), (0, 1, 2, 4, 7, 64), tuple(REGIMES)))
TRIALS = ("radix(digit_bits=11, select_bits=0)", "radix(digit_bits=11, select_bits=11)",
          "bitonic(run_k=1)", "bitonic(run_k=2)")  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Fork a group for every call, from one program: importing torch and TileLang takes seconds."""
    program = subprocess.Popen(
        [sys.executable, str(SUPPORT / "ranks.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert program.stdin is not None
    assert program.stdout is not None

    def run(deed: str, size: int, **order: Any) -> Reports:
        program.stdin.write(json.dumps({"deed": deed, "size": size, **order}) + "\n")  # type: ignore[union-attr]
        program.stdin.flush()  # type: ignore[union-attr]
        reports: Reports = json.loads(program.stdout.readline())  # type: ignore[union-attr]
        for rank, report in enumerate(reports):
            assert "error" not in report, f"rank {rank}: {report.get('trace')}"
        return reports

    yield run
    program.stdin.close()
    program.wait(60)
    program.stdout.close()


def results(reports: Reports) -> list[dict[str, Any]]:
    return [report["result"] for report in reports]


def told(tell: Callable[[str, object], None], what: str, reports: Reports) -> None:
    """Keep what each rank reported and how long it took, for the summary."""
    for rank, report in enumerate(reports):
        result = report.get("result", {})
        each = result.get("runs", [result]) if isinstance(result, dict) else []
        said = [(r.get("error") or str(r.get("result")), r["seconds"]) for r in each if "seconds" in r]
        tell("rank", (what, rank, said or [(f"died, exit code {report.get('died')}", 0.0)]))


# --- Merging ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_rank_finds_the_references_ids_to_the_bit(ranks: Ranks, size: int) -> None:
    """By both arms, with one collective call a merge, whatever a rank's chunk holds."""
    found = results(ranks("merge", size, cases=CASES))
    calls = sum(rows > 0 for _, _, rows, _ in CASES)
    for each in found:
        assert each["collectives"] == ["all_gather_into_tensor"] * calls
        assert each["allocating"] == []
    for index, (top_k, interleave, rows, regime) in enumerate(CASES):
        problem = SEAMS["topk_merge"].canonical(Problem(1, top_k=top_k, ranks=size, interleave=interleave))
        right = reference.merge(draw_all(problem, rows, index, regime))
        expected = hashlib.sha256(right.contiguous().numpy().tobytes()).hexdigest()
        assert [each["hashes"][index] for each in found] == [expected] * size, CASES[index]


def test_empty_chunks_take_part_draft_layers_bring_scores_and_converting_calls_nothing(ranks: Ranks) -> None:
    for rank, each in enumerate(results(ranks("merge_and_convert", 4))):
        # Rank 1 alone has entries; its best local ids are 511, 510, 509.
        assert each["answers"] == [[2015, 2014, 2013]] * 2
        assert (each["calls"], each["after"]) == (2, 2)
        first = rank * 16
        assert each["ids"] == [first + 14, first + 15, 64 + first, 65 + first]
        scores, shape, storage, group = each["misfits"]
        assert "scores is torch.float64, expected torch.float32" in scores
        assert "scores has shape (2, 100), expected (2, 512)" in shape
        assert "storage keys is 9 elements of torch.int64" in storage
        assert "the group has 4 ranks, the problem 5" in group


def test_without_a_group_one_rank_merges_alone() -> None:
    group, plan = Group(torch.device("cpu")), plan_of(Problem(1, top_k=8), "c")
    assert (group.rank, group.size, group.members) == (0, 1, (0,))
    gathered, sent = torch.zeros(1, 2, 2, 8).int(), torch.ones(2, 2, 8).int()
    group.gather(gathered, sent)
    assert torch.equal(gathered[0], sent)
    group.synchronize("nothing")
    require_agreement(group, ["ab" * 32])
    assert row_counts(plan, 3) == (1, 2, 3)
    with pytest.raises(ValueError, match="max_rows 0 is not positive"):
        row_counts(plan, 0)


# --- Warming up -------------------------------------------------------------------------------------------


def test_a_warm_up_runs_once_for_each_largest_batch(ranks: Ranks) -> None:
    """The first row count of each band among them; who has it compares notes and goes home."""
    for each in results(ranks("warm_up", 2, batches=[16, 16, 64, 16], table=1)):
        assert [r["result"] for r in each["runs"]] == [[1, 2, 3, 4, 16], [], [1, 2, 3, 4, 64], []]
        assert each["collectives"].count("barrier") == 2
        assert each["collectives"].count("all_gather_into_tensor") == 4 + 2 * (5 + 1)


@pytest.mark.parametrize("kernel", ["pack", "merge"])
def test_a_failed_warm_up_fails_everywhere_and_is_tried_again(
    ranks: Ranks, kernel: str, record_property: Callable[[str, object], None]
) -> None:
    reports = ranks("warm_up", 4, batches=[4, 4, 4], culprit=2, plant=kernel)
    told(record_property, f"{kernel} fails once on rank 2", reports)
    found = results(reports)
    for rank, each in enumerate(found):
        first, *later = each["runs"]
        assert first["error"].startswith(f"WarmUpFailed: rank {rank}: the top-k warm-up failed on rank 2")
        assert (f"planted: {kernel} fails once" in first["error"]) == (rank == 2)
        assert [r["result"] for r in later] == [[1, 2, 4], []]
        assert each["collectives"] == found[0]["collectives"]


def test_a_failing_barrier_raises_on_every_rank(
    ranks: Ranks, record_property: Callable[[str, object], None]
) -> None:
    reports = ranks("warm_up", 4, batches=[4, 4], culprit=1, plant="barrier", timeout_s=3)
    told(record_property, "the barrier fails on rank 1", reports)
    for rank, each in enumerate(results(reports)):
        error = each["runs"][0]["error"]
        assert error.startswith(f"GroupError: rank {rank} of 4: the barrier after the top-k warm-up failed")
        assert ("planted: the barrier fails" in error) == (rank == 1)


def test_ranks_that_warm_up_for_different_batches_say_so(
    ranks: Ranks, record_property: Callable[[str, object], None]
) -> None:
    reports = ranks("warm_up", 4, batches=[[16, 16, 8, 16]])
    told(record_property, "another largest batch on rank 2", reports)
    for each in results(reports):
        assert each["runs"][0]["error"].startswith("GroupError: rank 2 would warm up topk_merge for another")


# --- Agreement --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ([[2], [2], [2], [2]], None),
        ([[], [], [], []], None),
        ([[2, 3], [3, 2], [2, 3], [2, 3]], None),
        ([[2], [2], [3], [2]], ("ranks 0, 1, 3: table ", "; rank 2: table ")),
        ([[2], [], [2], []], ("ranks 0, 2: table ", "; ranks 1, 3: no table")),
        ([[2], [2, 3], [2], [2]], ("ranks 0, 2, 3: table ", "; rank 1: 2 tables, ")),
    ],
    ids=["same", "none", "two", "other", "some", "more"],
)
def test_ranks_compare_what_they_serve_in_one_call(
    ranks: Ranks, edges: list[Any], said: tuple[str, ...] | None,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    reports = ranks("agree", 4, edges=edges)
    for rank, each in enumerate(results(reports)):
        assert each["collectives"] == ["all_gather_into_tensor"]
        if said is None:
            assert "error" not in each, each
        else:
            assert each["error"].startswith(f"GroupError: rank {rank}: ranks serve different tables")
            assert all(part in each["error"] for part in said)
    if said is not None:
        told(record_property, "different tables", reports)


def test_a_rank_that_does_not_compare_is_no_hang(
    ranks: Ranks, record_property: Callable[[str, object], None]
) -> None:
    reports = ranks("agree", 2, edges=[[2], None], timeout_s=1)
    told(record_property, "rank 1 does not compare", reports[:1])
    assert "the comparison of the served tables failed or took more than 1 s" in results(reports)[0]["error"]


# --- Tuning -----------------------------------------------------------------------------------------------


def test_a_group_tunes_one_table_from_the_same_trials(ranks: Ranks) -> None:
    """A failure on one rank is everybody's; a time is the slowest rank's; inputs are equal and seeded."""
    plants = [
        {"rank": 2, "candidate": TRIALS[3], "where": "prepare", "kind": "mismatch"},
        {"rank": 1, "candidate": TRIALS[2], "where": "sample", "kind": "launch"},
    ]
    lead, *others = results(ranks("tune", 3, slow=1, plants=plants))
    assert lead["state"] == "complete"
    assert len(lead["result"]) == 64
    for other in others:
        assert other["result"] == lead["result"], other  # the SHA-256 of the table's bytes
        assert other["made"] == lead["made"]
        assert other["seen"] == lead["seen"]
    assert len(set(lead["seen"])) == 2  # the inputs of two cells
    assert [call for call in lead["made"] if call.startswith("enter")] == [
        f"enter {tokens} {lead['seed'] + tokens}" for tokens in (1, 2)
    ]
    for tokens in (1, 2):
        outcomes = [lead["outcomes"][f"{tokens} {candidate}"] for candidate in TRIALS]
        assert all(latency > 100 for latency in outcomes[:2])
        assert outcomes[2:] == ["launch: rank 1: planted", "mismatch: rank 2: planted"]
    assert lead["free"] == 10**9 - 2


@pytest.mark.parametrize("kind", [FailureKind.OUT_OF_MEMORY.value])
def test_memory_that_ends_on_one_rank_leaves_the_trial_unmeasured_everywhere(ranks: Ranks, kind: str) -> None:
    plants = [{"rank": 1, "candidate": TRIALS[2], "where": "prepare", "kind": kind}]
    lead, other = results(ranks("tune", 2, plants=plants))
    assert lead["outcomes"][f"1 {TRIALS[2]}"] == "out_of_memory: rank 1: planted"
    assert other["made"] == lead["made"]
    assert "1 found no memory" in lead["missing"][0]
    assert other["error"] == f"RankLost: {lead['missing'][0]}"


@pytest.mark.parametrize("kind", ["dies", "hangs"])
def test_a_rank_that_is_lost_in_a_trial_is_named_by_all_others(
    ranks: Ranks, kind: str, record_property: Callable[[str, object], None]
) -> None:
    plants = [{"rank": 2, "candidate": TRIALS[2], "where": "sample", "kind": kind}]
    limits = {"silence_s": 1.5} if kind == "dies" else {"silence_s": 10.0, "limit_s": 2.0}
    reports = ranks("tune", 3, plants=plants, **limits)
    told(record_property, f"rank 2 {kind} in a trial", reports)
    lead, other, lost = reports
    if kind == "dies":
        assert lost == {"died": 9}
    else:
        assert lost["result"]["error"].startswith("RankLost: rank 0, which holds the store")
    how = "was not heard for 1.5 s" if kind == "dies" else "lives and did not answer within 2 s"
    sentence = f"rank 2 {how} in timing {TRIALS[2]} at 1 token"
    assert other["result"]["error"].startswith(f"RankLost: {sentence}")
    assert lead["result"]["state"] == "incomplete"
    assert sentence in lead["result"]["missing"][0]


def test_a_leader_that_dies_is_named_by_all_others(
    ranks: Ranks, record_property: Callable[[str, object], None]
) -> None:
    plants = [{"rank": 0, "candidate": TRIALS[2], "where": "sample", "kind": "dies"}]
    reports = ranks("tune", 3, plants=plants, silence_s=1.5)
    told(record_property, "rank 0 dies in a trial", reports)
    assert reports[0] == {"died": 9}
    for other in results(reports[1:]):
        assert other["error"].startswith("RankLost: rank 0, which holds the store of the group, is gone in ")
        assert " in the call after " in other["error"]
        assert " at 1 token" in other["error"]


def test_ranks_on_different_machines_do_not_tune_together(ranks: Ranks) -> None:
    lead, first, second = results(ranks("tune", 3, other=[1]))
    assert lead["error"] == (
        "OtherDevice: rank 1 differs from rank 0 in gpu_name 'test' and 'other'; tune equal machines together"
    )
    for other in (first, second):
        assert "rank 1 is another machine than rank 0: gpu_name 'test' and 'other'" in other["error"]
        assert other["made"] == []
