"""Which tables this process serves: the one place with process state. Nothing registers at import."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from mhctune.kernels.buffers import OutputBuffers
from mhctune.kernels.compiler import Compiled, compile_variant
from mhctune.kernels.dispatch import Answer, Choice, DispatchTable, Status, TableError
from mhctune.kernels.legality import problem_of, refusals
from mhctune.kernels.manifest import manifest_of
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Arm, Launch, Problem, ScratchLayout, Variant
from mhctune.kernels.until import END

# These shape the compiled kernels or the choice; the rest of a problem are run-time scalars.
_SHAPING = (
    "hidden_size", "carried", "norm", "sinkhorn_iters", "hc_mult", "aux", "delayed", "top_k", "ranks",
    "interleave",
)  # fmt: skip


class NotServed(LookupError):
    """A digest that no table was registered under in this process."""


class NotCompiled(RuntimeError):
    """A kernel that would have to be compiled, or loaded, while its stream is being captured."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What a call launches: the arm, its config, the bound launch, its scratch and why it was chosen."""

    arm: Arm
    problem: Problem
    answer: Answer
    launch: Launch
    scratch: ScratchLayout


_lock = threading.Lock()
_tables: dict[str, DispatchTable] = {}
_kernels: dict[Variant, Compiled] = {}
_launches: dict[tuple[str, Problem, str, Choice], tuple[Arm, Launch]] = {}
_fitting: set[tuple[str, str, Problem, str]] = set()
"""Calls that were found to fit a table: digest, seam, problem, target. A digest never changes its meaning."""


def serve(table: DispatchTable, *, until: str = END) -> str:
    """Register a table under its digest and return the digest; registering it again changes nothing.

    Ops launch the whole seam on one stream. A runtime that binds an arm's kernels itself (`Arm.bind_until`)
    and begins the sublayer before the launches behind the layer input may ask for a table that was tuned
    `until` then.

    Raises:
        TableError: the table was tuned until another moment; or its seam, an arm or a config is unknown or
            illegal here. The message says which and why.
    """
    digest, wrong = table.digest, refusals(table)
    if table.until != until:
        raise TableError(
            f"table {digest[:12]} was tuned until {table.until!r}, not until {until!r}: its choices are the "
            f"fastest to another moment; serve one tuned for this, or say serve(table, until={table.until!r})"
        )
    if wrong:
        raise TableError(f"table {digest[:12]}: {next(iter(wrong.values()))}")
    with _lock:
        _tables[digest] = table
    return digest


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
    return _lookup(digest, seam, _canonical(seam, problem), target, num_tokens)


def _lookup(digest: str, seam: str, problem: Problem, target: str, num_tokens: int) -> Answer:
    if not digest:
        return _default(seam, problem, target)
    table = _tables.get(digest)
    if table is None:
        raise _not_served(digest)
    call = (digest, seam, problem, target)
    if call not in _fitting:
        _check_fits(table, seam, problem, target)
        _fitting.add(call)
    return table.lookup(num_tokens)


@lru_cache(maxsize=256)
def _canonical(seam: str, problem: Problem) -> Problem:
    return find_seam(seam).canonical(problem)


def builtin(seam: str, problem: Problem, target: str) -> Choice:
    """Return the choice served without a table, at every token count.

    It is the preferred config of the first arm, in the seam's preference, where that is legal; where none
    is, the first legal config of the first arm that has one.

    Raises:
        ValueError: no arm of the target has a legal config for the problem.
    """
    found, problem = find_seam(seam), _canonical(seam, problem)
    arms = found.preference(target)
    for arm in arms:
        if not arm.space(problem).refusals(arm.preferred):
            return Choice.of(arm.name, arm.preferred)
    for arm in arms:
        for candidate in arm.space(problem).legal():
            return Choice.of(arm.name, candidate.config)
    tried = ", ".join(arm.name for arm in arms) or "there is none"
    what = found.label(problem) if problem.top_k else str(problem)
    raise ValueError(f"no arm of {seam} on target {target!r} ({tried}) has a legal config for {what}")


@lru_cache(maxsize=256)
def _default(seam: str, problem: Problem, target: str) -> Answer:
    return Answer(builtin(seam, problem, target), Status.DEFAULT, 1, None)


def dispatch(digest: str, seam: str, problem: Problem, target: str, num_tokens: int) -> Dispatch:
    """Return what to launch for a token count, compiling it on first use.

    Raises:
        NotServed, TableError: as `lookup`.
        CompileError: the chosen kernels do not compile.
        NotCompiled: they are not compiled yet and the current stream is being captured.
    """
    return dispatch_canonical(digest, seam, _canonical(seam, problem), target, num_tokens)


def dispatch_canonical(digest: str, seam: str, problem: Problem, target: str, num_tokens: int) -> Dispatch:
    """Do as `dispatch` for a problem that is the seam's canonical one already: the hot path."""
    answer = _lookup(digest, seam, problem, target, num_tokens)
    arm, launch = _launch(seam, problem, target, answer.choice)
    return Dispatch(arm, problem, answer, launch, _scratch(arm, problem, answer.choice, num_tokens))


def warm_up(digest: str, max_tokens: int | None = None, capture_sizes: Sequence[int] = ()) -> int:
    """Compile what calls of up to `max_tokens` can reach and return how many kernels that took.

    That is the table's manifest (`mhctune.kernels.manifest`); without limits everything the table can choose.
    On cuda each choice is launched once, on the current device: call it there, before any capture.

    Raises:
        NotServed: the digest is not registered.
        ValueError: a token count is not positive.
        CompileError: a kernel does not compile.
        NotCompiled: the current stream is being captured.
    """
    table = _tables.get(digest)
    if table is None:
        raise _not_served(digest)
    if table.target == "cuda" and _capturing():
        raise NotCompiled(f"table {digest[:12]} cannot be warmed up inside a capture; do it before")
    before, problem = len(_kernels), problem_of(table)
    choices = manifest_of(table, max_tokens, capture_sizes).choices
    for choice in choices:
        _launch(table.seam, problem, table.target, choice)
    # A module is loaded onto a device when its kernel is first launched there. Loading allocates and may
    # synchronise, which a capture does not survive; so the first launch happens here.
    if table.target == "cuda":
        for choice in choices:
            _launch_once(table.seam, problem, table.target, choice, "cuda")
        torch.cuda.synchronize()
    return len(_kernels) - before


def _launch_once(seam: str, problem: Problem, target: str, choice: Choice, device: str) -> None:
    """Launch a choice for one token of zeros."""
    arm, launch = _launch(seam, problem, target, choice)
    drawn = find_seam(seam).inputs(problem, 1, 0, "cpu")
    inputs = {name: torch.zeros_like(tensor, device=device) for name, tensor in drawn.items()}
    launch(inputs, OutputBuffers(arm.plan(problem, dict(choice.config), 1), device).bind(1))


def scratch_numel(digest: str, seam: str, problem: Problem, target: str, max_tokens: int) -> int:
    """Return the float32 elements of scratch that any call with up to `max_tokens` needs."""
    problem, owner = _canonical(seam, problem), find_seam(seam)
    found = choices(digest, seam, problem, target)
    return max(_scratch(owner.arm(target, c.arm), problem, c, max_tokens).numel for c in found)


def choices(digest: str, seam: str, problem: Problem, target: str) -> tuple[Choice, ...]:
    """Return every choice that calls can reach: the table's, or the built-in one.

    Raises:
        NotServed, TableError: as `lookup`.
    """
    answer = lookup(digest, seam, problem, target, 1)
    return _tables[digest].choices if digest else (answer.choice,)


def first_counts(digest: str) -> tuple[int, ...]:
    """Return the first token count of every band, and the one above the last; of no table only 1.

    Raises:
        NotServed: the digest is not registered.
    """
    if not digest:
        return (1,)
    table = _tables.get(digest)
    if table is None:
        raise _not_served(digest)
    return (*(band.first for band in table.bands), table.max_tokens + 1)


@lru_cache(maxsize=4096)
def _scratch(arm: Arm, problem: Problem, choice: Choice, num_tokens: int) -> ScratchLayout:
    return arm.scratch_layout(problem, dict(choice.config), num_tokens)


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
            if _capturing():
                raise NotCompiled(
                    f"{variant} is not compiled and the stream is capturing; call serving.warm_up(table) or "
                    "run the op once before the capture"
                )
            _kernels[variant] = compile_variant(variant)
        return _kernels[variant]


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _check_fits(table: DispatchTable, seam: str, problem: Problem, target: str) -> None:
    # A table of another seam is told as such before its problem is looked at.
    has_problem = problem_of(table)
    pairs: dict[str, tuple[object, object]] = {"seam": (table.seam, seam), "target": (table.target, target)}
    pairs.update({name: (getattr(has_problem, name), getattr(problem, name)) for name in _SHAPING})
    for name, (has, value) in pairs.items():
        if has != value:
            raise TableError(
                f"table {table.digest[:12]} is for {name} {has!r}, the call has {value!r}; serve a table "
                "tuned for it, or pass no table for the built-in choice"
            )


def _not_served(digest: str) -> NotServed:
    known = ", ".join(d[:12] for d in _tables) or "none"
    return NotServed(f"no table {digest[:12]!r} is served here (served: {known}); call serving.serve(table)")
