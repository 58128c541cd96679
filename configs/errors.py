"""The one error of this floor: what is wrong, which value, what is allowed, what next."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class ConfigError(ValueError):
    """Bad input from a person; the message is meant for them, a line a problem."""


def unknown(kind: str, name: str, known: Sequence[str], otherwise: str = "") -> ConfigError:
    """Build the error for a name that is not known: it lists those that are and suggests the nearest."""
    near = nearest(name, known)
    listed = ", ".join(known) or "none"
    hint = f" (did you mean {near!r}?)" if near else ""
    return ConfigError(
        f"unknown {kind} {name!r}{hint}; known: {listed}{'; ' if otherwise else ''}{otherwise}"
    )


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name most like `name`, or None where none is close."""
    by_folded = {each.casefold(): each for each in known}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1)
    return by_folded[close[0]] if close else None
