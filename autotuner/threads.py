"""Compile threads: as many as the cores and the free memory carry."""

from __future__ import annotations

import os

from mhctune.autotuner.probe import free_host_bytes

COMPILE_BYTES = {"c": 400 * 2**20, "cuda": 700 * 2**20}
"""Host memory that the compilers of one kernel take: gcc stayed below 0.4 GiB, nvcc takes about 0.7 GiB."""


def cores() -> int:
    """Return the cores that this process may use: a container or a job may hold fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_threads(target: str, cores: int, free_bytes: int) -> int:
    """Return how many kernels of a target may be compiled at once; one where there is room for none."""
    return max(1, min(cores, free_bytes // COMPILE_BYTES[target]))


def threads_here(target: str) -> int:
    """Return `compile_threads` for this process and what is free on its host now."""
    return compile_threads(target, cores(), free_host_bytes())
