"""README and docs name every command, and nothing that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from mhctune import cli
from mhctune.configs.recorded import recorded_names

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def commands() -> dict[str, set[str]]:
    """Every command as it is typed, `mhctune db upgrade` included, with its options."""
    found = {}
    for name, command in get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        for typed, each in ((f"{name} {n}", c) for n, c in inner.items()) if inner else [(name, command)]:
            options = {text for p in each.params for text in (*p.opts, *p.secondary_opts)}
            found[f"mhctune {typed}"] = options
    return found


def code(page: Path) -> list[str]:
    """What a page sets as code: between backticks, and indented or fenced lines."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    prose = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.M | re.S)
    return [
        *re.findall(r"`([^`]+)`", prose),
        *re.findall(r"^    (.*)$", prose, re.M),
        *(line for block in fenced for line in block.splitlines()),
    ]


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links address them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("command", commands())
def test_the_readme_documents_the_command(command: str) -> None:
    assert command in README.read_text(encoding="utf-8")


def test_the_commands_are_those_that_the_help_lists() -> None:
    assert {"mhctune sweep", "mhctune plan", "mhctune db upgrade", "mhctune db verify"} <= set(commands())


@PAGE
def test_what_a_page_has_one_type_exists(page: Path) -> None:
    known = commands()
    for line in code(page):
        for typed in re.findall(r"(?<![\w/])mhctune [a-z][^|&;,]*", " ".join(line.split())):
            words = typed.split()
            name = " ".join(words[: 3 if words[1] == "db" else 2])
            assert name in known, f"{page.name}: {typed!r} is no command"
            options = {word.split("=")[0] for word in words if word.startswith("--")}
            assert options <= known[name], f"{page.name}: {typed!r} has unknown options"


@PAGE
def test_what_a_page_links_to_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        to = page.parent / path if path else page
        assert to.is_file(), f"{page.name}: {target} is no file"
        assert not anchor or anchor in anchors(to), f"{page.name}: {target} is no heading of {to.name}"


@PAGE
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    places = r"\b(?:benchmarks|configs|tests|kernels|autotuner|db|docs)/[\w./*-]+"
    for named in re.findall(places, page.read_text(encoding="utf-8")):
        named = named.rstrip(".")
        assert list(ROOT.glob(named)), f"{page.name}: {named} does not exist"


@PAGE
def test_the_recordings_that_a_page_replays_are_shipped(page: Path) -> None:
    for name in re.findall(r"mhctune replay ([a-z]\w+)", " ".join(page.read_text(encoding="utf-8").split())):
        assert name in recorded_names(), f"{page.name}: {name} is not shipped"


@PAGE
def test_the_python_of_a_page_compiles(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        compile(block, page.name, "exec")


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\((docs/\w+\.md)\)", README.read_text(encoding="utf-8")))
    assert linked == {f"docs/{page.name}" for page in PAGES if page.parent.name == "docs"}


def test_every_benchmark_is_named_somewhere() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for script in (ROOT / "benchmarks").glob("*.py"):
        assert f"benchmarks/{script.name}" in text, f"{script.name} is in no page"
