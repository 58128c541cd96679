"""Until the layer input: what arms release early is checked, timed, kept and never taken for the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from mhctune.autotuner import cuda_bench
from mhctune.autotuner.bench import HostBench, fewest_bytes
from mhctune.autotuner.cuda_bench import CudaBench
from mhctune.autotuner.planner import plan_sweep
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint
from mhctune.configs import options
from mhctune.configs.errors import ConfigError
from mhctune.configs.loader import load_gpu
from mhctune.configs.schema import Sweep
from mhctune.db.checks import kind_of, other_problem
from mhctune.db.export import export
from mhctune.db.here import load_measured
from mhctune.db.tables import load_table
from mhctune.kernels import serving
from mhctune.kernels.buffers import OutputBuffers, unwritten
from mhctune.kernels.c.arms import Fused
from mhctune.kernels.c.released import Released
from mhctune.kernels.compiler import Compiler
from mhctune.kernels.dispatch import Band, Choice, DispatchTable, TableError
from mhctune.kernels.post_pre_delayed import PostPreDelayed
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Arm, Launch, Problem, Tensors
from mhctune.kernels.space import Candidate, Config
from mhctune.kernels.until import END, LAYER_INPUT, UNTIL, brief, told, until_of

SEAM, PROBLEM = SEAMS["post_pre_delayed"], Problem(hidden_size=256)
CELL = Cell("post_pre_delayed", PROBLEM, 3)
CONFIG = {"tile_n": 24, "n_splits": 1, "block_h": 64, "block_m": 1}
CPU = load_gpu("cpu")


class SeamOf(PostPreDelayed):
    """The seam with one arm, whatever the target."""

    def __init__(self, arm: Arm) -> None:
        super().__init__()
        self._arm = arm

    def arms(self, target: str) -> tuple[Arm, ...]:
        return (self._arm,)


class Lying(Fused):
    """Says that its first launch completes the layer input, which its epilogue writes."""

    def releases(self, problem: Problem, config: Config) -> Mapping[str, int]:
        return {"layer_input": 1}


class Boasting(Released):
    """Releases its layer input in truth, and says the same of coefficients that come later."""

    def releases(self, problem: Problem, config: Config) -> Mapping[str, int]:
        return {**super().releases(problem, config), "next_pre_mix": 1}


class Rough(Released):
    """Leaves another layer input than the reference's until its last launch has run."""

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        inner = super().bind(problem, config, kernels)

        def launch(inputs: Tensors, buffers: Tensors) -> None:
            inner(inputs, buffers)
            if unwritten(buffers["next_pre_mix"]):
                buffers["layer_input"][0, 0] += 64

        return launch


def candidate(arm: Arm) -> Candidate:
    return Candidate.of(arm.name, CONFIG)


def host(compiler: Compiler, arm: Arm, until: str) -> HostBench:
    bench = HostBench(SeamOf(arm), compiler, until=until)
    bench.enter(CELL, 7)
    return bench


# Arms.


def test_an_arm_that_releases_nothing_is_complete_at_its_end() -> None:
    for arm in SEAM.arms("c"):
        launches = len(arm.variants(PROBLEM, CONFIG))
        assert arm.launches_until(PROBLEM, CONFIG, END) == launches
        expected = 1 if arm.name == "released" else launches
        assert arm.launches_until(PROBLEM, CONFIG, LAYER_INPUT) == expected
        assert arm.launches_until(PROBLEM, CONFIG, "next_pre_mix") == launches


@pytest.mark.parametrize("target", ["c", "cuda"])
@pytest.mark.parametrize("aux", [False, True])
def test_what_an_arm_releases_no_later_launch_is_given_to_write(target: str, aux: bool) -> None:
    problem = replace(PROBLEM, hidden_size=1024, aux=aux)
    released = {"residual_out", "layer_input", *(("aux",) if aux else ())}
    for arm in SEAM.arms(target):
        if aux and not getattr(arm, "writes_aux", False):
            continue
        config = CONFIG if target == "c" else arm.preferred
        launches = len(arm.variants(problem, config))
        given: list[set[str]] = []
        views = OutputBuffers(arm.plan(problem, config, 3), "cpu").bind(3)
        places = {view.data_ptr(): name for name, view in views.items()}

        def record(*arguments: object, into: list[set[str]] = given, at: dict[int, str] = places) -> None:
            tensors = (a for a in arguments if isinstance(a, torch.Tensor))
            into.append({at[t.data_ptr()] for t in tensors if t.data_ptr() in at})

        inputs = SEAM.inputs(problem, 3, 1, "cpu")
        arm.bind_until(problem, config, [record] * launches, END)(inputs, views)
        assert len(given) == launches, arm.name
        expected = dict.fromkeys(released, 1) if arm.name == "released" else {}
        assert arm.releases(problem, config) == expected, arm.name
        if expected:
            assert released <= given[0], arm.name
            # The streams are projected, which reads them; nothing else that is released comes again.
            assert set().union(*given[1:]) & released == {"residual_out"}, arm.name
        given.clear()
        arm.bind_until(problem, config, [record] * launches, LAYER_INPUT)(inputs, views)
        assert len(given) == (1 if expected else launches), arm.name


@pytest.mark.parametrize("aux", [False, True])
def test_the_first_launch_alone_writes_what_it_releases_and_nothing_else(
    compiler: Compiler, aux: bool
) -> None:
    arm, problem = Released(), replace(PROBLEM, aux=aux)
    kernels = [compiler.get(variant).run for variant in arm.variants(problem, CONFIG)]
    inputs = SEAM.inputs(problem, 5, 3, "cpu")
    whole, first = (OutputBuffers(arm.plan(problem, CONFIG, 5), "cpu") for _ in range(2))
    for buffers, until in ((whole, END), (first, LAYER_INPUT)):
        buffers.poison()
        arm.bind_until(problem, CONFIG, kernels, until)(inputs, buffers.bind(5))
    released = {"residual_out", "layer_input", *(("aux",) if aux else ())}
    assert set(arm.releases(problem, CONFIG)) == released
    for name, one, other in zip(whole.names(), whole.storages(), first.storages(), strict=True):
        view = first.bind(5)[name]
        if name in released:
            assert one.equal(other), name
        else:
            assert unwritten(view) == view.numel(), name


# Benches.


@pytest.mark.parametrize("until", [END, LAYER_INPUT])
def test_the_bench_times_the_launches_up_to_there_and_checks_all(compiler: Compiler, until: str) -> None:
    arm, launched = Released(), []

    class Counted(Released):
        def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
            names = [variant.kernel for variant in self.variants(problem, config)]

            def counted(kernel: Callable[..., None], name: str) -> Callable[..., None]:
                def run(*arguments: object) -> None:
                    launched.append(name)
                    kernel(*arguments)

                return run

            wrapped = [
                k if getattr(k, "__name__", "") == "_left_out" else counted(k, n)
                for k, n in zip(kernels, names, strict=True)
            ]
            return super().bind(problem, config, wrapped)

    bench = host(compiler, Counted(), until)
    assert isinstance(bench.prepare(candidate(arm)), Footprint)
    every = ["post_norm", "projection", "coefficients"]
    assert launched == (every if until == END else [*every, "post_norm"])
    launched.clear()
    assert isinstance(bench.sample(candidate(arm), 0, 0, 3), float)
    assert set(launched) == set(every if until == END else ["post_norm"])
    assert bench.move(candidate(arm), 1) is None
    bench.leave()


LIES = (
    (Lying(), "after 1 of 2 launches, until layer_input: layer_input: 768 elements not written"),
    (Boasting(), "after 1 of 3 launches, until layer_input: next_pre_mix: 12 elements not written"),
    (Rough(), "after 1 of 3 launches, until layer_input: layer_input: error"),
)


@pytest.mark.parametrize(("arm", "said"), LIES)
def test_an_arm_that_lies_about_its_release_is_a_mismatch(compiler: Compiler, arm: Arm, said: str) -> None:
    found = host(compiler, arm, LAYER_INPUT).prepare(candidate(arm))
    assert isinstance(found, Failure)
    assert found.kind is FailureKind.MISMATCH
    assert said in found.detail
    assert isinstance(host(compiler, arm, END).prepare(candidate(arm)), Footprint)


class Launches:
    """What was to be captured, launched at every replay; a clock says what kernels cost."""

    live_bytes = reserved_bytes = 0
    clock: Callable[[], float] = staticmethod(lambda: 0.0)

    def __init__(self, run: Callable[[], None], launches: int) -> None:
        self.run, self.launches = run, launches

    def replay(self) -> None:
        self.run()

    def time_us(self, replays: int) -> float:
        begin = self.clock()
        for _ in range(replays * self.launches):
            self.run()
        return self.clock() - begin

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def cuda(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Callable[[Arm], CudaBench]:
    """The bench of the target `cuda` until the layer input, without a GPU: a graph is its launches."""
    monkeypatch.setattr(cuda_bench, "CapturedGraph", Launches)
    monkeypatch.setattr(cuda_bench, "live_bytes", lambda: 0)
    monkeypatch.setattr(cuda_bench, "empty_graph", lambda: Launches(lambda: None, 0))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)

    def opened(arm: Arm) -> CudaBench:
        bench = CudaBench(SeamOf(arm), compiler, until=LAYER_INPUT)
        bench._device = SEAM.inputs(PROBLEM, 1, 0, "cpu")["x"].device
        bench.enter(CELL, 7)
        return bench

    return opened


def test_a_graph_holds_the_launches_up_to_there(cuda: Callable[[Arm], CudaBench]) -> None:
    arm = Released()
    bench = cuda(arm)
    assert isinstance(bench.prepare(candidate(arm)), Footprint)
    resident = bench._residents[candidate(arm)]
    resident.buffers.poison()
    resident.graph.replay()
    views = resident.buffers.bind(3)
    assert unwritten(views["layer_input"]) == 0
    assert unwritten(views["next_comb_mix"]) == 3 * 16
    assert bench.move(candidate(arm), 1) is None


def test_a_launch_is_timed_between_kernels_of_nobodys_which_do_not_count(
    cuda: Callable[[Arm], CudaBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    class Counted(Released):
        def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
            inner = super().bind(problem, config, kernels)

            def launch(inputs: Tensors, buffers: Tensors) -> None:
                ran.append("ours")
                inner(inputs, buffers)

            return launch

    bench = cuda(Counted())
    apart = bench._launch_apart
    monkeypatch.setattr(bench, "_launch_apart", lambda: (ran.append("nobody's"), apart()))
    monkeypatch.setattr(Launches, "clock", lambda self: 3.0 * ran.count("ours") + 0.5 * ran.count("nobody's"))
    assert isinstance(bench.prepare(candidate(Released())), Footprint)
    ran.clear()
    bench._residents[candidate(Released())].graph.replay()
    assert ran == ["ours", "nobody's"]
    assert bench.sample(candidate(Released()), 0, 0, 40) == pytest.approx(3.0)


def test_the_kernel_of_nobodys_is_timed_in_each_cell_anew(
    cuda: Callable[[Arm], CudaBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    arm, cost, ran = Released(), [0.5], [0.0]
    bench = cuda(arm)
    apart = bench._launch_apart

    def launch_apart() -> None:
        ran[0] += cost[0]
        apart()

    monkeypatch.setattr(bench, "_launch_apart", launch_apart)
    monkeypatch.setattr(Launches, "clock", lambda self: ran[0])
    for us in (0.5, 0.75):  # the GPU's clocks fell between the cells
        cost[0] = us
        assert isinstance(bench.prepare(candidate(arm)), Footprint)
        assert bench.sample(candidate(arm), 0, 0, 40) == pytest.approx(0.0)
        bench.leave()
        bench.enter(CELL, 8)


@pytest.mark.parametrize(("arm", "said"), LIES)
def test_a_lie_is_found_before_a_graph_is_captured(
    cuda: Callable[[Arm], CudaBench], arm: Arm, said: str
) -> None:
    found = cuda(arm).prepare(candidate(arm))
    assert isinstance(found, Failure)
    assert (found.kind, said in found.detail) == (FailureKind.MISMATCH, True)


def test_the_fewest_bytes_until_the_layer_input_are_what_it_needs() -> None:
    hidden, tokens = 256, 3
    mixes = 4 * (4 + 16 + 4)
    read = tokens * (2 * hidden * 5 + mixes) + 2 * hidden
    assert fewest_bytes(SEAM, PROBLEM, tokens, LAYER_INPUT) == read + tokens * 2 * hidden
    assert fewest_bytes(SEAM, PROBLEM, tokens) > fewest_bytes(SEAM, PROBLEM, tokens, LAYER_INPUT)
    # V4 collapses with its own pre-mix, which takes the whole projection; only its outputs may come later.
    own = SEAMS["post_pre"]
    problem = own.canonical(PROBLEM)
    saved = fewest_bytes(own, problem, tokens) - fewest_bytes(own, problem, tokens, LAYER_INPUT)
    assert saved == tokens * (2 * 4 * hidden + 4 * (4 + 16))


# What identifies a sweep and a table.


def test_until_is_of_the_protocol_and_older_ones_timed_to_the_end() -> None:
    end, early = Protocol.of("cuda", 9), replace(Protocol.of("cuda", 9), until=LAYER_INPUT)
    assert "until" not in end.to_dict()  # digests of older sweeps stay
    assert early.to_dict() == {**end.to_dict(), "until": LAYER_INPUT}
    assert [until_of(each.to_dict()) for each in (end, early)] == [END, LAYER_INPUT]
    assert Protocol(**early.to_dict()) == early  # type: ignore[arg-type]
    assert until_of(None) == END
    with pytest.raises(ValueError, match="until is 'streams'; it must be one of end, layer_input"):
        replace(end, until="streams")
    assert (brief(LAYER_INPUT), told(END)) == ("to the layer input", "to the end of the last launch")


def test_a_sweep_file_and_the_command_line_take_every_moment_that_is_timed() -> None:
    # Spelled out where they are: `configs` is below the floor that names them.
    assert get_args(Sweep.model_fields["until"].annotation) == UNTIL
    assert get_args(get_args(options.TableUntil)[0]) == UNTIL
    given, nothing = get_args(get_args(options.Until)[0])
    assert (get_args(given), nothing) == (UNTIL, type(None))


def test_a_sweep_until_the_layer_input_is_another_sweep() -> None:
    end, early = plan_sweep(CPU, "quick"), plan_sweep(CPU, "quick", until=LAYER_INPUT)
    assert end.record().digest != early.record().digest
    assert early.record().protocol["until"] == LAYER_INPUT
    assert end.record().digest == plan_sweep(CPU, "quick", until=END).record().digest
    with pytest.raises(
        ConfigError, match=r"seam post has no output 'layer_input' .* residual_out.*--until end"
    ):
        plan_sweep(CPU, "quick", seam="post", until=LAYER_INPUT)


EARLY = {"protocol": {"until": LAYER_INPUT}, "sweep_digest": "d" * 64, "sweep": 2}


def test_a_table_until_the_layer_input_is_only_had_by_asking(
    make_table: Callable[..., DispatchTable], tmp_path: Path
) -> None:
    early, end = make_table(evidence=EARLY), make_table()
    assert (early.until, end.until) == (LAYER_INPUT, END)
    paths = [export(table, "json", tmp_path) for table in (end, early)]
    assert paths[0] != paths[1]  # they may lie side by side
    assert [export(table, "json", tmp_path) for table in (end, early)] == paths
    assert load_table(paths[0]).digest == end.digest
    with pytest.raises(
        TableError,
        match=r"tuned until end, only until layer_input, .*--until layer_input "
        r"\(until='layer_input' in Python\), or tune one by `mhctune sweep --until end`",
    ):
        load_table(paths[1])
    with pytest.raises(TableError, match="tuned until layer_input, only until end"):
        load_table(paths[0], until=LAYER_INPUT)
    assert load_table(paths[1], until=LAYER_INPUT).digest == early.digest
    assert load_measured(str(paths[1]), until=None).digest == early.digest
    assert kind_of(early) != kind_of(end)
    (found,) = other_problem(early, end)
    assert "until end, the table of" in found.sentence


@pytest.mark.parametrize(
    ("form", "said"), [("python", 'UNTIL = "layer_input"'), ("csv", "# Timed to the layer input")]
)
def test_text_exports_say_what_was_timed(
    make_table: Callable[..., DispatchTable], tmp_path: Path, form: str, said: str
) -> None:
    early = export(make_table(evidence=EARLY), form, tmp_path).read_text()
    assert said in early
    assert said not in export(make_table(), form, tmp_path).read_text()


def test_a_process_serves_a_table_for_the_moment_that_it_was_tuned_for() -> None:
    plan = plan_sweep(CPU, "quick", until=LAYER_INPUT)
    choice = Choice.of("unfused", CONFIG)
    table = DispatchTable(
        SEAM.name, PROBLEM.to_dict(), "c", "rounded/1", plan.fingerprint, (Band(1, 4, choice),), choice,
        {"protocol": plan.protocol.to_dict()},
    )  # fmt: skip
    with pytest.raises(TableError, match=r"tuned until 'layer_input', not until 'end'.*until='layer_input'"):
        serving.serve(table)
    assert table.digest not in serving.served()
    digest = serving.serve(table, until=LAYER_INPUT)
    serving.withdraw(digest)
