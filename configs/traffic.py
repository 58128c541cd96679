"""Traffic: how often a serving runtime saw each token count, from a file."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from mhctune.configs.errors import ConfigError
from mhctune.configs.schema import MAX_TOKENS


def load_traffic(path: str | Path) -> dict[int, int]:
    """Load a token histogram: token count to number of calls, by rising token count.

    Either a JSON object such as `{"1": 900, "8": 50}`, or CSV lines `tokens,calls`; a first line without
    numbers is a heading, and lines that begin with `#` are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is not what it must be: which, and what is allowed.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    pairs = _of_json(path, text) if text.lstrip().startswith("{") else _of_csv(path, text)
    found: dict[int, int] = {}
    for where, tokens, calls in pairs:
        count, number = _integer(where, "token count", tokens), _integer(where, "number of calls", calls)
        if not 1 <= count <= MAX_TOKENS:
            raise ConfigError(f"{where}: token count {count} is not in 1 to {MAX_TOKENS}")
        if number < 0:
            raise ConfigError(f"{where}: number of calls {number} is negative")
        if count in found:
            raise ConfigError(f"{where}: token count {count} is repeated; give each count once")
        found[count] = number
    if not sum(found.values()):
        raise ConfigError(f"{path}: holds no calls; give lines such as 1,900 (tokens,calls)")
    return dict(sorted(found.items()))


def _of_json(path: Path, text: str) -> list[tuple[str, Any, Any]]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: no JSON: {error}") from error
    return [(f"{path}, {tokens!r}", tokens, calls) for tokens, calls in data.items()]


def _of_csv(path: Path, text: str) -> list[tuple[str, Any, Any]]:
    rows = list(enumerate(csv.reader(text.splitlines()), start=1))
    rows = [(n, row) for n, row in rows if row and not row[0].lstrip().startswith("#")]
    if rows and not any(any(c.isdigit() for c in cell) for cell in rows[0][1]):
        rows = rows[1:]
    for number, row in rows:
        if len(row) != 2:
            raise ConfigError(f"{path}, line {number}: {len(row)} values; a line is tokens,calls")
    return [(f"{path}, line {number}", row[0], row[1]) for number, row in rows]


def _integer(where: str, what: str, value: Any) -> int:
    text = str(value).strip()
    if isinstance(value, bool | float) or not text.removeprefix("-").isdigit():
        raise ConfigError(f"{where}: {what} {text[:40]!r} is no integer")
    return int(text)
