"""Optional arms: importable or absent with the reason, and legal or refused with the reason."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mhctune.autotuner import probe
from mhctune.kernels.optional import (
    MEGA,
    OPTIONAL_ARMS,
    PROJECTION,
    OptionalArm,
    mega_refusals,
    projection_refusals,
)
from mhctune.kernels.seam import Problem

BOTH = "def tf32_hc_prenorm_gemm(): ...\ndef mega_mhc(): ...\n"
H200, B200, RTX = (9, 0), (10, 0), (12, 0)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Put a module of the other project's name, with this source, where Python finds it."""

    def install(source: str) -> None:
        (tmp_path / "deep_gemm.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    sys.modules.pop("deep_gemm", None)


@pytest.mark.parametrize("arm", OPTIONAL_ARMS, ids=lambda arm: arm.name)
def test_an_arm_of_a_project_that_is_not_installed_is_absent(arm: OptionalArm) -> None:
    assert arm.absence(B200) == "deep_gemm is not installed"


@pytest.mark.parametrize(
    ("arm", "capability", "source", "reason"),
    [
        (PROJECTION, None, BOTH, "needs an NVIDIA GPU"),
        (PROJECTION, RTX, BOTH, "needs compute capability 9.x or 10.x, this GPU has 12.0"),
        (MEGA, H200, BOTH, "needs compute capability 10.x, this GPU has 9.0"),
        (MEGA, B200, "def tf32_hc_prenorm_gemm(): ...", "this deep_gemm has no mega_mhc"),
        (PROJECTION, H200, "raise OSError('libcuda.so.1')", "deep_gemm does not import: libcuda.so.1"),
        (PROJECTION, H200, BOTH, ""),
        (PROJECTION, B200, BOTH, ""),
        (MEGA, B200, BOTH, ""),
    ],
)
def test_what_keeps_an_arm_away_is_said(
    arm: OptionalArm, capability: tuple[int, int] | None, source: str, reason: str,
    installed: Callable[[str], None],
) -> None:  # fmt: skip
    installed(source)
    assert arm.absence(capability) == reason


def test_without_a_gpu_the_other_project_is_not_imported(installed: Callable[[str], None]) -> None:
    installed("raise AssertionError('imported')")
    assert PROJECTION.absence(None) == "needs an NVIDIA GPU"
    assert "deep_gemm" not in sys.modules


@pytest.mark.parametrize(
    ("hidden", "n_splits", "reasons"),
    [
        (5120, 1, ()), (5120, 64, ()), (5120, 6, ()), (4096, 256, ()),
        (4096, 257, ("n_splits 257 is not 1 to 256, the tiles of K 16384",)),
        (4096, 0, ("n_splits 0 is not 1 to 256, the tiles of K 16384",)),
        (65, 1, ("K 260 is not a multiple of 64",)),
    ],
)  # fmt: skip
def test_the_projection_takes_every_split_that_has_a_tile(
    hidden: int, n_splits: int, reasons: tuple[str, ...]
) -> None:
    assert projection_refusals(Problem(hidden), n_splits) == reasons


@pytest.mark.parametrize(
    ("changes", "tokens", "reason"),
    [
        ({}, 1, None),
        ({}, 2**20, None),
        ({}, 2**20 + 1, "1048577 tokens are more than 1048576"),
        ({"hidden_size": 2560}, 1, "hidden 2560 is not a multiple of 1024"),
        ({"carried": False}, 1, "it collapses with a carried pre-mix alone"),
        ({"delayed": False}, 1, "it collapses with a carried pre-mix alone"),
        ({"norm": False}, 1, "it always applies RMSNorm"),
        ({"aux": True}, 1, "it does not write aux"),
    ],
)
def test_mega_is_refused_where_its_contract_ends(
    changes: dict[str, Any], tokens: int, reason: str | None
) -> None:
    found = mega_refusals(replace(Problem(5120), **changes), tokens)
    assert found == (() if reason is None else (reason,))


def test_the_doctor_says_why_each_is_absent(installed: Callable[[str], None]) -> None:
    device = probe.Device("NVIDIA H200", "cuda", 1)
    assert dict(probe.optional_arms(device)) == {
        arm.name: "absent: deep_gemm is not installed" for arm in OPTIONAL_ARMS
    }
    installed(BOTH)
    rows = dict(probe.optional_arms(device))
    assert rows[PROJECTION.name].startswith("importable, not offered: it was never run")
    assert rows[MEGA.name] == "absent: needs compute capability 10.x, this GPU has 9.0"
    assert dict(probe.optional_arms(probe.Device("a processor", "c", 1)))[MEGA.name] == (
        "absent: needs an NVIDIA GPU"
    )
