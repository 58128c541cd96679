"""Input sets: a cell's inputs three times over, one of them live, at another address at every placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mhctune.kernels.seam import Tensors

MOST_PLACES = 20
"""Placements until an address comes again: more than a race has."""


def offset_of(placement: int) -> int:
    """Return the bytes by which the buffers of a placement begin later in what is allocated for them.

    An allocator may give back what another candidate has just left, so that a few addresses would come
    again and again. An odd multiple of 256 bytes, on which torch's own addresses on a GPU lie.
    """
    return 9 * 256 * placement


SLACK_BYTES = offset_of(MOST_PLACES)
"""Behind each tensor of a set that moves: 45 KiB, so that it may begin later."""


@dataclass
class InputSet:
    """One set of inputs: `storages` hold the slack too, `view` is where it lies now."""

    storages: dict[str, torch.Tensor]
    view: dict[str, torch.Tensor]

    @classmethod
    def like(cls, drawn: Tensors, device: torch.device, slack_bytes: int) -> InputSet:
        """Allocate a set for tensors of these shapes; it holds no values yet."""
        storages = {
            name: torch.empty(slack_bytes // t.itemsize + t.numel(), dtype=t.dtype, device=device)
            for name, t in drawn.items()
        }
        return cls(storages, {name: storages[name][: t.numel()].view(t.shape) for name, t in drawn.items()})

    @property
    def bytes(self) -> int:
        """Bytes of all storages."""
        return sum(t.numel() * t.element_size() for t in self.storages.values())

    def shift(self, offset_bytes: int) -> None:
        """Begin so many bytes into the storages; what the set held is lost."""
        for name, before in self.view.items():
            first = offset_bytes // before.itemsize
            self.view[name] = self.storages[name][first : first + before.numel()].view(before.shape)

    def holds(self, tensors: Tensors) -> bool:
        """Whether tensors lie in these storages, here or where the set lay before."""
        name, found = next(iter(tensors.items()))
        return found.untyped_storage().data_ptr() == self.storages[name].untyped_storage().data_ptr()

    def fill(self, source: Tensors) -> None:
        """Take over the values of another set."""
        copy(self.view, source)


def copy(target: Tensors, source: Tensors) -> None:
    """Copy values by name, in place."""
    for name, tensor in target.items():
        tensor.copy_(source[name])


class InputSets:
    """The sets of one cell: a live one a slot, which kernels read, and two that keep two sets of values.

    Each of the two and the live set of the first slot is in turn the live one, and begins elsewhere in its
    storages each time (`turn`). Timed cold only the first slot moves: the others' inputs come from memory
    and not from the cache. Whoever does not move reads on where it did, with the values that lie there.
    """

    def __init__(
        self, draw: Callable[[int], Tensors], seeds: tuple[int, int], device: torch.device, slots: int
    ) -> None:
        """Draw two sets of values, on the CPU, and allocate; the live sets get the first one's."""
        drawn = [draw(seed) for seed in seeds]
        first, second, live = (InputSet.like(drawn[0], device, SLACK_BYTES) for _ in range(3))
        others = [InputSet.like(drawn[0], device, 0) for _ in range(slots - 1)]
        first.fill(drawn[0])
        second.fill(drawn[1])
        self._values, self._live = [first, second], [live, *others]
        self.change(0)

    @property
    def bytes(self) -> int:
        """Bytes of all sets, their slack included."""
        return sum(each.bytes for each in (*self._live, *self._values))

    @property
    def live(self) -> tuple[Tensors, ...]:
        """The live set of each slot, as it lies now."""
        return tuple(dict(each.view) for each in self._live)

    def change(self, index: int) -> None:
        """Give all live sets the first (0) or the second (1) values, in place."""
        for each in self._live:
            each.fill(self._values[index].view)

    def turn(self, placement: int) -> None:
        """Let the three sets change places, the new live one where this placement has it: not a byte more.

        Who has not moved yet goes on reading where the live set was, with the second values; all live sets
        hold these afterwards.
        """
        live, (first, second) = self._live[0], self._values
        live.fill(second.view)
        second.fill(first.view)
        first.shift(offset_of(placement % (MOST_PLACES + 1)))
        self._live[0], self._values = first, [second, live]
        self.change(1)

    @contextmanager
    def showing(self, tensors: Tensors) -> Iterator[Callable[[], None]]:
        """Within the block, `tensors` (a live set of before) and the live sets hold equal values.

        What is yielded gives the live sets the same values again: to be called between what reads the one
        and what reads the other, since whoever missed three moves may read across what is live by now.
        Afterwards each set holds its own values again.
        """
        home = next(each for each in (self._live[0], *self._values) if each.holds(tensors))
        index = 0 if home is self._values[0] else 1
        self.change(index)
        gone = any(home.view[name].data_ptr() != t.data_ptr() for name, t in tensors.items())
        if gone:  # the set has moved on in its storages: its values have to come from another one
            copy(tensors, self._values[1].view if home is self._live[0] else self._live[0].view)

        def restore() -> None:
            if gone:
                home.fill(self._values[1].view if home is self._live[0] else self._live[0].view)

        yield restore
        self.change(1)
