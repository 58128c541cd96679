"""The ops of every seam: both forms, torch's own checks, and what they refuse."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from mhctune.kernels import forms, ops, serving
from mhctune.kernels.buffers import OutputBuffers, poison, unwritten
from mhctune.kernels.forms import FORMS, SCALARS, Form
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Problem

HIDDEN = 768
Tensors = dict[str, Any]

pytestmark = pytest.mark.usefixtures("fresh_serving")


def problems(form: Form) -> list[Problem]:
    """Return the problem with every flag, without any, and with each alone."""
    flags = [name for name in ("norm", "carried", "aux", "delayed") if name in form.free]
    settings = [dict.fromkeys(flags, True), dict.fromkeys(flags, False)]
    settings += [{name: name == chosen for name in flags} for chosen in flags]
    found = (form.canonical(Problem(HIDDEN, **each)) for each in settings)  # type: ignore[arg-type]
    return list(dict.fromkeys(found))


CASES = [(form, problem) for form in FORMS for problem in problems(form)]


def case(value: object) -> str:
    if not isinstance(value, Problem):
        return value.name  # type: ignore[attr-defined,no-any-return]
    return "+".join(name for name in ("norm", "carried", "aux", "delayed") if getattr(value, name)) or "plain"


def inputs_of(form: Form, problem: Problem, tokens: int, seed: int) -> Tensors:
    drawn = SEAMS[form.name].inputs(problem, tokens, seed, "cpu")
    return {spec.name: drawn[spec.name] if spec.exists(problem) else None for spec in form.reads}


def scalars_of(form: Form, problem: Problem) -> list[float]:
    return [getattr(problem, name) for name in (*SCALARS, "sinkhorn_iters") if name in form.free]


def outputs_of(form: Form, problem: Problem, tokens: int) -> Tensors:
    buffers = OutputBuffers(form.outputs(problem, tokens), "cpu")
    buffers.poison()
    outputs: Tensors = buffers.bind(tokens)
    if form.weights is not None:
        outputs["scratch"] = torch.empty(serving.scratch_numel("", form.name, problem, "c", tokens))
        poison(outputs["scratch"])
    return outputs


def arguments(form: Form, problem: Problem, inputs: Tensors) -> tuple[Any, ...]:
    """Return the arguments of the allocating form."""
    flags = [getattr(problem, spec.when) for spec in form.writes if spec.when]
    return (*inputs.values(), *scalars_of(form, problem), "", *flags)


def out_arguments(form: Form, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Any, ...]:
    """Return the arguments of the form that writes them."""
    written = [outputs[spec.name] for spec in form.writes if not spec.when]
    written += [outputs["scratch"]] if form.weights is not None else []
    optional = [outputs.get(spec.name) for spec in form.writes if spec.when]
    return (*inputs.values(), *written, *scalars_of(form, problem), "", *optional)


def op_of(form: Form, suffix: str = "") -> Any:
    return getattr(torch.ops.mhctune, form.name + suffix).default


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return a.shape == b.shape and torch.equal(a.view(integer), b.view(integer))


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize(("form", "problem"), CASES, ids=case)
def test_both_forms_are_right_and_equal_to_the_bit(
    form: Form, problem: Problem, tokens: int, seed: int
) -> None:
    inputs = inputs_of(form, problem, tokens, seed)
    before = {name: tensor.clone() for name, tensor in inputs.items() if tensor is not None}
    names = [spec.name for spec in form.outputs(problem, tokens)]
    returned = dict(zip(names, op_of(form)(*arguments(form, problem, inputs)), strict=True))
    assert all(d.ok for d in SEAMS[form.name].check(problem, before, returned))
    outputs = outputs_of(form, problem, tokens)
    pointers = {name: tensor.data_ptr() for name, tensor in outputs.items()}
    op_of(form, "_out")(*out_arguments(form, problem, inputs, outputs))
    assert all(same_bits(outputs[name], returned[name]) for name in names)
    assert {name: tensor.data_ptr() for name, tensor in outputs.items()} == pointers
    assert all(torch.equal(inputs[name], tensor) for name, tensor in before.items()), "an input was written"


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize(("form", "problem"), CASES, ids=case)
def test_torch_checks_both_forms(form: Form, problem: Problem, tokens: int, seed: int) -> None:
    inputs, outputs = inputs_of(form, problem, tokens, seed), outputs_of(form, problem, tokens)
    torch.library.opcheck(op_of(form), arguments(form, problem, inputs))
    for tensor in outputs.values():
        tensor.zero_()  # opcheck compares what is written by value, and NaN differs from itself
    torch.library.opcheck(op_of(form, "_out"), out_arguments(form, problem, inputs, outputs))


@pytest.mark.parametrize(("form", "problem"), CASES, ids=case)
def test_on_meta_the_op_tells_shapes_and_dtypes(form: Form, problem: Problem) -> None:
    inputs = {n: t if t is None else t.to("meta") for n, t in inputs_of(form, problem, 5, 1).items()}
    returned = op_of(form)(*arguments(form, problem, inputs))
    for spec, tensor in zip(form.outputs(problem, 5), returned, strict=True):
        assert (tensor.device.type, tuple(tensor.shape)) == ("meta", spec.shape)
        assert str(tensor.dtype) == f"torch.{spec.dtype}"


def test_every_op_names_its_arguments_and_what_they_are() -> None:
    for form, (allocating, out) in ops._OPS.items():
        found = SEAMS[form].form  # type: ignore[attr-defined]
        for spec in (*found.reads, *found.writes):
            assert str(spec) in allocating.__doc__
            assert str(spec) in out.__doc__
    assert "x [T, H] bf16: sublayer output." in ops.post_out.__doc__


WRONG = [
    (form, spec.name) for form in FORMS for spec in (*form.reads, *form.writes)
    if spec.name != form.reads[0].name
]  # fmt: skip


@pytest.mark.parametrize(("form", "name"), WRONG, ids=lambda value: getattr(value, "name", value))
def test_a_wrong_tensor_is_refused_with_argument_value_and_what_is_expected(
    form: Form, name: str, seed: int
) -> None:
    problem = problems(form)[0]
    inputs, outputs = inputs_of(form, problem, 5, seed), outputs_of(form, problem, 5)
    where = inputs if name in inputs else outputs
    right, op = where[name], f"mhctune::{form.name}_out"
    first = form.reads[0].name
    other = torch.float32 if right.dtype == torch.bfloat16 else torch.bfloat16
    wide = torch.zeros(*right.shape, 2, dtype=right.dtype)[..., 0]
    off = torch.zeros(right.numel() + 1, dtype=right.dtype)[1:].view(right.shape)
    for wrong, message in (
        (right.to(other), f"{op}: {name} is {other}, expected {right.dtype}; convert it before the call"),
        (torch.cat([right, right]), f"has shape {(2 * right.shape[0], *right.shape[1:])}, expected "),
        (wide, f"{op}: {name} has strides {wide.stride()}, expected contiguous; call .contiguous()"),
        (right.to("meta"), f"{op}: {name} is on meta, {first} on cpu; move it there"),
        (off, f"{op}: {name} begins {right.itemsize} bytes past a multiple of 16"),
    ):
        if wrong is wide and wide.is_contiguous():
            continue  # of one element
        where[name] = wrong
        with pytest.raises(ValueError) as caught:
            op_of(form, "_out")(*out_arguments(form, problem, inputs, outputs))
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    where[name] = right
    for spec in form.outputs(problem, 5):
        assert unwritten(outputs[spec.name]) == outputs[spec.name].numel(), "a refused call wrote"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_first_tensor_is_held_to_its_rank(form: Form) -> None:
    problem = problems(form)[0]
    inputs, name = inputs_of(form, problem, 5, 1), form.reads[0].name
    inputs[name] = inputs[name][None]
    expected = {2: r"\[tokens, hidden\]", 3: r"\[tokens, 4, hidden\]"}[len(form.reads[0].axes)]
    with pytest.raises(
        ValueError, match=rf"^mhctune::{form.name}: {name} has shape \(1, 5.*expected {expected}"
    ):
        op_of(form)(*arguments(form, problem, inputs))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_outputs_that_share_memory_are_refused(form: Form, seed: int) -> None:
    problem = problems(form)[0]
    specs = {spec.name: spec for spec in (*form.reads, *form.writes)}
    for one, other in itertools.permutations(specs, 2):
        same = (specs[one].axes, specs[one].dtype) == (specs[other].axes, specs[other].dtype)
        if same and specs[one] in form.writes:
            inputs, outputs = inputs_of(form, problem, 5, seed), outputs_of(form, problem, 5)
            outputs[one] = inputs[other] if other in inputs else outputs[other]
            with pytest.raises(ValueError, match=rf"({one} shares memory with {other}|{other} .* {one});"):
                op_of(form, "_out")(*out_arguments(form, problem, inputs, outputs))


def bytes_allocated(op: Any, given: tuple[Any, ...]) -> int:
    """Return the bytes that torch's allocator gives out during a call, the second of its kind."""
    op(*given)  # lays out what later calls only look up
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as seen:
        op(*given)
    return sum(max(event.self_cpu_memory_usage, 0) for event in seen.key_averages())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_out_form_allocates_nothing(form: Form, seed: int) -> None:
    problem = problems(form)[0]
    inputs, outputs = inputs_of(form, problem, 5, seed), outputs_of(form, problem, 5)
    assert bytes_allocated(op_of(form, "_out"), out_arguments(form, problem, inputs, outputs)) == 0
    returned = sum(spec.bytes for spec in form.outputs(problem, 5))
    assert bytes_allocated(op_of(form), arguments(form, problem, inputs)) >= returned


def far_apart(rows: torch.Tensor, distance: int) -> torch.Tensor:
    """Return rows `distance` elements apart, with NaN between them."""
    arena = torch.full((rows.shape[0] * distance,), torch.nan, dtype=rows.dtype)
    view = arena.as_strided(rows.shape, (distance, *rows.stride()[1:]))
    view.copy_(rows)
    return view


def test_the_collapse_reads_rows_that_lie_apart(seed: int) -> None:
    form, problem = forms.COLLAPSE, problems(forms.COLLAPSE)[0]
    inputs = inputs_of(form, problem, 5, seed)
    (expected,) = ops.collapse(*inputs.values())
    inputs["residual"] = far_apart(inputs["residual"], 4 * HIDDEN + 8)
    (found,) = ops.collapse(*inputs.values())
    assert same_bits(found, expected)
    torch.library.opcheck(op_of(form), tuple(inputs.values()))


@pytest.mark.parametrize(("row", "stream", "element"), [(4, 768, 1), (8 * 768, 1536, 1), (8 * 768, 1536, 2)])
def test_the_collapse_refuses_other_strides(row: int, stream: int, element: int, seed: int) -> None:
    """Rows that overlap, streams that lie apart, elements that lie apart."""
    inputs = inputs_of(forms.COLLAPSE, problems(forms.COLLAPSE)[0], 5, seed)
    arena = torch.zeros(2**16, dtype=torch.bfloat16)
    inputs["residual"] = arena.as_strided((5, 4, HIDDEN), (row, stream, element))
    with pytest.raises(ValueError, match=r"residual has strides .*, expected whole rows that do not overlap"):
        ops.collapse(*inputs.values())


def test_an_output_between_rows_that_lie_apart_is_refused(seed: int) -> None:
    form, problem = forms.COLLAPSE, problems(forms.COLLAPSE)[0]
    inputs, outputs = inputs_of(form, problem, 5, seed), outputs_of(form, problem, 5)
    inputs["residual"] = far_apart(inputs["residual"], 16 * HIDDEN)
    whole = inputs["residual"].as_strided((5 * 16 * HIDDEN,), (1,))
    outputs["collapsed"] = whole[4 * HIDDEN : 9 * HIDDEN].view(5, HIDDEN)
    with pytest.raises(ValueError, match="collapsed shares memory with residual"):
        op_of(form, "_out")(*out_arguments(form, problem, inputs, outputs))


@pytest.mark.parametrize("form", [f for f in FORMS if f.weights], ids=lambda form: form.name)
def test_too_little_scratch_is_refused(form: Form, seed: int) -> None:
    problem = problems(form)[0]
    inputs, outputs = inputs_of(form, problem, 5, seed), outputs_of(form, problem, 5)
    need = outputs["scratch"].numel()
    outputs["scratch"] = torch.zeros(need - 1)
    with pytest.raises(ValueError, match=f"scratch has {need - 1} elements, 5 tokens need {need}; size it"):
        op_of(form, "_out")(*out_arguments(form, problem, inputs, outputs))


def test_a_compiled_graph_calls_the_ops_as_they_are(seed: int) -> None:
    """A seam with an optional output, and one that returns a list of one."""
    problem = forms.POST.canonical(Problem(HIDDEN, aux=True))
    inputs = inputs_of(forms.POST, problem, 3, seed)
    weights = torch.rand(3, 4)

    def chain() -> torch.Tensor:
        streams, aux = torch.ops.mhctune.post(*inputs.values(), "", True)
        (collapsed,) = torch.ops.mhctune.collapse(streams, weights)
        return torch.cat([collapsed, aux])

    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(), chain())
