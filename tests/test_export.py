"""Exports say what the table says, in the same bytes, and never cost somebody a file."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from answers import READERS, module_of, wrong_answers

from mhctune.db import export as export_module
from mhctune.db.export import FORMATS, ExportError, export, file_stem
from mhctune.kernels.dispatch import Band, Choice, DispatchTable, Fingerprint, TableError

MakeTable = Callable[..., DispatchTable]
MakeFingerprint = Callable[..., Fingerprint]
EVERY_FORMAT = pytest.mark.parametrize("format", sorted(FORMATS))


def one_band(**changes: object) -> dict[str, object]:
    choice = Choice.of("fused", {"tile_n": 24})
    return {"bands": (Band(1, 5, choice),), "default": choice, **changes}


MAX_TOKENS = 8192


def wide(make_table: MakeTable) -> DispatchTable:
    """Five bands to 8192 tokens, one of a single count, one variant that returns; every arm has a config."""
    fused = [Choice.of("fused", {"tile_n": t, "n_splits": 8, "n_thr": 128, "vec": 2}) for t in (2, 6)]
    unfused = Choice.of("unfused_mma", {"tile_n": 24, "n_splits": 16, "n_thr": 0})
    ends = ((1, fused[0]), (15, fused[1]), (32, fused[0]), (33, unfused), (MAX_TOKENS, fused[1]))
    bands, first = [], 1
    for last, choice in ends:
        bands.append(Band(first, last, choice, {"measured": [{"num_tokens": first}, {"num_tokens": last}]}))
        first = last + 1
    evidence = {"sweep_digest": "ab" * 32, "sweep": 3}
    return make_table(bands=tuple(bands), default=unfused, evidence=evidence)


@EVERY_FORMAT
def test_every_form_answers_every_token_count_alike(
    make_table: MakeTable, tmp_path: Path, format: str
) -> None:
    table = wide(make_table)
    assert wrong_answers(format, export(table, format, tmp_path), table) == {}


@EVERY_FORMAT
def test_a_table_of_one_band_answers_alike(make_table: MakeTable, tmp_path: Path, format: str) -> None:
    choice = Choice.of("fused", {"tile_n": 24, "n_splits": 1, "n_thr": 64})
    table = make_table(bands=(Band(1, 5, choice),), default=choice)
    assert wrong_answers(format, export(table, format, tmp_path), table) == {}


def test_every_format_has_a_reader() -> None:
    assert set(READERS) == set(FORMATS)


@EVERY_FORMAT
@pytest.mark.parametrize("edge", [1, 2, 3, 4])
def test_an_edge_that_is_off_by_one_is_caught(
    make_table: MakeTable, tmp_path: Path, format: str, edge: int
) -> None:
    table = wide(make_table)
    bands = list(table.bands)
    moved = bands[edge].first + (1 if bands[edge].last > bands[edge].first else -1)
    bands[edge - 1] = bands[edge - 1].replace(last=moved - 1)
    bands[edge] = bands[edge].replace(first=moved)
    path = export(table.replace(bands=tuple(bands)), format, tmp_path)
    assert list(wrong_answers(format, path, table)) == [min(moved, table.bands[edge].first)]


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        ("python", "bisect_left(", "bisect_right("),
        ("vllm", "bisect_left(", "bisect_right("),
        ("cpp", ".last < num_tokens", ".last <= num_tokens"),
        ("cpp", "low < count ?", "low + 1 < count ?"),
        ("python", "index < len(BANDS)", "index + 1 < len(BANDS)"),
    ],
)
def test_a_lookup_that_is_off_by_one_is_caught(
    make_table: MakeTable, tmp_path: Path, format: str, right: str, wrong: str
) -> None:
    table = wide(make_table)
    path = export(table, format, tmp_path)
    text = path.read_text()
    assert right in text
    both = text.replace("import bisect_left", "import bisect_left, bisect_right")
    path.write_text(both.replace(right, wrong))
    assert wrong_answers(format, path, table)


def test_a_row_that_leaves_a_gap_is_caught(make_table: MakeTable, tmp_path: Path) -> None:
    table = wide(make_table)
    path = export(table, "csv", tmp_path)
    path.write_text(path.read_text().replace("\n34,8192,", "\n35,8192,"))
    with pytest.raises(AssertionError):
        wrong_answers("csv", path, table)


@pytest.mark.parametrize("format", ["cpp", "csv", "vllm"])
def test_the_text_forms_say_whose_they_are_and_what_speaks_for_each_band(
    make_table: MakeTable, tmp_path: Path, format: str
) -> None:
    table = wide(make_table)
    text = export(table, format, tmp_path).read_text()
    assert table.digest in text
    assert "Schema version: 1" in text
    assert 'Fingerprint, driver: "570.86"' in text
    assert sum("abababababab@2 abababababab@15" in line for line in text.splitlines()) == 1


@pytest.mark.parametrize("format", ["cpp", "csv", "vllm", "python"])
def test_a_moved_edge_changes_the_lines_of_two_bands_and_no_other(
    make_table: MakeTable, tmp_path: Path, format: str
) -> None:
    table = wide(make_table).replace(evidence={})
    bands = [band.replace(evidence={}) for band in table.bands]
    before = export(table.replace(bands=tuple(bands)), format, tmp_path).read_text().splitlines()
    bands[1], bands[2] = bands[1].replace(last=16), bands[2].replace(first=17)
    after = export(table.replace(bands=tuple(bands)), format, tmp_path).read_text().splitlines()
    assert len(before) == len(after)
    changed = [old for old, new in zip(before, after, strict=True) if old != new]
    digests = [line for line in changed if "digest" in line.lower()]
    assert len(changed) - len(digests) == 2


def test_the_vllm_shape_names_what_it_leaves_out(make_table: MakeTable, tmp_path: Path) -> None:
    path = export(wide(make_table), "vllm", tmp_path)
    module, text = module_of(path), path.read_text()
    assert module.split_config(1, 5120, 4) == (2, 8, 128)
    assert module.split_config(1, 7168, 4) is None
    assert module.split_config(1, 5120, 2) is None
    assert (module.covers(5120, 4), module.covers(7168, 4)) == (True, False)
    assert module.n_splits_to_warm() == (8,)
    assert "(1, (2, 8, 128)),  # 1-1: fused vec=2; evidence" in text
    assert "(33, None),  # 33-33: unfused_mma n_splits=16 n_thr=0 tile_n=24; evidence" in text


def test_a_fused_choice_that_the_vllm_shape_cannot_hold_is_refused(
    make_table: MakeTable, tmp_path: Path
) -> None:
    table = make_table(**one_band())
    with pytest.raises(TableError, match=r"fused at 1 tokens has no n_splits, .*export another format"):
        export(table, "vllm", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["int", "a b", "a__b", "n-thr"])
def test_a_tunable_that_is_no_name_in_cpp_is_refused(
    make_table: MakeTable, tmp_path: Path, name: str
) -> None:
    choice = Choice.of("fused", {name: 1})
    with pytest.raises(TableError, match="is no name in C"):
        export(make_table(bands=(Band(1, 5, choice),), default=choice), "cpp", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_module_carries_what_the_table_says(make_table: MakeTable, tmp_path: Path) -> None:
    table = make_table()
    module, data = module_of(export(table, "python", tmp_path)), table.to_dict()
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
    module = module_of(export(table, "python", tmp_path))
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
