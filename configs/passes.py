"""Pass options as a person writes them: NAME=true or NAME=false."""

from __future__ import annotations

from collections.abc import Iterable

from mhctune.configs.errors import ConfigError

_VALUES = {"true": True, "false": False}


def parse_passes(texts: Iterable[str]) -> dict[str, bool]:
    """Return pass options by name; whether a target has them is for the compiler to say.

    Raises:
        ConfigError: a text that is not NAME=true or NAME=false, or a name that is given twice.
    """
    found: dict[str, bool] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or value not in _VALUES:
            raise ConfigError(f"pass option {text!r} must be NAME=true or NAME=false")
        if name in found:
            raise ConfigError(f"pass option {name!r} is given twice")
        found[name] = _VALUES[value]
    return found
