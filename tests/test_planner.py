"""The planner turns what a person wrote down into a plan, or says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mhctune.autotuner.bench import HostBench, tensor_bytes
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.planner import ColdHost, NoArm, forecast, known_seam, plan_sweep, problem_of, spaces_of
from mhctune.autotuner.slots import cold_slots
from mhctune.configs.errors import ConfigError
from mhctune.configs.loader import load_gpu, load_model, names
from mhctune.kernels.compiler import Compiled, Compiler
from mhctune.kernels.post_pre_delayed import PostPreDelayed
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Arm, Problem, Variant

CPU = load_gpu("cpu")
SEAM = PostPreDelayed()
PROBLEM = Problem(hidden_size=5120)


@pytest.fixture
def sweep_file(tmp_path: Path) -> Callable[[str], str]:
    def write(body: str) -> str:
        path = tmp_path / "own.toml"
        path.write_text(
            'name = "own"\nabout = "a test"\ntoken_counts = [1, 2]\nsamples = 5\nmax_regret = 0.1\n' + body
        )
        return str(path)

    return write


@pytest.mark.parametrize("sweep", names("sweep"))
def test_every_shipped_sweep_gives_a_plan_on_the_cpu(sweep: str) -> None:
    plan = plan_sweep(CPU, sweep)
    assert plan.target == "c"
    assert plan.grid == len(plan.candidates) * len(plan.token_counts) > 0
    named = {"topk": {"radix", "bitonic"}, "quick": {"fused", "unfused"}, "decode": {"fused", "unfused"}}
    arms = named.get(sweep, {"fused", "unfused", "released"})
    assert {c.arm for c in plan.candidates} == arms
    assert len(set(plan.candidates)) == len(plan.candidates)


def test_the_quick_sweep_is_what_a_newcomer_can_wait_for() -> None:
    plan = plan_sweep(CPU)
    assert plan.record() == plan_sweep(CPU, "quick").record()
    assert plan.problem.hidden_size == 5120
    assert plan.token_counts == (1, 2, 4, 8, 16, 32, 64)
    assert set(plan.spaces) == {"fused", "unfused"}
    assert len(plan.variants) <= 60
    assert plan.protocol.samples == 9
    assert plan.max_regret == 0.10


def test_arguments_go_before_the_sweep_file() -> None:
    plan = plan_sweep(CPU, "quick", tokens="8,2", samples=7, max_regret=0.0)
    assert plan.token_counts == (2, 8)
    assert plan.protocol.samples == 7
    assert plan.max_regret == 0.0


def test_a_cold_plan_is_another_sweep_and_its_forecast_has_slots(sweep_file: Callable[[str], str]) -> None:
    gpu = load_gpu("h200")
    warm, cold = plan_sweep(gpu, here=False), plan_sweep(gpu, l2="cold", here=False)
    assert (warm.protocol.l2, cold.protocol.l2) == ("warm", "cold")
    assert warm.record().digest != cold.record().digest
    assert plan_sweep(gpu, sweep_file('l2 = "cold"\n'), here=False).protocol.l2 == "cold"
    assert plan_sweep(gpu, sweep_file('l2 = "cold"\n'), l2="warm", here=False).protocol.l2 == "warm"
    costs = [forecast(plan, 2, 4800, 60 * 2**20) for plan in (warm, cold)]
    slots = cold_slots(cold.seam, cold.problem, 128, 60 * 2**20)
    assert slots > 1
    assert costs[1].set_bytes == slots * costs[0].set_bytes
    one = tensor_bytes(cold.seam, cold.problem, 128)
    assert costs[1].input_bytes - costs[0].input_bytes == (slots - 1) * one
    with pytest.raises(ValueError, match="needs its size"):
        forecast(cold, 2, 4800)


def test_another_seed_is_another_sweep() -> None:
    assert plan_sweep(CPU).protocol.seed == plan_sweep(CPU).protocol.seed
    assert plan_sweep(CPU, seed=7).protocol.seed == 7
    assert plan_sweep(CPU, seed=7).record().digest != plan_sweep(CPU).record().digest


def test_a_processor_is_timed_warm_only() -> None:
    with pytest.raises(ColdHost, match=r"l2 'cold' is for GPUs; the target 'c' \(cpu\) is timed 'warm'"):
        plan_sweep(CPU, l2="cold")


def test_the_order_of_arms_in_a_file_does_not_matter(sweep_file: Callable[[str], str]) -> None:
    one, other = "[space.c.fused]\nblock_m = [1]\n", "[space.c.unfused]\nblock_m = [1]\n"
    first = plan_sweep(CPU, sweep_file(one + other))
    assert plan_sweep(CPU, sweep_file(other + one)).record().digest == first.record().digest
    assert list(first.spaces) == ["fused", "unfused"]


def test_a_file_that_names_one_arm_sweeps_that_one(sweep_file: Callable[[str], str]) -> None:
    plan = plan_sweep(CPU, sweep_file("[space.c.unfused]\ntile_n = [24]\n"))
    assert list(plan.spaces) == ["unfused"]
    assert {c.config["tile_n"] for c in plan.candidates} == {24}


def test_a_space_of_another_target_is_none_of_ours(sweep_file: Callable[[str], str]) -> None:
    plan = plan_sweep(CPU, sweep_file("[space.cuda.fused]\ntile_n = [24]\n"))
    assert set(plan.spaces) == {"fused", "unfused", "released"}


@pytest.mark.parametrize(
    ("body", "fragments"),
    [
        ("[space.c.fussed]\nblock_m = [1]\n", ("unknown arm 'fussed'", "did you mean 'fused'", "unfused")),
        ("[space.c.fused]\nblockm = [1]\n", ("arm fused has no tunable 'blockm'", "block_h, block_m")),
        ("[space.c.fused]\nn_splits = [3]\n", ("arm 'fused' has no legal config", "5120", "n_splits 3")),
        ('seam = "pots"\n', ("unknown seam 'pots'", "known: collapse, hc_head, post, ")),
        ('model = "deepseek-v4-pro"\n', ("'deepseek-v4-pro' does not delay", "deepseek-v4.1-flash")),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(
    sweep_file: Callable[[str], str], body: str, fragments: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_sweep(CPU, sweep_file(body))
    for fragment in fragments:
        assert fragment in str(refused.value)


def test_an_unknown_seam_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'post_pre_delayed'\?"):
        known_seam("post_pre_delay")
    assert known_seam("post_pre_delayed").name == "post_pre_delayed"


@pytest.mark.parametrize("model", ["deepseek-v4-pro", "deepseek-v4-flash"])
def test_a_model_that_does_not_delay_has_no_delayed_problem(model: str) -> None:
    with pytest.raises(ConfigError, match=f"model '{model}' does not delay its pre block"):
        problem_of(load_model(model), SEAM)


def test_the_problem_of_a_model_has_its_constants() -> None:
    model = load_model("deepseek-v4.1-flash")
    problem = problem_of(model, SEAM)
    assert problem.to_dict() == model.problem_fields()


class Armless(PostPreDelayed):
    """A seam that nobody wrote an arm for."""

    def arms(self, target: str) -> tuple[Arm, ...]:
        return ()


@pytest.mark.parametrize("gpu", names("gpu"))
def test_a_seam_without_an_arm_on_a_target_says_so(monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    monkeypatch.setitem(SEAMS, "post_pre_delayed", Armless())
    target = load_gpu(gpu)
    with pytest.raises(NoArm, match=f"post_pre_delayed has no arm on target '{target.target}' .{gpu}."):
        plan_sweep(target, here=False)


@pytest.mark.parametrize("gpu", ["cpu", "gb300"])
def test_a_target_that_has_arms_can_be_planned_without_its_device(gpu: str) -> None:
    target = load_gpu(gpu)
    if not SEAM.arms(target.target):
        with pytest.raises(NoArm):
            plan_sweep(target, here=False)
        return
    plan = plan_sweep(target, here=False)
    cost = forecast(plan, 8, target.figures.bandwidth_gb_s.value)
    assert (plan.target, cost.trials) == (target.target, plan.grid)
    assert cost.set_bytes > 0
    assert plan.fingerprint.gpu_name == gpu
    assert plan.fingerprint.source_hash == ""


def test_without_limits_every_arm_has_its_whole_space() -> None:
    spaces = spaces_of(SEAM, "c", PROBLEM, {})
    assert {name: space.candidates() for name, space in spaces.items()} == {
        arm.name: arm.space(PROBLEM).candidates() for arm in SEAM.arms("c")
    }


# The forecast.


def compile_nothing(variant: Variant) -> Compiled:
    raise AssertionError(f"a forecast compiles nothing: {variant}")


def test_the_forecast_counts_what_the_plan_has() -> None:
    plan = plan_sweep(CPU, "quick")
    cost = forecast(plan, cores=2, bandwidth_gb_s=None)
    assert [arm.arm for arm in cost.arms] == ["fused", "unfused"]
    assert sum(arm.candidates for arm in cost.arms) == len(plan.candidates)
    assert cost.trials == plan.grid
    assert cost.variants == len(plan.variants)
    # Kernels that arms share are compiled once.
    assert cost.variants < sum(arm.variants for arm in cost.arms)
    assert all(arm.points >= arm.candidates > 0 for arm in cost.arms)


def test_the_forecast_bytes_are_those_of_the_bench() -> None:
    plan = plan_sweep(CPU, "quick")
    cost = forecast(plan, cores=2, bandwidth_gb_s=None)
    compiler = Compiler(1, compile_nothing)
    bench = HostBench(plan.seam, compiler)
    inputs = bench.enter(plan.cells[-1], 0)
    sets = [bench.forecast(c).forecast_bytes for c in plan.candidates]
    compiler.close()
    assert cost.set_bytes == max(sets)
    assert cost.resident_bytes - cost.input_bytes == sum(sets)
    # The forecast of the inputs leaves out the coefficients: a few hundred bytes a token.
    assert inputs * 0.98 < cost.input_bytes <= inputs


def tiny(tokens: str = "1,2", samples: int = 5) -> SweepPlan:
    return plan_sweep(CPU, "quick", tokens=tokens, samples=samples)


def test_more_cores_compile_faster_and_more_samples_take_longer() -> None:
    one, two = (forecast(tiny(), cores, None) for cores in (1, 2))
    assert two.compile_s < one.compile_s
    assert two.race_s == one.race_s
    five, eleven, seventeen = (forecast(tiny(samples=n), 1, None).race_s for n in (5, 11, 17))
    assert seventeen - eleven == pytest.approx(eleven - five)
    assert eleven > five
    assert forecast(tiny("1,2,4096"), 1, None).race_s > one.race_s
    assert forecast(tiny("4096"), 1, 100.0).race_s < forecast(tiny("4096"), 1, 10.0).race_s


V4_SEAMS = {"pre", "post_pre", "post_pre_bf16", "hc_head"}


@pytest.mark.parametrize("seam", SEAMS)
def test_every_seam_can_be_planned_on_the_cpu_without_naming_a_model(seam: str) -> None:
    plan = plan_sweep(CPU, "quick", seam=seam)
    assert plan.seam.name == seam
    assert plan.problem == plan.seam.canonical(plan.problem)
    hidden = 7168 if seam in V4_SEAMS else 5120
    assert plan.problem.hidden_size == (1 if seam == "topk_merge" else hidden)
    assert plan.problem.delayed == (seam not in V4_SEAMS)
    assert 4 <= len(plan.candidates) <= 60
    named = {"fused", "unfused"} if seam == "post_pre_delayed" else {arm.name for arm in plan.seam.arms("c")}
    assert {c.arm for c in plan.candidates} == named  # its own sweep names the arms
    assert forecast(plan, 2, None).trials == plan.grid


@pytest.mark.parametrize("hidden", [4096, 7168])
def test_a_hidden_size_that_is_given_takes_the_place_of_the_models(
    sweep_file: Callable[[str], str], hidden: int
) -> None:
    path = sweep_file("hidden_size = 1024\n")
    plan = plan_sweep(CPU, path, hidden_size=hidden)
    assert plan.problem == Problem(hidden_size=hidden)  # still V4.1's delayed seam, and its eps
    assert plan.record().digest != plan_sweep(CPU, path).record().digest
    assert plan_sweep(CPU, path).problem.hidden_size == 1024
    named = plan_sweep(CPU, path, model="deepseek-v4.1-flash", hidden_size=hidden)
    assert named.problem == plan.problem


@pytest.mark.parametrize("seam", sorted(V4_SEAMS))
def test_a_v4_seam_is_refused_for_a_v41_model(seam: str) -> None:
    with pytest.raises(ConfigError, match=r"delays its pre block \(V4\.1\), seam .* such as deepseek-v4-pro"):
        plan_sweep(CPU, "quick", seam=seam, model="deepseek-v4.1-flash")


@pytest.mark.parametrize("seam", ["post", "collapse", "pre_broadcast"])
def test_a_seam_of_both_versions_takes_either_model(seam: str) -> None:
    for model in names("model"):
        assert plan_sweep(CPU, "quick", seam=seam, model=model).problem.hidden_size > 0
    delayed = [
        plan_sweep(CPU, "quick", seam="pre_broadcast", model=model).problem.delayed
        for model in ("deepseek-v4-flash", "deepseek-v4.1-flash")
    ]
    assert delayed == [False, True]


def test_a_sweep_may_ask_for_aux(sweep_file: Callable[[str], str]) -> None:
    path = sweep_file("aux = true\n")
    assert plan_sweep(CPU, path).problem.aux
    assert not plan_sweep(CPU, path, seam="pre_delayed").problem.aux


def test_aux_is_refused_where_an_arm_cannot_write_it(sweep_file: Callable[[str], str]) -> None:
    cannot = [arm for arm in SEAM.arms("cuda") if not getattr(arm, "writes_aux", False)]
    problem = Problem(hidden_size=5120, aux=True)
    for arm in cannot:
        with pytest.raises(ConfigError, match=r"does not write aux; call without aux and take torch.mean"):
            spaces_of(SEAM, "cuda", problem, {arm.name: {}})
    assert spaces_of(SEAM, "c", problem, {})


def test_a_sweep_of_the_global_top_k_says_k_ranks_and_interleave() -> None:
    problem = plan_sweep(CPU, "topk").problem
    assert (problem.hidden_size, problem.top_k, problem.ranks, problem.interleave) == (1, 2048, 8, 1)


def test_the_forecast_of_the_global_top_k_is_of_its_own_shapes() -> None:
    plan = plan_sweep(CPU, "topk")
    # Local ids and scores, both packed, the ids found: five of K; what eight ranks sent: sixteen; four bytes.
    assert plan.seam.moved_bytes(plan.problem, 3) == 3 * 21 * 2048 * 4
    assert SEAM.moved_bytes(Problem(5120), 3) == 3 * 36 * 5120
    large, small = (plan_sweep(CPU, "topk", tokens=tokens) for tokens in ("4096", "2048"))
    seconds = [forecast(each, 2, 10.0).race_s for each in (large, small)]
    assert seconds[0] / seconds[1] == pytest.approx(2, rel=0.05)
