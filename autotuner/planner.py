"""The planner: from what a person wrote down to a sweep plan, and what that plan will cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from mhctune.autotuner.bench import input_bytes
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.probe import Device, detect, fingerprint
from mhctune.autotuner.protocol import PROTOCOL_VERSION, Protocol
from mhctune.autotuner.shipped import shipped_candidates
from mhctune.autotuner.slots import cold_slots
from mhctune.autotuner.store import SweepRecord
from mhctune.configs.errors import ConfigError, unknown
from mhctune.configs.loader import (
    load_gpu,
    load_model,
    load_sweep,
    names,
    parse_token_counts,
    recognise,
)
from mhctune.configs.schema import GpuTarget, Model, Sweep, Target
from mhctune.kernels.buffers import total_bytes
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Problem, Seam
from mhctune.kernels.space import SearchSpace
from mhctune.kernels.until import END

COMPILE_S = {"c": 1.1, "cuda": 3.3}
"""Seconds of one core a kernel: TileLang, and gcc with -O3 on one Xeon core or nvcc 13.0 on an H200 host."""

PREPARE_S = {"c": 0.005, "cuda": 0.017}
"""Seconds to allocate, check and capture one candidate; measured on two Xeon cores and on an H200 host."""

LOAD_S = {"c": 0.0, "cuda": 0.38}
"""Seconds of the first launch of a kernel, one after the other: 56 s for 148 on an H200."""

_STARTUP_S = 10.0
"""Importing torch and TileLang, measured on two cores."""


Limits = Mapping[str, Mapping[str, Sequence[int]]]
"""Arm → tunable → the values that are tried."""


def known_seam(name: str) -> Seam:
    """Return a seam by name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in SEAMS:
        raise unknown("seam", name, sorted(SEAMS))
    return SEAMS[name]


def problem_of(model: Model, seam: Seam, aux: bool = False) -> Problem:
    """Return a model's problem for a seam, with the mean over the streams if `aux`.

    Raises:
        ConfigError: one of them delays the pre block and the other does not.
    """
    problem = Problem(**model.problem_fields(), aux=aux, delayed=model.delayed)  # type: ignore[arg-type]
    found = seam.canonical(problem)
    if found.delayed != model.delayed and "rms_eps" in seam.depends_on:
        does = {True: "delays its pre block (V4.1)", False: "does not delay its pre block (V4)"}
        raise ConfigError(
            f"model {model.name!r} {does[model.delayed]}, seam {seam.name!r} {does[found.delayed]}; "
            f"use a model that fits, such as {_MODELS[found.delayed]}"
        )
    return found


_MODELS = {True: "deepseek-v4.1-flash", False: "deepseek-v4-pro"}


def _model_of(named: str | None, config: Sweep, seam: Seam, hidden_size: int | None) -> Model:
    """Return the model that was named, or the sweep's; for a seam of the other version that version's.

    A hidden size that the sweep states takes the place of its models', not of one that was named; one that
    is given takes the place of all.
    """
    model = load_model(named or config.model)
    if named is None and seam.name != config.seam:
        wanted = seam.canonical(Problem(model.hidden_size, delayed=model.delayed)).delayed
        model = model if wanted == model.delayed else load_model(_MODELS[wanted])
    stated = None if named else config.hidden_size
    return model.model_copy(update={"hidden_size": hidden_size or stated or model.hidden_size})


def _limits_of(config: Sweep, target: str, seam: Seam, problem: Problem) -> Limits:
    """Return the sweep's limits; for another seam than the sweep's what of them it has.

    An arm that the sweep does not name keeps every value, and so does a tunable none of whose values fit.
    """
    limits = config.space.get(cast(Target, target), {})
    if seam.name == config.seam and not config.seams:
        return limits
    fitting: dict[str, dict[str, Sequence[int]]] = {}
    for arm in seam.arms(target):
        declared = {tunable.name: tunable.values for tunable in arm.space(problem).tunables}
        kept = {
            name: [value for value in values if value in declared.get(name, ())]
            for name, values in limits.get(arm.name, {}).items()
        }
        fitting[arm.name] = {name: values for name, values in kept.items() if values}
    return fitting


def require_family(config: Sweep, target: str) -> tuple[str, ...]:
    """Return the seams that a sweep names; each arm and tunable of its space must be one of theirs.

    Raises:
        ConfigError: an unknown seam, or an arm or tunable that none of several has.
    """
    seams = [known_seam(name) for name in config.seams or (config.seam,)]
    if not config.seams:
        return (config.seam,)
    known: dict[str, set[str]] = {}
    for seam in seams:
        problem = seam.canonical(Problem(load_model(config.model).hidden_size))
        for arm in seam.arms(target):
            known.setdefault(arm.name, set()).update(t.name for t in arm.space(problem).tunables)
    for name, tunables in config.space.get(cast(Target, target), {}).items():
        if name not in known:
            raise unknown("arm", name, sorted(known))
        for tunable in tunables:
            if tunable not in known[name]:
                raise unknown(f"tunable of arm {name}", tunable, sorted(known[name]))
    return tuple(seam.name for seam in seams)


def plan_sweeps(
    gpu: GpuTarget, sweep: str | None = None, *, seam: str | None = None, **changes: Any
) -> tuple[SweepPlan, ...]:
    """Return the plans of a sweep: one, or one a seam where it names several and `seam` picks none.

    The other arguments and errors are those of `plan_sweep`.
    """
    named = (seam,) if seam else require_family(_sweep_of(gpu, sweep), gpu.target)
    return tuple(plan_sweep(gpu, sweep, seam=name, **changes) for name in named)


def spaces_of(seam: Seam, target: str, problem: Problem, limits: Limits) -> dict[str, SearchSpace]:
    """Return the space of each arm; `limits` restrict tunables and, where given, name the arms.

    Raises:
        ConfigError: an unknown arm or tunable, or an arm left without a legal config.
    """
    arms = {arm.name: arm for arm in seam.arms(target)}
    for name in limits:
        if name not in arms:
            raise unknown("arm", name, sorted(arms))
    spaces = {}
    for name in [name for name in arms if name in (limits or arms)]:  # the order of ties, not the TOML's
        try:
            space = arms[name].space(problem).restricted(limits.get(name, {}))
            arms[name].plan(problem, arms[name].preferred, 1)  # an arm may be unable to write aux
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if next(space.legal(), None) is None:
            reasons = sorted({reason for point in space.points() for reason in space.refusals(point)})
            raise ConfigError(f"arm {name!r} has no legal config for {problem}: {reasons[0]}")
        spaces[name] = space
    return spaces


class OtherDevice(ValueError):
    """The device of this machine is not the target that was asked for."""


def target_of(gpu: str, device: Device | None) -> GpuTarget:
    """Return the named target, or with `auto` the device's; a device that is given must be that target.

    Raises:
        ConfigError: there is no such target.
        OtherDevice: the device is another: says what was found and what can be done.
    """
    wanted = None if gpu == "auto" else load_gpu(gpu)
    if device is None and wanted is not None:
        return wanted
    here = device or detect()
    found = recognise(here.gpu_name)
    if found is not None and wanted in (None, found):
        return found
    has = here.name if here.gpu_name else f"no GPU, only the processor {here.name}"
    has += (
        f" (target {found.name})"
        if found
        else f", for which no target is written ({', '.join(names('gpu'))})"
    )
    if wanted is None:
        raise OtherDevice(f"--gpu auto: this machine has {has}. `mhctune plan --gpu NAME` forecasts another")
    asked = wanted.match or "a machine without a GPU"
    raise OtherDevice(
        f"--gpu {gpu} asks for {asked}, this machine has {has}. Nothing was run. `--gpu auto` tunes what is "
        f"here; `mhctune plan --gpu {gpu}` shows what the sweep will cost there"
    )


def require_same(record: SweepRecord, device: Device) -> SweepRecord:
    """Return a sweep's record if this machine may add samples to it.

    Raises:
        OtherDevice: the device or the toolchain is another than that of its samples.
    """
    there = record.fingerprint
    found = f"this machine has {device.name}. Nothing was run"
    if (record.target, there.gpu_name) != (device.target, device.name):
        raise OtherDevice(f"the sweep was measured on {there.gpu_name}, {found}")
    changed = there.differences(fingerprint(known_seam(record.seam), record.target))
    if changed:
        parts = "; ".join(f"{name} {then!r}, now {now!r}" for name, (then, now) in changed.items())
        raise OtherDevice(
            f"the sweep was measured under another fingerprint: {parts}. Samples are not mixed; nothing was "
            "run: `mhctune sweep` measures anew"
        )
    return record


class NoArm(ValueError):
    """A seam that this version cannot run on a target."""


class ColdHost(ValueError):
    """A cold L2 was asked for where none can be had."""


def plan_sweep(
    gpu: GpuTarget,
    sweep: str | None = None,
    *,
    model: str | None = None,
    seam: str | None = None,
    tokens: str | None = None,
    samples: int | None = None,
    max_regret: float | None = None,
    l2: str | None = None,
    seed: int | None = None,
    hidden_size: int | None = None,
    until: str | None = None,
    here: bool = True,
) -> SweepPlan:
    """Return the plan of a sweep on a target.

    `sweep` names a shipped sweep or a TOML file (default: `quick` on the target `c`, else `decode`); the
    other arguments override what it says. A plan that is not for `here` can be forecast, not run.

    Raises:
        ConfigError: something in it is unknown or contradicts the rest.
        NoArm: the seam has no arm on the target.
        ColdHost: the target `c` is timed warm only.
    """
    config = _sweep_of(gpu, sweep)
    found = known_seam(seam or config.seam)
    if not found.arms(gpu.target):
        raise NoArm(f"seam {found.name} has no arm on target {gpu.target!r} ({gpu.name}) in this version")
    l2 = l2 or config.l2
    if gpu.target == "c" and l2 == "cold":
        raise ColdHost(f"l2 'cold' is for GPUs; the target {gpu.target!r} ({gpu.name}) is timed 'warm'")
    try:
        protocol = Protocol.of(gpu.target, samples or config.samples)
    except ValueError as error:
        raise ConfigError(f"{error}; give fewer by --samples or in the sweep file") from error
    problem = problem_of(_model_of(model, config, found, hidden_size), found, config.aux)
    shared = replace(problem, top_k=config.top_k, ranks=config.ranks, interleave=config.interleave)
    problem, until = found.canonical(shared), until or config.until
    try:
        found.needs(problem, until)
    except ValueError as error:
        raise ConfigError(f"{error}; use --until {END}") from error
    limits = _limits_of(config, gpu.target, found, problem)
    counts = config.token_counts if tokens is None else parse_token_counts(tokens)
    machine = fingerprint(found, gpu.target) if here else _described(gpu)
    ships = (found, problem, gpu.target, machine.sm_count, counts) if config.shipped else None
    return SweepPlan(
        seam=found,
        problem=problem,
        target=gpu.target,
        token_counts=counts,
        spaces=spaces_of(found, gpu.target, problem, limits),
        protocol=replace(protocol, l2=l2, until=until, seed=protocol.seed if seed is None else seed),
        fingerprint=machine,
        max_regret=config.max_regret if max_regret is None else max_regret,
        shipped=shipped_candidates(*ships) if ships else (),
    )


def _sweep_of(gpu: GpuTarget, named: str | None) -> Sweep:
    return load_sweep(named or ("quick" if gpu.target == "c" else "decode"))


def _described(gpu: GpuTarget) -> Fingerprint:
    """Return what is written of a target that was not read off a device; nothing is measured under it."""
    count, memory = gpu.figures.sm_count.value or 0, gpu.figures.memory_gib.value or 0
    return Fingerprint(
        gpu.name, int(count), int(memory), "", "", "", "", "", "", "", "", PROTOCOL_VERSION, ""
    )


@dataclass(frozen=True, slots=True)
class ArmForecast:
    """What one arm brings: its points, the legal ones, those it races anywhere, and the kernels it compiles.

    An arm that is searched races fewer than are legal; which ones is not known yet, so that `variants` is the
    number for as many points drawn at random.
    """

    arm: str
    points: int
    candidates: int
    raced: int
    variants: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a plan will cost: kernels, trials, bytes at the largest token count, and seconds."""

    arms: tuple[ArmForecast, ...]
    anchors: tuple[int, ...]
    """Token counts at which arms are searched; none where all are enumerated."""
    variants: int
    trials: int
    input_bytes: int
    set_bytes: int
    """The largest output-buffer set of one candidate."""
    resident_bytes: int
    """Inputs and all candidates of the largest cell at once."""
    compile_s: float
    race_s: float


def forecast(
    plan: SweepPlan, cores: int, bandwidth_gb_s: float | None, l2_bytes: int | None = None
) -> Forecast:
    """Forecast a plan on `cores` cores and a device of `bandwidth_gb_s`.

    A launch is taken to move the seam's bytes (`Seam.moved_bytes`) at half the bandwidth and to cost at
    least 200 us on the target `c` and 15 us on a GPU; a sample repeats it for `replay_us`. A cold protocol
    multiplies inputs and buffers by slots that outgrow a cache of `l2_bytes`.

    Raises:
        ValueError: the protocol is cold and the size of the cache is not known.
    """
    arms = []
    raced = (*plan.candidates, *plan.drawn)
    for name, space in plan.spaces.items():
        mine = [c for c in raced if c.arm == name]
        kernels = {v for c in mine for v in plan.variants_of(c)}
        points = math.prod(len(tunable.values) for tunable in space.tunables)
        arms.append(ArmForecast(name, points, len(plan.legal[name]), len(mine), len(kernels)))
    largest = max(plan.token_counts)
    slots = 1
    if plan.protocol.l2 == "cold":
        slots = cold_slots(plan.seam, plan.problem, largest, l2_bytes or 0)
    inputs = input_bytes(plan.seam, plan.problem, largest, plan.target, slots)
    sets = [
        slots * total_bytes(plan.seam.arm(plan.target, c.arm).plan(plan.problem, c.config, largest))
        for c in raced
    ]
    floor_us = 200.0 if plan.target == "c" else 15.0
    # One core of a server reads about 10 GB/s.
    rate = (bandwidth_gb_s or 10.0) * 1e3 / 2
    samples_us = sum(
        plan.raced_at(n)
        * max(
            plan.protocol.replay_us,
            plan.protocol.unroll * max(floor_us, plan.seam.moved_bytes(plan.problem, n) / rate),
        )
        for n in plan.token_counts
    )
    prepare_s = PREPARE_S[plan.target] * plan.grid + LOAD_S[plan.target] * len(plan.variants)
    race_s = prepare_s + (plan.protocol.samples + 1) * samples_us / 1e6
    compile_s = COMPILE_S[plan.target] * math.ceil(len(plan.variants) / max(cores, 1)) + _STARTUP_S
    return Forecast(
        arms=tuple(arms),
        anchors=plan.anchors,
        variants=len(plan.variants),
        trials=plan.grid,
        input_bytes=inputs,
        set_bytes=max(sets, default=0),
        resident_bytes=inputs + sum(sets),
        compile_s=compile_s,
        race_s=race_s,
    )
