"""The installed package is a view of the top-level folders, and takes its data along."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("autotuner", "kernels", "configs", "db", "cli.py")


@pytest.mark.parametrize("part", PARTS)
def test_each_link_of_the_package_resolves_to_the_top_level(part: str) -> None:
    link = ROOT / "src" / "mhctune" / part
    # A checkout without links has a text file here and builds a wheel with almost nothing in it, silently.
    assert link.is_symlink(), f"{link} is no link: check out again with core.symlinks=true"
    assert link.resolve() == ROOT / part
    assert link.exists(), f"{link} points to nothing"


def test_the_package_holds_nothing_else() -> None:
    found = {path.name for path in (ROOT / "src" / "mhctune").iterdir()} - {"__pycache__"}
    assert found == {"__init__.py", "__main__.py", "py.typed", *PARTS}


@pytest.mark.parametrize(
    ("folder", "suffix"),
    [("gpus", ".toml"), ("models", ".toml"), ("sweeps", ".toml"), ("recorded", ".jsonl")],
)
def test_the_data_is_found_through_the_package(folder: str, suffix: str) -> None:
    found = {entry.name for entry in (resources.files("mhctune.configs") / folder).iterdir()}
    assert found == {path.name for path in (ROOT / "configs" / folder).iterdir()}
    assert any(name.endswith(suffix) for name in found)


def test_every_data_file_is_declared_as_package_data() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    globs = pyproject["tool"]["setuptools"]["package-data"]["mhctune.configs"]
    declared = {path for glob in globs for path in (ROOT / "configs").glob(glob)}
    present = {path for path in (ROOT / "configs").rglob("*") if path.is_file()}
    code = {path for path in present if path.suffix in {".py", ".pyc"}}
    assert present - code == declared
