"""A sweep to be killed: real races into a real database, of candidates that need no kernel.

Run as a program it forks a child for every line `DATABASE LOG` that it reads (what it has imported, the child
has too: a kill costs tenths of a second), answers with the child's process id, waits for its end and answers
with its exit code. The child appends each timing to LOG before it makes it.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time

from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.records import Cell, Failure, FailureKind, Footprint
from mhctune.autotuner.sweep import Sweep
from mhctune.autotuner.twin import Twin
from mhctune.db.repository import Repository
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Problem
from mhctune.kernels.space import Candidate

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PROTOCOL = Protocol(13, screening=6, confirmation=7, placements=7, further=2)
VALUES = {"tile_n": [12, 24], "n_splits": [1], "block_h": [64], "block_m": [1, 2]}


def plan(token_counts: tuple[int, ...] = TOKENS) -> SweepPlan:
    """Return a plan of eight candidates, at twelve token counts if no others are given."""
    seam, problem = SEAMS["post_pre_delayed"], Problem(hidden_size=256)
    spaces = {arm.name: arm.space(problem).restricted(VALUES) for arm in seam.arms("c")[:2]}
    fingerprint = Fingerprint("test", 1, 1, "", "", "", "", "", "", "", "", 1, "")
    return SweepPlan(seam, problem, "c", token_counts, spaces, PROTOCOL, fingerprint, 0.05)


def latency(tokens: int, candidate: Candidate, batch: int, round: int) -> float:
    """Return a time that repeats: `fused` is ahead up to 8 tokens, some are near the best, some not."""
    noise = random.Random(f"{tokens} {candidate} {batch} {round}").uniform(1, 1.02)
    slow = 1.3 if (candidate.arm == "fused") == (tokens > 8) else 1.0
    config = candidate.config
    return (
        tokens * 10 * noise * slow * (1 + 0.01 * config["block_m"]) * (1.04 if config["tile_n"] == 12 else 1)
    )


class LoggingBench:
    """Holds three candidates beside a champion; one candidate is wrong, one falls in its fourth round."""

    def __init__(self, log: str) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._tokens = 0

    def input_bytes(self, cell: Cell) -> int:
        return 10

    def enter(self, cell: Cell, seed: int) -> int:
        self._tokens = cell.num_tokens
        return 10

    def floor_us(self) -> float:
        return 0.0

    def forecast(self, candidate: Candidate) -> Footprint:
        return Footprint(10, 100, 0)

    def prepare(self, candidate: Candidate) -> Footprint | Failure:
        if self._tokens == 4 and candidate.config == {
            "tile_n": 24,
            "n_splits": 1,
            "block_h": 64,
            "block_m": 2,
        }:
            return Failure(FailureKind.MISMATCH, "layer_input: 3 elements not written")
        return self.forecast(candidate)

    def sample(self, candidate: Candidate, batch: int, round: int, launches: int) -> float | Failure:
        if launches > 1:
            twin = int(isinstance(candidate, Twin))
            line = f"{self._tokens} {batch} {round} {candidate.arm} {candidate.key} {twin}\n"
            os.write(self._log, line.encode())
            time.sleep(0.0003)
        falls = (self._tokens, candidate.arm, candidate.config["block_m"], round) == (16, "fused", 1, 3)
        if falls and launches > 1:
            return Failure(FailureKind.LAUNCH, "RuntimeError: no")
        return latency(self._tokens, candidate, batch, round)

    def move(self, candidate: Candidate, placement: int) -> Failure | None:
        """Nothing lies anywhere."""
        return None

    def release(self, candidate: Candidate) -> None:
        """Nothing is held."""

    def leave(self) -> None:
        """Nothing is held."""


def run(database: str, log: str, token_counts: tuple[int, ...] = TOKENS) -> None:
    """Run the sweep to its end."""
    with Repository.open(database) as store:
        room = VramBudget(10 + 4 * 100, 10**6)
        Sweep(plan(token_counts), store, LoggingBench(log), room, lambda variants, tell: None).run()


def warm_up() -> None:
    """Sweep one token count twice: SQLAlchemy keeps the statements that it built, and a child has them."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            run(f"{folder}/warm.db", os.devnull, TOKENS[:1])


def serve() -> None:
    """Fork, answer, wait, answer; until there is no more to read."""
    warm_up()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(*line.split())
            os._exit(0)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
