"""Every seam but `post_pre_delayed` (its own file) on the C backend, against the staged float64 reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cover import pairwise

from mhctune.autotuner.bench import HostBench
from mhctune.autotuner.records import Cell as Race
from mhctune.autotuner.records import Footprint
from mhctune.kernels import forms
from mhctune.kernels.buffers import total_bytes
from mhctune.kernels.compiler import Compiler
from mhctune.kernels.draw import REGIMES
from mhctune.kernels.forms import Form
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Arm, Problem
from mhctune.kernels.space import Candidate

Run = Callable[..., dict[str, torch.Tensor]]
FORMS = tuple(form for form in forms.FORMS if form is not forms.POST_PRE_DELAYED)
ARMS = tuple((form, arm) for form in FORMS for arm in SEAMS[form.name].arms("c"))
TOKENS = (0, 1, 2, 3, 5, 8, 9, 17, 64)
SMALL = 768

# A config a hidden size: tile_n, n_splits, block_h, block_m; of a head's 4 columns a quarter or a half tile.
TILES = {
    320: (24, 5, 64, 4), 768: (24, 1, 64, 4), 4096: (12, 4, 256, 1), 5120: (6, 2, 128, 8),
    7168: (24, 4, 64, 2),
}  # fmt: skip
BLOCKS = {320: 64, 768: 256, 4096: 1024, 5120: 512, 7168: 128}
UNEVEN = {65: 64, 513: 128, 5137: 1024}
"""Sizes that only the collapse computes, with a last block that is shorter."""
FLAGS = ("norm", "aux", "carried", "delayed", "long")
# Two opposite settings a hidden size; together every two flags meet in all four ways.
PATTERNS = {320: 0b11111, 768: 0b11001, 4096: 0b10101, 5120: 0b10010, 7168: 0b01101}


@dataclass(frozen=True)
class Point:
    """A hidden size, what is tuned, and the flags of the problem."""

    hidden: int
    flags: tuple[bool, ...]

    def problem(self, form: Form, eps: float = 1e-6) -> Problem:
        fields: dict[str, Any] = dict(zip(FLAGS, self.flags, strict=True))
        iterations = 20 if fields.pop("long") else 1
        wanted = Problem(self.hidden, sinkhorn_iters=iterations, rms_eps=eps, norm_eps=eps, **fields)
        return form.canonical(wanted)

    def config(self, form: Form) -> dict[str, int]:
        if form.weights is None:
            return {"block_h": {**BLOCKS, **UNEVEN}[self.hidden]}
        tile_n, *rest = TILES[self.hidden]
        if form is forms.HC_HEAD:
            tile_n = {24: 4, 12: 2, 6: 2}[tile_n]
        return dict(zip(("tile_n", "n_splits", "block_h", "block_m"), (tile_n, *rest), strict=True))

    def arms(self, form: Form) -> list[Arm]:
        arms = SEAMS[form.name].arms("c")
        problem, config = self.problem(form), self.config(form)
        return [arm for arm in arms if not arm.space(problem).refusals(config)]

    def __str__(self) -> str:
        on = [name for name, flag in zip(FLAGS, self.flags, strict=True) if flag]
        return f"{self.hidden}[{','.join(on)}]"


def points(form: Form) -> list[Point]:
    """Return two points a hidden size; fewer where a seam does not depend on the flags."""
    found: dict[Problem, Point] = {}
    uneven = {hidden: 0 for hidden in (UNEVEN if form is forms.COLLAPSE else ())}
    for hidden, pattern in {**PATTERNS, **uneven}.items():
        for bits in (pattern, ~pattern):
            point = Point(hidden, tuple(bool(bits >> at & 1) for at in range(len(FLAGS))))
            found.setdefault(point.problem(form), point)
    return list(found.values())


@dataclass(frozen=True)
class Cell:
    """What one test computes."""

    form: Form
    point: Point
    tokens: int
    regime: str
    eps: float
    apart: bool

    def __str__(self) -> str:
        end = "-apart" if self.apart else ""
        return f"{self.form.name}-{self.point}-T{self.tokens}-{self.regime}-{self.eps:g}{end}"


def cells() -> list[Cell]:
    """Return, seam by seam, cells in which every two levels of two factors meet."""
    chosen = []
    for form in FORMS:
        apart = (False, True) if form is forms.COLLAPSE else (False,)
        factors = (points(form), TOKENS, tuple(REGIMES), (1e-6, 1e-20), apart)
        chosen += [Cell(form, *row) for row in pairwise(factors)]
    return chosen


CELLS = cells()


@pytest.fixture(scope="module")
def warm(compiler: Compiler) -> None:
    """Ask for everything this file compiles at once, so that all cores work on it."""
    for form in FORMS:
        for point in points(form):
            for arm in point.arms(form):
                compiler.request(arm.variants(point.problem(form), point.config(form)))


def with_rows_apart(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the inputs with NaN between the rows of the streams."""
    rows = inputs["residual"]
    width = math.prod(rows.shape[1:])
    wide = torch.full((rows.shape[0], width + 24), torch.nan, dtype=rows.dtype)
    view = wide[:, :width].unflatten(1, rows.shape[1:])
    view.copy_(rows)
    return {**inputs, "residual": view}


def inputs_of(form: Form, problem: Problem, tokens: int, seed: int, regime: str = "") -> dict[str, Any]:
    return SEAMS[form.name].inputs(problem, tokens, seed, "cpu", regime)


def findings(form: Form, problem: Problem, inputs: Any, buffers: Any) -> list[tuple[str, float, float]]:
    """Assert that every output is written and right; return seam and output, error and bound of each."""
    names = [spec.name for spec in form.outputs(problem, 1)]
    outputs = {name: buffers[name] for name in names}
    deviations = SEAMS[form.name].check(problem, inputs, outputs)
    assert sorted(d.output for d in deviations) == sorted(names)
    assert all(d.ok for d in deviations), "; ".join(str(d) for d in deviations if not d.ok)
    return [(f"{form.name} {d.output}", d.error, d.bound) for d in deviations]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


# --- The grid ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_arm_matches_the_reference_and_stores_the_same(
    cell: Cell, run_arm: Run, warm: None, seed: int, record_property: Callable[[str, object], None]
) -> None:
    form, problem = cell.form, cell.point.problem(cell.form, cell.eps)
    inputs = inputs_of(form, problem, cell.tokens, seed, cell.regime)
    inputs = with_rows_apart(inputs) if cell.apart else inputs
    arms = cell.point.arms(form)
    assert arms, "no arm is legal"
    first, *others = (run_arm(arm, problem, cell.point.config(form), inputs) for arm in arms)
    found = findings(form, problem, inputs, first)
    record_property("cell", found)
    for arm in arms:
        record_property("arm", (form.name, arm.name))
    for other in others:
        # Not only what is stored in bf16: with the same config the sums are split alike.
        for spec in form.outputs(problem, 1):
            assert same_bits(first[spec.name], other[spec.name]), spec.name
        record_property(
            "cell", found
        )  # equal bits have equal errors; the reference costs more than both arms


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_grid_covers_every_pair_of_factors(form: Form) -> None:
    rows = [(c.point, c.tokens, c.regime, c.eps) for c in CELLS if c.form is form]
    levels = (points(form), TOKENS, tuple(REGIMES), (1e-6, 1e-20))
    for a, b in itertools.combinations(range(4), 2):
        assert len({(row[a], row[b]) for row in rows}) == len(levels[a]) * len(levels[b]), (a, b)
    problems = [point.problem(form) for point in points(form)]
    free = [name for name in ("norm", "aux", "carried", "delayed", "sinkhorn_iters") if name in form.free]
    for one, other in itertools.combinations(free, 2):
        assert len({(getattr(p, one), getattr(p, other)) for p in problems}) == 4, (one, other)
    for name in free:
        assert len({(p.hidden_size, getattr(p, name)) for p in problems}) == 2 * len(PATTERNS), name


# --- What holds for every arm -----------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "arm"), ARMS, ids=lambda value: value.name)
def test_a_row_does_not_depend_on_its_batch(form: Form, arm: Arm, run_arm: Run, seed: int) -> None:
    problem, tokens = form.canonical(Problem(SMALL, aux=True)), 9
    inputs = inputs_of(form, problem, tokens, seed)
    batch = run_arm(arm, problem, dict(arm.preferred), inputs)
    for token in (0, 3, 8):
        row = {
            name: tensor[token : token + 1] if tensor.shape[0] == tokens else tensor
            for name, tensor in inputs.items()
        }
        alone = run_arm(arm, problem, dict(arm.preferred), row)
        for spec in form.outputs(problem, 1):
            assert same_bits(alone[spec.name][0], batch[spec.name][token]), (token, spec.name)


@pytest.mark.parametrize(("form", "arm"), ARMS, ids=lambda value: value.name)
def test_a_nan_stays_in_its_row_and_a_row_of_zeros_is_finite(
    form: Form, arm: Arm, run_arm: Run, seed: int
) -> None:
    """The rows that pad a captured graph may hold anything."""
    problem = form.canonical(Problem(SMALL, rms_eps=1e-20, norm_eps=1e-20, aux=True))
    inputs = inputs_of(form, problem, 5, seed, "zero_row")
    clean = run_arm(arm, problem, dict(arm.preferred), inputs)
    findings(form, problem, inputs, clean)
    name = form.reads[0].name
    inputs[name] = inputs[name].clone()
    inputs[name][4] = torch.nan
    dirty = run_arm(arm, problem, dict(arm.preferred), inputs)
    for spec in form.outputs(problem, 1):
        assert clean[spec.name].isfinite().all(), spec.name
        assert dirty[spec.name][4].isnan().all(), spec.name
        assert same_bits(dirty[spec.name][:4], clean[spec.name][:4]), spec.name


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_row_of_zeros_that_does_not_come_out_as_zeros_is_seen(form: Form, run_arm: Run, seed: int) -> None:
    """Half a step of zero is nothing, not half a step of 0.5."""
    problem, arm = form.canonical(Problem(SMALL, aux=True)), SEAMS[form.name].arms("c")[0]
    inputs = inputs_of(form, problem, 5, seed, "zero_row")
    outputs = run_arm(arm, problem, dict(arm.preferred), inputs)
    for spec in form.outputs(problem, 1):
        if spec.dtype == "bfloat16":
            assert not outputs[spec.name][2].any()
            wrong = {**outputs, spec.name: outputs[spec.name].clone()}
            wrong[spec.name][2].flatten()[7] = 1e-6
            found = {d.output: d for d in SEAMS[form.name].check(problem, inputs, wrong)}
            assert not found[spec.name].ok, spec.name


@pytest.mark.parametrize(("form", "arm"), ARMS, ids=lambda value: value.name)
def test_eps_values_are_run_time_scalars_of_the_same_kernels(
    form: Form, arm: Arm, run_arm: Run, seed: int, record_property: Callable[[str, object], None]
) -> None:
    usual = form.canonical(Problem(SMALL))
    odd = {"rms_eps": 0.5, "hc_pre_eps": 0.25, "sinkhorn_eps": 0.01, "post_mult": 1.5, "norm_eps": 0.5}
    problem = form.canonical(replace(usual, **odd))  # type: ignore[arg-type]
    assert arm.variants(problem, arm.preferred) == arm.variants(usual, arm.preferred)
    inputs = inputs_of(form, problem, 5, seed)
    buffers = run_arm(arm, problem, dict(arm.preferred), inputs)
    record_property("cell", findings(form, problem, inputs, buffers))
    for name in set(odd) & set(form.free):
        other = replace(problem, **{name: getattr(usual, name)})  # type: ignore[arg-type]
        assert not all(d.ok for d in SEAMS[form.name].check(other, inputs, buffers)), name


@pytest.mark.parametrize(("form", "arm"), ARMS, ids=lambda value: value.name)
def test_the_bench_of_a_sweep_checks_and_times_every_arm(
    form: Form, arm: Arm, compiler: Compiler, seed: int
) -> None:
    bench, problem = HostBench(SEAMS[form.name], compiler), form.canonical(Problem(SMALL))
    cell = Race(form.name, problem, 3)
    assert bench.enter(cell, seed) == bench.input_bytes(cell)
    candidate = Candidate.of(arm.name, arm.preferred)
    prepared = bench.prepare(candidate)
    assert isinstance(prepared, Footprint), prepared
    assert prepared.measured_bytes == total_bytes(arm.plan(problem, arm.preferred, 3))
    latency = bench.sample(candidate, 0, 0, 2)
    assert isinstance(latency, float)
    assert latency > 0


@pytest.mark.parametrize("form", [f for f in forms.FORMS if "aux" in f.free], ids=lambda form: form.name)
def test_aux_adds_an_output_and_changes_no_other(form: Form, run_arm: Run, seed: int) -> None:
    """Bit-equal to torch.mean of the stored streams; without it there is no buffer and another kernel."""
    off, on = (form.canonical(Problem(SMALL, aux=aux)) for aux in (False, True))
    for arm in SEAMS[form.name].arms("c"):
        inputs = inputs_of(form, off, 33, seed, "large")
        without, having = (run_arm(arm, problem, dict(arm.preferred), inputs) for problem in (off, on))
        assert set(having) - set(without) == {"aux"}
        assert all(same_bits(without[name], having[name]) for name in without)
        assert torch.equal(having["aux"], having["residual_out"].mean(1))


@pytest.mark.parametrize("form", [forms.PRE_BROADCAST], ids=lambda form: form.name)
@pytest.mark.parametrize("delayed", [True, False], ids=["V4.1", "V4"])
def test_the_entry_is_the_pre_block_of_equal_streams(
    form: Form, delayed: bool, run_arm: Run, seed: int
) -> None:
    """With weights summed over the streams and divisor H: within fp32 error of projecting all four."""
    problem = form.canonical(Problem(SMALL, delayed=delayed))
    other = forms.PRE_DELAYED if delayed else forms.PRE
    whole = other.canonical(Problem(SMALL, carried=False))
    inputs = inputs_of(other, whole, 5, seed)
    inputs["residual"] = inputs["residual"][:, :1].expand(-1, 4, -1).contiguous()
    entry = {**inputs, "x": inputs["residual"][:, 0].contiguous(), "fn": inputs["fn"].sum(1, keepdim=True)}
    entry = {spec.name: entry[spec.name] for spec in form.reads}
    (arm,), (other_arm,) = SEAMS[form.name].arms("c"), SEAMS[other.name].arms("c")
    found = run_arm(arm, problem, dict(arm.preferred), entry)
    expected = run_arm(other_arm, whole, dict(other_arm.preferred), inputs)
    assert same_bits(found["residual_out"], inputs["residual"])
    for spec in other.outputs(whole, 1):
        error = (found[spec.name].double() - expected[spec.name].double()).abs().max()
        assert error <= (2e-5 if spec.dtype == "float32" else 2**-5), spec.name


def test_v4_squares_the_unrounded_collapse_and_v41_the_rounded_one(run_arm: Run) -> None:
    """One row where that moves every output: all elements of the collapse round up by nearly half a step."""
    hidden, ones = SMALL, torch.ones(1, 24)
    inputs: dict[str, torch.Tensor] = {
        "residual": torch.zeros(1, 4, hidden, dtype=torch.bfloat16),
        "fn": torch.zeros(24, 4, hidden), "scale": torch.ones(3), "base": 0 * ones[0],
        "norm_weight": torch.ones(hidden, dtype=torch.bfloat16),
    }  # fmt: skip
    inputs["residual"][:, 0] = 1 + 2**-7
    # A logit of 40 makes a weight of 1 + hc_pre_eps; 0.003 of 1.0078 is just under half a step of 2^-7.
    inputs["base"][0] = 40.0
    values = {}
    for form, carried in (
        (forms.PRE, {}),
        (forms.PRE_DELAYED, {"pre_mix": torch.tensor([[1.003, 0, 0, 0]])}),
    ):
        problem = form.canonical(Problem(hidden, hc_pre_eps=0.003, norm_eps=1e-6))
        (arm,) = SEAMS[form.name].arms("c")
        values[form.name] = run_arm(arm, problem, dict(arm.preferred), {**inputs, **carried})
    rounded = torch.tensor(1.003 * (1 + 2**-7)).bfloat16().double()
    assert rounded == 1 + 2**-7
    exact = torch.tensor(1.003 * (1 + 2**-7), dtype=torch.float64)
    assert values["pre_delayed"]["layer_input"].double().eq(1).all()
    v4 = values["pre"]["layer_input"].double()
    assert v4.eq((rounded / exact).float().bfloat16().double()).all()
    assert not v4.eq(1).any()


# --- The collapse -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [64, 65])
@pytest.mark.parametrize("apart", [False, True], ids=["contiguous", "apart"])
def test_a_collapse_of_65537_tokens_is_right(
    hidden: int, apart: bool, run_arm: Run, seed: int, record_property: Callable[[str, object], None]
) -> None:
    form = forms.COLLAPSE
    problem, (arm,) = form.canonical(Problem(hidden)), SEAMS[form.name].arms("c")
    inputs = inputs_of(form, problem, 65537, seed)
    inputs = with_rows_apart(inputs) if apart else inputs
    buffers = run_arm(arm, problem, {"block_h": 64}, inputs)
    record_property("cell", findings(form, problem, inputs, buffers))


def test_index_arithmetic_holds_beyond_2_to_the_31_elements(run_arm: Run, seed: int) -> None:
    """Rows 2^30 elements apart; only their pages are ever touched, so this takes no memory."""
    form = forms.COLLAPSE
    problem, (arm,) = form.canonical(Problem(64)), SEAMS[form.name].arms("c")
    inputs = inputs_of(form, problem, 4, seed)
    arena = torch.empty(3 * 2**30 + 256, dtype=torch.bfloat16)
    far = arena.as_strided((4, 4, 64), (2**30, 64, 1))
    far.copy_(inputs["residual"])
    inputs["residual"] = far
    findings(form, problem, inputs, run_arm(arm, problem, {"block_h": 64}, inputs))


def test_without_the_other_streams_the_collapse_is_the_stream_itself(run_arm: Run, seed: int) -> None:
    form = forms.COLLAPSE
    problem, (arm,) = form.canonical(Problem(513)), SEAMS[form.name].arms("c")
    inputs = inputs_of(form, problem, 3, seed)
    inputs["pre_mix"] = torch.tensor([[0.0, 0, 1, 0]]).repeat(3, 1)
    found = run_arm(arm, problem, {"block_h": 128}, inputs)
    assert torch.equal(found["collapsed"], inputs["residual"][:, 2])
