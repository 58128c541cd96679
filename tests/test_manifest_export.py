"""The manifest names exactly the kernels that a table can reach, and says when a table has moved on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mhctune.autotuner.check import Verdict
from mhctune.db.export import ExportError, export
from mhctune.db.manifest import export_manifest, manifests_beside, reachable
from mhctune.kernels import serving
from mhctune.kernels.dispatch import Band, Choice, DispatchTable, TableError
from mhctune.kernels.registry import seam
from mhctune.kernels.seam import Problem

PROBLEM = Problem(hidden_size=256)
CONFIG = {"tile_n": 24, "n_splits": 1, "block_h": 64, "block_m": 1}
FUSED, UNFUSED = Choice.of("fused", CONFIG), Choice.of("unfused", {**CONFIG, "block_h": 128})


@pytest.fixture
def table(make_table: Callable[..., DispatchTable]) -> DispatchTable:
    bands = (Band(1, 4, FUSED), Band(5, 9, UNFUSED))
    return make_table(target="c", problem=PROBLEM.to_dict(), bands=bands, default=FUSED)


def test_it_holds_the_kernels_of_every_choice_and_no_other(table: DispatchTable, tmp_path: Path) -> None:
    data = json.loads(export_manifest(table, tmp_path).read_text())
    owner = seam(table.seam)
    wanted = {
        str(variant)
        for choice in (FUSED, UNFUSED)
        for variant in owner.arm("c", choice.arm).variants(PROBLEM, dict(choice.config))
    }
    assert data["table"] == table.digest
    assert {_named(key) for key in data["compile_keys"]} == wanted
    assert len(data["compile_keys"]) == len(wanted)


def _named(key: dict[str, object]) -> str:
    params = key["params"]
    assert isinstance(params, dict)
    return f"{key['target']}:{key['kernel']}({', '.join(f'{k}={params[k]}' for k in sorted(params))})"


def test_the_default_is_reachable_too(table: DispatchTable) -> None:
    first = table.replace(bands=table.bands[:1], default=UNFUSED)
    assert set(reachable(first)) == set(reachable(table))
    assert len(reachable(first.replace(default=FUSED))) < len(reachable(first))


def test_warming_up_compiles_exactly_what_it_names(table: DispatchTable) -> None:
    digest = serving.serve(table)
    try:
        known = set(serving._kernels)
        serving.warm_up(digest)
        assert set(serving._kernels) - known == set(reachable(table)) - known
        assert set(reachable(table)) <= set(serving._kernels)
    finally:
        serving.withdraw(digest)


def test_the_same_table_gives_the_same_bytes_one_line_a_key(table: DispatchTable, tmp_path: Path) -> None:
    first, second = (export_manifest(table, tmp_path / name) for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    lines = [line for line in first.read_text().splitlines() if '"kernel"' in line]
    assert len(lines) == len(reachable(table))


def test_it_lies_beside_the_export_and_is_compared_with_it(table: DispatchTable, tmp_path: Path) -> None:
    path = export(table, "json", tmp_path)
    assert manifests_beside(path, table) == []
    manifest = export_manifest(table, tmp_path)
    (found,) = manifests_beside(path, table)
    assert found.verdict is Verdict.PASSED, found.sentence
    (moved,) = manifests_beside(path, table.replace(bands=table.bands[:1], default=FUSED))
    assert moved.verdict is Verdict.DISAGREES
    assert "lacks 0 compile keys of the table and has" in moved.sentence
    (other,) = manifests_beside(path, table.replace(evidence={}))
    assert other.verdict is Verdict.DISAGREES
    assert f"is of table {table.digest[:12]}" in other.sentence
    for text, verdict in (("[]", Verdict.DISAGREES), ("{", Verdict.MISSING)):
        manifest.write_text(text)
        (found,) = manifests_beside(path, table)
        assert found.verdict is verdict


def test_a_table_that_cannot_be_launched_has_none(
    make_table: Callable[..., DispatchTable], tmp_path: Path
) -> None:
    with pytest.raises(TableError, match=r"has no manifest here: .*is illegal"):
        export_manifest(make_table(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_somebody_else_is_kept(table: DispatchTable, tmp_path: Path) -> None:
    path = export_manifest(table, tmp_path)
    path.write_text("{}")
    with pytest.raises(ExportError, match="was not written by mhctune"):
        export_manifest(table, tmp_path)
    assert path.read_text() == "{}"
