"""The README names every command."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.main import get_command

from mhctune import cli

README = Path(__file__).resolve().parents[1] / "README.md"


def commands() -> list[str]:
    """Every command as it is typed, `mhctune db upgrade` included."""
    found = []
    for name, command in get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found += [f"mhctune {name} {each}" for each in inner] if inner else [f"mhctune {name}"]
    return found


@pytest.mark.parametrize("command", commands())
def test_the_readme_documents_the_command(command: str) -> None:
    assert command in README.read_text(encoding="utf-8")


def test_the_commands_are_those_that_the_help_lists() -> None:
    assert {"mhctune sweep", "mhctune plan", "mhctune db upgrade", "mhctune db verify"} <= set(commands())
