"""Fixtures that several test files share. The `make_*` ones are constructors with sensible defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mhctune.autotuner.store import SweepRecord
from mhctune.db.repository import Repository
from mhctune.kernels.dispatch import Band, Choice, DispatchTable, Fingerprint
from mhctune.kernels.seam import Problem

FINGERPRINT: dict[str, Any] = {
    "gpu_name": "NVIDIA H200",
    "sm_count": 132,
    "memory_gib": 140,
    "mig": "",
    "driver": "570.86",
    "cuda": "12.8",
    "compiler": "nvcc 12.8",
    "torch": "2.11.0",
    "tilelang": "0.1.15",
    "pass_config": "{}",
    "compile_flags": "",
    "protocol": 1,
    "source_hash": "5" * 64,
}


@pytest.fixture
def make_fingerprint() -> Callable[..., Fingerprint]:
    return lambda **changes: Fingerprint(**{**FINGERPRINT, **changes})


@pytest.fixture
def make_sweep(make_fingerprint: Callable[..., Fingerprint]) -> Callable[..., SweepRecord]:
    def make(**changes: Any) -> SweepRecord:
        values: dict[str, Any] = {
            "digest": "d" * 64,
            "seam": "post_pre_delayed",
            "problem": Problem(hidden_size=5120),
            "target": "cuda",
            "token_counts": (1, 8, 64),
            "grid": 12,
            "space": {"fused": {"tile_n": [24, 32], "n_splits": [1, 4]}},
            "protocol": {"version": 1, "samples": 5},
            "fingerprint": make_fingerprint(),
            "sources": {"fused": "a" * 64, "unfused": "b" * 64},
            "bound": 0.05,
        }
        return SweepRecord(**{**values, **changes})

    return make


@pytest.fixture
def make_table(make_fingerprint: Callable[..., Fingerprint]) -> Callable[..., DispatchTable]:
    def make(**changes: Any) -> DispatchTable:
        fused = Choice.of("fused", {"tile_n": 24, "n_splits": 4})
        unfused = Choice.of("unfused", {"tile_n": 32, "n_splits": 1})
        values: dict[str, Any] = {
            "seam": "post_pre_delayed",
            "problem": Problem(hidden_size=5120).to_dict(),
            "target": "cuda",
            "numerics": "rounded/1",
            "fingerprint": make_fingerprint(),
            "bands": (
                Band(1, 1, fused, {"regret": 0.0, "tie_set": ['fused "a"', "it's"]}),
                Band(2, 17, unfused, {"regret": 0.0125, "probed": True}),
                Band(18, 64, fused, {"regret": 0.04, "interval_us": [3.1, 3.4], "note": None}),
            ),
            "default": unfused,
            "evidence": {"bound": 0.05, "sweep": 1, "measured": [1, 8, 64]},
        }
        return DispatchTable(**{**values, **changes})

    return make


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A path where no database is yet."""
    return tmp_path / "mhctune.db"


@pytest.fixture
def repository(database: Path) -> Iterator[Repository]:
    """An open repository on `database`."""
    with Repository.open(database) as opened:
        yield opened
