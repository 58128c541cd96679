"""Words: numbers and shares as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it needs one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """Return a share as a percentage with one decimal."""
    return f"{share * 100:.1f} %"


def token_range(first: int, last: int | None) -> str:
    """Return a token range for people; one without an end is open above."""
    if last is None:
        return f"{first} and up"
    return f"{first}-{last}" if last > first else str(first)


def size_text(problem: Mapping[str, Any]) -> str:
    """Return what measures a problem, given its fields: the hidden size, or K and W of a global top-k."""
    if not problem.get("top_k"):
        return f"hidden {problem.get('hidden_size', '?')}"
    return f"top {problem['top_k']} of {counted(problem.get('ranks', 1), 'rank')}"
