"""Every CUDA arm computes the seam: at every token count, hidden size and pre-mix, captured or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_configs import CONFIGS, HIDDEN, NAMES, fitting  # type: ignore[import-not-found]

from mhctune.autotuner.graph import empty_graph
from mhctune.kernels import ops, serving
from mhctune.kernels.buffers import OutputBuffers
from mhctune.kernels.compiler import Compiler, compile_variant
from mhctune.kernels.dispatch import Band, Choice, DispatchTable
from mhctune.kernels.registry import seam
from mhctune.kernels.seam import Problem, Variant
from mhctune.kernels.space import Candidate

SEAM = seam("post_pre_delayed")
ROOT = Path(__file__).resolve().parents[2]
TOKENS = (0, 1, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 512, 1000, 1024, 4096)


@pytest.fixture(scope="module", autouse=True)
def warm(compiler: Compiler) -> None:
    """Compile everything at once, on all cores."""
    for hidden in HIDDEN:
        for carried in (True, False):
            problem = Problem(hidden, carried=carried)
            for candidate in fitting(problem):
                arm = SEAM.arm("cuda", candidate.arm)
                compiler.request(arm.variants(problem, candidate.config))


@pytest.mark.parametrize("carried", [True, False], ids=["carried", "absent"])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_every_arm_is_right_at_every_token_count(
    bind: Callable[..., Any], hidden: int, carried: bool, seed: int, record_property: Callable[..., None]
) -> None:
    problem = Problem(hidden, carried=carried)
    for offset, tokens in enumerate(TOKENS):
        regime = SEAM.regimes[offset % len(SEAM.regimes)]
        inputs = SEAM.inputs(problem, tokens, seed + offset, "cuda", regime)
        streams: dict[str, torch.Tensor] = {}
        for candidate in fitting(problem):
            if tokens == 0:
                continue  # the ops return before any launch; see test_nothing_is_launched_for_no_tokens
            launch, buffers = bind(candidate, problem, tokens)
            views = buffers.bind(tokens)
            launch(inputs, views)
            deviations = SEAM.check(problem, inputs, views)
            record_property("cell", [(d.output, d.error, d.bound) for d in deviations])
            assert all(d.ok for d in deviations), (
                tokens,
                regime,
                str(candidate),
                [str(d) for d in deviations],
            )
            for name in ("residual_out", "layer_input"):
                bits = views[name].view(torch.int16)
                assert torch.equal(bits, streams.setdefault(name, bits.clone())), (
                    name,
                    tokens,
                    str(candidate),
                )


@pytest.mark.parametrize("candidate", CONFIGS, ids=str)
def test_a_thousand_replays_are_equal_to_the_bit(
    bind: Callable[..., Any], candidate: Candidate, seed: int
) -> None:
    problem, tokens = Problem(5120), 33
    inputs = SEAM.inputs(problem, tokens, seed, "cuda")
    launch, buffers = bind(candidate, problem, tokens)
    views = buffers.bind(tokens)
    launch(inputs, views)
    expected = [t.clone() for t in buffers.storages()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(inputs, views)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        buffers.poison()
        graph.replay()
        for storage, known in zip(buffers.storages(), expected, strict=True):
            differing += (storage != known).sum()
    assert int(differing) == 0


@pytest.mark.parametrize("candidate", CONFIGS, ids=str)
@pytest.mark.parametrize("tokens", [3, 150])
def test_a_captured_chain_of_seams_waits_where_it_must(
    bind: Callable[..., Any], candidate: Candidate, tokens: int, seed: int
) -> None:
    """Kernels begin before the one ahead has ended: each must wait before it reads or overwrites anything.

    Sixteen seams read what the one before wrote and overwrite what the one before that had written; a copy
    and a fill stand between some of them. Launched one by one, with a synchronisation after each seam, the
    same chain leaves the same bits.
    """
    problem = Problem(5120)
    inputs = SEAM.inputs(problem, tokens, seed, "cuda")
    launch, first = bind(candidate, problem, tokens)
    _, second = bind(candidate, problem, tokens)
    views = (first.bind(tokens), second.bind(tokens))
    start = {name: inputs[name].clone() for name in ("x", "residual", "post_mix", "comb_mix", "pre_mix")}
    carried = {"x": "layer_input", "residual": "residual_out", "post_mix": "next_post_mix",
               "comb_mix": "next_comb_mix", "pre_mix": "next_pre_mix"}  # fmt: skip
    spare = torch.empty_like(inputs["x"])

    def chain(after: Callable[[], object]) -> None:
        for name, value in start.items():
            inputs[name].copy_(value)
        current = dict(inputs)
        for step in range(16):
            out = views[step % 2]
            launch(current, out)
            after()
            current = {**inputs, **{name: out[source] for name, source in carried.items()}}
            if step % 5 == 1:
                spare.copy_(current["x"])
                current["x"] = spare
            if step % 5 == 3:
                views[(step + 1) % 2]["layer_input"].zero_()

    chain(torch.cuda.synchronize)
    expected = [t.clone() for buffers in (first, second) for t in buffers.storages()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(lambda: None)
    for _ in range(20):
        first.poison()
        second.poison()
        graph.replay()
    torch.cuda.synchronize()
    found = [t for buffers in (first, second) for t in buffers.storages()]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("candidate", CONFIGS, ids=str)
def test_a_row_does_not_depend_on_its_batch(
    bind: Callable[..., Any], candidate: Candidate, seed: int
) -> None:
    problem, tokens = Problem(4096), 130
    inputs = SEAM.inputs(problem, tokens, seed, "cuda")
    launch, buffers = bind(candidate, problem, tokens)
    views = buffers.bind(tokens)
    launch(inputs, views)
    whole = {
        name: views[name].clone() for name in ("residual_out", "next_comb_mix", "layer_input", "next_pre_mix")
    }
    row = 77
    alone = {n: t[row : row + 1] if t.shape[:1] == (tokens,) else t for n, t in inputs.items()}
    views = buffers.bind(1)
    launch(alone, views)
    for name, tensor in whole.items():
        assert torch.equal(tensor[row], views[name][0]), name


@pytest.mark.parametrize("candidate", CONFIGS, ids=str)
def test_a_row_of_nan_touches_no_other(bind: Callable[..., Any], candidate: Candidate, seed: int) -> None:
    problem, tokens, row = Problem(4096), 20, 7
    inputs = SEAM.inputs(problem, tokens, seed, "cuda")
    launch, buffers = bind(candidate, problem, tokens)
    views = buffers.bind(tokens)
    launch(inputs, views)
    clean = {s.name: views[s.name].clone() for s in SEAM.outputs(problem, tokens)}
    inputs["residual"][row] = float("nan")
    launch(inputs, views)
    for name, tensor in clean.items():
        assert views[name][row].isnan().all(), name
        others = [i for i in range(tokens) if i != row]
        assert torch.equal(tensor[others], views[name][others]), name


def test_eps_values_are_run_time_scalars(bind: Callable[..., Any], seed: int) -> None:
    strange = Problem(4096, rms_eps=0.5, hc_pre_eps=0.25, sinkhorn_eps=0.01, post_mult=1.5, norm_eps=0.5)
    for candidate in CONFIGS:
        arm = SEAM.arm("cuda", candidate.arm)
        assert arm.variants(strange, candidate.config) == arm.variants(Problem(4096), candidate.config)
        inputs = SEAM.inputs(strange, 5, seed, "cuda")
        launch, buffers = bind(candidate, strange, 5)
        views = buffers.bind(5)
        launch(inputs, views)
        assert all(d.ok for d in SEAM.check(strange, inputs, views)), str(candidate)


def _arguments(inputs: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    names = ("x", "residual", "post_mix", "comb_mix", "fn", "scale", "base", "pre_mix", "norm_weight")
    return tuple(inputs[name] for name in names)


SCALARS = (1e-20, 1e-6, 1e-6, 2.0, 1e-20, 20, "")


def _out(problem: Problem, tokens: int) -> tuple[torch.Tensor, ...]:
    outputs = [
        torch.full(s.shape, float("nan"), dtype=getattr(torch, s.dtype), device="cuda")
        for s in SEAM.outputs(problem, tokens)
    ]
    numel = serving.scratch_numel("", SEAM.name, problem, "cuda", tokens)
    return (*outputs, torch.full((numel,), float("nan"), device="cuda"))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_the_ops_pass_opcheck(tokens: int, seed: int) -> None:
    problem = Problem(1024)
    arguments = _arguments(SEAM.inputs(problem, tokens, seed, "cuda"))
    torch.library.opcheck(ops.post_pre_delayed, (*arguments, *SCALARS))
    torch.library.opcheck(ops.post_pre_delayed_out, (*arguments, *_out(problem, tokens), *SCALARS))


def test_nothing_is_launched_for_no_tokens() -> None:
    problem = Problem(5120)
    outputs = ops.post_pre_delayed(*_arguments(SEAM.inputs(problem, 0, 1, "cuda")), *SCALARS)
    assert [tuple(t.shape) for t in outputs] == [s.shape for s in SEAM.outputs(problem, 0)]


def test_the_out_op_is_captured_and_replayed_with_other_inputs(seed: int) -> None:
    problem, tokens = Problem(4096), 9
    inputs = SEAM.inputs(problem, tokens, seed, "cuda")
    out = _out(problem, tokens)
    torch.ops.mhctune.post_pre_delayed_out(*_arguments(inputs), *out, *SCALARS)
    torch.cuda.synchronize()
    first = empty_graph()  # torch keeps 1,024 bytes of random state while any graph lives
    live = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.mhctune.post_pre_delayed_out(*_arguments(inputs), *out, *SCALARS)
    for name, tensor in SEAM.inputs(problem, tokens, seed + 1, "cuda").items():
        inputs[name].copy_(tensor)
    for tensor in out:
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == live
    first.close()
    named = dict(zip([s.name for s in SEAM.outputs(problem, tokens)], out, strict=False))
    assert all(d.ok for d in SEAM.check(problem, inputs, named))


_CAPTURE_FIRST = """
import json
import sys
import torch
from mhctune.kernels import ops, serving
from mhctune.kernels.compiler import quiet
from mhctune.kernels.dispatch import DispatchTable
from mhctune.kernels.registry import seam
from mhctune.kernels.seam import Problem

quiet()
table = DispatchTable.from_dict(json.loads(sys.argv[1]))
seam, problem = seam(table.seam), Problem(**table.problem)
digest = serving.serve(table)
serving.warm_up(digest)
names = ("x", "residual", "post_mix", "comb_mix", "fn", "scale", "base", "pre_mix", "norm_weight")
scalars = (1e-20, 1e-6, 1e-6, 2.0, 1e-20, 20, digest)
numel = serving.scratch_numel(digest, seam.name, problem, "cuda", 64)
scratch = torch.empty(numel, device="cuda")
for tokens in (1, 9, 33):
    inputs = seam.inputs(problem, tokens, tokens, "cuda")
    specs = seam.outputs(problem, tokens)
    out = [torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device="cuda") for s in specs]
    arguments = (*(inputs[name] for name in names), *out, scratch, *scalars)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.mhctune.post_pre_delayed_out(*arguments)
    for tensor in out:
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    replayed = [tensor.clone() for tensor in out]
    assert all(d.ok for d in seam.check(problem, inputs, dict(zip([s.name for s in specs], replayed))))
    torch.ops.mhctune.post_pre_delayed_out(*arguments)
    torch.cuda.synchronize()
    for spec, one, other in zip(specs, replayed, out):
        assert torch.equal(one, other), (tokens, spec.name)
print("equal")
"""


def test_a_warmed_up_table_is_captured_before_it_ever_ran(
    make_table: Callable[..., DispatchTable],
) -> None:
    """In a process of its own: whatever the first launch loads, no capture may be the one to load it."""
    fused, unfused, mma = (Choice.of(CONFIGS[at].arm, CONFIGS[at].config) for at in (0, 9, 6))
    table = make_table(
        problem=Problem(4096).to_dict(), bands=(Band(1, 4, fused), Band(5, 16, unfused)), default=mma
    )
    path = os.pathsep.join([str(ROOT / "src"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", _CAPTURE_FIRST, json.dumps(table.to_dict())],
        env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "equal"


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capturing_what_is_not_compiled_is_a_clear_error(seed: int) -> None:
    problem = Problem(1280)  # used nowhere else
    inputs, out = SEAM.inputs(problem, 3, seed, "cuda"), _out(problem, 3)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(serving.NotCompiled, match=r"is not compiled and the stream is capturing.*warm_up"),
        torch.cuda.graph(graph),
    ):
        torch.ops.mhctune.post_pre_delayed_out(*_arguments(inputs), *out, *SCALARS)
    torch.ops.mhctune.post_pre_delayed_out(*_arguments(inputs), *out, *SCALARS)
    torch.cuda.synchronize()  # the process is not broken


def test_two_streams_at_once_do_not_disturb_each_other(seed: int) -> None:
    problem, tokens = Problem(5120), 64
    sets = []
    for offset in range(2):
        inputs = SEAM.inputs(problem, tokens, seed + offset, "cuda")
        sets.append((inputs, _out(problem, tokens), torch.cuda.Stream()))
    torch.ops.mhctune.post_pre_delayed_out(*_arguments(sets[0][0]), *sets[0][1], *SCALARS)
    torch.cuda.synchronize()
    for _ in range(50):
        for inputs, out, stream in sets:
            with torch.cuda.stream(stream):
                torch.ops.mhctune.post_pre_delayed_out(*_arguments(inputs), *out, *SCALARS)
    torch.cuda.synchronize()
    for inputs, out, _ in sets:
        named = dict(zip([s.name for s in SEAM.outputs(problem, tokens)], out, strict=False))
        assert all(d.ok for d in SEAM.check(problem, inputs, named))


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_the_ops_run_on_a_device_that_is_not_the_current_one(seed: int) -> None:
    problem, tokens = Problem(5120), 16
    inputs = {n: t.to("cuda:1") for n, t in SEAM.inputs(problem, tokens, seed, "cpu").items()}
    outputs = ops.post_pre_delayed(*_arguments(inputs), *SCALARS)
    assert all(t.device == torch.device("cuda:1") for t in outputs)
    named = dict(zip([s.name for s in SEAM.outputs(problem, tokens)], outputs, strict=True))
    assert all(d.ok for d in SEAM.check(problem, inputs, named))


def test_poisoned_partials_show_what_a_config_off_the_rules_drops(seed: int) -> None:
    """The constraints refuse these; built by hand they drop columns or slices of k, and the check sees it."""
    problem, tokens = Problem(5120), 4
    inputs = SEAM.inputs(problem, tokens, seed, "cuda")
    arm = SEAM.arm("cuda", "fused")
    for wrong in ({"tile_n": 5}, {"n_splits": 3}, {"n_thr": 96}):
        config = {**CONFIGS[0].config, **wrong}
        assert arm.space(problem).refusals(config)
        sizes = {name: config[name] for name in (*NAMES, "ahead", "collapse")}
        kernel = Variant.of("post_pre", "cuda", hidden_size=5120, **sizes)
        runs = [compile_variant(v).run for v in (kernel, arm.variants(problem, config)[1])]
        buffers = OutputBuffers(arm.plan(problem, config, tokens), "cuda")
        buffers.poison()
        views = buffers.bind(tokens)
        arm.bind(problem, config, runs)(inputs, views)
        assert not all(d.ok for d in SEAM.check(problem, inputs, views)), wrong
