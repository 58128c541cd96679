"""Recorded measurements: what was timed somewhere else, kept as JSON lines with its source.

The first line is the header, an object; every further line is one row, an array in the order of `columns`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mhctune.configs.errors import ConfigError, unknown

RECORDED = Path(__file__).resolve().parent / "recorded"

Value = int | float | str | bool | None

_HEADER: Mapping[str, type] = {"about": str, "source": str, "columns": list, "fingerprint": dict, "unit": str}
_OPTIONAL: Mapping[str, type] = {"sweep": dict}
_JSON_NAMES: Mapping[type, str] = {str: "string", list: "list", dict: "object"}


@dataclass(frozen=True, slots=True)
class Recorded:
    """One file of recorded measurements.

    Attributes:
        about: What was measured, and how.
        source: Where the file comes from, and when it was measured.
        columns: Names of a row's values.
        fingerprint: What is known of the machine and the toolchain; may be incomplete.
        unit: Of the measured column: `us` is microseconds per launch.
        rows: By column name, in the order of the file.
        sweep: What identifies a recorded sweep; None where single timings were recorded.
    """

    about: str
    source: str
    columns: tuple[str, ...]
    fingerprint: Mapping[str, Value]
    unit: str
    rows: tuple[dict[str, Value], ...]
    sweep: Mapping[str, Any] | None = None


def recorded_names() -> tuple[str, ...]:
    """Return the names of the recorded measurements that are shipped, sorted."""
    return tuple(sorted(path.stem for path in RECORDED.glob("*.jsonl")))


def load_recorded(name_or_path: str | Path) -> Recorded:
    """Load recorded measurements by shipped name, or from a `.jsonl` file.

    Raises:
        ConfigError: there is no such name or file, or a line is not what it must be.
    """
    path = Path(name_or_path)
    if path.suffix != ".jsonl":
        path = RECORDED / f"{name_or_path}.jsonl"
        if str(name_or_path) not in recorded_names():
            raise unknown(
                "recorded measurement", str(name_or_path), recorded_names(), "or give a .jsonl file"
            )
    try:
        text = path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not text:
        raise ConfigError(f"{path}, line 1: the file is empty; the first line must be the header object")
    lines = text.split("\n")  # splitlines() would also split at U+2028, which JSON strings may hold
    header = _header(path, lines[0])
    columns = tuple(header["columns"])
    rows = tuple(_row(path, number, line, columns) for number, line in enumerate(lines[1:], start=2))
    return Recorded(
        header["about"],
        header["source"],
        columns,
        header["fingerprint"],
        header["unit"],
        rows,
        header.get("sweep"),
    )


def _header(path: Path, line: str) -> dict[str, Any]:
    header = _parse(path, 1, line)
    if not isinstance(header, dict):
        raise ConfigError(f"{path}, line 1: the header must be an object, got {type(header).__name__}")
    if set(header) - set(_OPTIONAL) != set(_HEADER):
        raise ConfigError(
            f"{path}, line 1: the header has the keys {_join(header)}; it must have {_join(_HEADER)}"
        )
    for key, kind in {**_HEADER, **{k: v for k, v in _OPTIONAL.items() if k in header}}.items():
        if not isinstance(header[key], kind):
            raise ConfigError(f"{path}, line 1: {key} is {header[key]!r}; it must be a {_JSON_NAMES[kind]}")
    columns = header["columns"]
    if not columns or not all(isinstance(c, str) for c in columns) or len(set(columns)) != len(columns):
        raise ConfigError(f"{path}, line 1: columns is {columns!r}; it must be names without repetition")
    return header


def _row(path: Path, number: int, line: str, columns: tuple[str, ...]) -> dict[str, Value]:
    row = _parse(path, number, line)
    if not isinstance(row, list) or any(isinstance(value, (list, dict)) for value in row):
        raise ConfigError(f"{path}, line {number}: a row must be a flat array, got {line[:60]}")
    if len(row) != len(columns):
        raise ConfigError(
            f"{path}, line {number}: {len(row)} values for {len(columns)} columns ({', '.join(columns)})"
        )
    return dict(zip(columns, row, strict=True))


def _parse(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: no JSON: {error}") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _join(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names))
