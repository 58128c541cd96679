"""The ranks that a launcher started: who this process is among them, and the mail between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from mhctune.autotuner.mail import Mail, RankLost
from mhctune.configs.errors import ConfigError

_START_S = 120.0
"""How long ranks may come after one another, in seconds: each imports torch and starts its worker first."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of a launcher.

    Attributes:
        rank: Its number; 0 leads.
        size: How many there are; 1 without a launcher.
        local: Its number on this machine: the index of its GPU.
        address, port: Where the store of the group is.
        hosted: Whether the launcher holds that store (torchrun); otherwise rank 0 does.
        attempt: How often the launcher has started the group anew.
    """

    rank: int = 0
    size: int = 1
    local: int = 0
    address: str = ""
    port: int = 0
    hosted: bool = False
    attempt: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Ranks:
        """Read what `torchrun` sets: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, if given, LOCAL_RANK.

        Raises:
            ConfigError: WORLD_SIZE asks for a group and the rest is missing or is no number.
        """
        if environ.get("WORLD_SIZE", "1") == "1":
            return cls()
        try:
            rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
            address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
            local = int(environ.get("LOCAL_RANK", rank))
            attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"WORLD_SIZE {environ['WORLD_SIZE']} asks for a group of ranks, but {error} of RANK, "
                "MASTER_ADDR, MASTER_PORT is missing or no number; start it by torchrun, or unset WORLD_SIZE"
            ) from error
        if not 0 <= rank < size:
            raise ConfigError(f"RANK {rank} is none of WORLD_SIZE {size} ranks; ranks are 0 to {size - 1}")
        hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(rank, size, local, address, port, hosted, attempt)


@contextmanager
def open_mail(ranks: Ranks) -> Iterator[Mail]:
    """Open the mail of a group; it closes with the block.

    Raises:
        RankLost: not all ranks came.
    """
    holds, wait = ranks.rank == 0 and not ranks.hosted, timedelta(seconds=_START_S)
    try:
        store = TCPStore(ranks.address, ranks.port, ranks.size, holds, wait)
    except dist.DistError as error:
        where = f"{ranks.address}:{ranks.port}"
        raise RankLost(
            f"not all of {ranks.size} ranks came to {where} within {_START_S:g} s: {error}"
        ) from error
    mail = Mail(PrefixStore(f"mhctune/{ranks.attempt}", store), ranks.rank, ranks.size)
    try:
        yield mail
    finally:
        mail.close()
