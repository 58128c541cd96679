"""A dispatch table as a Python module that needs nothing but the standard library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mhctune.db.form import MARKER
from mhctune.kernels.until import END, told, until_of

WIDTH = 110

_HEAD = """\
# {marker}
# Table digest: {digest}
{about}

from bisect import bisect_left

"""

_TAIL = """
_LASTS = [last for _, last, _, _ in BANDS]


def lookup(num_tokens: int) -> tuple[str, dict[str, int]]:
    \"\"\"Return arm and config for a token count; above the last band the default.\"\"\"
    index = bisect_left(_LASTS, num_tokens)
    return BANDS[index][2:] if index < len(BANDS) else DEFAULT
"""


def render_python(data: Mapping[str, Any]) -> str:
    """Return the module's text from a table's JSON form."""
    bands = data["bands"]
    constants: dict[str, Any] = {
        "SCHEMA_VERSION": data["mhctune_table"],
        "DIGEST": data["digest"],
        "SEAM": data["seam"],
        "PROBLEM": data["problem"],
        "TARGET": data["target"],
        "NUMERICS": data["numerics"],
        "FINGERPRINT": data["fingerprint"],
        "EVIDENCE": data["evidence"],
        "BANDS": tuple((b["first"], b["last"], b["arm"], b["config"]) for b in bands),
        "BAND_EVIDENCE": tuple(b["evidence"] for b in bands),
        "DEFAULT": (data["default"]["arm"], data["default"]["config"]),
    }
    about = f"Dispatch table of seam {data['seam']}, measured on {data['fingerprint']['gpu_name']}."
    if (until := until_of(data["evidence"].get("protocol"))) != END:
        constants["UNTIL"] = until
        about += f" Timed {told(until)}."
    head = _HEAD.format(marker=MARKER, digest=data["digest"], about=_docstring(about))
    lines = [f"{name} = {_literal(value, len(name) + 3)}\n" for name, value in constants.items()]
    return head + "".join(lines) + _TAIL


def _docstring(text: str) -> str:
    # A GPU's name comes from a driver: it must not end the string.
    return '"""' + text.replace("\\", "\\\\").replace('"', "'") + '"""'


def _literal(value: Any, column: int = 0, indent: int = 0, tail: int = 0) -> str:
    """Return a literal as ruff formats it: on one line if it fits, otherwise an element a line.

    `column` is where it begins, `tail` how many characters follow it on its last line.
    """
    flat = _flat(value)
    if not isinstance(value, dict | list | tuple) or not value or column + len(flat) + tail <= WIDTH:
        return flat
    inner = indent + 4
    keys = [f"{_flat(key)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    values = value.values() if isinstance(value, dict) else value
    lines = [
        f"{' ' * inner}{key}{_literal(item, inner + len(key), inner, 1)},\n"
        for key, item in zip(keys, values, strict=True)
    ]
    left, right = _brackets(value)
    return f"{left}\n{''.join(lines)}{' ' * indent}{right}"


def _flat(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flat(key)}: {_flat(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        left, right = _brackets(value)
        comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
        return left + ", ".join(map(_flat, value)) + comma + right
    return repr(value)


def _brackets(value: Any) -> tuple[str, str]:
    if isinstance(value, dict):
        return "{", "}"
    return ("(", ")") if isinstance(value, tuple) else ("[", "]")


def _text(value: str) -> str:
    # Double quotes, unless single ones save escapes. JSON's escapes are Python's too, surrogates left out.
    if '"' in value and "'" not in value:
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
