"""The search space: what may be tuned, what may not be combined and why."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

Config = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Tunable:
    """A named integer of an arm with its legal values, in the order they are tried."""

    name: str
    values: tuple[int, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class Constraint:
    """A rule that removes points; `reason` may name tunables in braces."""

    reason: str
    allows: Callable[[Config], bool]


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One legal point: an arm and the values of its tunables."""

    arm: str
    items: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, arm: str, config: Config) -> Candidate:
        """Build a candidate; the order of the tunables does not matter."""
        return cls(arm, tuple(sorted(config.items())))

    @property
    def config(self) -> dict[str, int]:
        """The values of the tunables."""
        return dict(self.items)

    @property
    def key(self) -> str:
        """The canonical JSON text of the config: the form that databases and tables store."""
        return json.dumps(self.config, sort_keys=True, separators=(",", ":"))

    def __str__(self) -> str:
        """Return a label for people, such as `fused(block_h=64, tile_n=24)`."""
        return f"{self.arm}({', '.join(f'{name}={value}' for name, value in self.items)})"


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Every combination of an arm's tunables, less those that a constraint refuses."""

    arm: str
    tunables: tuple[Tunable, ...]
    constraints: tuple[Constraint, ...] = ()

    def points(self) -> Iterator[dict[str, int]]:
        """Yield every combination, legal or not, in the order of the declared values."""
        names = [tunable.name for tunable in self.tunables]
        for values in itertools.product(*(tunable.values for tunable in self.tunables)):
            yield dict(zip(names, values, strict=True))

    def refusals(self, config: Config) -> tuple[str, ...]:
        """Return why a config is illegal; empty means legal.

        A config may lie off the declared values (a maintainer's own, say): constraints decide alone.
        """
        names = {tunable.name for tunable in self.tunables}
        if set(config) != names:
            return (f"arm {self.arm} takes the tunables {sorted(names)}, got {sorted(config)}",)
        return tuple(rule.reason.format(**config) for rule in self.constraints if not rule.allows(config))

    def candidates(self) -> tuple[Candidate, ...]:
        """Return the legal points in the order of the declared values."""
        return tuple(self.legal())

    def legal(self) -> Iterator[Candidate]:
        """Yield the legal points in the order of the declared values, one by one: spaces can be large."""
        for point in self.points():
            if all(rule.allows(point) for rule in self.constraints):
                yield Candidate.of(self.arm, point)

    def restricted(self, values: Mapping[str, Sequence[int]]) -> SearchSpace:
        """Return the space with some tunables limited to `values`.

        Raises:
            ValueError: a name is no tunable of the arm, or a list is empty.
        """
        known = {tunable.name for tunable in self.tunables}
        for name, chosen in values.items():
            if name not in known:
                raise ValueError(f"arm {self.arm} has no tunable {name!r}; it has {', '.join(sorted(known))}")
            if not chosen:
                raise ValueError(f"tunable {name!r} of arm {self.arm} is given no value")
        return replace(
            self,
            tunables=tuple(
                replace(tunable, values=tuple(values.get(tunable.name, tunable.values)))
                for tunable in self.tunables
            ),
        )
