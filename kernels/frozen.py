"""Frozen values without `dataclasses`, whose import costs a serving process more than the lookup's own code.

Standard library only, and of that only what `json` imports anyway.
"""

from __future__ import annotations

from operator import attrgetter

TYPE_CHECKING = False  # as type checkers read it, see `mhctune.kernels.dispatch`
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, ClassVar, NoReturn, Self, dataclass_transform
else:

    def dataclass_transform(**_: bool):  # noqa: ANN201
        """Tell type checkers, and only them, that the subclasses are built as dataclasses are."""
        return lambda base: base


@dataclass_transform(frozen_default=True)
class Frozen:
    """A value with fields: its class lists them as annotations and takes them by place or by name.

    What it is, is its fields: equality (of one class), hash and repr are theirs. A class attribute is its
    field's default; one that is a dict is copied. Fields are not inherited from another frozen class.
    """

    __match_args__: ClassVar[tuple[str, ...]]
    _defaults: ClassVar[dict[str, Any]]
    _values: ClassVar[attrgetter[Any]]

    def __init_subclass__(cls) -> None:
        """Lay out the fields."""
        names = tuple(cls.__annotations__)
        cls.__match_args__ = names  # type: ignore[misc]  # mypy takes it for final, the names are these
        cls._defaults = {name: vars(cls)[name] for name in names if name in vars(cls)}
        cls._values = attrgetter(*names)

    def __init__(self, *values: Any, **named: Any) -> None:
        """Keep the fields, then validate.

        Raises:
            TypeError: a field is missing, unknown or given twice.
        """
        kind, names = type(self).__name__, self.__match_args__
        if len(values) > len(names):
            raise TypeError(f"{kind} has {len(names)} fields, {len(values)} values were given")
        given = dict(zip(names, values, strict=False))
        if twice := [name for name in named if name in given]:
            raise TypeError(f"{kind} was given {', '.join(twice)} twice")
        given.update(named)
        if unknown := [name for name in named if name not in names]:
            raise TypeError(f"{kind} has no field {', '.join(unknown)}; its fields are {', '.join(names)}")
        for name, default in self._defaults.items():
            given.setdefault(name, default.copy() if isinstance(default, dict) else default)
        if missing := [name for name in names if name not in given]:
            raise TypeError(f"{kind} lacks {', '.join(missing)}")
        for name in names:
            object.__setattr__(self, name, given[name])
        self.__post_init__()

    def __post_init__(self) -> None:
        """Validate; for subclasses."""

    if not TYPE_CHECKING:  # mypy reads a __setattr__ as leave to set what no class declares

        def __setattr__(self, name: str, value: object) -> NoReturn:
            raise AttributeError(
                f"{type(self).__name__} is frozen: cannot set {name}; use replace({name}=...)"
            )

        def __delattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"{type(self).__name__} is frozen: cannot delete {name}")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return bool(self._values(self) == self._values(other))

    def __hash__(self) -> int:
        return hash(self._values(self))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.as_dict().items())
        return f"{type(self).__qualname__}({fields})"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, in order; what they hold is not converted."""
        return {name: getattr(self, name) for name in self.__match_args__}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated as a new one is."""
        return type(self)(**{**self.as_dict(), **changes})


def plain(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict with frozen values as dicts: `dataclasses.asdict(..., dict_factory=plain)`.

    For dataclasses that hold frozen values in their fields; `asdict` alone leaves those as they are.
    """
    return {name: value.as_dict() if isinstance(value, Frozen) else value for name, value in pairs}
