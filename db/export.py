"""Exports: a dispatch table as a file to check in."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mhctune.configs.errors import ConfigError
from mhctune.db.export_cpp import render_cpp
from mhctune.db.export_csv import render_csv
from mhctune.db.export_python import render_python
from mhctune.db.export_vllm import render_vllm
from mhctune.db.form import MARKER
from mhctune.db.rows import table_text
from mhctune.db.tables import problem_key
from mhctune.kernels.dispatch import DispatchTable
from mhctune.kernels.until import END


class ExportError(Exception):
    """A file that cannot or may not be written: which one, why, and what to do next."""


@dataclass(frozen=True, slots=True)
class Format:
    """How a table is written: the file's suffix, its text from the JSON form, and how it is known again."""

    suffix: str
    render: Callable[[Mapping[str, Any]], str]
    is_ours: Callable[[str], bool]


def export(table: DispatchTable, format: str, folder: str | Path, force: bool = False) -> Path:
    """Write a table into a folder, which is made if need be, and return the file's path.

    The same table gives the same name and the same bytes. The file is replaced as a whole or not at all.

    Raises:
        ExportError: the format is unknown, the folder cannot be written, or a file of that name exists
            that mhctune did not write and `force` is not given.
        TableError: the table does not survive JSON, or the format cannot say what it holds.
    """
    if format not in FORMATS:
        raise ExportError(f"unknown export format {format!r}; known: {', '.join(sorted(FORMATS))}")
    chosen = FORMATS[format]
    path = Path(folder) / (file_stem(table) + chosen.suffix)
    write(path, chosen.render(json.loads(table_text(table))), chosen.is_ours, force)
    return path


def write(path: Path, text: str, is_ours: Callable[[str], bool], force: bool) -> None:
    """Write a file, whole or not at all, into a folder that is made if need be.

    Raises:
        ExportError: as `export`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not force:
            _require_ours(path, is_ours)
        _replace(path, text)
    except OSError as error:
        raise ExportError(f"{path}: cannot be written: {error.strerror}; choose another folder") from error


def formats_of(text: str) -> tuple[str, ...]:
    """Read a comma-separated list of formats.

    Raises:
        ConfigError: one is unknown.
    """
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in FORMATS]
    if unknown:
        raise ConfigError(f"unknown format {unknown[0]!r}; known: {', '.join(FORMATS)}")
    return names


def file_stem(table: DispatchTable) -> str:
    """Return a table's file name without suffix; it is also a Python module's name.

    Seam, problem, GPU, numerics class, and until when it was timed unless to the end: tables that may stand
    side by side do not share a name.
    """
    fingerprint, until = table.fingerprint, "" if table.until == END else f"until {table.until}"
    parts = (table.seam, problem_key(table), fingerprint.gpu_name, fingerprint.mig, table.numerics, until)
    return "_".join(slug for slug in map(_slug, parts) if slug)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def _require_ours(path: Path, is_ours: Callable[[str], bool]) -> None:
    if not os.path.lexists(path):
        return
    if path.is_file() and is_ours(path.read_text(encoding="utf-8", errors="replace")):
        return
    raise ExportError(f"{path} exists and was not written by mhctune; move it away, or use --force")


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _render_json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def is_json_with(key: str) -> Callable[[str], bool]:
    """Return what says whether a text is a JSON object with a key, by which a file of ours is known again."""

    def check(text: str) -> bool:
        try:
            data = json.loads(text)
        except ValueError:
            return False
        return isinstance(data, dict) and key in data

    return check


def _begins_with(sign: str) -> Callable[[str], bool]:
    return lambda text: text.startswith(f"{sign} {MARKER}")


FORMATS: Mapping[str, Format] = {
    "json": Format(".json", _render_json, is_json_with("mhctune_table")),
    "python": Format(".py", render_python, _begins_with("#")),
    "csv": Format(".csv", render_csv, _begins_with("#")),
    "cpp": Format(".hpp", render_cpp, _begins_with("//")),
    "vllm": Format("_vllm.py", render_vllm, _begins_with("#")),
}
