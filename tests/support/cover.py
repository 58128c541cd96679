"""Covering selections: the few combinations of factors in which every pair of levels occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any


def pairs_of(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
    """Return a row's pairs as (factor, level, factor, level)."""
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)}


def pairwise(factors: Sequence[Sequence[Any]], seed: int = 1) -> list[tuple[Any, ...]]:
    """Return rows in which every two levels of two factors meet; the same for the same arguments.

    Greedy: of 60 random rows that hold a missing pair, the one that adds most.
    """
    sizes, chance = [len(levels) for levels in factors], random.Random(seed)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(sizes)), 2)
        for i, j in itertools.product(range(sizes[a]), range(sizes[b]))
    }
    rows: list[tuple[Any, ...]] = []
    while missing:
        a, i, b, j = min(missing)
        tries = []
        for _ in range(60):
            row = [chance.randrange(size) for size in sizes]
            row[a], row[b] = i, j
            tries.append(row)
        best = max(tries, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        rows.append(tuple(levels[index] for levels, index in zip(factors, best, strict=True)))
    return rows
