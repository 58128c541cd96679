"""The torch ops: both forms, what they refuse, and that the result does not depend on what was there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mhctune.kernels import ops, serving
from mhctune.kernels.buffers import OutputBuffers, poison, unwritten
from mhctune.kernels.dispatch import Band, Choice, DispatchTable, TableError
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Problem

SEAM = find_seam("post_pre_delayed")
PROBLEM = Problem(768)
ALLOCATING, OUT = torch.ops.mhctune.post_pre_delayed, torch.ops.mhctune.post_pre_delayed_out
OUTPUTS = ("residual_out", "next_post_mix", "next_comb_mix", "layer_input", "next_pre_mix")
INPUTS = ("x", "residual", "post_mix", "comb_mix", "fn", "scale", "base", "pre_mix", "norm_weight")
FUSED = Choice.of("fused", {"tile_n": 24, "n_splits": 1, "block_h": 64, "block_m": 4})
UNFUSED = Choice.of("unfused", {"tile_n": 24, "n_splits": 2, "block_h": 64, "block_m": 8})

PROBLEMS = {
    "usual": PROBLEM,
    "absent": replace(PROBLEM, carried=False),
    "plain": replace(PROBLEM, norm=False),
    "absent and plain": replace(PROBLEM, carried=False, norm=False),
    "other eps": replace(
        PROBLEM, rms_eps=0.5, hc_pre_eps=0.25, sinkhorn_eps=0.01, norm_eps=0.5, post_mult=1.5
    ),
}

Tensors = dict[str, torch.Tensor]


pytestmark = pytest.mark.usefixtures("fresh_serving")


def inputs_of(problem: Problem, num_tokens: int, seed: int) -> dict[str, torch.Tensor | None]:
    tensors: dict[str, torch.Tensor | None] = dict(SEAM.inputs(problem, num_tokens, seed, "cpu"))
    if not problem.carried:
        tensors["pre_mix"] = None
    if not problem.norm:
        tensors["norm_weight"] = None
    return {name: tensors[name] for name in INPUTS}


def scalars_of(problem: Problem) -> tuple[float, ...]:
    p = problem
    return p.rms_eps, p.hc_pre_eps, p.sinkhorn_eps, p.post_mult, p.norm_eps, p.sinkhorn_iters


def outputs_of(problem: Problem, num_tokens: int, spare: int = 0, table: str = "") -> Tensors:
    """Poisoned outputs and scratch, the scratch larger than needed by `spare`."""
    outputs = OutputBuffers(SEAM.outputs(problem, num_tokens), "cpu")
    outputs.poison()
    numel = serving.scratch_numel(table, SEAM.name, problem, "c", num_tokens) + spare
    scratch = torch.empty(numel)
    poison(scratch)
    return {**outputs.bind(num_tokens), "scratch": scratch}


def call(problem: Problem, inputs: dict[str, Any], table: str = "") -> Tensors:
    result = ALLOCATING(*inputs.values(), *scalars_of(problem), table)
    return dict(zip(OUTPUTS, result, strict=True))


def call_out(problem: Problem, inputs: dict[str, Any], outputs: Tensors, table: str = "") -> None:
    written = [outputs[name] for name in OUTPUTS]
    OUT(*inputs.values(), *written, outputs["scratch"], *scalars_of(problem), table)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return a.shape == b.shape and torch.equal(a.view(integer), b.view(integer))


@pytest.fixture
def table(make_table: Callable[..., DispatchTable]) -> str:
    """The digest of a served table: fused up to 3 tokens, unfused to 16."""
    return serving.serve(
        make_table(
            problem=PROBLEM.to_dict(),
            target="c",
            bands=(Band(1, 3, FUSED), Band(4, 16, UNFUSED)),
            default=UNFUSED,
        )
    )


# --- Results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
def test_the_op_matches_the_reference(problem: Problem, num_tokens: int, seed: int) -> None:
    inputs = inputs_of(problem, num_tokens, seed)
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    assert all(d.ok for d in SEAM.check(problem, given, call(problem, inputs)))


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 16, 17])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
@pytest.mark.parametrize("served", [False, True], ids=["built-in", "table"])
def test_the_out_form_writes_exactly_what_the_allocating_form_returns(
    problem: Problem, num_tokens: int, served: bool, table: str, seed: int
) -> None:
    """Into poison, with more scratch than needed, the rest of which stays untouched."""
    digest = table if served and (problem.carried, problem.norm) == (True, True) else ""
    inputs = inputs_of(problem, num_tokens, seed)
    before = {name: None if t is None else t.clone() for name, t in inputs.items()}
    expected = call(problem, inputs, digest)
    outputs = outputs_of(problem, num_tokens, spare=1000, table=digest)
    pointers = {name: tensor.data_ptr() for name, tensor in outputs.items()}
    call_out(problem, inputs, outputs, digest)
    for name in OUTPUTS:
        assert same_bits(outputs[name], expected[name]), name
        assert unwritten(outputs[name]) == 0
    assert unwritten(outputs["scratch"][-1000:]) == 1000
    assert {name: tensor.data_ptr() for name, tensor in outputs.items()} == pointers
    assert all(t is None or torch.equal(t, before[name]) for name, t in inputs.items()), (
        "an input was written"
    )


def test_a_table_and_the_built_in_choice_store_the_same_streams(table: str, seed: int) -> None:
    for num_tokens in (3, 5, 20):
        inputs = inputs_of(PROBLEM, num_tokens, seed)
        one, other = call(PROBLEM, inputs), call(PROBLEM, inputs, table)
        assert same_bits(one["residual_out"], other["residual_out"])
        assert same_bits(one["layer_input"], other["layer_input"])


def test_the_op_takes_slices_of_larger_tensors(seed: int) -> None:
    inputs = SEAM.inputs(PROBLEM, 9, seed, "cpu")
    whole = call(PROBLEM, {name: inputs[name] for name in INPUTS})
    for rows in (slice(3, 4), slice(4, 9)):
        part = {name: inputs[name][rows] if inputs[name].shape[0] == 9 else inputs[name] for name in INPUTS}
        for name, tensor in call(PROBLEM, part).items():
            assert same_bits(tensor, whole[name][rows].contiguous()), name


def test_one_row_of_a_padded_buffer_is_contiguous_enough(seed: int) -> None:
    """torch calls a tensor of one row contiguous whatever its row stride is."""
    inputs = inputs_of(PROBLEM, 1, seed)
    expected = call(PROBLEM, inputs)
    padded = torch.zeros(1, 2 * 768, dtype=torch.bfloat16)
    padded[:, :768] = inputs["x"]
    found = call(PROBLEM, {**inputs, "x": padded[:, :768]})
    assert padded[:, :768].stride() != inputs["x"].stride()  # type: ignore[union-attr]
    assert all(same_bits(found[name], expected[name]) for name in OUTPUTS)


def test_no_tokens_launch_and_look_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("looked up or launched")

    monkeypatch.setattr(serving, "dispatch", refuse)
    inputs = inputs_of(PROBLEM, 0, 1)
    found = call(PROBLEM, inputs)
    assert [tuple(t.shape) for t in found.values()] == [(0, 4, 768), (0, 4), (0, 4, 4), (0, 768), (0, 4)]
    call_out(PROBLEM, inputs, outputs_of(PROBLEM, 0))


# --- torch's own checks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
def test_torch_checks_the_allocating_form(problem: Problem, num_tokens: int, seed: int) -> None:
    inputs = inputs_of(problem, num_tokens, seed)
    torch.library.opcheck(ALLOCATING.default, (*inputs.values(), *scalars_of(problem)))


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
def test_torch_checks_the_out_form(problem: Problem, num_tokens: int, seed: int) -> None:
    inputs, outputs = inputs_of(problem, num_tokens, seed), outputs_of(problem, num_tokens)
    for tensor in outputs.values():
        tensor.zero_()  # opcheck compares what is written by value, and NaN differs from itself
    written = [outputs[name] for name in (*OUTPUTS, "scratch")]
    torch.library.opcheck(OUT.default, (*inputs.values(), *written, *scalars_of(problem)))


def test_on_meta_the_op_tells_shapes_and_dtypes() -> None:
    inputs = {n: t.to("meta") for n, t in SEAM.inputs(PROBLEM, 5, 1, "cpu").items()}
    found = call(PROBLEM, {name: inputs[name] for name in INPUTS})
    specs = {spec.name: spec for spec in SEAM.outputs(PROBLEM, 5)}
    for name, tensor in found.items():
        assert tensor.device.type == "meta"
        assert tuple(tensor.shape) == specs[name].shape
        assert str(tensor.dtype) == f"torch.{specs[name].dtype}"


# --- Refusals ---------------------------------------------------------------------------------------------

SHAPES = {
    "x": "(5, 768)", "residual": "(5, 4, 768)", "post_mix": "(5, 4)", "comb_mix": "(5, 4, 4)",
    "fn": "(24, 4, 768)", "scale": "(3,)", "base": "(24,)", "pre_mix": "(5, 4)", "norm_weight": "(768,)",
    "residual_out": "(5, 4, 768)", "next_post_mix": "(5, 4)", "next_comb_mix": "(5, 4, 4)",
    "layer_input": "(5, 768)", "next_pre_mix": "(5, 4)",
}  # fmt: skip


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with every second element skipped in memory."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def refused(problem: Problem, tensors: dict[str, Any], form: str, table: str = "") -> str:
    """Return the message of the ValueError with which an op refuses the tensors."""
    inputs = {name: tensors[name] for name in INPUTS}
    with pytest.raises(ValueError) as caught:
        if form == "out":
            call_out(problem, inputs, tensors, table)
        else:
            call(problem, inputs, table)
    message = str(caught.value)
    assert "\n" not in message
    return message


def everything(seed: int) -> dict[str, Any]:
    return {**inputs_of(PROBLEM, 5, seed), **outputs_of(PROBLEM, 5)}


WHERE = [
    *(("mhctune::post_pre_delayed", "allocating", name) for name in INPUTS),
    *(("mhctune::post_pre_delayed_out", "out", name) for name in (*INPUTS, *OUTPUTS)),
]


@pytest.mark.parametrize(("op", "form", "name"), WHERE, ids=lambda value: value.rpartition(":")[2])
@pytest.mark.parametrize("wrong", ["dtype", "shape", "rank", "stride", "meta"])
def test_a_wrong_tensor_is_refused_with_op_argument_value_and_what_is_expected(
    op: str, form: str, name: str, wrong: str, seed: int
) -> None:
    tensors = everything(seed)
    tensor = tensors[name]
    if wrong == "dtype":
        right = tensor.dtype
        other = torch.float32 if right == torch.bfloat16 else torch.bfloat16
        tensors[name] = tensor.to(other)
        message = f"{op}: {name} is {other}, expected {right}"
    elif wrong == "shape":
        if name == "x":
            tensors["x"] = torch.cat([tensor, tensor])  # x gives the counts, so its neighbour disagrees
            message = f"{op}: residual has shape (5, 4, 768), expected (10, 4, 768)"
        else:
            tensors[name] = torch.cat([tensor, tensor], -1)
            message = f"{op}: {name} has shape {tuple(tensors[name].shape)}, expected {SHAPES[name]}"
    elif wrong == "rank":
        tensors[name] = tensor[None]
        expected = "[tokens, hidden]" if name == "x" else SHAPES[name]
        message = f"{op}: {name} has shape {tuple(tensors[name].shape)}, expected {expected}"
    elif wrong == "stride":
        tensors[name] = strided(tensor)
        message = f"{op}: {name} has strides {tensors[name].stride()}, expected contiguous"
    else:
        tensors[name] = tensor.to("meta")
        other_name = "residual" if name == "x" else name
        message = f"{op}: {other_name} is on {tensors[other_name].device}, x on {tensors['x'].device}"
    assert refused(PROBLEM, tensors, form).startswith(message)


@pytest.mark.parametrize(
    ("op", "form", "name"),
    [*WHERE, ("mhctune::post_pre_delayed_out", "out", "scratch")],
    ids=lambda value: value.rpartition(":")[2],
)
@pytest.mark.parametrize("elements", [1, 3])
def test_a_slice_off_the_16_bytes_of_a_load_is_refused(
    op: str, form: str, name: str, elements: int, seed: int
) -> None:
    tensors = everything(seed)
    tensor = tensors[name]
    arena = torch.zeros(tensor.numel() + elements, dtype=tensor.dtype)
    tensors[name] = arena[elements:].view(tensor.shape)
    assert tensors[name].is_contiguous()
    remedy = ", or call .clone()" if name in INPUTS else ""
    assert refused(PROBLEM, tensors, form) == (
        f"{op}: {name} begins {elements * tensor.itemsize} bytes past a multiple of 16; the kernels move 16 "
        f"bytes at a time: slice at a multiple{remedy}"
    )


def test_no_tokens_may_lie_anywhere() -> None:
    inputs = inputs_of(PROBLEM, 0, 1)
    inputs["post_mix"] = torch.zeros(9)[1:1].view(0, 4)
    call(PROBLEM, inputs)
    call_out(PROBLEM, inputs, outputs_of(PROBLEM, 0))


def test_a_call_builds_no_plan_after_the_first(
    table: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hot path: shapes, scratch and what fits are laid out once a token count."""
    inputs = inputs_of(PROBLEM, 3, seed)
    outputs = {digest: outputs_of(PROBLEM, 3, table=digest) for digest in ("", table)}
    for digest, tensors in outputs.items():
        call_out(PROBLEM, inputs, tensors, digest)

    def refuse(*args: object) -> None:
        raise AssertionError("laid out again")

    for arm in SEAM.arms("c"):
        monkeypatch.setattr(type(arm), "plan", refuse)
        monkeypatch.setattr(type(arm), "space", refuse)
    monkeypatch.setattr(type(SEAM), "outputs", refuse)
    monkeypatch.setattr(serving, "_check_fits", refuse)
    for digest, tensors in outputs.items():
        call_out(PROBLEM, inputs, tensors, digest)


def test_a_compiled_graph_calls_the_op_as_it_is(seed: int) -> None:
    inputs, outputs = inputs_of(PROBLEM, 3, seed), outputs_of(PROBLEM, 3)
    call_out(PROBLEM, inputs, outputs)
    expected = {name: outputs[name].clone() for name in OUTPUTS}
    for name in OUTPUTS:
        poison(outputs[name])
    compiled = torch.compile(
        lambda given: call_out(PROBLEM, given, outputs), backend="aot_eager", fullgraph=True
    )
    compiled(inputs)
    assert all(same_bits(outputs[name], expected[name]) for name in OUTPUTS)


def test_parameters_that_require_a_gradient_are_read_as_any(seed: int) -> None:
    inputs, outputs = inputs_of(PROBLEM, 3, seed), outputs_of(PROBLEM, 3)
    assert inputs["fn"] is not None
    inputs["fn"] = torch.nn.Parameter(inputs["fn"])
    call_out(PROBLEM, inputs, outputs)
    assert not any(outputs[name].requires_grad for name in OUTPUTS)


def test_a_refused_call_writes_nothing(seed: int) -> None:
    tensors = everything(seed)
    tensors["next_pre_mix"] = torch.zeros(5, 3)
    refused(PROBLEM, tensors, "out")
    for name in OUTPUTS[:-1]:
        assert unwritten(tensors[name]) == tensors[name].numel()


@pytest.mark.parametrize("by_name", [False, True], ids=["positional", "by name"])
def test_a_meta_tensor_is_refused_however_it_is_passed(by_name: bool, seed: int) -> None:
    """torch runs the fake implementation where any tensor is on meta; it must not return garbage."""
    inputs = inputs_of(PROBLEM, 5, seed)
    inputs["fn"] = inputs["fn"].to("meta")  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="fn is on meta, x on cpu; move it there"):
        if by_name:
            names = ("rms_eps", "hc_pre_eps", "sinkhorn_eps", "post_mult", "norm_eps", "sinkhorn_iters")
            ALLOCATING(**inputs, **dict(zip(names, scalars_of(PROBLEM), strict=True)))
        else:
            call(PROBLEM, inputs)


@pytest.mark.parametrize(
    ("output", "source"),
    [
        ("residual_out", "residual"), ("layer_input", "x"), ("next_pre_mix", "pre_mix"),
        ("next_post_mix", "post_mix"), ("next_comb_mix", "comb_mix"),
    ],
)  # fmt: skip
def test_an_output_in_the_storage_of_an_input_is_refused(output: str, source: str, seed: int) -> None:
    tensors = everything(seed)
    tensors[output] = tensors[source]
    message = refused(PROBLEM, tensors, "out")
    assert message.startswith("mhctune::post_pre_delayed_out: ")
    assert (
        f"{output} shares memory with {source}" in message
        or f"{source} shares memory with {output}" in message
    )


def test_an_output_that_overlaps_an_input_in_part_is_refused(seed: int) -> None:
    tensors = everything(seed)
    arena = torch.zeros(8, 4, 768, dtype=torch.bfloat16)
    arena[:5] = tensors["residual"]
    tensors["residual"], tensors["residual_out"] = arena[:5], arena[3:]
    assert "residual_out shares memory with residual; give" in refused(PROBLEM, tensors, "out")


def test_two_outputs_in_one_storage_are_refused(seed: int) -> None:
    tensors = everything(seed)
    tensors["next_pre_mix"] = tensors["next_post_mix"]
    message = refused(PROBLEM, tensors, "out")
    assert "next_pre_mix" in message
    assert "next_post_mix" in message
    assert "shares memory" in message


def test_scratch_in_the_storage_of_an_output_is_refused(seed: int) -> None:
    tensors = everything(seed)
    arena = torch.zeros(tensors["scratch"].numel() + 20)
    tensors["scratch"], tensors["next_post_mix"] = arena, arena[-20:].view(5, 4)
    assert "shares memory" in refused(PROBLEM, tensors, "out")


def test_outputs_side_by_side_in_one_arena_and_inputs_that_share_are_fine(seed: int) -> None:
    tensors = everything(seed)
    arena = torch.zeros(40)
    tensors["next_pre_mix"], tensors["next_post_mix"] = arena[:20].view(5, 4), arena[20:].view(5, 4)
    tensors["post_mix"] = tensors["pre_mix"]
    inputs = {name: tensors[name] for name in INPUTS}
    call_out(PROBLEM, inputs, tensors)
    assert all(same_bits(tensors[name], t) for name, t in call(PROBLEM, inputs).items())


def test_too_little_scratch_is_refused_with_both_numbers(seed: int) -> None:
    tensors = everything(seed)
    need = tensors["scratch"].numel()
    tensors["scratch"] = torch.zeros(need - 1)
    message = refused(PROBLEM, tensors, "out")
    assert message.startswith(
        f"mhctune::post_pre_delayed_out: scratch has {need - 1} elements, 5 tokens need {need}; "
    )
    assert "serving.scratch_numel" in message
    tensors["scratch"] = torch.zeros(need)
    call_out(PROBLEM, {name: tensors[name] for name in INPUTS}, tensors)


@pytest.mark.parametrize("wrong", ["dtype", "rank", "stride", "meta"])
def test_wrong_scratch_is_refused(wrong: str, seed: int) -> None:
    tensors = everything(seed)
    scratch = tensors["scratch"]
    tensors["scratch"] = {
        "dtype": scratch.double(),
        "rank": scratch[None],
        "stride": strided(scratch),
        "meta": scratch.to("meta"),
    }[wrong]
    assert refused(PROBLEM, tensors, "out").startswith("mhctune::post_pre_delayed_out: scratch ")


def test_a_table_for_another_hidden_size_is_refused_by_the_call(table: str) -> None:
    problem = Problem(1024)
    for num_tokens in (1, 5):
        with pytest.raises(
            TableError, match="is for hidden_size 768, the call has 1024; serve a table tuned"
        ):
            call(problem, inputs_of(problem, num_tokens, 1), table)


def test_a_table_that_is_not_served_is_a_lookup_error() -> None:
    with pytest.raises(LookupError, match="no table 'beefbeefbeef' is served here"):
        call(PROBLEM, inputs_of(PROBLEM, 3, 1), "beefbeefbeefbeef")


def test_a_problem_that_no_kernel_computes_is_refused_by_the_call() -> None:
    inputs = inputs_of(PROBLEM, 3, 1)
    with pytest.raises(ValueError, match=r"rms_eps 0\.0 must be a normal positive float32"):
        ALLOCATING(*inputs.values(), 0.0, *scalars_of(PROBLEM)[1:], "")


def test_a_hidden_size_without_a_legal_config_is_refused_with_its_name() -> None:
    problem = Problem(200)
    with pytest.raises(ValueError, match=r"no arm of .* has a legal config for hidden 200"):
        call(problem, inputs_of(problem, 3, 1))


def test_a_hidden_size_that_one_arm_alone_can_do_is_served(seed: int) -> None:
    problem = Problem(320)
    inputs = inputs_of(problem, 3, seed)
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    assert all(d.ok for d in SEAM.check(problem, given, call(problem, inputs)))


def test_the_python_functions_are_the_ops(seed: int) -> None:
    inputs = inputs_of(PROBLEM, 3, seed)
    direct = ops.post_pre_delayed(*inputs.values(), *scalars_of(PROBLEM))  # type: ignore[arg-type]
    for one, other in zip(direct, call(PROBLEM, inputs).values(), strict=True):
        assert same_bits(one, other)
