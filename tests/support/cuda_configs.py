"""CUDA candidates of `post_pre_delayed` that the GPU tests run, legal at every hidden size of the models."""

from __future__ import annotations

from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

HIDDEN = (4096, 5120, 7168)
# Legal at each hidden size (H is a multiple of 1024), and together every width, row block and tile.
EPILOGUE = {"epilogue_thr": 128, "collapse": 0}
EARLY = {"epilogue_thr": 128, "collapse": 1}
NAMES = ("tile_n", "n_splits", "n_thr", "vec", "block_m")


BASE = {
    "tile_n": 4, "n_splits": 4, "n_thr": 128, "vec": 2, "block_m": 1, "ahead": 0, "epilogue_thr": 128,
    "collapse": 0,
}  # fmt: skip


def _tiled(arm: str, *values: int) -> Candidate:
    return Candidate.of(arm, dict(zip(NAMES, values, strict=True)) | EPILOGUE)


def _fused(ahead: int, *values: int) -> Candidate:
    return Candidate.of("fused", {**_tiled("fused", *values).config, "ahead": ahead})


def _mma(n_splits: int, block_h: int, block_m: int, epilogue: dict[str, int], n_thr: int = 128) -> Candidate:
    tile = {"n_splits": n_splits, "block_h": block_h, "block_m": block_m, "n_thr": n_thr}
    return Candidate.of("fused_mma", tile | epilogue)


def _ws(n_splits: int, cache: int, mix_lanes: int, epilogue: dict[str, int]) -> Candidate:
    tile = {"n_splits": n_splits, "cache": cache, "mix_lanes": mix_lanes}
    return Candidate.of("fused_ws", tile | epilogue)


CONFIGS = (
    Candidate.of("fused", BASE),
    Candidate.of("fused", {**_fused(12, 24, 8, 64, 2, 2).config, **EARLY}),
    _fused(4, 8, 2, 128, 4, 4),
    _fused(0, 3, 1, 128, 8, 1),
    Candidate.of("fused", {**_fused(2, 2, 4, 64, 2, 1).config, **EARLY}),
    _mma(16, 64, 64, EPILOGUE),
    _mma(32, 32, 16, EARLY),
    _mma(8, 128, 32, EARLY),
    _mma(4, 64, 64, EARLY),
    _mma(16, 64, 64, EARLY, 256),
    _mma(16, 32, 64, EPILOGUE, 256),
    _ws(16, 0, 32, EPILOGUE),
    _ws(8, 2, 1, EARLY),
    _ws(1, 1, 1, EPILOGUE),
    _ws(2, 1, 32, EARLY),
    _tiled("unfused", 4, 16, 64, 4, 4),
    Candidate.of("unfused", {**_tiled("unfused", 6, 32, 64, 2, 8).config, **EARLY}),
    Candidate.of("unfused_mma", {"n_splits": 64, "block_k": 64} | EPILOGUE),
    Candidate.of("unfused_mma", {"n_splits": 16, "block_k": 256} | EARLY),
    Candidate.of("unfused_mma", {"n_splits": 32, "block_k": 128} | EARLY),
    Candidate.of("released", {"n_splits": 16, "block_k": 64, "epilogue_thr": 128}),
)


def fitting(problem: Problem) -> tuple[Candidate, ...]:
    """The same configs, collapsed by the epilogue where no pre-mix is carried."""
    early = int(problem.carried)

    def fit(candidate: Candidate) -> Candidate:
        if "collapse" not in candidate.config:
            return candidate
        collapse = min(candidate.config["collapse"], early)
        return Candidate.of(candidate.arm, {**candidate.config, "collapse": collapse})

    return tuple(map(fit, CONFIGS))
