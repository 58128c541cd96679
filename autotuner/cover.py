"""Cover: which compiled variants have to stay so that every token count is served."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class SetCover:
    """The fewest of some masks whose union holds a set; exact, and remembered by set."""

    def __init__(self, masks: Iterable[int]) -> None:
        distinct = set(masks)
        # A mask inside another never makes a cover smaller.
        self._masks = [m for m in distinct if not any(m != other and m & ~other == 0 for other in distinct)]
        self._holders = [
            [mask for mask in self._masks if mask >> place & 1]
            for place in range(max(distinct, default=0).bit_length())
        ]
        # The element with the fewest masks leaves the fewest branches.
        self._rarest_first = sorted(range(len(self._holders)), key=lambda place: len(self._holders[place]))
        self._sizes: dict[int, int] = {0: 0}

    def size(self, wanted: int) -> int:
        """Return how many masks are needed to hold `wanted`, which their union holds."""
        known = self._sizes.get(wanted)
        if known is None:
            place = next(place for place in self._rarest_first if wanted >> place & 1)
            rests = {wanted & ~mask for mask in self._holders[place]}
            known = self._sizes[wanted] = 1 + min(map(self.size, rests))
        return known


class VariantCover:
    """The variants that options launch and the token counts that the options may serve, as bit masks.

    `launches[g]` is the set of variants of option g, `serves[g]` the set of positions where g stays within
    the bound. A set of variants covers a position if an option that launches only these serves there.
    """

    def __init__(self, launches: Sequence[int], serves: Sequence[int]) -> None:
        merged: dict[int, int] = {}
        for launched, served in zip(launches, serves, strict=True):
            if served:
                merged[launched] = merged.get(launched, 0) | served
        self._footprints = merged
        self._helps = _united((v, served) for launched, served in merged.items() for v in bits(launched))
        users = {v: sum(launched >> v & 1 for launched in merged) for v in self._helps}
        # An unfused option launches a projection of its own and a post kernel that hundreds share. The
        # shared one helps everywhere and makes the first bound in `missing` worthless, so a second one
        # counts for every footprint only its mark: the variant that the fewest footprints launch.
        self._marks = _united(
            (min(bits(launched), key=lambda v: (users[v], v)), served)
            for launched, served in merged.items()
            if launched
        )
        self._help_cover = SetCover(self._helps.values())
        self._mark_cover = SetCover(self._marks.values())
        self._everything = 0
        for served in merged.values():
            self._everything |= served
        self._covered: dict[int, int] = {}
        self._refused: dict[int, int] = {}

    def covered(self, variants: int) -> int:
        """Return the positions that `variants` cover."""
        known = self._covered.get(variants)
        if known is None:
            known = 0
            for launched, served in self._footprints.items():
                if not launched & ~variants:
                    known |= served
            self._covered[variants] = known
        return known

    def missing(self, variants: int, positions: int) -> int:
        """Return a lower bound on the variants to be added to `variants` before they cover `positions`.

        Both bounds hold for every completion. A position not covered needs a new variant, and one helps only
        where an option that launches it serves. A position served by an option whose mark is not in
        `variants` needs that mark. If every option launches one variant, both are the exact number.
        """
        unhelped = positions & ~self.covered(variants)
        if not unhelped:
            return 0
        unmarked = unhelped
        for variant in bits(variants):
            unmarked &= ~self._marks.get(variant, 0)
        return max(self._help_cover.size(unhelped), self._mark_cover.size(unmarked))

    def fewest(self) -> int:
        """Return the number of variants in the smallest set that covers every position."""
        limit = self.missing(0, self._everything)
        while not self._coverable(0, limit):
            limit += 1
        return limit

    def _coverable(self, variants: int, spare: int) -> bool:
        """Say whether `spare` more variants suffice; branches on the position with the fewest footprints."""
        open_positions = self._everything & ~self.covered(variants)
        if not open_positions:
            return True
        if self._refused.get(variants, -1) >= spare or self.missing(variants, self._everything) > spare:
            return False
        branches = min(
            ({launched & ~variants for launched, served in self._footprints.items() if served >> place & 1}
             for place in bits(open_positions)),
            key=len,
        )  # fmt: skip
        for added in branches:
            if added.bit_count() <= spare and self._coverable(variants | added, spare - added.bit_count()):
                return True
        self._refused[variants] = spare
        return False


def _united(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    masks: dict[int, int] = {}
    for key, mask in pairs:
        masks[key] = masks.get(key, 0) | mask
    return masks
