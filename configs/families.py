"""Families: device names that mean the same GPU target. Standard library only: serving imports this."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

GPUS = Path(__file__).resolve().parent / "gpus"


@cache
def _patterns() -> dict[str, str]:
    import tomllib  # 5 ms that only a table of another device has to wait for

    loaded = {
        path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(GPUS.glob("*.toml"))
    }
    return {name: data["match"] for name, data in loaded.items() if data["match"]}


def family_of(gpu_name: str) -> str | None:
    """Return the name of the GPU target that a device name is an alias of; None: of none."""
    return next((name for name, match in _patterns().items() if re.fullmatch(match, gpu_name.strip())), None)


def same_family(one: str, other: str) -> bool:
    """Return whether two device names are aliases of one GPU target, such as `NVIDIA H200` and `H200 NVL`."""
    return family_of(one) is not None and family_of(one) == family_of(other)
