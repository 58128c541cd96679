"""Serving: which tables this process has, what a call launches, and what is compiled when."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mhctune.kernels import serving
from mhctune.kernels.buffers import OutputBuffers
from mhctune.kernels.compiler import Compiled
from mhctune.kernels.dispatch import Band, Choice, DispatchTable, Status, TableError
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Problem, Variant

NAME = "post_pre_delayed"
SEAM = find_seam(NAME)
PROBLEM = Problem(768)
ROOT = Path(__file__).resolve().parents[1]

FUSED = Choice.of("fused", {"tile_n": 24, "n_splits": 1, "block_h": 64, "block_m": 4})
UNFUSED = Choice.of("unfused", {"tile_n": 24, "n_splits": 2, "block_h": 64, "block_m": 8})
DEFAULT = Choice.of("unfused", {"tile_n": 12, "n_splits": 2, "block_h": 128, "block_m": 2})


@pytest.fixture
def compiled(fresh_serving: list[Variant]) -> list[Variant]:
    """What serving, as in a fresh process, compiles: the list grows with each kernel."""
    return fresh_serving


@pytest.fixture
def make(make_table: Callable[..., DispatchTable]) -> Callable[..., DispatchTable]:
    """A table for the C backend: fused for 1 to 4 tokens, unfused to 16, another unfused above."""

    def build(**changes: Any) -> DispatchTable:
        values = {
            "problem": PROBLEM.to_dict(),
            "target": "c",
            "bands": (Band(1, 4, FUSED), Band(5, 16, UNFUSED)),
            "default": DEFAULT,
        }
        return make_table(**{**values, **changes})

    return build


Make = Callable[..., DispatchTable]


def test_nothing_is_registered_at_import() -> None:
    code = "from mhctune.kernels import ops, serving; print(serving.served(), serving._kernels)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert done.stdout.strip() == "() {}"


def test_a_served_table_is_found_under_its_digest_until_it_is_withdrawn(
    make: Make, compiled: list[Variant]
) -> None:
    table = make()
    assert serving.served() == ()
    digest = serving.serve(table)
    assert digest == table.digest
    assert serving.served() == (digest,)
    assert serving.lookup(digest, NAME, PROBLEM, "c", 3) == table.lookup(3)
    serving.withdraw(digest)
    assert serving.served() == ()
    with pytest.raises(serving.NotServed):
        serving.lookup(digest, NAME, PROBLEM, "c", 3)


def test_serving_a_table_twice_changes_nothing(make: Make, compiled: list[Variant]) -> None:
    assert serving.serve(make()) == serving.serve(make())
    assert len(serving.served()) == 1


def test_several_tables_are_served_side_by_side(make: Make, compiled: list[Variant]) -> None:
    one, other = serving.serve(make()), serving.serve(make(bands=(Band(1, 16, UNFUSED),)))
    assert serving.served() == (one, other)
    assert serving.lookup(one, NAME, PROBLEM, "c", 1).choice == FUSED
    assert serving.lookup(other, NAME, PROBLEM, "c", 1).choice == UNFUSED


def test_serving_compiles_nothing(make: Make, compiled: list[Variant]) -> None:
    serving.lookup(serving.serve(make()), NAME, PROBLEM, "c", 3)
    serving.lookup("", NAME, PROBLEM, "c", 3)
    assert compiled == []


@pytest.mark.parametrize(
    "call",
    [
        lambda digest: serving.lookup(digest, NAME, PROBLEM, "c", 1),
        lambda digest: serving.dispatch(digest, NAME, PROBLEM, "c", 1),
        lambda digest: serving.scratch_numel(digest, NAME, PROBLEM, "c", 1),
        serving.warm_up,
        serving.withdraw,
    ],
    ids=["lookup", "dispatch", "scratch_numel", "warm_up", "withdraw"],
)
def test_an_unknown_digest_is_named_with_those_served(
    call: Callable[[str], object], make: Make, compiled: list[Variant]
) -> None:
    with pytest.raises(LookupError, match=r"no table 'feedfeedfeed' is served here \(served: none\)"):
        call("feedfeedfeedfeed")
    digest = serving.serve(make())
    with pytest.raises(serving.NotServed, match=rf"\(served: {digest[:12]}\); call serving.serve"):
        call("feedfeedfeedfeed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seam": "pots"}, "unknown seam 'pots'; known: collapse, hc_head, post, "),
        ({"target": "abacus"}, "has no arm 'fused' on target 'abacus'"),
        (
            {"default": Choice.of("mega", {})},
            "has no arm 'mega' on target 'c'; it has fused, unfused, released",
        ),
        ({"default": Choice.of("fused", {"tile_n": 24})}, "takes the tunables .* got .'tile_n'."),
        (
            {"bands": (Band(1, 4, Choice.of("fused", {**dict(FUSED.config), "tile_n": 7})),)},
            "tile_n=7.* is illegal: 24 columns are not a multiple of tile_n 7",
        ),
        (
            {"default": Choice.of("unfused", {**dict(UNFUSED.config), "n_splits": 5})},
            "n_splits=5.* is illegal: hidden 768 is not a multiple of n_splits 5",
        ),
        ({"problem": {**PROBLEM.to_dict(), "hidden_size": 700}}, "hidden 700 is not a multiple"),
        ({"problem": {**PROBLEM.to_dict(), "width": 3}}, "unknown problem fields .'width'."),
        ({"problem": {"norm": True}}, "hidden_size"),
        ({"problem": {**PROBLEM.to_dict(), "hc_mult": 2}}, "hc_mult 2 is not supported"),
    ],
    ids=str,
)
def test_an_illegal_table_is_refused_with_the_reason(
    changes: dict[str, Any], message: str, make: Make, compiled: list[Variant]
) -> None:
    table = make(**changes)
    with pytest.raises(TableError, match=rf"^table {table.digest[:12]}: .*{message}"):
        serving.serve(table)
    assert serving.served() == ()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hidden_size": 1024}, "hidden_size 768, the call has 1024"),
        ({"carried": False}, "carried True, the call has False"),
        ({"norm": False}, "norm True, the call has False"),
        ({"sinkhorn_iters": 10}, "sinkhorn_iters 20, the call has 10"),
    ],
    ids=str,
)
def test_a_table_for_another_problem_is_refused_by_the_lookup(
    changes: dict[str, Any], name: str, make: Make, compiled: list[Variant]
) -> None:
    digest = serving.serve(make())
    problem = Problem(**{**PROBLEM.to_dict(), **changes})
    with pytest.raises(TableError, match=f"^table {digest[:12]} is for {name}; serve a table tuned for it"):
        serving.lookup(digest, NAME, problem, "c", 3)


def test_a_table_for_another_seam_or_target_is_refused_by_the_lookup(
    make: Make, compiled: list[Variant]
) -> None:
    digest = serving.serve(make())
    with pytest.raises(TableError, match="is for target 'c', the call has 'cuda'"):
        serving.lookup(digest, NAME, PROBLEM, "cuda", 3)
    with pytest.raises(TableError, match="is for seam 'post_pre_delayed', the call has 'pre'"):
        serving.lookup(digest, "pre", PROBLEM, "c", 3)


def test_a_table_that_leaves_out_usual_values_serves_the_usual_problem(
    make: Make, compiled: list[Variant]
) -> None:
    digest = serving.serve(make(problem={"hidden_size": 768}))
    assert serving.lookup(digest, NAME, PROBLEM, "c", 3).choice == FUSED
    with pytest.raises(TableError, match="is for norm True, the call has False"):
        serving.lookup(digest, NAME, Problem(768, norm=False), "c", 3)


def test_eps_values_do_not_need_a_table_of_their_own(make: Make, compiled: list[Variant]) -> None:
    digest = serving.serve(make())
    assert serving.lookup(digest, NAME, Problem(768, rms_eps=1e-6), "c", 3).choice == FUSED


@pytest.mark.parametrize(
    ("num_tokens", "choice", "status"),
    [
        (1, FUSED, Status.EXACT),
        (4, FUSED, Status.EXACT),
        (5, UNFUSED, Status.EXACT),
        (16, UNFUSED, Status.EXACT),
        (17, DEFAULT, Status.OUT_OF_RANGE),
        (40, DEFAULT, Status.OUT_OF_RANGE),
    ],
)
def test_a_call_launches_the_choice_of_its_band_and_the_result_is_right(
    num_tokens: int, choice: Choice, status: Status, make: Make, compiled: list[Variant], seed: int
) -> None:
    digest = serving.serve(make())
    found = serving.dispatch(digest, NAME, PROBLEM, "c", num_tokens)
    assert found.arm.name == choice.arm
    assert found.answer.choice == choice
    assert found.answer.status is status
    assert compiled == list(found.arm.variants(PROBLEM, dict(choice.config)))
    inputs = SEAM.inputs(PROBLEM, num_tokens, seed, "cpu")
    buffers = OutputBuffers(found.arm.plan(PROBLEM, dict(choice.config), num_tokens), "cpu")
    buffers.poison()
    views = buffers.bind(num_tokens)
    found.launch(inputs, views)
    assert all(d.ok for d in SEAM.check(PROBLEM, inputs, views))


@pytest.mark.parametrize("status", [Status.OTHER_DRIVER, Status.OTHER_SOURCE, Status.FOREIGN])
def test_an_answer_carries_the_status_of_its_table(
    status: Status, make: Make, compiled: list[Variant]
) -> None:
    digest = serving.serve(make(status=status))
    assert serving.lookup(digest, NAME, PROBLEM, "c", 1).status is status
    assert serving.lookup(digest, NAME, PROBLEM, "c", 17).status is Status.OUT_OF_RANGE


def test_without_a_table_the_built_in_choice_is_served_and_says_so(compiled: list[Variant]) -> None:
    for num_tokens in (1, 100, 10**9):
        answer = serving.lookup("", NAME, PROBLEM, "c", num_tokens)
        assert answer.status is Status.DEFAULT
        assert answer.choice == Choice.of("fused", SEAM.arm("c", "fused").preferred)
        assert (answer.first, answer.last) == (1, None)
    assert serving.dispatch("", NAME, PROBLEM, "c", 7).arm.name == "fused"


@pytest.mark.parametrize(
    ("target", "hidden", "arm"),
    [
        ("c", 64, "fused"), ("c", 320, "fused"), ("c", 5120, "fused"),
        ("cuda", 4096, "fused_mma"), ("cuda", 5120, "fused_mma"), ("cuda", 7168, "fused_mma"),
    ],
)  # fmt: skip
def test_the_built_in_choice_is_the_first_preferred_config_that_is_legal(
    target: str, hidden: int, arm: str
) -> None:
    expected = Choice.of(arm, SEAM.arm(target, arm).preferred)
    assert serving.builtin(NAME, Problem(hidden), target) == expected


def test_the_built_in_choice_goes_on_to_the_next_arms_preferred_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, *_ = SEAM.preference("c")
    monkeypatch.setattr(type(first), "preferred", {**first.preferred, "n_splits": 7})
    monkeypatch.setattr(type(second), "preferred", dict(second.preferred))
    assert serving.builtin(NAME, PROBLEM, "c") == Choice.of(second.name, second.preferred)
    assert serving.builtin(NAME, Problem(1792), "c") == Choice.of(first.name, first.preferred)
    # Neither is legal at 320, and the second arm has no legal config there at all.
    legal = first.space(Problem(320)).candidates()[0]
    assert serving.builtin(NAME, Problem(320), "c") == Choice.of(first.name, legal.config)


def test_where_no_preferred_config_is_legal_the_first_legal_one_is_built_in() -> None:
    problem = Problem(1280)
    assert all(arm.space(problem).refusals(arm.preferred) for arm in SEAM.arms("cuda"))
    choice = serving.builtin(NAME, problem, "cuda")
    arm = SEAM.arm("cuda", "fused_mma")
    assert choice == Choice.of(arm.name, arm.space(problem).candidates()[0].config)


@pytest.mark.parametrize(
    ("target", "tried"),
    [
        ("c", "fused, unfused, released"),
        ("cuda", "fused_mma, fused_ws, unfused_mma, unfused, fused, released"),
        ("abacus", "there is none"),
    ],
)  # fmt: skip
def test_only_where_no_arm_has_a_legal_config_there_is_no_built_in_choice(target: str, tried: str) -> None:
    message = rf"^no arm of {NAME} on target '{target}' \({tried}\) has a legal config for hidden 200,"
    with pytest.raises(ValueError, match=message):
        serving.lookup("", NAME, Problem(200), target, 1)


@pytest.mark.parametrize("choice", [FUSED, UNFUSED], ids=str)
def test_a_first_launch_runs_every_kernel_of_a_choice_once(
    choice: Choice, compiled: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What warming up does on cuda, where a module is loaded by its first launch."""
    launched: list[Variant] = []
    compile_one = serving.compile_variant

    def counting(variant: Variant) -> Compiled:
        kernel = compile_one(variant)

        def run(*args: torch.Tensor) -> None:
            launched.append(variant)
            kernel.run(*args)

        return Compiled(run, kernel.code_hash)

    monkeypatch.setattr(serving, "compile_variant", counting)
    serving._launch_once(NAME, PROBLEM, "c", choice, "cpu")
    assert launched == list(SEAM.arm("c", choice.arm).variants(PROBLEM, dict(choice.config)))


def test_warming_up_launches_on_cuda_only(
    make: Make, compiled: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Choice] = []
    monkeypatch.setattr(serving, "_launch_once", lambda *args: launched.append(args[3]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    serving.warm_up(serving.serve(make()))
    assert launched == []
    assert compiled != []
    tile = {"tile_n": 4, "n_splits": 4, "n_thr": 128, "vec": 2, "block_m": 1, "epilogue_thr": 128}
    fused, mma = (
        Choice.of("fused", {**tile, "ahead": 0, "collapse": 0}),
        SEAM.arm("cuda", "unfused_mma").preferred,
    )
    table = make(
        target="cuda",
        problem={"hidden_size": 4096},
        bands=(Band(1, 8, fused),),
        default=Choice.of("unfused_mma", mma),
    )
    monkeypatch.setattr(serving, "_launch", lambda *args: None)
    serving.warm_up(serving.serve(table))
    assert launched == list(table.choices)
    monkeypatch.setattr(serving, "_capturing", lambda: True)
    with pytest.raises(serving.NotCompiled, match="cannot be warmed up inside a capture; do it before"):
        serving.warm_up(table.digest)


def test_warming_up_compiles_exactly_the_tables_variants_and_nothing_compiles_after(
    make: Make, compiled: list[Variant]
) -> None:
    table = make()
    digest = serving.serve(table)
    wanted = {
        variant
        for choice in table.choices
        for variant in SEAM.arm("c", choice.arm).variants(PROBLEM, dict(choice.config))
    }
    assert serving.warm_up(digest) == len(wanted)
    assert len(compiled) == len(wanted)
    assert set(compiled) == wanted
    for num_tokens in range(1, 40):
        serving.dispatch(digest, NAME, PROBLEM, "c", num_tokens)
    serving.dispatch(digest, NAME, Problem(768, rms_eps=1e-6, post_mult=1.5), "c", 3)
    assert serving.warm_up(digest) == 0
    assert len(compiled) == len(wanted)


def test_a_dispatch_compiles_on_first_use_only(make: Make, compiled: list[Variant]) -> None:
    digest = serving.serve(make())
    first = serving.dispatch(digest, NAME, PROBLEM, "c", 2)
    assert len(compiled) == 2
    again = serving.dispatch(digest, NAME, PROBLEM, "c", 3)
    assert again.launch is first.launch
    assert len(compiled) == 2
    serving.dispatch(digest, NAME, PROBLEM, "c", 5)
    assert len(compiled) == 4, "the epilogue is shared"


def test_scratch_is_sized_for_every_choice_up_to_the_largest_token_count(
    make: Make, compiled: list[Variant]
) -> None:
    table = make()
    digest = serving.serve(table)
    largest = 33
    numel = serving.scratch_numel(digest, NAME, PROBLEM, "c", largest)
    for num_tokens in range(1, largest + 1):
        choice = table.lookup(num_tokens).choice
        arm = SEAM.arm("c", choice.arm)
        need = arm.scratch_layout(PROBLEM, dict(choice.config), num_tokens)
        assert need.numel <= numel
        assert serving.dispatch(digest, NAME, PROBLEM, "c", num_tokens).scratch == need
    built_in = SEAM.arm("c", "fused")
    expected = built_in.scratch_layout(PROBLEM, dict(built_in.preferred), largest).numel
    assert serving.scratch_numel("", NAME, PROBLEM, "c", largest) == expected


def test_each_choice_is_launched_with_its_own_kernels(
    make: Make, compiled: list[Variant], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Counts launches: fused two, unfused three."""
    launched: list[str] = []
    compile_one = serving.compile_variant

    def counting(variant: Variant) -> Compiled:
        kernel = compile_one(variant)

        def run(*args: torch.Tensor) -> None:
            launched.append(variant.kernel)
            kernel.run(*args)

        return Compiled(run, kernel.code_hash)

    monkeypatch.setattr(serving, "compile_variant", counting)
    digest = serving.serve(make())
    for num_tokens, kernels in (
        (4, ["post_pre", "epilogue"]), (5, ["post", "projection", "epilogue"]),
        (17, ["post", "projection", "epilogue"]),
    ):  # fmt: skip
        launched.clear()
        found = serving.dispatch(digest, NAME, PROBLEM, "c", num_tokens)
        config = dict(found.answer.choice.config)
        buffers = OutputBuffers(found.arm.plan(PROBLEM, config, num_tokens), "cpu").bind(num_tokens)
        found.launch(SEAM.inputs(PROBLEM, num_tokens, seed, "cpu"), buffers)
        assert launched == kernels
