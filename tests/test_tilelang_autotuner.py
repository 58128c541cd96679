"""The AutoTuner's side of the comparison: the same kernels, called with what they take."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "tilelang_autotuner.py"))


def test_every_kernel_of_the_target_is_known_with_its_candidates(script: dict[str, Any]) -> None:
    known = script["kernels"]()
    assert len(known) == 126
    assert sum(len(candidates) for _, candidates in known.values()) == 252
    assert all(
        {**c.config, **config} == c.config for config, candidates in known.values() for c in candidates
    )


def test_the_sample_is_seeded_and_holds_our_winner(script: dict[str, Any]) -> None:
    names = [f"k{n}" for n in range(20)]
    assert script["drawn"](names, 5, None) == script["drawn"](names, 5, None)
    found = script["drawn"](names, 5, "k7")
    assert (found[0], len(set(found))) == ("k7", 5)
    assert sorted(script["drawn"](names, 0, "k7")) == sorted(names)
    assert len(script["drawn"](names, 99, None)) == 20


@pytest.mark.parametrize("tokens", [1, 32])
def test_what_a_kernel_is_given_has_the_shapes_that_it_declares(script: dict[str, Any], tokens: int) -> None:
    """And the ninth parameter tells the splits, by which the AutoTuner is supplied."""
    config = {"tile_n": 8, "n_splits": 10, "n_thr": 64, "vec": 4, "block_m": 2, "ahead": 2, "collapse": 1}
    function = script["kernel"](**config)
    buffers = [function.buffer_map[param] for param in function.params]
    given = script["arguments"](config, tokens, "cpu")
    assert len(given) == len(buffers)
    for buffer, tensor in zip(buffers, given, strict=True):
        declared = [int(n) if str(n).isdigit() else tokens for n in buffer.shape]
        assert list(tensor.shape) == declared, buffer.name
        assert str(tensor.dtype) == f"torch.{buffer.dtype}", buffer.name
    assert int(buffers[8].shape[0]) == config["n_splits"]


def test_a_process_that_fails_says_what_it_wrote(script: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="at 3 tokens left with 1"):
        script["cell"]([{"tile_n": 4}], 3)
