"""The table to serve on the machine at hand, of a database that holds those of several machines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mhctune.autotuner.probe import Device
from mhctune.configs.errors import ConfigError
from mhctune.db import here
from mhctune.db.engine import DatabaseError
from mhctune.db.export import export
from mhctune.db.here import load_here, load_measured
from mhctune.db.repository import Repository
from mhctune.db.tables import problem_key
from mhctune.kernels.dispatch import DispatchTable, Fingerprint, Status, TableError
from mhctune.kernels.seam import Problem, Seam

MakeTable = Callable[..., DispatchTable]
Save = Callable[[DispatchTable], DispatchTable]
GPU, CPU = Device("NVIDIA H200", "cuda", 1), Device("a processor", "c", 1)
URL = "postgresql://me:secret@host/fleet"


@pytest.fixture
def save(repository: Repository, make_sweep: Any) -> Save:
    """Keep a table under a sweep of its own."""

    def keep(table: DispatchTable) -> DispatchTable:
        changes = {"seam": table.seam, "target": table.target, "fingerprint": table.fingerprint}
        sweep = make_sweep(problem=Problem(**table.problem), **changes)
        repository.save_table(repository.begin(sweep, new=True), table)
        return table

    return keep


@pytest.fixture
def machine(make_fingerprint: Callable[..., Fingerprint], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The fingerprints of this machine by target; they count as read when asked for."""
    made = {"cuda": make_fingerprint(), "c": make_fingerprint(gpu_name="a processor")}
    asked: list[str] = []

    def read(seam: Seam, target: str) -> Fingerprint:
        asked.append(target)
        return made[target]

    monkeypatch.setattr(here, "fingerprint", read)
    return {**made, "asked": asked}


@pytest.fixture
def on_cpu(save: Save, make_table: MakeTable, machine: dict[str, Any]) -> Callable[[], DispatchTable]:
    return lambda: save(make_table(target="c", fingerprint=machine["c"]))


@pytest.fixture
def on_gpu(save: Save, make_table: MakeTable, machine: dict[str, Any]) -> Callable[[], DispatchTable]:
    return lambda: save(make_table(fingerprint=machine["cuda"]))


@pytest.mark.parametrize("newer", ["cpu", "gpu"])
def test_a_newer_table_of_another_target_hides_none_of_this_device(
    on_cpu: Callable[[], DispatchTable],
    on_gpu: Callable[[], DispatchTable],
    database: Path,
    newer: str,
) -> None:
    for keep in (on_gpu, on_cpu) if newer == "cpu" else (on_cpu, on_gpu):
        keep()
    for device in (CPU, GPU):
        table = load_here(str(database), device)
        assert (table.target, table.status) == (device.target, Status.EXACT)
    assert load_measured(str(database)).target == ("c" if newer == "cpu" else "cuda")


def test_without_a_table_of_the_target_the_newest_is_foreign_and_nothing_is_probed(
    on_cpu: Callable[[], DispatchTable], database: Path, machine: dict[str, Any]
) -> None:
    kept = on_cpu()
    table = load_here(str(database), GPU)
    assert (table.digest, table.status) == (kept.digest, Status.FOREIGN)
    assert machine["asked"] == []


def test_of_one_target_the_best_status_goes_before_the_newest(
    save: Save,
    make_table: MakeTable,
    make_fingerprint: Callable[..., Fingerprint],
    machine: dict[str, Any],
    database: Path,
) -> None:
    save(make_table(fingerprint=make_fingerprint(gpu_name="NVIDIA B200")))
    assert load_here(str(database), GPU).status is Status.FOREIGN
    mine = save(make_table(fingerprint=make_fingerprint(driver="570.1")))
    save(make_table(fingerprint=make_fingerprint(torch="2.12.0")))
    table = load_here(str(database), GPU)
    assert (table.digest, table.status) == (mine.digest, Status.OTHER_DRIVER)


def test_several_problems_must_be_told_apart_by_name(
    on_gpu: Callable[[], DispatchTable], save: Save, make_table: MakeTable, database: Path
) -> None:
    on_gpu()
    other = save(make_table(problem=Problem(hidden_size=7168).to_dict()))
    for load in (load_measured, lambda db, **named: load_here(db, GPU, **named)):
        with pytest.raises(TableError, match="tables of 2 problems match"):
            load(str(database))
        assert load(str(database), problem_digest=problem_key(other)).digest == other.digest


def test_a_seam_that_this_version_does_not_know_is_said(
    save: Save, make_table: MakeTable, machine: dict[str, Any], database: Path
) -> None:
    save(make_table(seam="pots"))
    with pytest.raises(ConfigError, match="unknown seam 'pots'"):
        load_here(str(database), GPU)


def test_an_exported_file_is_judged_too(
    on_gpu: Callable[[], DispatchTable], database: Path, tmp_path: Path
) -> None:
    path = export(on_gpu(), "json", tmp_path)
    assert load_here(str(path), GPU).status is Status.EXACT
    assert load_here(str(path), CPU).status is Status.FOREIGN


# PostgreSQL.


@pytest.fixture
def server(repository: Repository, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the URL name an SQLite file: no server is needed to show which tables are chosen."""
    opened = Repository.open.__func__  # type: ignore[attr-defined]

    def instead(cls: type[Repository], target: str | Path, *, readonly: bool = False) -> Repository:
        assert (target, readonly) == (URL, True)
        made: Repository = opened(cls, database, readonly=True)
        return made

    monkeypatch.setattr(Repository, "open", classmethod(instead))


@pytest.mark.usefixtures("server")
def test_tables_of_a_url_are_chosen_as_those_of_a_file(
    on_cpu: Callable[[], DispatchTable],
    on_gpu: Callable[[], DispatchTable],
    save: Save,
    make_table: MakeTable,
) -> None:
    mine = on_gpu()
    newest = on_cpu()
    assert load_measured(URL).digest == newest.digest
    found = load_here(URL, GPU)
    assert (found.digest, found.status) == (mine.digest, Status.EXACT)
    other = save(make_table(problem=Problem(hidden_size=7168).to_dict()))
    with pytest.raises(TableError, match=r"me:\*\*\*@host/fleet: tables of 2 problems match"):
        load_here(URL, GPU)
    assert load_measured(URL, problem_digest=problem_key(other)).digest == other.digest
    assert load_here(URL, GPU, problem_digest=problem_key(mine)).digest == mine.digest


@pytest.mark.usefixtures("server")
def test_a_url_without_a_table_says_so_without_its_password(repository: Repository) -> None:
    with pytest.raises(TableError, match="holds no table of seam post, problem any") as refused:
        load_measured(URL, "post")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("load", [load_measured, lambda db: load_here(db, GPU)])
def test_without_the_driver_of_a_url_it_is_said_what_to_install(
    load: Callable[[str], DispatchTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(DatabaseError, match=r"needs psycopg, .*pip install 'mhctune\[postgres\]'"):
        load(URL)
