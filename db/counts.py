"""Counts: how many trials of a sweep came to what."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.orm import Session

from mhctune.autotuner.records import FailureKind
from mhctune.db.models import SweepRow, TrialRow


@dataclass(frozen=True, slots=True)
class Counts:
    """How many trials of a sweep's grid came to what, and how many more were probes of edges."""

    measured: int
    failed: int
    racing: int
    failures: Mapping[FailureKind, int]
    probes: int = 0


def counts_of(session: Session, sweep_id: int) -> Counts:
    """Count the trials of a sweep; all zero for an unknown one."""
    key = (TrialRow.state, TrialRow.failure_kind)
    query = select(*key, func.count()).where(TrialRow.sweep_id == sweep_id).group_by(*key)
    by_state: Counter[str] = Counter()
    failures: Counter[FailureKind] = Counter()
    probes = 0
    found = [(state, kind, count) for state, kind, count in session.execute(query)]
    row = session.get(SweepRow, sweep_id)
    # Apart, and by ranges: the index then yields the few probes without a look at the whole grid.
    between = query.where(_off_grid(json.loads(row.token_counts))) if row else None
    for state, kind, count in session.execute(between) if between is not None else ():
        probes += count
        found.append((state, kind, -count))
    for state, kind, count in found:
        by_state[state] += count
        if kind is not None:
            failures[FailureKind(kind)] += count
    return Counts(by_state["measured"], by_state["failed"], by_state["racing"], +failures, probes)


def _off_grid(token_counts: Sequence[int]) -> ColumnElement[bool]:
    ends = [0, *token_counts, None]
    inside = (
        and_(TrialRow.num_tokens > low, *([TrialRow.num_tokens < high] if high is not None else []))
        for low, high in pairwise(ends)
    )
    return or_(*inside)
