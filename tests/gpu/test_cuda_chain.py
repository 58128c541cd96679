"""Whole models in small on a GPU: the chains of `support/chain.py`, each arm of each seam in one of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chain import (  # type: ignore[import-not-found]
    BOUND,
    SEAMS_OF,
    apart,
    chain_of,
    exact_chain,
    legal,
    model_of,
    problem_of,
    served_tables,
    v4_chain,
    v41_chain,
)

from mhctune.kernels.compiler import Compiler
from mhctune.kernels.dispatch import Choice, DispatchTable
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Arm, Problem

pytestmark = pytest.mark.usefixtures("fresh_serving")
HIDDEN = 1024
PICKS = ((0, -1), (1, -2), (2, -3))
"""Which of a seam's arms serve to 4 tokens, and above: from the first and the last inwards."""


def choose(arms: tuple[Arm, ...], problem: Problem, pick: tuple[int, int]) -> tuple[Choice, Choice]:
    few, many = (legal(arms[at % len(arms)], problem) for at in pick)
    return few, many


@pytest.fixture(scope="module", autouse=True)
def warm(compiler: Compiler) -> None:
    """Compile everything at once, on all cores."""
    for version, keys in SEAMS_OF.items():
        for name, _, aux in (key.partition("/") for key in keys):
            problem = SEAMS[name].canonical(problem_of(version, HIDDEN, aux=bool(aux)))
            for pick in PICKS:
                for choice in choose(SEAMS[name].arms("cuda"), problem, pick):
                    arm = SEAMS[name].arm("cuda", choice.arm)
                    compiler.request(arm.variants(problem, dict(choice.config)))


@pytest.mark.parametrize("pick", PICKS, ids=["outer", "inner", "middle"])
@pytest.mark.parametrize("tokens", [3, 9, 200])
@pytest.mark.parametrize("version", ["V4", "V4.1"])
def test_a_chain_equals_the_exact_one_within_the_bound(
    version: str, tokens: int, pick: tuple[int, int], make_table: Callable[..., DispatchTable], seed: int,
    record_property: Callable[..., None],
) -> None:  # fmt: skip
    """First layer, Engram, aux, last layer and head of eight layers."""
    tables = served_tables(version, "cuda", HIDDEN, make_table, lambda arms, p: choose(arms, p, pick))
    model = model_of(tokens, seed, HIDDEN, "cuda")
    exact, exact_aux = exact_chain(version, model)
    ours, aux = chain_of(version)(model, tables)
    found = [("chain head", apart(ours, exact), BOUND), ("chain aux", apart(aux, exact_aux), BOUND)]
    record_property("cell", found)
    assert all(error <= bound for _, error, bound in found), (version, tokens, found)


def test_a_chain_with_bf16_weights_equals_the_exact_one_of_those_weights(
    make_table: Callable[..., DispatchTable], seed: int
) -> None:
    tables = served_tables("V4", "cuda", HIDDEN, make_table, lambda arms, p: choose(arms, p, PICKS[0]))
    model = model_of(5, seed, HIDDEN, "cuda")
    for weights in model.seams[1:]:
        weights.fn = weights.fn.bfloat16().float()
    ours, _ = v4_chain(model, tables, bf16_from=11)  # behind the layer that asks for aux
    assert apart(ours, exact_chain("V4", model)[0]) <= BOUND


def test_a_pre_mix_that_is_not_handed_on_is_seen(make_table: Callable[..., DispatchTable], seed: int) -> None:
    tables = served_tables("V4.1", "cuda", HIDDEN, make_table, lambda arms, p: choose(arms, p, PICKS[0]))
    model = model_of(9, seed, HIDDEN, "cuda")
    stale, _ = v41_chain(model, tables, stale=True)
    assert apart(stale, exact_chain("V4.1", model)[0]) > 3 * BOUND
