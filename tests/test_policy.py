"""Loading decides once: what is served here, why, and which line of a file broke which rule."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mhctune.configs.families import family_of, same_family
from mhctune.configs.loader import recognise
from mhctune.db.export import export
from mhctune.db.policy import Policy
from mhctune.db.tables import against, load_table
from mhctune.kernels.dispatch import DispatchTable, Fingerprint, Status, TableError

MakeTable = Callable[..., DispatchTable]
MakeFingerprint = Callable[..., Fingerprint]


@pytest.fixture
def path(make_table: MakeTable, tmp_path: Path) -> Path:
    return export(make_table(), "json", tmp_path)


def test_what_the_policy_allows_is_served_and_the_reason_logged_once(
    path: Path, make_fingerprint: MakeFingerprint, caplog: pytest.LogCaptureFixture
) -> None:
    policy, here = Policy(Status.OTHER_TOOLCHAIN), make_fingerprint(driver="580.1", tilelang="0.1.16")
    with caplog.at_level(logging.INFO, logger="mhctune"):
        for _ in range(3):
            assert load_table(path, here, policy=policy).lookup(1).status is Status.OTHER_TOOLCHAIN
        assert load_table(path, make_fingerprint(), policy=policy).status is Status.EXACT
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "other_toolchain here: driver '570.86', here '580.1'; tilelang '0.1.15', here '0.1.16'" in (
        record.getMessage()
    )


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        (Policy(), {Status.EXACT, Status.OTHER_DRIVER}),
        (Policy(Status.EXACT), {Status.EXACT}),
        (Policy(Status.EXACT, also=[Status.FAMILY]), {Status.EXACT, Status.FAMILY}),
        (Policy(Status.FOREIGN), set(Status) - {Status.OUT_OF_RANGE, Status.DEFAULT}),
    ],
)
def test_the_caller_decides_which_statuses_are_served(
    path: Path, make_fingerprint: MakeFingerprint, policy: Policy, served: set[Status]
) -> None:
    machines = {
        Status.EXACT: make_fingerprint(),
        Status.OTHER_DRIVER: make_fingerprint(driver="580"),
        Status.OTHER_TOOLCHAIN: make_fingerprint(cuda="13.0"),
        Status.OTHER_SOURCE: make_fingerprint(source_hash="6" * 64),
        Status.FAMILY: make_fingerprint(gpu_name="NVIDIA H200 NVL", sm_count=120),
        Status.FOREIGN: make_fingerprint(gpu_name="NVIDIA B200"),
    }
    for status, here in machines.items():
        if status in served:
            assert load_table(path, here, policy=policy).status is status
            continue
        with pytest.raises(
            TableError, match=f"is {status} here .* and the policy serves exact.*: sweep here"
        ):
            load_table(path, here, policy=policy)


def test_a_policy_needs_a_machine_and_statuses_that_a_table_can_have(path: Path) -> None:
    with pytest.raises(ValueError, match="a policy needs the fingerprint"):
        load_table(path, policy=Policy())
    for status in (Status.OUT_OF_RANGE, Status.DEFAULT):
        with pytest.raises(ValueError, match=f"status {status} is no table's"):
            Policy(status)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"gpu_name": "NVIDIA H200 NVL"}, Status.FAMILY),
        ({"gpu_name": "NVIDIA H200 NVL", "driver": "580", "source_hash": "6" * 64}, Status.FAMILY),
        ({"gpu_name": "NVIDIA H200 NVL", "mig": "1g.18gb"}, Status.FOREIGN),
        ({"gpu_name": "NVIDIA H100 80GB HBM3"}, Status.FOREIGN),
        ({"memory_gib": 90}, Status.FOREIGN),  # the same name with less memory is another device
        ({"gpu_name": "some processor"}, Status.FOREIGN),
    ],
)
def test_a_name_of_the_same_family_is_an_alias_with_its_own_status(
    make_table: MakeTable, make_fingerprint: MakeFingerprint, changes: dict[str, Any], status: Status
) -> None:
    assert against(make_table(), make_fingerprint(**changes)).status is status


def test_families_are_the_gpu_targets() -> None:
    for name in ("NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA GB300", "NVIDIA H100 80GB HBM3", "NVIDIA A100"):
        target = recognise(name)
        assert family_of(name) == (target.name if target else None)
    assert not same_family("one processor", "another processor")


def edited(path: Path, old: str, new: str) -> tuple[Path, int]:
    """Replace the first occurrence and return the line it stands on."""
    text = path.read_text()
    line = text.count("\n", 0, text.index(old)) + 1
    path.write_text(text.replace(old, new, 1))
    return path, line


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ('"first": 2,', '"first": 3,', "band 2 begins at 3; it must begin at 2: bands are contiguous from 1"),
        ('"last": 17', '"last": 1', "band 2 ends at 1, before it begins at 2"),
        ('"last": 17', '"last": 17.5', "band 2 has last 17.5; it must be an integer"),
        ('"last": 17', '"last": true', "band 2 has last True; it must be an integer"),
        ('"n_splits": 1', '"n_splits": "1"', "band 2 has n_splits '1'; a tunable is an integer"),
    ],
)
def test_a_broken_band_is_named_with_its_line_and_rule(path: Path, old: str, new: str, rule: str) -> None:
    lines = path.read_text().splitlines()
    opening = [n for n, line in enumerate(lines, start=1) if line == "  {"]
    edited(path, old, new)
    with pytest.raises(TableError) as found:
        load_table(path)
    assert str(found.value) == f"{path}: line {opening[1]}: {rule}"


def test_a_line_that_is_no_json_is_named(path: Path) -> None:
    _, line = edited(path, '"last": 17', '"last" 17')
    with pytest.raises(TableError, match=rf"neither an SQLite .* \(line {line}: Expecting ':' delimiter\)"):
        load_table(path)


def test_a_key_that_stands_twice_is_refused(path: Path) -> None:
    edited(path, '"last": 17', '"last": 17, "last": 18')
    with pytest.raises(TableError, match="the key 'last' stands twice in one object; export it again"):
        load_table(path)


def test_bands_that_are_no_list_are_named(path: Path) -> None:
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "bands": {}}, indent=1))
    with pytest.raises(TableError, match=r"line \d+: bands is a dict; it must be a list"):
        load_table(path)
    path.write_text(json.dumps({**data, "bands": [1]}, indent=1))
    with pytest.raises(TableError, match=r"band 1 is a int; it must be an object"):
        load_table(path)
