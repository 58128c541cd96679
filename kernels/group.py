"""The group of ranks: what they tell each other through torch.distributed, with bounded waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


class GroupError(RuntimeError):
    """A collective call that did not come to its end, or ranks that contradict each other."""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that share a KV cache or serve one model, as this rank sees them.

    Without an initialised process group there is one rank and nothing to wait for; every other trouble is an
    error on every rank.

    Attributes:
        device: Where this rank computes; tensors that travel are on it (gloo: cpu, NCCL: cuda).
        handle: A process group of torch.distributed; None is the default one.
        timeout_s: Longest wait of `exchange` and `barrier`, in seconds.
    """

    device: torch.device
    handle: dist.ProcessGroup | None = None
    timeout_s: float = 60.0

    @property
    def initialised(self) -> bool:
        """Whether there is a process group at all."""
        return dist.is_available() and dist.is_initialized()

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return dist.get_rank(self.handle) if self.initialised else 0

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size(self.handle) if self.initialised else 1

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks of the group, in its order."""
        if not self.initialised:
            return (0,)
        return tuple(dist.get_process_group_ranks(self.handle or dist.group.WORLD))

    def gather(self, gathered: torch.Tensor, sent: torch.Tensor) -> None:
        """Write what every rank sent, in rank order: one collective call, in stream order, capturable."""
        if self.initialised:
            dist.all_gather_into_tensor(gathered.flatten(0, 1), sent, group=self.handle)
        else:
            gathered[0].copy_(sent)

    def exchange(self, numbers: Sequence[int], what: str) -> list[tuple[int, ...]]:
        """Return every rank's numbers, in rank order: one collective call of the same size on every rank.

        Raises:
            GroupError: a rank did not join within `timeout_s`.
        """
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        if not self.initialised:
            return [tuple(numbers)]
        found = torch.empty(self.size * len(numbers), dtype=torch.int64, device=self.device)
        self._bounded(
            lambda: dist.all_gather_into_tensor(found, mine, group=self.handle, async_op=True), what
        )
        return [tuple(row) for row in found.view(self.size, len(numbers)).tolist()]

    def barrier(self, what: str) -> None:
        """Return once every rank has come here.

        Raises:
            GroupError: a rank did not come within `timeout_s`, or its barrier failed.
        """
        if self.initialised:
            devices = [self.device.index or 0] if self.device.type == "cuda" else None
            self._bounded(lambda: dist.barrier(group=self.handle, async_op=True, device_ids=devices), what)

    def synchronize(self, what: str) -> None:
        """Wait for the device, for every rank, and for what the barrier itself put on the device.

        Raises:
            GroupError: as `barrier`.
        """
        self.settle()
        self.barrier(what)
        self.settle()

    def settle(self) -> None:
        """Wait for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _bounded(self, call: Callable[[], dist.Work | None], what: str) -> None:
        try:
            work = call()
            assert work is not None
            work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise GroupError(
                f"rank {self.rank} of {self.size}: {what} failed or took more than {self.timeout_s:g} s: "
                f"{error}; a rank that did not join has died, hangs or raised before: read its output"
            ) from error


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks for people, such as `rank 3` or `ranks 0, 2`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
