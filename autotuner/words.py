"""Words: numbers and shares as people read them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it needs one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """Return a share as a percentage with one decimal."""
    return f"{share * 100:.1f} %"
