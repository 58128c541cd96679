"""The torch ops that dispatch: `mhctune::<seam>` and `mhctune::<seam>_out`, built from the seams' forms.

`table` is the digest of a served table, or empty for the built-in choice. The allocating form is for eager
use and tests and returns its outputs as a list; the `_out` form writes its arguments, allocates nothing and
is what graphs capture. `ops.post_pre_delayed_out.__doc__` lists the arguments. An output that only some
problems have (`aux`) comes after `table`: the `_out` form takes the tensor or None, the other form a bool.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mhctune.kernels import serving
from mhctune.kernels.argument import Expected, check, check_devices, tokens_and_hidden
from mhctune.kernels.buffers import torch_dtype
from mhctune.kernels.forms import FORMS, SCALARS, Form
from mhctune.kernels.seam import Problem

_TARGETS = {"cpu": "c", "cuda": "cuda"}

Tensors = dict[str, Tensor]


class SeamOp:
    """Both forms of one seam's op."""

    def __init__(self, form: Form) -> None:
        """Lay out the arguments: inputs, outputs, scratch, scalars, table, optional outputs."""
        self.form = form
        self.name, self.out_name = f"mhctune::{form.name}", f"mhctune::{form.name}_out"
        self._first = form.reads[0].name
        self._reads = [spec.name for spec in form.reads]
        self._writes = [spec.name for spec in form.writes if not spec.when]
        self._optional = [spec for spec in form.writes if spec.when]
        self._scratch = ["scratch"] if form.weights is not None else []
        self._scalars = [name for name in (*SCALARS, "sinkhorn_iters") if name in form.free]
        self.names = [*self._reads, *self._writes, *self._scratch, *self._scalars, "table"]
        self.names += [spec.name for spec in self._optional]
        self._tensors = [*self._reads, *self._writes, *self._scratch, *(s.name for s in self._optional)]
        # Problem fields that follow from which tensors are given.
        self._given = [(spec.when, spec.name) for spec in form.reads if spec.when]
        self._problem = lru_cache(maxsize=256)(self._build_problem)
        self._expected = lru_cache(maxsize=1024)(self._build_expected)

    def schema(self, out: bool) -> str:
        """Return the signature of a form in torch's language."""
        parts = [f"Tensor{'?' if spec.when else ''} {spec.name}" for spec in self.form.reads]
        written = [*self._writes, *self._scratch, *(spec.name for spec in self._optional)]
        if out:
            parts += [f"Tensor(a{written.index(name)}!) {name}" for name in (*self._writes, *self._scratch)]
        kinds = {"sinkhorn_iters": "SymInt"}
        parts += [f"{kinds.get(name, 'float')} {name}" for name in self._scalars]
        parts.append('str table=""')
        for spec in self._optional:
            of_out = f"Tensor(a{written.index(spec.name)}!)? {spec.name}=None"
            parts.append(of_out if out else f"bool {spec.when}=False")
        return f"({', '.join(parts)}) -> {'()' if out else 'Tensor[]'}"

    def run_out(self, *args: Any) -> None:
        """Run the seam into the caller's tensors."""
        named = self._named(self.names, args)
        tensors = {name: named[name] for name in self._tensors if named[name] is not None}
        flags = [named[spec.name] is not None for spec in self._optional]
        tokens, problem = self._call(self.out_name, named, flags)
        size = tensors["scratch"].numel() if self._scratch else 0
        check(self.out_name, self._expected(problem, tokens, size), tensors, self._first)
        if tokens:
            self._launch(self.out_name, named["table"], problem, tokens, tensors)

    def run(self, *args: Any) -> list[Tensor]:
        """Run the seam into new tensors."""
        flag_names = [spec.when for spec in self._optional]
        named = self._named([*self._reads, *self._scalars, "table", *flag_names], args)
        flags = [bool(named[name]) for name in flag_names]
        tokens, problem = self._call(self.name, named, flags)
        tensors = {name: named[name] for name in self._reads if named[name] is not None}
        check(self.name, self._expected(problem, tokens, None), tensors, self._first)
        first = tensors[self._first]
        outputs = self._empty(first, flags)
        if tokens:
            target, table = _TARGETS[first.device.type], named["table"]
            if self._scratch:
                numel = serving.scratch_numel(table, self.form.name, problem, target, tokens)
                tensors["scratch"] = first.new_empty(numel, dtype=torch.float32)
            self._launch(self.name, table, problem, tokens, {**tensors, **outputs})
        return list(outputs.values())

    def fake_out(self, *args: Any, **kwargs: Any) -> None:
        """Check devices; there is nothing else to tell."""
        check_devices(self.out_name, self.names, self._merged(self.names, args, kwargs))

    def fake(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Return outputs of the right shapes without computing."""
        flag_names = [spec.when for spec in self._optional]
        names = [*self._reads, *self._scalars, "table", *flag_names]
        values = self._merged(names, args, kwargs)
        check_devices(self.name, names, values)
        flags = [bool(values[names.index(name)]) for name in flag_names]
        return list(self._empty(values[0], flags).values())

    def _named(self, names: list[str], args: tuple[Any, ...]) -> dict[str, Any]:
        # torch leaves out trailing arguments that equal their defaults.
        values = args if len(args) == len(names) else self._merged(names, args, {})
        return dict(zip(names, values, strict=True))

    def _merged(self, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        return [*args, *(kwargs.get(name, "" if name == "table" else None) for name in names[len(args) :])]

    def _call(self, op: str, named: dict[str, Any], flags: list[bool]) -> tuple[int, Problem]:
        first = named[self._first]
        tokens, hidden = tokens_and_hidden(op, self.form.reads[0], first, tuple(_TARGETS))
        given = tuple(named[name] is not None for _, name in self._given)
        scalars = tuple(named[name] for name in self._scalars)
        return tokens, self._problem(hidden, given, tuple(flags), scalars)

    def _build_problem(
        self, hidden: int, given: tuple[bool, ...], flags: tuple[bool, ...], scalars: tuple[float, ...]
    ) -> Problem:
        fields: dict[str, Any] = dict(zip(self._scalars, scalars, strict=True))
        fields.update(zip((when for when, _ in self._given), given, strict=True))
        fields.update(zip((spec.when for spec in self._optional), flags, strict=True))
        return self.form.canonical(Problem(hidden, **fields))

    def _build_expected(self, problem: Problem, tokens: int, scratch: int | None) -> tuple[Expected, ...]:
        """Return what inputs must be and, unless the elements of scratch are None, what is written."""
        found = [Expected.of(spec, problem, tokens) for spec in self.form.reads if spec.exists(problem)]
        if scratch is not None:
            written = [spec for spec in self.form.writes if spec.exists(problem)]
            found += [Expected.of(spec, problem, tokens, True) for spec in written]
            if self._scratch:
                found.append(Expected("scratch", (scratch,), torch.float32, 4 * scratch, True))
        return tuple(found)

    def _empty(self, first: Tensor, flags: list[bool]) -> Tensors:
        asked = dict(zip((spec.name for spec in self._optional), flags, strict=True))
        return {
            spec.name: first.new_empty(
                spec.extents(first.shape[0], first.shape[-1]), dtype=torch_dtype(spec.dtype)
            )
            for spec in self.form.writes
            if asked.get(spec.name, True)
        }

    def _launch(self, op: str, table: str, problem: Problem, tokens: int, tensors: Tensors) -> None:
        target = _TARGETS[tensors[self._first].device.type]
        found = serving.dispatch_canonical(table, self.form.name, problem, target, tokens)
        if self._scratch:
            scratch = tensors["scratch"]
            if scratch.numel() < found.scratch.numel:
                raise ValueError(
                    f"{op}: scratch has {scratch.numel()} elements, {tokens} tokens need "
                    f"{found.scratch.numel}; size it once with serving.scratch_numel(table, seam, problem, "
                    "target, max_tokens)"
                )
            tensors.update(found.scratch.views(scratch))
        # Arms take every input; one that a problem leaves out is never read: its slot gets a view like it.
        if "pre_mix" in self._reads and "pre_mix" not in tensors:
            tensors["pre_mix"] = tensors["next_post_mix"]
        if "norm_weight" in self._reads and "norm_weight" not in tensors:
            tensors["norm_weight"] = tensors["layer_input"][0]
        found.launch(tensors, tensors)


_library: Any = torch.library.Library("mhctune", "FRAGMENT")  # type: ignore[no-untyped-call]


def _documented(op: SeamOp, out: bool) -> str:
    lines = [f"    {spec}" for spec in op.form.reads] + ["  writes:" if out else "  returns:"]
    lines += [f"    {spec}" for spec in op.form.writes]
    return "\n".join([f"{op.form.about[0].upper()}{op.form.about[1:]}.", f"  {op.schema(out)}", *lines])


def _define(form: Form) -> tuple[Callable[..., list[Tensor]], Callable[..., None]]:
    """Register both forms of a seam's op and return them."""
    op = SeamOp(form)
    allocating: Any = torch.library.custom_op(op.name, op.run, mutates_args=(), schema=op.schema(out=False))
    allocating.register_fake(op.fake)
    # Not `torch.library.custom_op`: the wrapper that it puts around an op of six mutated arguments takes
    # longer than all checks together. What it adds serves autograd, and these ops have no gradient.
    name = f"{form.name}_out"
    _library.define(f"{name}{op.schema(out=True)}")
    _library.impl(name, op.run_out, "CompositeExplicitAutograd")
    torch.library.register_fake(op.out_name, op.fake_out, lib=_library)
    out = getattr(torch.ops.mhctune, name).default
    allocating.__doc__, out.__doc__ = _documented(op, out=False), _documented(op, out=True)
    return allocating, out


_OPS = {form.name: _define(form) for form in FORMS}

post_pre_delayed, post_pre_delayed_out = _OPS["post_pre_delayed"]
pre_delayed, pre_delayed_out = _OPS["pre_delayed"]
post_pre, post_pre_out = _OPS["post_pre"]
post_pre_bf16, post_pre_bf16_out = _OPS["post_pre_bf16"]
pre, pre_out = _OPS["pre"]
pre_broadcast, pre_broadcast_out = _OPS["pre_broadcast"]
post, post_out = _OPS["post"]
hc_head, hc_head_out = _OPS["hc_head"]
collapse, collapse_out = _OPS["collapse"]
