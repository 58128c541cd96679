"""Frozen values behave as frozen dataclasses do: construction, equality, hash, repr, copies, pickles."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass, make_dataclass
from typing import Any

import pytest

from mhctune.kernels.dispatch import Answer, Band, Choice, DispatchTable, Status, TableError
from mhctune.kernels.frozen import Frozen, plain

FUSED = Choice("fused", (("tile_n", 24),))
UNFUSED = Choice("unfused", (("tile_n", 12),))
BAND = Band(1, 8, FUSED, {"regret": 0.01})

MakeTable = Callable[..., DispatchTable]


class Other(Frozen):
    """The fields of `Choice`."""

    arm: str
    config: tuple[tuple[str, int], ...]


@pytest.mark.parametrize(
    "built",
    [
        Band(1, 8, FUSED, {"regret": 0.01}),
        Band(1, 8, evidence={"regret": 0.01}, choice=FUSED),
        Band(first=1, last=8, choice=FUSED, evidence={"regret": 0.01}),
    ],
)
def test_fields_are_given_by_place_or_by_name(built: Band) -> None:
    assert (built.first, built.last, built.choice, built.evidence) == (1, 8, FUSED, {"regret": 0.01})
    assert built == BAND


@pytest.mark.parametrize(
    ("values", "named", "message"),
    [
        ((1, 8), {}, "^Band lacks choice$"),
        ((), {"choice": FUSED}, "^Band lacks first, last$"),
        ((1, 8, FUSED, {}, 5), {}, "^Band has 4 fields, 5 values were given$"),
        ((1, 8, FUSED), {"last": 9}, "^Band was given last twice$"),
        ((1, 8, FUSED), {"arm": 9}, "^Band has no field arm; its fields are first, last, choice, evidence$"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_fields_is_refused(
    values: tuple[Any, ...], named: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        Band(*values, **named)


def test_a_dict_that_is_a_default_is_each_ones_own() -> None:
    one, two = Band(1, 8, FUSED), Band(1, 8, FUSED)
    assert one.evidence == two.evidence == {}
    assert one.evidence is not two.evidence


def test_fields_cannot_be_set_deleted_or_added(make_table: MakeTable) -> None:
    for value, name in ((FUSED, "arm"), (BAND, "last"), (make_table(), "status"), (FUSED, "speed")):
        with pytest.raises(AttributeError, match=rf"is frozen: cannot set {name}; use replace\({name}="):
            setattr(value, name, 1)
    with pytest.raises(AttributeError, match=r"^Choice is frozen: cannot delete arm$"):
        del FUSED.arm
    assert FUSED.arm == "fused"


def test_equality_and_hash_are_those_of_the_fields_of_one_class() -> None:
    again = Choice("fused", (("tile_n", 24),))
    assert FUSED == again
    assert hash(FUSED) == hash(again)
    assert len({FUSED, again, UNFUSED}) == 2
    assert UNFUSED != FUSED != Other("fused", (("tile_n", 24),))
    assert FUSED != ("fused", (("tile_n", 24),))
    with pytest.raises(TypeError, match="unhashable"):
        hash(BAND)  # its evidence is a dict


def test_repr_and_patterns_are_a_dataclasses() -> None:
    twin = make_dataclass("Choice", ["arm", "config"], frozen=True)("fused", (("tile_n", 24),))
    assert repr(FUSED) == repr(twin)
    assert Choice.__match_args__ == type(twin).__match_args__
    assert repr(Answer(FUSED, Status.EXACT, 1, None)) == (
        f"Answer(choice={FUSED!r}, status={Status.EXACT!r}, first=1, last=None)"
    )


def test_a_copy_with_changes_leaves_the_first_as_it_was() -> None:
    assert BAND.replace(last=9) == Band(1, 9, FUSED, {"regret": 0.01})
    assert BAND.replace() == BAND
    assert BAND.last == 8
    with pytest.raises(TypeError, match=r"^Band has no field end; "):
        BAND.replace(end=9)


def test_a_copy_with_changes_is_validated_and_laid_out_again(make_table: MakeTable) -> None:
    table = make_table()
    with pytest.raises(TableError, match="must begin at 1"):
        table.replace(bands=table.bands[1:])
    short = table.replace(bands=table.bands[:1])
    assert short.lookup(2).status is Status.OUT_OF_RANGE
    assert table.lookup(2).status is Status.EXACT


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_copies_and_pickles_are_equal_and_serve_alike(
    make_table: MakeTable, copied: Callable[[Any], Any]
) -> None:
    for value in (FUSED, BAND, make_table().fingerprint, make_table().lookup(12)):
        assert copied(value) == value
        assert type(copied(value)) is type(value)
    table = make_table()
    again = copied(table)
    assert again == table
    assert [again.lookup(count) for count in range(70)] == [table.lookup(count) for count in range(70)]


def test_as_dict_has_the_fields_in_order_and_nothing_else(make_table: MakeTable) -> None:
    assert BAND.as_dict() == {"first": 1, "last": 8, "choice": FUSED, "evidence": {"regret": 0.01}}
    assert tuple(make_table().as_dict()) == DispatchTable.__match_args__


@dataclass(frozen=True)
class Change:
    """A dataclass that holds frozen values, one of them in another dataclass."""

    first: int
    after: Choice
    inner: Change | None = None


def test_a_dataclass_of_frozen_values_becomes_plain_dicts() -> None:
    fused, unfused = FUSED.as_dict(), UNFUSED.as_dict()
    assert asdict(Change(1, FUSED, Change(2, UNFUSED)), dict_factory=plain) == {
        "first": 1, "after": fused, "inner": {"first": 2, "after": unfused, "inner": None},
    }  # fmt: skip
