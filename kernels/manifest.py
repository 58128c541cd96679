"""The manifest: the compile keys that a table can reach, no more and no fewer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mhctune.kernels.dispatch import Choice, DispatchTable
from mhctune.kernels.legality import problem_of
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Variant


@dataclass(frozen=True, slots=True)
class Manifest:
    """What calls of up to `max_tokens` tokens, and of the captured sizes, can launch.

    Attributes:
        table: Digest of the table.
        max_tokens: The largest token count of a call; None for any.
        capture_sizes: Token counts that are captured whatever the largest is.
        choices: The choices that a lookup can return, in token order.
        variants: Their kernels, each once.
    """

    table: str
    max_tokens: int | None
    capture_sizes: tuple[int, ...]
    choices: tuple[Choice, ...]
    variants: tuple[Variant, ...]


def manifest_of(
    table: DispatchTable, max_tokens: int | None = None, capture_sizes: Sequence[int] = ()
) -> Manifest:
    """Return the manifest of a table: the image of its lookup over every token count that a call can have.

    A lookup is constant inside a band, so the first count of every band stands for the rest of it.

    Raises:
        ValueError: `max_tokens` or a capture size is not positive.
        TableError: the table's problem is none.
    """
    for value in (*(() if max_tokens is None else (max_tokens,)), *capture_sizes):
        if value < 1:
            raise ValueError(f"token count {value} is not positive; a manifest needs counts of at least 1")
    firsts = [band.first for band in table.bands] + [table.max_tokens + 1]
    reached = [first for first in firsts if max_tokens is None or first <= max_tokens]
    counts = sorted({*reached, *capture_sizes})
    choices = tuple(dict.fromkeys(table.lookup(count).choice for count in counts))
    owner, problem = find_seam(table.seam), problem_of(table)
    variants = (
        variant
        for choice in choices
        for variant in owner.arm(table.target, choice.arm).variants(problem, dict(choice.config))
    )
    sizes = tuple(sorted(set(capture_sizes)))
    return Manifest(table.digest, max_tokens, sizes, choices, tuple(dict.fromkeys(variants)))
