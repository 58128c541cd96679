"""Loading: from a name or a TOML file to a GPU target, a model, a sweep or a baseline."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from mhctune.configs.baseline import Baseline
from mhctune.configs.errors import ConfigError, nearest, unknown
from mhctune.configs.schema import GpuTarget, Model, Sweep, check_token_counts

PACKAGE = Path(__file__).resolve().parent

Kind = Literal["gpu", "model", "sweep", "baseline"]
_T = TypeVar("_T", bound=BaseModel)


def names(kind: Kind) -> tuple[str, ...]:
    """Return the names that are shipped of a kind, sorted."""
    return tuple(sorted(path.stem for path in (PACKAGE / f"{kind}s").glob("*.toml")))


def load_gpu(name: str) -> GpuTarget:
    """Load a GPU target by name.

    Raises:
        ConfigError: there is no such target, or its file is not what it must be.
    """
    return _load(GpuTarget, _shipped("gpu", name))


def load_model(name: str) -> Model:
    """Load a model by name.

    Raises:
        ConfigError: there is no such model, or its file is not what it must be.
    """
    return _load(Model, _shipped("model", name))


def load_baseline(name: str) -> Baseline:
    """Load what a runtime ships by name.

    Raises:
        ConfigError: there is no such baseline, or its file is not what it must be.
    """
    return _load(Baseline, _shipped("baseline", name))


def baseline_of(seam: str) -> Baseline | None:
    """Return what a runtime ships for a seam; None where nothing shipped has anything to tune."""
    return next((found for found in map(load_baseline, names("baseline")) if seam in found.seams), None)


def load_sweep(name_or_path: str | Path) -> Sweep:
    """Load a sweep by shipped name, or from a `.toml` file.

    Raises:
        ConfigError: there is no such sweep or file, it is not what it must be, or names an unknown model.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = _shipped("sweep", str(name_or_path), "or give the path of a .toml file")
    sweep = _load(Sweep, path)
    if sweep.model not in names("model"):
        raise ConfigError(f"{path}: model: {unknown('model', sweep.model, names('model'))}")
    return sweep


def recognise(device_name: str | None) -> GpuTarget | None:
    """Return the target of a device, by the name its driver reports; `None` is a machine without a GPU.

    A device that no target is meant for gives None.
    """
    targets = (load_gpu(name) for name in names("gpu"))
    return next((target for target in targets if target.recognises(device_name)), None)


def parse_token_counts(text: str) -> tuple[int, ...]:
    """Return the token counts of a text such as `1,2,4` or `1 2 4`, in rising order.

    Raises:
        ConfigError: there is none, or one is no integer, zero, negative or repeated.
    """
    counts: list[int] = []
    for word in re.split(r"[,\s]+", text.strip(", \t\r\n")) if text.strip(", \t\r\n") else ():
        if not re.fullmatch(r"-?[0-9]{1,18}", word):
            raise ConfigError(
                f"token count {word[:40]!r} is no integer; allowed are positive integers, such as 1,2,4"
            )
        counts.append(int(word))
    try:
        return check_token_counts(counts)
    except ValueError as error:
        raise ConfigError(f"{error}, such as 1,2,4") from None


def _shipped(kind: Kind, name: str, otherwise: str = "") -> Path:
    if name not in names(kind):
        raise unknown(kind, name, names(kind), otherwise)
    return PACKAGE / f"{kind}s" / f"{name}.toml"


def _load(schema: type[_T], path: Path) -> _T:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: invalid TOML: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: invalid TOML: it is not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        raise ConfigError("\n".join(_sentence(schema, path, each) for each in problems)) from None


def _sentence(schema: type[BaseModel], path: Path, problem: Any) -> str:
    """Return one problem as a line: file, key, what is wrong, what is allowed."""
    location = [str(part) for part in problem["loc"] if part != "[key]"]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        known = sorted(_fields_at(schema, location[:-1]))
        near = nearest(location[-1], known)
        hint = f" (did you mean {near!r}?)" if near else ""
        return f"{path}: unknown key {key!r}{hint}; known: {', '.join(known)}"
    if problem["type"] == "missing":
        return f"{path}: the key {key!r} is missing"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    if problem["type"] == "value_error":
        return f"{path}: {key}: {message}" if key else f"{path}: {message}"
    return f"{path}: {key} is {_short(problem['input'])}; {message}"


def _fields_at(schema: type[BaseModel], location: list[str]) -> set[str]:
    for part in location:
        inner = schema.model_fields[part].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        schema = inner
    return set(schema.model_fields)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
