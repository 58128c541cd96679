"""The form that every export is written from: a table's JSON form, its bands and the default alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mhctune.kernels.until import END, told, until_of

MARKER = "Written by mhctune: do not edit, export it again."
"""In the first line of every text export; a file that has it may be replaced."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an export: a token range and its choice; `last` is None for the default, open above."""

    first: int
    last: int | None
    arm: str
    config: Mapping[str, int]
    evidence: tuple[str, ...]
    """Ids of the cells that speak for it: `<12 hex digits of the sweep's digest>@<tokens>`; see
    `evidence_ids`."""


def lines_of(data: Mapping[str, Any]) -> list[Line]:
    """Return the bands of a table's JSON form and, last, its default."""
    lines = [Line(b["first"], b["last"], b["arm"], b["config"], evidence_ids(data, b)) for b in data["bands"]]
    default = data["default"]
    after = data["bands"][-1]["last"] + 1
    return [*lines, Line(after, None, default["arm"], default["config"], ())]


def evidence_ids(data: Mapping[str, Any], band: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ids of the cells that a band of a table's JSON form was chosen by.

    Sweeps are named by digest: their numbers change when databases are merged. A band without evidence
    has none.
    """
    sweep = str(data["evidence"].get("sweep_digest", ""))[:12]
    measured = band["evidence"].get("measured") or ()
    return tuple(f"{sweep}@{row['num_tokens']}" for row in measured if sweep)


def tunables_of(lines: list[Line]) -> list[str]:
    """Return the names of all tunables that a table's choices have, sorted."""
    return sorted({name for line in lines for name in line.config})


def heading(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that say whose a text export is, without a comment sign."""
    problem, fingerprint = data["problem"], data["fingerprint"]
    yield MARKER
    yield f"Table digest: {data['digest']}"
    yield f"Schema version: {data['mhctune_table']}"
    yield from (f"{name.title()}: {compact(data[name])}" for name in ("seam", "target", "numerics"))
    if (until := until_of(data["evidence"].get("protocol"))) != END:
        yield f"Timed {told(until)}"
    yield f"Problem: {compact(problem)}"
    yield from (f"Fingerprint, {name}: {compact(value)}" for name, value in fingerprint.items())


def compact(value: Any) -> str:
    """Return a value as JSON in one line of ASCII, so that nothing in it can end a comment."""
    return json.dumps(value, sort_keys=True)
