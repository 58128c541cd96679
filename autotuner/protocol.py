"""The measuring protocol: how a sample is taken. Its version is part of every fingerprint."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from mhctune.autotuner.records import PLACEMENT_ROUNDS
from mhctune.kernels.until import END, UNTIL

PROTOCOL_VERSION = 5
"""Raise it when the same machine would give other numbers for the same candidate."""

FURTHER, FURTHER_ROUNDS = 11, 3
"""Further placements on a GPU, and the rounds of each. Of 19 values the sixth is a 95 % limit of their
median, exact at 96.8 %: room for the look before them (`mhctune.autotuner.field`). A move costs as much as
ten samples, and in sweeps of an H200 a round's noise was 1.7 % where what a placement adds was 0.6 %."""

UNROLL = 20
"""Launches in a CUDA graph: a replay costs a few microseconds by itself, and events step by half a one."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """How the samples of a sweep are taken.

    Attributes:
        samples: Rounds for every candidate that stays in the race; one sample a round.
        screening: Rounds to each look at the race, until `samples`: losers leave there.
        confirmation: Further rounds of those that are not told from the best, and of its twin. With 0 there
            is no twin, and the noise floor stays unknown.
        placements: How often those are moved to other addresses meanwhile. Where buffers lie makes a
            candidate faster or slower for as long as they lie there, which no further round there averages
            out: on an H200 two sweeps ordered six candidates within 2.2 % differently. With 0 they stay.
        further: How many more placements those get, of three rounds each, who are then not told from the
            leader: an H200 sweep that ended after seven served at one of 12 token counts a candidate that a
            long race found 1.5 % slower. With 0 nobody goes on, as before protocol 5.
        discarded: Samples thrown away at the head of each round. Between rounds the samples are committed and
            the clocks read while GPU and worker are idle, and whoever comes next is timed too long: on an
            H200 finalists were 1.7 to 3.1 % (median of a sweep) slower in the rounds that they came first
            in than in the others, 0.16 to 0.24 us a launch at 40 a sample. Forward and back do not cancel
            that: one came first in every other round and lost 3.4 %, 0.9 % in the rounds that it did not.
        repeats: Throttled rounds of a batch that are taken again; later ones are only marked.
        replay_us: A sample repeats replays until it is at least this long: the step of the clock and the
            noise around a replay are a few tenths of a microsecond. On a CPU 5 ms also average out the
            short interruptions that 2 ms do not (three sweeps each: 6-15 against 5-12 ties at 1 token).
        unroll: Launches of one replay: a loop of one on the CPU, a CUDA graph of 20 on a GPU, where a graph
            without nodes is replayed as often and subtracted.
        l2: `warm` (the same buffers every launch) or `cold` (slots in turn, `mhctune.autotuner.slots`).
        pdl: Whether kernels may begin before the one ahead of them has ended (programmatic dependent
            launch), as on a GPU when served. A seam lets the next one's first kernel begin where its own last
            one stores its last results and not before, as what ships does; `released` does before, as its
            last launch is for the sublayer to overlap.
        seed: Of the inputs; cell by cell the token count is added.
        until: `end` times the whole launch, `layer_input` the launches up to the one that completes the layer
            input: two numbers that are never compared. On a GPU a kernel of nobody's stands behind each of
            the latter and is subtracted (`mhctune.autotuner.cuda_bench`).
    """

    samples: int
    replay_us: float = 5000.0
    unroll: int = 1
    l2: str = "warm"
    pdl: bool = False
    seed: int = 20261129
    screening: int = 6
    confirmation: int = 0
    repeats: int = 10
    placements: int = 0
    discarded: int = 0
    further: int = 0
    version: int = PROTOCOL_VERSION
    until: str = END

    def __post_init__(self) -> None:
        """Refuse rounds that cannot be counted.

        Raises:
            ValueError: which field, its value and what is allowed.
        """
        for name, least in (
            ("samples", 1),
            ("screening", 1),
            ("confirmation", 0),
            ("repeats", 0),
            ("placements", 0),
            ("discarded", 0),
            ("further", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"protocol: {name} is {value}; it must be at least {least}")
        if self.placements > self.confirmation:
            raise ValueError(
                f"protocol: placements is {self.placements}; with {self.confirmation} confirming rounds it "
                f"may be at most {self.confirmation}"
            )
        if self.further and not self.placements:
            raise ValueError(f"protocol: further is {self.further}; without placements it must be 0")
        if self.until not in UNTIL:
            raise ValueError(f"protocol: until is {self.until!r}; it must be one of {', '.join(UNTIL)}")
        most = PLACEMENT_ROUNDS - self.confirmation - self.repeats
        if self.samples > most:
            raise ValueError(
                f"protocol: samples is {self.samples}; with {self.confirmation} confirming rounds and "
                f"{self.repeats} repeats it may be at most {most}"
            )

    @classmethod
    def of(cls, target: str, samples: int) -> Protocol:
        """Return the protocol of a target: finalists get as many rounds again, 15 at most.

        Seven placements, with the first one eight: of eight values the second and the last but one are 95 %
        limits of their median; of six only the first and the last are, and of four none. On a GPU whoever is
        not told apart there goes on to `FURTHER` more; on a CPU, where a cell has tens of them, nobody does.
        """
        confirmation = min(samples, 15)
        placements = min(7, confirmation)
        if target == "cuda":
            return cls(
                samples, replay_us=200.0, unroll=UNROLL, pdl=True, confirmation=confirmation,
                placements=placements, discarded=1, further=FURTHER if placements == 7 else 0,
            )  # fmt: skip
        return cls(samples, confirmation=confirmation, placements=placements)

    def placement(self, confirmed: int) -> int:
        """Return the placement of the round after `confirmed` confirming ones.

        Those share the placements evenly; after them come the further ones.
        """
        if self.further and confirmed >= self.confirmation:
            return 1 + self.placements + (confirmed - self.confirmation) // FURTHER_ROUNDS
        return 1 + confirmed * self.placements // self.confirmation if self.placements else 0

    @property
    def looks(self) -> tuple[int, ...]:
        """After how many rounds losers leave: every `screening` ones, before the last."""
        return tuple(range(self.screening, self.samples, self.screening))

    @property
    def extension(self) -> int:
        """The rounds after the confirmation, of those who are not told apart by then."""
        return self.further * FURTHER_ROUNDS

    def to_dict(self) -> dict[str, int | float | str]:
        """Return the fields by name; `until` only where it is not the end, as sweeps of before have none."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("until", END)}

    def launches(self, fastest_us: float) -> int:
        """Return the launches of a sample, whole replays, the same for all candidates of a race."""
        replay_us = max(fastest_us, 1e-3) * self.unroll
        return self.unroll * max(1, math.ceil(self.replay_us / replay_us))
