"""Two sweeps do not share a database; readers and the next sweep are not kept out."""

from __future__ import annotations

from pathlib import Path

import pytest

from mhctune.db.engine import DatabaseError
from mhctune.db.lock import exclusive
from mhctune.db.repository import Repository


def test_a_second_sweep_is_refused_while_the_first_one_runs(database: Path, repository: Repository) -> None:
    with (
        exclusive(str(database)),
        pytest.raises(DatabaseError, match=r"another sweep is writing to .*; wait for it, or name another"),
        exclusive(str(database)),
    ):
        pass


def test_readers_go_on_and_the_next_sweep_gets_its_turn(database: Path, repository: Repository) -> None:
    with exclusive(str(database)), Repository.open(database, readonly=True) as reader:
        assert reader.sweeps() == []
    with exclusive(str(database)):
        pass


def test_a_writer_is_not_disturbed_by_the_lock(
    database: Path, repository: Repository, make_sweep: object
) -> None:
    with exclusive(str(database)):
        assert repository.begin(make_sweep()) == 1  # type: ignore[operator]
