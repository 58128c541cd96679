"""Which tables this process serves: the one place with process state. Nothing registers at import."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from mhctune.kernels.compiler import Compiled, compile_variant
from mhctune.kernels.dispatch import Answer, Choice, DispatchTable, Status, TableError
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Arm, Launch, Problem, Variant
from mhctune.kernels.space import Candidate

# These shape the compiled kernels or the choice; the rest of a problem are run-time scalars.
_SHAPING = ("hidden_size", "carried", "norm", "sinkhorn_iters", "hc_mult")
_DEFAULTS = {field.name: field.default for field in fields(Problem)}


class NotServed(LookupError):
    """A digest that no table was registered under in this process."""


class NotCompiled(RuntimeError):
    """A kernel that would have to be compiled while its stream is being captured."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What a call launches: the arm, its config, the bound launch and why it was chosen."""

    arm: Arm
    problem: Problem
    answer: Answer
    launch: Launch


_lock = threading.Lock()
_tables: dict[str, DispatchTable] = {}
_kernels: dict[Variant, Compiled] = {}
_launches: dict[tuple[str, Problem, str, Choice], tuple[Arm, Launch]] = {}


def serve(table: DispatchTable) -> str:
    """Register a table under its digest and return the digest; registering it again changes nothing.

    Raises:
        TableError: the seam, an arm or a config of the table is unknown or illegal here; the message says
            which and why.
    """
    problem = _problem_of(table)
    try:
        seam = find_seam(table.seam)
    except KeyError as error:
        raise TableError(f"table {table.digest[:12]}: {error.args[0]}") from error
    for choice in table.choices:
        try:
            arm = seam.arm(table.target, choice.arm)
        except KeyError as error:
            raise TableError(f"table {table.digest[:12]}: {error.args[0]}") from error
        refusals = arm.space(problem).refusals(dict(choice.config))
        if refusals:
            raise TableError(f"table {table.digest[:12]}: {choice} is illegal: {'; '.join(refusals)}")
    with _lock:
        _tables[table.digest] = table
    return table.digest


def withdraw(digest: str) -> None:
    """Remove a table.

    Raises:
        NotServed: no table of that digest is served.
    """
    with _lock:
        if _tables.pop(digest, None) is None:
            raise _not_served(digest)


def served() -> tuple[str, ...]:
    """Return the digests that this process serves."""
    return tuple(_tables)


def lookup(digest: str, seam: str, problem: Problem, target: str, num_tokens: int) -> Answer:
    """Return the choice for a token count; an empty digest gives the built-in choice, status `default`.

    Raises:
        NotServed: the digest is not registered.
        TableError: the table is for another seam, target or problem.
    """
    if not digest:
        return Answer(builtin(seam, problem, target), Status.DEFAULT, 1, None)
    table = _tables.get(digest)
    if table is None:
        raise _not_served(digest)
    _check_fits(table, seam, problem, target)
    return table.lookup(num_tokens)


def builtin(seam: str, problem: Problem, target: str) -> Choice:
    """Return the choice served without a table: the last arm's preferred config, or its first legal one."""
    arm = find_seam(seam).arms(target)[-1]
    space = arm.space(problem)
    if not space.refusals(arm.preferred):
        return Choice.of(arm.name, arm.preferred)
    candidates: tuple[Candidate, ...] = space.candidates()
    if not candidates:
        raise ValueError(f"arm {arm.name} has no legal config for {problem}")
    return Choice.of(arm.name, candidates[0].config)


def dispatch(digest: str, seam: str, problem: Problem, target: str, num_tokens: int) -> Dispatch:
    """Return what to launch for a token count, compiling it on first use.

    Raises:
        NotServed, TableError: as `lookup`.
        CompileError: the chosen kernels do not compile.
        NotCompiled: they are not compiled yet and the current stream is being captured.
    """
    answer = lookup(digest, seam, problem, target, num_tokens)
    arm, launch = _launch(seam, problem, target, answer.choice)
    return Dispatch(arm, problem, answer, launch)


def warm_up(digest: str) -> int:
    """Compile everything that a table can choose and return how many kernels that took."""
    table = _tables.get(digest)
    if table is None:
        raise _not_served(digest)
    before = len(_kernels)
    for choice in table.choices:
        _launch(table.seam, _problem_of(table), table.target, choice)
    return len(_kernels) - before


def scratch_numel(digest: str, seam: str, problem: Problem, target: str, max_tokens: int) -> int:
    """Return the float32 elements of scratch that any call with up to `max_tokens` needs."""
    owner = find_seam(seam)
    if digest:
        lookup(digest, seam, problem, target, max_tokens)
        choices = _tables[digest].choices
    else:
        choices = (builtin(seam, problem, target),)
    return max(owner.arm(target, c.arm).scratch_numel(problem, dict(c.config), max_tokens) for c in choices)


def _launch(seam: str, problem: Problem, target: str, choice: Choice) -> tuple[Arm, Launch]:
    key = (seam, problem, target, choice)
    found = _launches.get(key)
    if found is None:
        arm = find_seam(seam).arm(target, choice.arm)
        config = dict(choice.config)
        runs: list[Callable[..., None]] = [_kernel(v).run for v in arm.variants(problem, config)]
        found = arm, arm.bind(problem, config, runs)
        _launches[key] = found
    return found


def _kernel(variant: Variant) -> Compiled:
    with _lock:
        if variant not in _kernels:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise NotCompiled(
                    f"{variant} is not compiled and the stream is capturing; call serving.warm_up(table) or "
                    "run the op once before the capture"
                )
            _kernels[variant] = compile_variant(variant)
        return _kernels[variant]


def _problem_of(table: DispatchTable) -> Problem:
    known = {field.name for field in fields(Problem)}
    if set(table.problem) - known:
        raise TableError(
            f"table {table.digest[:12]}: unknown problem fields {sorted(set(table.problem) - known)}"
        )
    try:
        return Problem(**table.problem)
    except (TypeError, ValueError) as error:
        raise TableError(f"table {table.digest[:12]}: {error}") from error


def _check_fits(table: DispatchTable, seam: str, problem: Problem, target: str) -> None:
    wanted: dict[str, object] = {"seam": seam, "target": target}
    wanted.update({name: getattr(problem, name) for name in _SHAPING})
    fits = {**_DEFAULTS, **table.problem, "seam": table.seam, "target": table.target}
    for name, value in wanted.items():
        has = fits[name]
        if has != value:
            raise TableError(
                f"table {table.digest[:12]} is for {name} {has!r}, the call has {value!r}; serve a table "
                "tuned for it, or pass no table for the built-in choice"
            )


def _not_served(digest: str) -> NotServed:
    known = ", ".join(d[:12] for d in _tables) or "none"
    return NotServed(f"no table {digest[:12]!r} is served here (served: {known}); call serving.serve(table)")
