"""Bands that a maintainer wrote by hand: what is served today where no table is."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mhctune.configs.errors import ConfigError


class HandBand(BaseModel):
    """One band: token counts `first` to `last` (left out: open above), an arm and its config."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    first: Annotated[int, Field(ge=1)]
    last: Annotated[int, Field(ge=1)] | None = None
    arm: str
    config: dict[str, int] = Field(default_factory=dict)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    band: Annotated[list[HandBand], Field(min_length=1)]


def load_hand_bands(path: str | Path) -> tuple[HandBand, ...]:
    """Load bands from TOML (`[[band]]`) or JSON (`{"band": [...]}`); ranges must rise, gaps are allowed.

    Raises:
        ConfigError: the file cannot be read or is not what it must be: which band, and what is allowed.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        data: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path}: invalid {kind}: {error}") from None
    try:
        bands = _File.model_validate(data).band
    except ValidationError as error:
        lines = [_sentence(path, each) for each in error.errors(include_url=False, include_context=False)]
        raise ConfigError("\n".join(lines)) from None
    after = 1
    for number, band in enumerate(bands, start=1):
        if band.first < after:
            raise ConfigError(
                f"{path}: band {number} begins at {band.first}; it must begin at {after} or above"
            )
        if band.last is not None and band.last < band.first:
            raise ConfigError(f"{path}: band {number} ends at {band.last}, before it begins at {band.first}")
        if band.last is None and number < len(bands):
            raise ConfigError(f"{path}: band {number} has no last; only the last band may be open above")
        after = (band.last or band.first) + 1
    return tuple(bands)


def _sentence(path: Path, problem: Any) -> str:
    where = [f"band {part + 1}" if isinstance(part, int) else str(part) for part in problem["loc"]]
    return f"{path}: {'.'.join(where)}: {problem['msg']}; a band has first, last, arm and config"
