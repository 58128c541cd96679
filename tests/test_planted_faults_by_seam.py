"""Planted faults of every other seam: which faults a seam can have, and the inputs that catch each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from plain import run

from mhctune.kernels import forms
from mhctune.kernels.forms import Form
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Deviation, Problem, Tensors

HIDDEN, TOKENS = 256, 16
FORMS = tuple(form for form in forms.FORMS if form is not forms.POST_PRE_DELAYED)

POST = (
    "comb transposed in the post block", "comb of the post block in bfloat16",
    "comb of the post block in TF32", "x left out of the post block", "a row's streams from its neighbour",
    "streams truncated", "streams rounded half away",
)  # fmt: skip
AFTER_POST = (
    "unrounded streams projected", "unrounded streams squared", "collapse of unrounded streams",
    "collapse of the old streams",
)  # fmt: skip
PROJECTION = (
    "last eighth of H not squared", "last eighth of H not projected",
    "a row's partial sums from its neighbour",
    "second row of a block holds the sum of both", "rms_eps missing", "rms_eps outside the rsqrt",
    "rms_eps before the division",
)  # fmt: skip
FP32_WEIGHTS = ("weights in bfloat16", "operands in TF32")
FOUR_STREAMS = ("one stream not projected", "streams flattened in reverse", "divisor H instead of 4 H")
ENTRY = ("divisor 4 H instead of H", "an entry's fourth stream left out")
MIXES = (
    "last column tile dropped", "hc_pre_eps inside the sigmoid", "hc_pre_eps on post as well",
    "sinkhorn_eps in place of hc_pre_eps", "post_mult missing", "pre and post columns swapped",
    "scale[1] for comb", "scale[0] for post", "norm_eps in place of rms_eps", "one iteration more",
    "one iteration less", "last step a row step", "first column step missing", "softmax over columns",
    "softmax without eps", "eps inside the softmax's denominator", "row denominators without eps",
    "column denominators without eps", "comb stored transposed",
)  # fmt: skip
PRE = ("hc_pre_eps missing", "post_mult on pre as well", "base missing")
COLLAPSE = ("layer input truncated",)
WEIGHTED = ("pre-mix in bfloat16",)
APART = ("collapse with the wrong streams",)
NORM = (
    "norm weight missing", "norm of the unrounded collapse", "norm divisor 4 H", "norm_eps missing",
    "norm_eps outside the rsqrt", "rms_eps in place of norm_eps",
)  # fmt: skip
OF_THE_ROUNDING = ("norm of the unrounded collapse", "norm squares of the rounded collapse")
AUX = (
    "aux of the unrounded streams", "aux of the old streams", "aux summed in bfloat16",
    "aux summed and not divided",
)  # fmt: skip

# Where a fault shows, if not in the regime `served` of the usual problem.
CARRIED, PLAIN, SHARP = ("served", {"carried": True}), ("served", {"norm": False}), ("sharp", {})
HALF, QUARTER = ("served", {"norm_eps": 0.5}), ("served", {"hc_pre_eps": 0.25})
WHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "rms_eps missing": ("tiny", {"rms_eps": 1e-10}),
    "rms_eps outside the rsqrt": ("served", {"rms_eps": 0.5}),
    "rms_eps before the division": ("served", {"rms_eps": 0.5}),
    "norm_eps in place of rms_eps": ("served", {"norm_eps": 0.5}),
    "rms_eps in place of norm_eps": ("served", {"rms_eps": 0.5}),
    "norm_eps missing": ("zero_row", {}),
    "norm_eps outside the rsqrt": ("zero_row", {}),
    "hc_pre_eps missing": ("served", {"hc_pre_eps": 0.25, "norm": False}),
    "hc_pre_eps inside the sigmoid": ("served", {"hc_pre_eps": 0.25, "norm": False}),
    "hc_pre_eps on post as well": ("served", {"hc_pre_eps": 0.25}),
    "sinkhorn_eps in place of hc_pre_eps": ("served", {"hc_pre_eps": 0.25, "norm": False}),
    # The norm forgets a factor of the collapse.
    "post_mult on pre as well": ("served", {"norm": False}),
    "one iteration more": SHARP,
    "one iteration less": SHARP,
    "last step a row step": SHARP,
    "row denominators without eps": ("sharp", {"sinkhorn_eps": 0.01}),
    "column denominators without eps": ("served", {"sinkhorn_eps": 0.01}),
}
SURVIVORS = {
    # At a tie the check takes either neighbour; inputs made of ties are in test_post_pre_delayed.py, which
    # shares the macro that rounds.
    "streams rounded half away",
}


def faults_of(form: Form) -> tuple[str, ...]:
    """Return the faults that a seam can have."""
    mixes = form.weights is not None and form is not forms.HC_HEAD
    norm_squares = "unrounded" if form is forms.PRE_DELAYED else "rounded"
    groups = (
        (form.has_post, POST),
        (form.has_post and mixes, AFTER_POST),
        (form.weights is not None, PROJECTION),
        (form.weights is not None and form.weights.dtype == "float32", FP32_WEIGHTS),
        (form.weights is not None and not form.broadcast, FOUR_STREAMS),
        (form.broadcast, ENTRY),
        (mixes, MIXES),
        (form.weights is not None, PRE),
        (form is not forms.POST, COLLAPSE),
        (form not in (forms.POST, forms.PRE_BROADCAST), WEIGHTED + APART),
        (form is forms.PRE_BROADCAST, WEIGHTED),
        (mixes, (*NORM, f"norm squares of the {norm_squares} collapse")),
        ("aux" in form.free, AUX),
        (form is forms.PRE_DELAYED, ("collapse with the new pre-mix", "absent pre-mix takes the mean")),
    )
    return tuple(fault for applies, faults in groups if applies for fault in faults)


CASES = [(form, fault) for form in FORMS for fault in faults_of(form)]
CASES += [(forms.POST_PRE_DELAYED, fault) for fault in AUX]  # its others have a file of their own


def problem_of(form: Form, fault: str) -> tuple[str, Problem]:
    """Return regime and problem that show a fault."""
    regime, changes = WHERE.get(fault, ("served", {}))
    usual: dict[str, Any] = {"aux": fault in AUX, "delayed": form is not forms.PRE_BROADCAST}
    if form is forms.PRE_BROADCAST:
        # V4 weights the streams; V4.1 takes the embedding as it is: nothing is rounded before the norm.
        usual["delayed"] = fault not in (*WEIGHTED, *OF_THE_ROUNDING)
    if fault == "absent pre-mix takes the mean":
        usual["carried"] = False
    return regime, form.canonical(replace(Problem(HIDDEN, **usual), **changes))


def deviations(form: Form, regime: str, problem: Problem, seed: int) -> list[Deviation]:
    seam = SEAMS[form.name]
    inputs = seam.inputs(problem, TOKENS, seed, "cpu", regime)
    return seam.check(problem, inputs, run(form, problem, inputs))


@cache
def right(form: Form, regime: str, problem: Problem) -> Tensors:
    """Inputs with which the plain version without a fault is right; shared by the faults of a problem."""
    seed = int.from_bytes(hashlib.sha256(f"{form.name} {regime} {problem}".encode()).digest()[:4], "big")
    inputs = SEAMS[form.name].inputs(problem, TOKENS, seed, "cpu", regime)
    found = SEAMS[form.name].check(problem, inputs, run(form, problem, inputs))
    assert all(d.ok for d in found), "wrong without the fault"
    return inputs


@pytest.mark.parametrize(("form", "fault"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_planted_fault_is_caught_where_the_list_says(
    form: Form, fault: str, record_property: Callable[[str, object], None]
) -> None:
    regime, problem = problem_of(form, fault)
    inputs = right(form, regime, problem)
    # A name misspelt in the list or in the plain version would be no fault, and would not be caught.
    found = SEAMS[form.name].check(problem, inputs, run(form, problem, inputs, fault))
    if fault in SURVIVORS:
        assert all(d.ok for d in found)
        return
    worst = max(found, key=lambda d: (not d.ok, d.error if d.bound == 0 else d.error / d.bound))
    label = ", ".join([regime, *(f"{n}={v:g}" for n, v in WHERE.get(fault, ("", {}))[1].items())])
    times = "not 0" if worst.bound == 0 else f"{worst.error / worst.bound:.3g} x bound"
    record_property("fault", (f"{form.name}: {fault}", label, worst.output, times))
    assert not worst.ok, "; ".join(map(str, found))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_plain_version_without_a_fault_passes_in_every_regime(form: Form, seed: int) -> None:
    flags = ({}, {"norm": False, "aux": True}, {"carried": False, "delayed": False})
    problems = {
        form.canonical(Problem(320, rms_eps=eps, norm_eps=eps, **changes)): None  # type: ignore[arg-type]
        for changes in flags
        for eps in (1e-6, 1e-20, 0.5)
    }
    for regime in SEAMS[form.name].regimes:
        for problem in problems:  # each once: a seam knows not every flag
            found = deviations(form, regime, problem, seed)
            assert all(d.ok for d in found), "; ".join(str(d) for d in found if not d.ok)
