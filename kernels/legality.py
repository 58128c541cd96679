"""Legality: can this process launch everything that a table can choose?"""

from __future__ import annotations

from dataclasses import fields

from mhctune.kernels.dispatch import Choice, DispatchTable, TableError
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Problem


def problem_of(table: DispatchTable) -> Problem:
    """Return the problem of a table; fields that it leaves out have their usual values.

    Fields that the table's seam does not depend on are at their one value.

    Raises:
        TableError: a field is unknown, missing or has a value that no kernel computes.
    """
    known = [field.name for field in fields(Problem)]
    unknown = sorted(set(table.problem) - set(known))
    if unknown:
        raise TableError(f"unknown problem fields {unknown}; known: {', '.join(known)}")
    owner = SEAMS.get(table.seam)
    try:
        problem = Problem(**table.problem)
        return owner.canonical(problem) if owner else problem
    except (TypeError, ValueError) as error:
        raise TableError(str(error)) from error


def refusals(table: DispatchTable) -> dict[Choice | None, str]:
    """Return why choices of a table cannot be launched, in the order of `choices`; empty means legal.

    The key None is for the whole table: its seam or its problem is unknown.
    """
    try:
        seam, problem = find_seam(table.seam), problem_of(table)
    except (KeyError, TableError) as error:
        return {None: str(error.args[0])}
    wrong: dict[Choice | None, str] = {}
    for choice in table.choices:
        try:
            reasons = seam.arm(table.target, choice.arm).space(problem).refusals(dict(choice.config))
        except KeyError as error:
            reasons = (str(error.args[0]),)
        if reasons:
            wrong[choice] = f"{choice} is illegal: {'; '.join(reasons)}"
    return wrong
