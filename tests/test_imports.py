"""Looking a band up loads the standard library and nothing else."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mhctune.db.export import export
from mhctune.kernels.dispatch import DispatchTable

ROOT = Path(__file__).resolve().parents[1]
INITS = sorted(
    path
    for folder in ("src/mhctune", "autotuner", "kernels", "configs", "db")
    for path in (ROOT / folder).rglob("__init__.py")
)

PROBE = """
import importlib, json, sys
before = {name.partition(".")[0] for name in sys.modules}
for name in sys.argv[1:]:
    importlib.import_module(name)
after = {name.partition(".")[0] for name in sys.modules}
print(json.dumps(sorted(after - before - sys.stdlib_module_names - {"mhctune"})))
"""


def loaded_by(modules: list[str], folder: Path) -> list[str]:
    """Return the third-party packages that importing some modules loads, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *modules],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout)
    assert isinstance(names, list)
    return names


# What a process must not wait for that imports the serving side, loads an exported table and looks bands up.
# dataclasses and what it imports were half of the import's time; sqlite3 is for databases, paths and logs
# for those who ask.
UNUSED = {
    "dataclasses", "inspect", "ast", "dis", "opcode", "tokenize", "linecache", "copy", "weakref", "typing",
    "contextlib", "importlib.metadata", "logging", "traceback", "threading", "tempfile", "pickle",
    "pathlib", "sqlite3", "datetime", "decimal", "random", "statistics", "tomllib", "csv", "argparse", "ssl",
    "torch", "tilelang", "numpy", "scipy", "sqlalchemy", "alembic", "pydantic", "optuna", "rich", "typer",
    "mhctune.kernels.seam", "mhctune.kernels.serving", "mhctune.autotuner", "mhctune.configs",
}  # fmt: skip

SERVE = """
import sys, mhctune.db.tables
print(*sys.modules)
mhctune.db.tables.load_table(sys.argv[1]).lookup(12)
print(*sys.modules)
"""


def test_serving_an_exported_table_waits_for_nothing_that_it_does_not_use(
    make_table: Callable[..., DispatchTable], tmp_path: Path
) -> None:
    path = export(make_table(), "json", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", SERVE, str(path)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    imported, served = (set(line.split()) for line in done.stdout.splitlines())
    assert "mhctune.kernels.dispatch" in imported
    assert "mhctune.db.table_rules" in served
    assert not UNUSED & (imported | served)


def test_looking_a_band_up_loads_no_third_party_package(tmp_path: Path) -> None:
    assert loaded_by(["mhctune.db.tables", "mhctune.kernels.dispatch"], tmp_path) == []


def test_the_probe_sees_a_third_party_package(tmp_path: Path) -> None:
    assert "pydantic" in loaded_by(["mhctune.configs.schema"], tmp_path)


def test_reading_configs_loads_nothing_heavy(tmp_path: Path) -> None:
    loaded = loaded_by(["mhctune.configs.loader", "mhctune.configs.recorded"], tmp_path)
    assert not {"torch", "tilelang", "numpy", "sqlalchemy", "optuna", "scipy", "typer", "rich"} & set(loaded)


@pytest.mark.parametrize("path", INITS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_init_is_a_docstring(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1
