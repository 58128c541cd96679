"""Rounds: samples, twins' samples and conditions, written together and read by sweep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from mhctune.autotuner.conditions import Conditions
from mhctune.autotuner.records import Sample
from mhctune.db import rows
from mhctune.db.models import ConditionsRow, SampleRow, TrialRow, TwinRow

Taken = Sequence[tuple[int, Sample]]
"""Samples with the id of their trial."""


def add_round(session: Session, samples: Taken, twins: Taken, conditions: Conditions | None) -> None:
    """Insert one round; `samples` are not empty, and their trials say which cell it is of."""
    for model, taken in ((SampleRow, samples), (TwinRow, twins)):
        if taken:
            session.execute(insert(model), [rows.sample_values(*each) for each in taken])
    if conditions is not None:
        trial_id, sample = samples[0]
        trial = session.get_one(TrialRow, trial_id)
        key = {"sweep_id": trial.sweep_id, "num_tokens": trial.num_tokens}
        key |= {"batch": sample.batch, "round": sample.round}
        session.execute(insert(ConditionsRow), {**key, **rows.conditions_values(conditions)})


def samples_of(
    session: Session, sweep_id: int, model: type[SampleRow] | type[TwinRow], num_tokens: int | None = None
) -> dict[int, list[Sample]]:
    """Return the samples, or the twins', of a sweep or one cell by trial, in the order of batch and round."""
    query = select(model.__table__).join(TrialRow, TrialRow.id == model.trial_id)
    if num_tokens is not None:
        query = query.where(TrialRow.num_tokens == num_tokens)
    key = (model.trial_id, model.batch, model.round)
    found: dict[int, list[Sample]] = defaultdict(list)
    for row in session.execute(query.where(TrialRow.sweep_id == sweep_id).order_by(*key)):
        found[row.trial_id].append(rows.sample_of(row))
    return found


def conditions_of(session: Session, sweep_id: int) -> list[Conditions]:
    """Return the conditions of every round of a sweep, by token count, batch and round."""
    key = (ConditionsRow.num_tokens, ConditionsRow.batch, ConditionsRow.round)
    query = select(ConditionsRow).where(ConditionsRow.sweep_id == sweep_id).order_by(*key)
    return [rows.conditions_of(row) for row in session.scalars(query)]
