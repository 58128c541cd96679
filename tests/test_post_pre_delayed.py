"""The seam's kernels on the C backend, against the staged float64 reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mhctune.kernels import reference
from mhctune.kernels.buffers import OutputBuffers, Role, stray_nans, unwritten
from mhctune.kernels.compiler import Compiler
from mhctune.kernels.draw import REGIMES
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Arm, Problem

Run = Callable[..., dict[str, torch.Tensor]]
Config = dict[str, int]

SEAM = find_seam("post_pre_delayed")
FUSED, UNFUSED = SEAM.arm("c", "fused"), SEAM.arm("c", "unfused")
ARMS = SEAM.arms("c")
OUTPUTS = tuple(spec.name for spec in SEAM.outputs(Problem(256), 1))
TUNABLES = ("tile_n", "n_splits", "block_h", "block_m")
SMALL = 768  # an odd multiple of 256

# Three to five configs a hidden size; together they use every value of every tunable.
CONFIGS = {
    768: ((24, 1, 64, 4), (24, 1, 256, 1), (12, 2, 128, 2), (6, 4, 64, 4), (24, 2, 64, 8)),
    4096: ((24, 8, 64, 8), (12, 4, 256, 1), (6, 1, 128, 4)),
    5120: ((24, 5, 256, 4), (12, 8, 64, 2), (6, 2, 128, 8)),
    7168: ((6, 8, 128, 1), (24, 4, 64, 2), (12, 1, 256, 8)),
}
POINTS = [(hidden, values) for hidden, several in CONFIGS.items() for values in several]
TOKENS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64, 65)
SHAPES = list(itertools.product((True, False), (True, False), REGIMES))  # carried, norm, regime

Cell = tuple[int, tuple[int, ...], int, bool, bool, str]


def cells() -> list[Cell]:
    """Return every config at every token count; 7 has no divisor in common with the 24 shapes, so that
    all pairs of the other factors occur as well."""
    return [
        (hidden, values, tokens, *SHAPES[(7 * i + j) % len(SHAPES)])
        for i, (hidden, values) in enumerate(POINTS)
        for j, tokens in enumerate(TOKENS)
    ]


def label(cell: Cell) -> str:
    hidden, values, tokens, carried, norm, regime = cell
    config = "-".join(f"{name}{value}" for name, value in zip("nshm", values, strict=True))
    mix, end = "carried" if carried else "absent", "norm" if norm else "plain"
    return f"{hidden}-{config}-T{tokens}-{mix}-{end}-{regime}"


def config_of(values: tuple[int, ...]) -> Config:
    return dict(zip(TUNABLES, values, strict=True))


@pytest.fixture(scope="module")
def warm(compiler: Compiler) -> None:
    """Ask for everything this file compiles at once, so that all cores work on it."""
    for arm in (FUSED, UNFUSED):
        for hidden, values in POINTS:
            for carried, norm in itertools.product((True, False), repeat=2):
                compiler.request(arm.variants(Problem(hidden, carried, norm), config_of(values)))
    for iterations in GOLDEN:
        compiler.request(UNFUSED.variants(Problem(SMALL, sinkhorn_iters=iterations), dict(UNFUSED.preferred)))


def findings(problem: Problem, inputs: Any, buffers: Any) -> list[tuple[str, float, float]]:
    """Assert that every output is written and right; return output, error and bound of each."""
    deviations = SEAM.check(problem, inputs, {name: buffers[name] for name in OUTPUTS})
    assert {d.output for d in deviations} == set(OUTPUTS)
    assert all(d.ok for d in deviations), "; ".join(str(d) for d in deviations if not d.ok)
    return [(d.output, d.error, d.bound) for d in deviations]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare through an integer view: NaN equals itself, and -0 is not 0."""
    integer = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


# --- The grid ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", cells(), ids=label)
def test_both_arms_match_the_reference_and_store_the_same_streams(
    cell: Cell, run_arm: Run, warm: None, seed: int, record_property: Callable[[str, object], None]
) -> None:
    hidden, values, tokens, carried, norm, regime = cell
    problem = Problem(hidden, carried, norm)
    inputs = SEAM.inputs(problem, tokens, seed, "cpu", regime)
    fused, unfused = (run_arm(arm, problem, config_of(values), inputs) for arm in (FUSED, UNFUSED))
    for buffers in (fused, unfused):
        assert not any(unwritten(buffer) for buffer in buffers.values()), "scratch left unwritten"
    for name in ("residual_out", "layer_input"):
        assert same_bits(fused[name], unfused[name]), name
    found = findings(problem, inputs, fused)
    record_property("cell", found)
    # Equal bits have equal errors; the reference costs more than both arms.
    if not all(same_bits(fused[name], unfused[name]) for name in OUTPUTS):
        found = findings(problem, inputs, unfused)
    record_property("cell", found)


def test_the_grid_covers_every_pair_of_factors_and_every_tunable_value() -> None:
    chosen = cells()
    points = {(cell[0], cell[1]) for cell in chosen}
    for first, second in itertools.combinations(range(5), 2):
        factors = [[(cell[0], cell[1]), cell[2], cell[3], cell[4], cell[5]] for cell in chosen]
        levels = [points, set(TOKENS), {True, False}, {True, False}, set(REGIMES)]
        seen = {(row[first], row[second]) for row in factors}
        assert len(seen) == len(levels[first]) * len(levels[second]), (first, second)
    for index, tunable in enumerate(FUSED.space(Problem(SMALL)).tunables):
        assert {values[index] for _, values in points} == set(tunable.values), tunable.name
    for hidden, values in points:
        for arm in (FUSED, UNFUSED):
            assert arm.space(Problem(hidden)).refusals(config_of(values)) == ()


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_thousand_tokens_match_the_reference(
    arm: Arm, run_arm: Run, warm: None, seed: int, record_property: Callable[[str, object], None]
) -> None:
    problem = Problem(SMALL)
    inputs = SEAM.inputs(problem, 1024, seed, "cpu")
    record_property(
        "cell", findings(problem, inputs, run_arm(arm, problem, config_of((24, 2, 64, 8)), inputs))
    )


@pytest.mark.parametrize("hidden", CONFIGS)
def test_the_stored_streams_do_not_depend_on_arm_or_config(
    hidden: int, run_arm: Run, warm: None, seed: int
) -> None:
    problem = Problem(hidden)
    inputs = SEAM.inputs(problem, 5, seed, "cpu")
    first, *others = (
        run_arm(arm, problem, config_of(values), inputs)
        for arm in (FUSED, UNFUSED)
        for values in CONFIGS[hidden]
    )
    assert len(others) == 2 * len(CONFIGS[hidden]) - 1
    for other in others:
        assert same_bits(first["residual_out"], other["residual_out"])
        assert same_bits(first["layer_input"], other["layer_input"])


@pytest.mark.parametrize("values", CONFIGS[SMALL], ids=str)
@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_row_does_not_depend_on_its_batch(
    arm: Arm, values: tuple[int, ...], run_arm: Run, warm: None, seed: int
) -> None:
    problem, tokens = Problem(SMALL), 9
    inputs = SEAM.inputs(problem, tokens, seed, "cpu")
    batch = run_arm(arm, problem, config_of(values), inputs)
    for token in range(tokens):
        row = {
            name: tensor[token : token + 1] if tensor.shape[0] == tokens else tensor
            for name, tensor in inputs.items()
        }
        alone = run_arm(arm, problem, config_of(values), row)
        for name in OUTPUTS:
            assert same_bits(alone[name][0], batch[name][token]), (token, name)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_without_pre_mix_and_norm_the_layer_input_is_stream_zero_bit_for_bit(
    arm: Arm, run_arm: Run, warm: None, seed: int
) -> None:
    problem = Problem(SMALL, carried=False, norm=False)
    for regime in SEAM.regimes:
        buffers = run_arm(arm, problem, dict(arm.preferred), SEAM.inputs(problem, 5, seed, "cpu", regime))
        assert same_bits(buffers["layer_input"], buffers["residual_out"][:, 0])


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_launch_writes_again_what_a_launch_before_it_wrote(
    arm: Arm, compiler: Compiler, warm: None, seed: int
) -> None:
    problem, config = Problem(SMALL), dict(arm.preferred)
    launch = arm.bind(problem, config, [compiler.get(v).run for v in arm.variants(problem, config)])
    buffers = OutputBuffers(arm.plan(problem, config, 5), "cpu", slots=2)
    for inputs in (SEAM.inputs(problem, 5, seed, "cpu"), SEAM.inputs(problem, 5, seed + 1, "cpu", "large")):
        for slot in range(2):
            launch(inputs, buffers.bind(5, slot))
            findings(problem, inputs, buffers.bind(5, slot))


# --- NaN --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0x7FC0, 0x7FFF, 0xFFFF, 0x7F81], ids=hex)
@pytest.mark.parametrize("where", ["residual", "x"])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_nan_stays_a_nan_and_stays_in_its_row(
    arm: Arm, norm: bool, where: str, bits: int, run_arm: Run, warm: None, seed: int
) -> None:
    problem, tokens, row, column = Problem(SMALL, norm=norm), 5, 2, 300
    inputs = SEAM.inputs(problem, tokens, seed, "cpu")
    clean = run_arm(arm, problem, dict(arm.preferred), inputs)
    spot = inputs[where][row, 3] if where == "residual" else inputs[where][row]
    spot.view(torch.int16)[column] = bits - (1 << 16 if bits >> 15 else 0)
    assert spot[column].isnan()
    buffers = run_arm(arm, problem, dict(arm.preferred), inputs)

    assert buffers["residual_out"][row, :, column].isnan().all()
    assert buffers["residual_out"].isnan().sum() == 4
    assert buffers["layer_input"][row, column].isnan()
    assert buffers["layer_input"][row].isnan().sum() == (SMALL if norm else 1)
    for name in ("next_post_mix", "next_comb_mix", "next_pre_mix"):
        assert buffers[name][row].isnan().all()
    assert not any(unwritten(buffers[name]) for name in OUTPUTS)
    assert stray_nans(buffers)["residual_out"] == 4
    others = [token for token in range(tokens) if token != row]
    for name in OUTPUTS:
        assert same_bits(buffers[name][others], clean[name][others]), name


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7FFF8000], ids=hex)
@pytest.mark.parametrize("where", ["post_mix", "comb_mix", "pre_mix"])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_nan_in_a_coefficient_is_not_rounded_into_a_number(
    arm: Arm, norm: bool, where: str, bits: int, run_arm: Run, warm: None, seed: int
) -> None:
    """A full payload plus the rounding increment would carry into the exponent and give -0."""
    problem, tokens, row = Problem(SMALL, norm=norm), 3, 1
    inputs = SEAM.inputs(problem, tokens, seed, "cpu")
    clean = run_arm(arm, problem, dict(arm.preferred), inputs)
    inputs[where][row].view(torch.int32).flatten()[-1] = bits - (1 << 32 if bits >> 31 else 0)
    buffers = run_arm(arm, problem, dict(arm.preferred), inputs)

    assert buffers["layer_input"][row].isnan().all()
    if where != "pre_mix":
        assert buffers["residual_out"][row, 3].isnan().all()
        assert not buffers["residual_out"][row, :3].isnan().any()
    for name in OUTPUTS:
        assert same_bits(buffers[name][[0, 2]], clean[name][[0, 2]]), name


# --- Ties, which the check leaves open --------------------------------------------------------------------


def ties() -> tuple[torch.Tensor, torch.Tensor]:
    """Return bf16 numbers whose sums lie halfway between two bf16 numbers, below odd and even ones."""
    steps = torch.arange(128, dtype=torch.float32)
    a = torch.cat([1 + steps / 128, -1 - steps / 128])
    b = torch.where(a > 0, 2.0**-8, -(2.0**-8))
    return a.bfloat16(), b.bfloat16()


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_stream_halfway_between_two_numbers_becomes_the_even_one(
    arm: Arm, run_arm: Run, warm: None
) -> None:
    problem = Problem(SMALL, carried=False, norm=False)
    inputs = SEAM.inputs(problem, 1, 0, "cpu")
    a, b = (part.repeat(3) for part in ties())
    inputs["residual"][0, :], inputs["x"][0] = a, b
    inputs["comb_mix"][0], inputs["post_mix"][0] = torch.eye(4), torch.ones(4)
    expected = (a.float() + b.float()).bfloat16()
    assert not same_bits(expected, a)
    buffers = run_arm(arm, problem, dict(arm.preferred), inputs)
    for stream in range(4):
        assert same_bits(buffers["residual_out"][0, stream], expected)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_collapse_halfway_between_two_numbers_becomes_the_even_one(
    arm: Arm, norm: bool, run_arm: Run, warm: None
) -> None:
    problem = Problem(SMALL, norm=norm)
    inputs = SEAM.inputs(problem, 1, 0, "cpu")
    a, b = (part.repeat(3) for part in ties())
    inputs["residual"][0, 0], inputs["residual"][0, 1] = a, b
    inputs["comb_mix"][0], inputs["post_mix"][0] = torch.eye(4), torch.zeros(4)
    inputs["pre_mix"][0] = torch.tensor([1.0, 1.0, 0.0, 0.0])
    collapsed = (a.float() + b.float()).bfloat16().double()
    expected = collapsed
    if norm:
        rstd = torch.rsqrt(collapsed.square().mean() + problem.norm_eps)
        expected = collapsed * rstd * inputs["norm_weight"].double()
    buffers = run_arm(arm, problem, dict(arm.preferred), inputs)
    step = reference.step_of(expected) / 2 * (1 + 1e-3)
    assert ((buffers["layer_input"][0].double() - expected).abs() <= (step if norm else 0.0)).all()


# --- Sinkhorn and the run-time scalars --------------------------------------------------------------------

LOGITS = [[2, -1, 0, 0.5], [0, 3, -2, 1], [-1, 0.25, 1.5, 0], [0.75, 0, -0.5, 2]]
# From facts/mhc.md 1.6: the first rows, and for 20 iterations all rows; float64, eps 1e-6, 7 digits.
GOLDEN = {
    1: [[0.7144216, 0.0308946, 0.1224874, 0.1471029]],
    2: [[0.7060372, 0.0282811, 0.1335271, 0.1417147]],
    10: [[0.6966467, 0.0250042, 0.1422060, 0.1363870]],
    20: [
        [0.6965159, 0.0249653, 0.1422003, 0.1363183],
        [0.0554080, 0.8011691, 0.0113137, 0.1321063],
        [0.0411958, 0.1035125, 0.7570702, 0.0982211],
        [0.2068792, 0.0703520, 0.0894147, 0.6333533],
    ],
}


@pytest.mark.parametrize("iterations", GOLDEN)
def test_the_reference_has_the_golden_sinkhorn_values(iterations: int) -> None:
    comb = reference.sinkhorn(torch.tensor(LOGITS), iterations, 1e-6)
    expected = torch.tensor(GOLDEN[iterations], dtype=torch.float64)
    torch.testing.assert_close(comb[: len(expected)], expected, atol=6e-8, rtol=0)


def test_the_references_column_sums_are_one_and_its_row_sums_nearly() -> None:
    once, often = (reference.sinkhorn(torch.tensor(LOGITS), iterations, 1e-6) for iterations in (1, 20))
    rows = torch.tensor([1.01491, 0.88783, 1.14006, 0.95720], dtype=torch.float64)
    torch.testing.assert_close(once.sum(1), rows, atol=1e-5, rtol=0)
    rows = torch.tensor([0.9999999, 0.9999972, 0.9999997, 0.9999993], dtype=torch.float64)
    torch.testing.assert_close(often.sum(1), rows, atol=1e-7, rtol=0)
    columns = torch.full((4,), 0.999999, dtype=torch.float64)
    torch.testing.assert_close(once.sum(0), columns, atol=5e-7, rtol=0)
    torch.testing.assert_close(often.sum(0), columns, atol=1e-7, rtol=0)


@pytest.mark.parametrize("iterations", GOLDEN)
def test_the_kernel_has_the_golden_sinkhorn_values(
    iterations: int, run_arm: Run, warm: None, seed: int
) -> None:
    """With weights of zero the logits are the base."""
    problem = Problem(SMALL, sinkhorn_iters=iterations)
    inputs = SEAM.inputs(problem, 3, seed, "cpu")
    inputs["fn"].zero_()
    inputs["base"][8:] = torch.tensor(LOGITS).flatten()
    buffers = run_arm(UNFUSED, problem, dict(UNFUSED.preferred), inputs)
    expected = torch.tensor(GOLDEN[iterations])
    for token in range(3):
        comb = buffers["next_comb_mix"][token, : len(expected)]
        torch.testing.assert_close(comb, expected, atol=5e-7, rtol=0)


@pytest.mark.parametrize("regime", SEAM.regimes)
@pytest.mark.parametrize("iterations", GOLDEN)
def test_any_iteration_count_matches_the_reference(
    iterations: int, regime: str, run_arm: Run, warm: None, seed: int,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    problem = Problem(SMALL, sinkhorn_iters=iterations)
    inputs = SEAM.inputs(problem, 9, seed, "cpu", regime)
    buffers = run_arm(UNFUSED, problem, dict(UNFUSED.preferred), inputs)
    record_property("cell", findings(problem, inputs, buffers))


SCALARS = {
    "hc_pre_eps": {"hc_pre_eps": 0.25},
    "sinkhorn_eps": {"sinkhorn_eps": 0.01},
    "post_mult": {"post_mult": 1.5},
    "norm_eps": {"norm_eps": 0.5},
    "rms_eps": {"rms_eps": 0.5},
    "all": {"hc_pre_eps": 0.25, "sinkhorn_eps": 0.01, "post_mult": 1.5, "norm_eps": 0.5, "rms_eps": 0.5},
}


@pytest.mark.parametrize("regime", SEAM.regimes)
@pytest.mark.parametrize("scalars", SCALARS.values(), ids=list(SCALARS))
@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_eps_values_are_run_time_scalars_of_the_same_compiled_kernels(
    arm: Arm, scalars: dict[str, float], regime: str, run_arm: Run, warm: None, seed: int,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    usual, config = Problem(SMALL), dict(arm.preferred)
    problem = replace(usual, **scalars)
    assert arm.variants(problem, config) == arm.variants(usual, config)
    inputs = SEAM.inputs(problem, 5, seed, "cpu", regime)
    buffers = run_arm(arm, problem, config, inputs)
    record_property("cell", findings(problem, inputs, buffers))
    wrong = SEAM.check(usual, inputs, {name: buffers[name] for name in OUTPUTS})
    if regime == "served":
        assert not all(d.ok for d in wrong), "the check does not see the scalar"


# --- Illegal configs, launched all the same ---------------------------------------------------------------

ILLEGAL = {
    "tile_n 7 leaves 3 columns": (768, (7, 1, 64, 4), "next_comb_mix"),
    "tile_n 5 leaves 4 columns": (768, (5, 1, 64, 2), "next_comb_mix"),
    "n_splits 5 of 768 leaves a slice in each split": (768, (24, 5, 64, 4), "next_post_mix"),
    "block_h 512 of 768 leaves a third": (768, (24, 1, 512, 4), "next_post_mix"),
    "block_h 24 leaves half a row of lanes": (768, (24, 1, 24, 4), "next_post_mix"),
}


@pytest.mark.parametrize(("hidden", "values", "output"), ILLEGAL.values(), ids=list(ILLEGAL))
@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_an_illegal_config_is_refused_and_would_be_caught(
    arm: Arm, hidden: int, values: tuple[int, ...], output: str, run_arm: Run, warm: None, seed: int
) -> None:
    problem, config = Problem(hidden), config_of(values)
    assert arm.space(problem).refusals(config)
    inputs = SEAM.inputs(problem, 3, seed, "cpu")
    buffers = run_arm(arm, problem, config, inputs)
    found = {d.output: d for d in SEAM.check(problem, inputs, {n: buffers[n] for n in OUTPUTS})}
    assert not found[output].ok


def test_a_fused_kernel_that_drops_a_slice_leaves_poison_in_the_streams(
    run_arm: Run, warm: None, seed: int
) -> None:
    problem = Problem(768)
    inputs = SEAM.inputs(problem, 3, seed, "cpu")
    buffers = run_arm(FUSED, problem, config_of((24, 5, 64, 4)), inputs)
    found = {d.output: d for d in SEAM.check(problem, inputs, {n: buffers[n] for n in OUTPUTS})}
    assert found["residual_out"].unwritten == 3 * 4 * (768 - 5 * 128)


def test_the_post_kernel_would_leave_poison_where_its_block_does_not_divide_hidden(
    run_arm: Run, warm: None, seed: int
) -> None:
    problem, config = Problem(320), config_of((24, 1, 64, 1))
    assert FUSED.space(problem).refusals(config) == ()
    assert any("post kernel" in reason for reason in UNFUSED.space(problem).refusals(config))
    inputs = SEAM.inputs(problem, 2, seed, "cpu")
    found = {d.output: d for d in SEAM.check(problem, inputs, run_arm(UNFUSED, problem, config, inputs))}
    assert found["residual_out"].unwritten == 2 * 4 * 64


def test_an_uneven_hidden_size_is_computed_right_where_it_is_legal(
    run_arm: Run, warm: None, seed: int, record_property: Callable[[str, object], None]
) -> None:
    problem, config = Problem(320), config_of((24, 5, 64, 4))
    inputs = SEAM.inputs(problem, 6, seed, "cpu")
    record_property("cell", findings(problem, inputs, run_arm(FUSED, problem, config, inputs)))


# --- The arms as objects ----------------------------------------------------------------------------------


def test_the_seam_and_both_arms_plan_the_same_outputs() -> None:
    problem = Problem(5120)
    for arm in (FUSED, UNFUSED):
        planned = arm.plan(problem, dict(arm.preferred), 64)
        assert tuple(s for s in planned if s.role is Role.OUTPUT) == SEAM.outputs(problem, 64)


def test_inputs_are_the_same_for_the_same_seed_and_fresh_for_another() -> None:
    first, again, other = (SEAM.inputs(Problem(256), 3, seed, "cpu") for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_an_unknown_regime_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="stormy"):
        SEAM.inputs(Problem(256), 1, 1, "cpu", "stormy")


def test_the_check_reports_nan_and_poison_and_infinity_as_wrong(run_arm: Run, warm: None, seed: int) -> None:
    problem = Problem(SMALL)
    inputs = SEAM.inputs(problem, 3, seed, "cpu")
    for name, value in itertools.product(OUTPUTS, (torch.nan, torch.inf)):
        outputs = {n: t.clone() for n, t in run_arm(FUSED, problem, dict(FUSED.preferred), inputs).items()}
        outputs[name].flatten()[-1] = value
        found = {d.output: d for d in SEAM.check(problem, inputs, {n: outputs[n] for n in OUTPUTS})}
        assert not found[name].ok, (name, value)
