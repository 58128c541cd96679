"""Slots: the copies of a cell's inputs and buffers that a graph's launches take in turn."""

from __future__ import annotations

import math

from mhctune.autotuner.bench import fewest_bytes
from mhctune.autotuner.protocol import UNROLL
from mhctune.kernels.seam import Problem, Seam


def cold_slots(seam: Seam, problem: Problem, num_tokens: int, l2_bytes: int) -> int:
    """Return how many slots it takes that a launch finds nothing of its own in a cache of `l2_bytes`.

    The slots together hold more than twice the cache, counting inputs and outputs and not the scratch, so
    that every candidate of a cell has the same number. A flush inside the timed region would be timed.

    Raises:
        ValueError: the size of the cache is not known.
    """
    if l2_bytes <= 0:
        raise ValueError(f"the L2 cache has {l2_bytes} bytes; a cold protocol needs its size")
    return 2 * l2_bytes // fewest_bytes(seam, problem, num_tokens) + 1


def unroll(slots: int) -> int:
    """Return the launches of one graph: at least 20, and a multiple of the slots."""
    return slots * math.ceil(UNROLL / slots)
