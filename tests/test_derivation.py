"""What the database holds gives bands again, and a table that covers less is kept with a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mhctune.autotuner.records import Cell, Footprint, Sample, SweepState
from mhctune.autotuner.store import SweepRecord
from mhctune.db.derivation import derive_stored, keep, other_times
from mhctune.db.repository import Repository
from mhctune.kernels.dispatch import DispatchTable, Fingerprint
from mhctune.kernels.post_pre_delayed import PostPreDelayed
from mhctune.kernels.seam import Problem

MakeTable = Callable[..., DispatchTable]


@pytest.fixture
def begin(repository: Repository, make_sweep: Any) -> Callable[..., int]:
    return lambda **changes: repository.begin(make_sweep(**changes), new=True)


def of(table: DispatchTable, sweep: int, bands: int = 3) -> DispatchTable:
    """A table of a sweep with its first bands."""
    return table.replace(bands=table.bands[:bands], evidence={**table.evidence, "sweep": sweep})


def measure(repository: Repository, sweep_id: int, sweep: SweepRecord, count: int) -> None:
    """Keep five rounds of every candidate at a token count: 10 us, and one more for each place behind."""
    for place, candidate in enumerate(sweep.candidates):
        cell = Cell(sweep.seam, sweep.problem, count)
        trial = repository.open_trial(sweep_id, cell, candidate, Footprint(1, 2, 3))
        repository.add_samples([(trial, Sample(0, n, 0, 20, 10.0 + place)) for n in range(5)])
        repository.finish_trial(trial)


def test_a_table_that_ends_earlier_than_the_one_it_replaces_is_kept_with_a_warning(
    repository: Repository, begin: Callable[..., int], make_table: MakeTable
) -> None:
    assert keep(repository, of(make_table(), begin())) == ""
    assert keep(repository, of(make_table(), begin())) == ""
    assert keep(repository, of(make_table(), begin(), bands=1)) == (
        "the bands now end at 1 token; those of sweep 2, which they take the place of, end at 64"
    )
    assert [stored.table.max_tokens for stored in repository.tables()] == [1, 64, 64]
    assert keep(repository, of(make_table(), begin(), bands=2)) == ""


@pytest.mark.parametrize("change", ["fingerprint", "problem", "seam", "target", "numerics"])
def test_a_table_that_stands_beside_another_takes_no_place(
    repository: Repository,
    begin: Callable[..., int],
    make_table: MakeTable,
    make_fingerprint: Callable[..., Fingerprint],
    change: str,
) -> None:
    keep(repository, of(make_table(), begin()))
    other = {
        "fingerprint": make_fingerprint(driver="571"),
        "problem": Problem(hidden_size=7168),
        "seam": "pre",
        "target": "c",
        "numerics": "rounded/8",
    }[change]
    given = other.to_dict() if isinstance(other, Problem) else other
    sweep = begin() if change == "numerics" else begin(**{change: other})
    assert keep(repository, of(make_table(**{change: given}), sweep, bands=1)) == ""


def test_a_stored_sweep_gives_its_bands_when_its_arms_are_gone(
    repository: Repository, begin: Callable[..., int], make_sweep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = make_sweep()
    sweep_id = begin()
    for count in sweep.token_counts:
        measure(repository, sweep_id, sweep, count)
    repository.end(sweep_id, SweepState.COMPLETE)
    monkeypatch.setattr(PostPreDelayed, "arms", lambda seam, target: ())
    table = derive_stored(repository, repository.sweep(sweep_id)).table
    assert [(band.first, band.last) for band in table.bands] == [(1, 64)]
    assert str(table.bands[0].choice) == str(sweep.candidates[0])
    assert table.evidence["variants"] == sorted(sweep.variants[sweep.candidates[0]])


EARLY = {"version": 1, "samples": 5, "until": "layer_input"}


def test_the_other_times_are_of_an_alike_sweep_and_not_of_its_probes(
    repository: Repository, begin: Callable[..., int], make_sweep: Any
) -> None:
    sweep, whole = make_sweep(), begin()
    early = begin(digest="e" * 64, protocol={**EARLY, "samples": 9})
    for count in (1, 5):  # 5 is not of the sweep's grid: a probe
        measure(repository, early, sweep, count)
    assert other_times(repository, repository.sweep(whole)) is None  # it has not ended
    repository.end(early, SweepState.INCOMPLETE)
    found = other_times(repository, repository.sweep(whole))
    assert found is not None
    assert (found.sweep, found.until) == (early, "layer_input")
    assert found.at(1) == {candidate: 10.0 + place for place, candidate in enumerate(sweep.candidates)}
    assert (found.at(5), found.at(8)) == ({}, {})


@pytest.mark.parametrize(
    "change",
    [
        {"target": "c"}, {"problem": Problem(hidden_size=7168)}, {"protocol": {**EARLY, "l2": "cold"}},
        {"protocol": {**EARLY, "version": 2}}, {"protocol": {"version": 1, "samples": 9}},
    ],
)  # fmt: skip
def test_a_sweep_that_differs_in_more_than_until_when_it_timed_gives_no_other_times(
    repository: Repository, begin: Callable[..., int], change: dict[str, Any]
) -> None:
    whole = begin()
    repository.end(begin(**{"digest": "e" * 64, "protocol": EARLY, **change}), SweepState.COMPLETE)
    assert other_times(repository, repository.sweep(whole)) is None
