"""Exports say what the table says, in the same bytes, and never cost somebody a file."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from mhctune.db import export as export_module
from mhctune.db.export import FORMATS, ExportError, export, file_stem
from mhctune.db.tables import load_table
from mhctune.kernels.dispatch import Band, Choice, DispatchTable, Fingerprint, TableError

MakeTable = Callable[..., DispatchTable]
MakeFingerprint = Callable[..., Fingerprint]
EVERY_FORMAT = pytest.mark.parametrize("format", sorted(FORMATS))


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_band(**changes: object) -> dict[str, object]:
    choice = Choice.of("fused", {"tile_n": 24})
    return {"bands": (Band(1, 5, choice),), "default": choice, **changes}


@pytest.mark.parametrize("changes", [{}, one_band()])
def test_every_form_answers_every_token_count_alike(
    make_table: MakeTable, tmp_path: Path, changes: dict[str, object]
) -> None:
    table = make_table(**changes)
    module = load_module(export(table, "python", tmp_path))
    loaded = load_table(export(table, "json", tmp_path))
    for num_tokens in range(2 * table.max_tokens + 6):
        choice = table.lookup(num_tokens).choice
        assert loaded.lookup(num_tokens) == table.lookup(num_tokens)
        assert module.lookup(num_tokens) == (choice.arm, dict(choice.config)), num_tokens


def test_the_module_carries_what_the_table_says(make_table: MakeTable, tmp_path: Path) -> None:
    table = make_table()
    module, data = load_module(export(table, "python", tmp_path)), table.to_dict()
    assert module.SCHEMA_VERSION == data["mhctune_table"]
    assert module.DIGEST == data["digest"]
    for name in ("seam", "problem", "target", "numerics", "fingerprint", "evidence"):
        assert getattr(module, name.upper()) == data[name], name
    assert module.BAND_EVIDENCE == tuple(band["evidence"] for band in data["bands"])


def test_the_json_is_the_tables_own_form(make_table: MakeTable, tmp_path: Path) -> None:
    text = export(make_table(), "json", tmp_path).read_text(encoding="utf-8")
    assert json.loads(text) == make_table().to_dict()
    assert text == json.dumps(make_table().to_dict(), indent=1, sort_keys=True) + "\n"


def test_the_module_needs_the_standard_library_only(make_table: MakeTable, tmp_path: Path) -> None:
    path = export(make_table(), "python", tmp_path)
    code = f"import {path.stem} as table; print(table.lookup(8))"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "('unfused', {'n_splits': 1, 'tile_n': 32})\n"


def test_the_module_says_whose_it_is(make_table: MakeTable, tmp_path: Path) -> None:
    lines = export(make_table(), "python", tmp_path).read_text().splitlines()
    assert lines[0] == "# Written by mhctune: do not edit, export it again."
    assert make_table().digest in lines[1]


@pytest.mark.parametrize(
    "name", ['NVIDIA "H200"', "back\\slash", '"""', "it's", "Größe \U0001f600", "x" * 300]
)
def test_any_name_makes_a_module_that_compiles(
    make_table: MakeTable, make_fingerprint: MakeFingerprint, tmp_path: Path, name: str
) -> None:
    table = make_table(fingerprint=make_fingerprint(pass_config=name, compiler=name), evidence={name: [name]})
    module = load_module(export(table, "python", tmp_path))
    assert module.FINGERPRINT["compiler"] == name
    assert module.EVIDENCE == {name: [name]}


def test_the_module_keeps_to_the_line_length(make_table: MakeTable, tmp_path: Path) -> None:
    evidence = {f"measured_{n}": [{"latency_us": n + 0.5, "tokens": n}] * 9 for n in range(30)}
    text = export(make_table(evidence=evidence), "python", tmp_path).read_text()
    assert max(map(len, text.splitlines())) <= 110
    assert ast.get_docstring(ast.parse(text)) is not None


@EVERY_FORMAT
def test_the_same_table_gives_the_same_bytes(make_table: MakeTable, tmp_path: Path, format: str) -> None:
    first = export(make_table(), format, tmp_path / "a")
    second = export(make_table(), format, tmp_path / "b")
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


def test_names_can_be_read_and_imported(make_table: MakeTable) -> None:
    stem = file_stem(make_table())
    assert stem == f"post_pre_delayed_{stem.split('_')[3]}_nvidia_h200_rounded_1"
    assert stem.isidentifier()


def test_tables_that_stand_side_by_side_do_not_share_a_name(
    make_table: MakeTable, make_fingerprint: MakeFingerprint
) -> None:
    tables = [
        make_table(),
        make_table(seam="pre"),
        make_table(problem={"hidden_size": 1}),
        make_table(numerics="unrounded/1"),
        make_table(fingerprint=make_fingerprint(gpu_name="NVIDIA B200")),
        make_table(fingerprint=make_fingerprint(mig="1g.18gb")),
    ]
    assert len({file_stem(table) for table in tables}) == len(tables)


@EVERY_FORMAT
def test_a_file_of_ours_is_replaced(make_table: MakeTable, tmp_path: Path, format: str) -> None:
    path = export(make_table(), format, tmp_path)
    assert export(make_table(evidence={"sweep": 2}), format, tmp_path) == path
    assert make_table(evidence={"sweep": 2}).digest in path.read_text()


@EVERY_FORMAT
@pytest.mark.parametrize("content", ["", "{}", "mhctune_table = 1\n", "\xff"])
def test_a_file_of_somebody_else_is_kept_unless_forced(
    make_table: MakeTable, tmp_path: Path, format: str, content: str
) -> None:
    path = tmp_path / (file_stem(make_table()) + FORMATS[format].suffix)
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ExportError, match=r"exists and was not written by mhctune; .*--force"):
        export(make_table(), format, tmp_path)
    assert path.read_text(encoding="latin-1") == content
    assert list(tmp_path.iterdir()) == [path]
    assert export(make_table(), format, tmp_path, force=True) == path
    assert make_table().digest in path.read_text()


def test_an_unknown_format_is_refused(make_table: MakeTable, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"unknown export format 'yaml'; known: .*json, python"):
        export(make_table(), "yaml", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("force", [True, False])
def test_a_folder_that_cannot_be_written_is_named(make_table: MakeTable, tmp_path: Path, force: bool) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", Path("/proc/self")):
        with pytest.raises(ExportError, match=f"{folder}/.*cannot be written: .*choose another folder"):
            export(make_table(), "json", folder, force)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_write_that_fails_half_way_leaves_the_old_file_alone(
    make_table: MakeTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = export(make_table(), "json", tmp_path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ExportError, match="No space left on device"):
        export(make_table(evidence={"sweep": 2}), "json", tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_that_json_would_change_is_not_exported(make_table: MakeTable, tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot be written as JSON"):
        export_module.export(make_table(evidence={"regret": float("inf")}), "json", tmp_path)
    assert list(tmp_path.iterdir()) == []
