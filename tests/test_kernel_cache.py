"""A source is compiled once: another process and a moved checkout find it in TileLang's cache on disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROBE = """
import sys
import mhctune
from mhctune.kernels.compiler import compile_variant, quiet
from mhctune.kernels.registry import seam
from mhctune.kernels.seam import Problem

quiet()
arm, problem = seam("post_pre_delayed").arm(sys.argv[1], "fused"), Problem(1024)
config = next(arm.space(problem).legal()).config
codes = [compile_variant(variant).code_hash for variant in arm.variants(problem, config)]
print(mhctune.__file__, *codes)
"""


@pytest.fixture
def checkouts(tmp_path: Path) -> list[Path]:
    """Two copies of the package, in places that differ in every part of their paths."""
    places = [tmp_path / "here" / "a", tmp_path / "moved to" / "there" / "b"]
    for place in places:
        shutil.copytree(ROOT / "src", place, ignore=shutil.ignore_patterns("__pycache__"))
    return places


def counting(folder: Path, *names: str) -> Path:
    """Return a folder of compilers that write down each call and pass it on."""
    folder.mkdir(parents=True)
    for name in names:
        real = shutil.which(name)
        if real is not None:
            shim = folder / name
            shim.write_text(f'#!/bin/sh\necho {name} "$@" >> "{folder}/calls"\nexec "{real}" "$@"\n')
            shim.chmod(0o755)
    return folder


def compile_in(checkout: Path, target: str, shims: Path, cache: Path) -> tuple[str, list[str], int]:
    """Compile two kernels in a process of a checkout; return its package, the codes' hashes and the calls."""
    calls = shims / "calls"
    calls.write_text("")
    environment = {
        **os.environ, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1", "TILELANG_CACHE_DIR": str(cache),
        "PATH": f"{shims}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    environment.pop("CXX", None)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, target], cwd=checkout, env=environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    package, *codes = done.stdout.removesuffix("\n").rsplit(" ", 2)
    return package, codes, len(calls.read_text().splitlines())


@pytest.mark.parametrize(
    "target",
    ["c", pytest.param("cuda", marks=pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"))],
)
def test_a_second_process_and_a_moved_checkout_compile_nothing(
    target: str, checkouts: list[Path], tmp_path: Path
) -> None:
    # TileLang runs `bin/nvcc` of the folder two above the nvcc that is on PATH.
    shims = counting(tmp_path / "shims" / "bin", "gcc", "g++", "cc", "c++", "nvcc")
    first, again, moved = (
        compile_in(checkout, target, shims, tmp_path / "cache")
        for checkout in (checkouts[0], checkouts[0], checkouts[1])
    )
    assert first[0] == again[0] != moved[0]
    assert first[1] == again[1] == moved[1]
    assert len(set(first[1])) == 2
    assert first[2] >= 2  # the shims are what TileLang calls
    assert (again[2], moved[2]) == (0, 0)
