"""The dispatch table: bands of token counts, each with one choice, and how far they can be trusted.

Standard library only: serving runtimes import this.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from enum import IntEnum

from mhctune.kernels.frozen import Frozen
from mhctune.kernels.until import until_of

# As type checkers read it. Importing typing would add 6 ms of CPU time to the 17 that importing
# `mhctune.db.tables` takes, dataclasses 15 (medians of 25 processes on two busy cores, bytecode kept).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SCHEMA_VERSION = 1


class TableError(ValueError):
    """A table that may not be served: what is wrong, and where."""


class Status(IntEnum):
    """A lookup's honesty; of the first six the worst that holds.

    `family`: another device whose name is an alias of the same GPU target (see `mhctune.db.tables`).
    """

    EXACT = 0
    OTHER_DRIVER = 1
    OTHER_TOOLCHAIN = 2
    OTHER_SOURCE = 3
    FAMILY = 4
    FOREIGN = 5
    OUT_OF_RANGE = 6
    DEFAULT = 7

    def __str__(self) -> str:
        """Return the name used in output."""
        return self.name.lower()


_WORST = {
    Status.FOREIGN: ("gpu_name", "sm_count", "memory_gib", "mig"),
    Status.OTHER_SOURCE: ("source_hash",),
    Status.OTHER_TOOLCHAIN: (
        "cuda", "compiler", "torch", "tilelang", "pass_config", "compile_flags", "protocol",
    ),
    Status.OTHER_DRIVER: ("driver",),
}  # fmt: skip


class Fingerprint(Frozen):
    """What makes a measurement valid.

    `memory_gib` is rounded: two boots of one machine report sizes that differ by megabytes. On the target
    `c` the GPU is the processor, an SM a core, the driver the operating system's kernel and cuda empty.
    """

    gpu_name: str
    sm_count: int
    memory_gib: int
    mig: str
    driver: str
    cuda: str
    compiler: str
    torch: str
    tilelang: str
    pass_config: str
    compile_flags: str
    protocol: int
    source_hash: str

    @property
    def digest(self) -> str:
        """Return 16 hex digits that name this fingerprint."""
        return _digest(self.as_dict())[:16]

    def differences(self, other: Fingerprint) -> dict[str, tuple[Any, Any]]:
        """Return the fields that differ, with both values."""
        theirs = other.as_dict()
        pairs = {name: (value, theirs[name]) for name, value in self.as_dict().items()}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def status(self, current: Fingerprint) -> Status:
        """Return how a table measured under this fingerprint stands on a machine that is `current`."""
        differing = self.differences(current)
        for status, names in _WORST.items():
            if any(name in differing for name in names):
                return status
        return Status.EXACT


class Choice(Frozen):
    """An arm and its config."""

    arm: str
    config: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, arm: str, config: Mapping[str, int]) -> Choice:
        """Build a choice; the order of the tunables does not matter."""
        return cls(arm, tuple(sorted(config.items())))

    def __str__(self) -> str:
        """Return a label for people, such as `fused(block_h=64, tile_n=24)`."""
        return f"{self.arm}({', '.join(f'{name}={value}' for name, value in self.config)})"


class Band(Frozen):
    """A closed token range with one choice; `evidence` is JSON that explains it."""

    first: int
    last: int
    choice: Choice
    evidence: Mapping[str, Any] = {}


class Answer(Frozen):
    """What a lookup returns."""

    choice: Choice
    status: Status
    first: int
    last: int | None
    """Token range of the answer; `last` is None where it is open above."""


class DispatchTable(Frozen):
    """The bands of one seam, problem and numerics class on one fingerprint.

    `default` is served above the last band. `status` is fixed when the table is loaded, so that a lookup
    is a bisection.
    """

    seam: str
    problem: Mapping[str, Any]
    target: str
    numerics: str
    fingerprint: Fingerprint
    bands: tuple[Band, ...]
    default: Choice
    evidence: Mapping[str, Any] = {}
    status: Status = Status.EXACT

    def __post_init__(self) -> None:
        """Validate, and lay out the answers."""
        if not self.bands:
            raise TableError(f"table of seam {self.seam!r} has no band")
        expected = 1
        for band in self.bands:
            if band.first != expected or band.last < band.first:
                raise TableError(
                    f"band {band.first}..{band.last} of seam {self.seam!r} must begin at {expected} and not "
                    f"end before it; bands are contiguous from 1"
                )
            expected = band.last + 1
        answers = [Answer(b.choice, self.status, b.first, b.last) for b in self.bands]
        worst = max(self.status, Status.OUT_OF_RANGE)
        answers.append(Answer(self.default, worst, expected, None))
        object.__setattr__(self, "_lasts", [band.last for band in self.bands])
        object.__setattr__(self, "_answers", answers)

    def lookup(self, num_tokens: int) -> Answer:
        """Return the choice for a token count; never raises. Zero and below answer as 1 does."""
        return self._answers[bisect_left(self._lasts, num_tokens)]  # type: ignore[attr-defined,no-any-return]

    @property
    def until(self) -> str:
        """Until when the launches that it was tuned by were timed: `end`, or `layer_input`."""
        return until_of(self.evidence.get("protocol"))

    @property
    def max_tokens(self) -> int:
        """The last token count inside a band."""
        return self.bands[-1].last

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Every distinct choice that a lookup can return, in band order, the default last."""
        return tuple(dict.fromkeys([*(band.choice for band in self.bands), self.default]))

    @property
    def digest(self) -> str:
        """Return the SHA-256 of what the table says; its status is not part of it."""
        return _digest(self._content())

    def against(self, current: Fingerprint) -> DispatchTable:
        """Return the table with its status on a machine that is `current`."""
        return self.replace(status=self.fingerprint.status(current))

    def elsewhere(self) -> DispatchTable:
        """Return the table with the status `foreign`: the machine at hand is of another target."""
        return self.replace(status=Status.FOREIGN)

    def _content(self) -> dict[str, Any]:
        return {
            "seam": self.seam,
            "problem": dict(self.problem),
            "target": self.target,
            "numerics": self.numerics,
            "fingerprint": self.fingerprint.as_dict(),
            "bands": [
                {
                    "first": band.first,
                    "last": band.last,
                    "arm": band.choice.arm,
                    "config": dict(band.choice.config),
                    "evidence": dict(band.evidence),
                }
                for band in self.bands
            ],
            "default": {"arm": self.default.arm, "config": dict(self.default.config)},
            "evidence": dict(self.evidence),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: the schema version, the digest and the content."""
        return {"mhctune_table": SCHEMA_VERSION, "digest": self.digest, **self._content()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "table") -> DispatchTable:
        """Build a table from its JSON form.

        Raises:
            TableError: a newer schema, a missing or mistyped field, broken bands, or a digest that does
                not match the content.
        """
        version = data.get("mhctune_table")
        if version != SCHEMA_VERSION:
            raise TableError(f"{where}: schema {version!r} is not {SCHEMA_VERSION}; export it again")
        try:
            table = cls(
                seam=data["seam"],
                problem=data["problem"],
                target=data["target"],
                numerics=data["numerics"],
                fingerprint=Fingerprint(**data["fingerprint"]),
                bands=tuple(
                    Band(
                        int(b["first"]),
                        int(b["last"]),
                        Choice.of(b["arm"], b["config"]),
                        b.get("evidence", {}),
                    )
                    for b in _sequence(data["bands"])
                ),
                default=Choice.of(data["default"]["arm"], data["default"]["config"]),
                evidence=data.get("evidence", {}),
            )
            digest = table.digest
        except TableError as error:
            raise TableError(f"{where}: {error}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise TableError(f"{where}: field missing or of the wrong type: {error}") from error
        if data.get("digest") != digest:
            raise TableError(
                f"{where}: digest {data.get('digest')!r} does not match the content ({digest}); "
                "the file was edited or damaged, export it again"
            )
        return table


def _sequence(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise TypeError(f"bands must be a list, not {type(value).__name__}")
    return value


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
