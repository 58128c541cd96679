"""The rules of an exported table, each violation with its line. Standard library only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice

TYPE_CHECKING = False  # as type checkers read it, see `mhctune.kernels.dispatch`
if TYPE_CHECKING:
    from typing import Any

_BANDS = re.compile(r'"bands"\s*:\s*\[')
_SEPARATOR = re.compile(r"[\s,]*")


def violation(text: str, data: dict[str, Any]) -> str:
    """Return the first rule that the bands of an exported table break, with the line it begins on.

    Empty where they break none; the digest and the other fields are the table's own to check.
    """
    bands = data.get("bands")
    if not isinstance(bands, list):
        return f"line {_line_of_key(text, 'bands')}: bands is a {type(bands).__name__}; it must be a list"
    expected = 1
    for place, band in enumerate(bands):
        if broken := _broken(band, expected):
            line = next(islice(_lines(text, len(bands)), place, None))
            return f"line {line}: band {place + 1} {broken}"
        expected = band["last"] + 1
    return ""


def repeated_key(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, for `json.loads`; the last of two values of one key would win without a word.

    Raises:
        ValueError: a key stands twice.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RepeatedKey(f"the key {key!r} stands twice in one object")
        found[key] = value
    return found


class RepeatedKey(ValueError):
    """A key that stands twice in one object."""


def _broken(band: Any, expected: int) -> str:
    if not isinstance(band, dict):
        return f"is a {type(band).__name__}; it must be an object with first, last, arm and config"
    missing = [key for key in ("first", "last", "arm", "config") if key not in band]
    if missing:
        return f"lacks {missing[0]}; a band has first, last, arm and config"
    for key in ("first", "last"):
        if isinstance(band[key], bool) or not isinstance(band[key], int):
            return f"has {key} {band[key]!r}; it must be an integer"
    if not isinstance(band["arm"], str):
        return f"has arm {band['arm']!r}; it must be a string"
    config = band["config"]
    if not isinstance(config, dict):
        return f"has a config that is a {type(config).__name__}; it must be an object"
    for name, value in config.items():
        if isinstance(value, bool) or not isinstance(value, int):
            return f"has {name} {value!r}; a tunable is an integer"
    if band["first"] != expected:
        return f"begins at {band['first']}; it must begin at {expected}: bands are contiguous from 1"
    if band["last"] < band["first"]:
        return f"ends at {band['last']}, before it begins at {band['first']}"
    return ""


def _lines(text: str, count: int) -> Iterator[int]:
    """Yield the line that each band begins on; 1 for all where the text is laid out otherwise."""
    found = _BANDS.search(text)
    place, decoder = found.end() if found else 0, json.JSONDecoder()
    for _ in range(count):
        start = _SEPARATOR.match(text, place)
        place = start.end() if start else place
        yield text.count("\n", 0, place) + 1
        place = decoder.raw_decode(text, place)[1] if found else place


def _line_of_key(text: str, key: str) -> int:
    place = text.find(f'"{key}"')
    return text.count("\n", 0, max(place, 0)) + 1
