"""Agreement: ranks that serve together serve the same tables, or say at the start who does not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from mhctune.kernels import serving
from mhctune.kernels.group import Group, GroupError, ranks_text

_WORDS = 4
"""Signed 64-bit numbers that a SHA-256 digest travels as."""


def require_agreement(group: Group, digests: Sequence[str] | None = None) -> None:
    """Compare the digests of the served tables (default: all that this process serves) between all ranks.

    Every rank calls this once, before it serves, with a table or without: one collective call of the same
    size everywhere. A digest covers bands, configs and numerics class, so that a batch-invariant table is so
    across the ranks that agree on it.

    Raises:
        GroupError: ranks serve different tables, or only some serve one; says which rank serves what. Also
            when a rank does not call within the group's time.
    """
    held = sorted(serving.served() if digests is None else digests)
    # One table goes by its own digest, so that the error shows what `mhctune bands` shows.
    one = held[0] if len(held) == 1 else hashlib.sha256("".join(held).encode()).hexdigest()
    words = [int.from_bytes(bytes.fromhex(one)[8 * i : 8 * i + 8], "big", signed=True) for i in range(_WORDS)]
    told = group.exchange((len(held), *words), "the comparison of the served tables")
    if len(set(told)) == 1:
        return
    parts = [
        f"{ranks_text([r for r, each in enumerate(told) if each == one_of])}: {_text(one_of)}"
        for one_of in dict.fromkeys(told)
    ]
    raise GroupError(
        f"rank {group.rank}: ranks serve different tables ({'; '.join(parts)}); load one file on every rank"
    )


def _text(told: tuple[int, ...]) -> str:
    count, *words = told
    digest = b"".join(word.to_bytes(8, "big", signed=True) for word in words).hex()[:12]
    return "no table" if not count else f"table {digest}" if count == 1 else f"{count} tables, {digest}"
