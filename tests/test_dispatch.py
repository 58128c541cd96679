"""The dispatch table: lookups, honesty, digests and its JSON form."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mhctune.kernels.dispatch import (
    SCHEMA_VERSION,
    Band,
    Choice,
    DispatchTable,
    Fingerprint,
    Status,
    TableError,
)

MakeTable = Callable[..., DispatchTable]
MakeFingerprint = Callable[..., Fingerprint]

# What a difference in each field of a fingerprint means. A new field needs a line here and in dispatch.py.
MEANING = {
    "gpu_name": ("NVIDIA H100", Status.FOREIGN),
    "sm_count": (114, Status.FOREIGN),
    "memory_gib": (80, Status.FOREIGN),
    "mig": ("3g.71gb", Status.FOREIGN),
    "driver": ("580.1", Status.OTHER_DRIVER),
    "cuda": ("13.0", Status.OTHER_TOOLCHAIN),
    "compiler": ("nvcc 13.0", Status.OTHER_TOOLCHAIN),
    "torch": ("2.12.0", Status.OTHER_TOOLCHAIN),
    "tilelang": ("0.1.16", Status.OTHER_TOOLCHAIN),
    "pass_config": ('{"tl.x":true}', Status.OTHER_TOOLCHAIN),
    "compile_flags": ("-O2", Status.OTHER_TOOLCHAIN),
    "protocol": (2, Status.OTHER_TOOLCHAIN),
    "source_hash": ("6" * 64, Status.OTHER_SOURCE),
}


# --- Lookups ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "band"), [(1, 0), (2, 1), (3, 1), (16, 1), (17, 1), (18, 2), (19, 2), (63, 2), (64, 2)]
)
def test_a_token_count_finds_the_band_that_holds_it(
    make_table: MakeTable, num_tokens: int, band: int
) -> None:
    table = make_table()
    answer = table.lookup(num_tokens)
    expected = table.bands[band]
    assert answer.choice == expected.choice
    assert (answer.first, answer.last) == (expected.first, expected.last)
    assert answer.status is Status.EXACT


@pytest.mark.parametrize("num_tokens", [65, 66, 10**6, 2**63, 10**30])
def test_above_the_last_band_the_default_is_served_and_says_so(
    make_table: MakeTable, num_tokens: int
) -> None:
    table = make_table()
    answer = table.lookup(num_tokens)
    assert answer.choice == table.default
    assert answer.status is Status.OUT_OF_RANGE
    assert (answer.first, answer.last) == (65, None)


@pytest.mark.parametrize("num_tokens", [0, -1, -(10**30), False, True])
def test_zero_and_below_answer_as_one_token_does(make_table: MakeTable, num_tokens: int) -> None:
    table = make_table()
    assert table.lookup(num_tokens) == table.lookup(1)


def test_every_lookup_equals_a_linear_search(make_table: MakeTable) -> None:
    table = make_table()
    for num_tokens in range(1, 65):
        (band,) = (b for b in table.bands if b.first <= num_tokens <= b.last)
        assert table.lookup(num_tokens).choice == band.choice


def test_a_table_of_one_band_of_one_token_works(make_table: MakeTable) -> None:
    choice = Choice.of("fused", {"tile_n": 24})
    table = make_table(bands=(Band(1, 1, choice),))
    assert table.max_tokens == 1
    assert table.lookup(1).last == 1
    assert table.lookup(2).status is Status.OUT_OF_RANGE


def test_choices_are_distinct_in_band_order_with_the_default_last(make_table: MakeTable) -> None:
    table = make_table()
    assert table.choices == (table.bands[0].choice, table.bands[1].choice)
    other = Choice.of("fused", {"tile_n": 6})
    assert make_table(default=other).choices == (*table.choices, other)
    assert table.max_tokens == 64


# --- Honesty ----------------------------------------------------------------------------------------------


def test_statuses_are_ordered_from_best_to_worst() -> None:
    names = "exact other_driver other_toolchain other_source family foreign out_of_range default"
    assert [str(status) for status in sorted(Status)] == names.split()


def test_every_field_of_the_fingerprint_has_a_meaning() -> None:
    assert set(MEANING) == set(Fingerprint.__match_args__)


@pytest.mark.parametrize("name", MEANING)
def test_a_difference_in_one_field_has_its_status(
    make_table: MakeTable, make_fingerprint: MakeFingerprint, name: str
) -> None:
    value, status = MEANING[name]
    measured, current = make_fingerprint(), make_fingerprint(**{name: value})
    assert measured.status(current) is status
    assert current.status(measured) is status
    assert measured.differences(current) == {name: (getattr(measured, name), value)}
    assert make_table().against(current).lookup(1).status is status


@pytest.mark.parametrize("first", MEANING)
def test_of_two_differences_the_worse_status_holds(make_fingerprint: MakeFingerprint, first: str) -> None:
    for second, (value, status) in MEANING.items():
        if second != first:
            current = make_fingerprint(**{first: MEANING[first][0], second: value})
            assert make_fingerprint().status(current) is max(status, MEANING[first][1])


def test_the_same_fingerprint_is_exact(make_table: MakeTable, make_fingerprint: MakeFingerprint) -> None:
    assert make_fingerprint().status(make_fingerprint()) is Status.EXACT
    assert make_fingerprint().differences(make_fingerprint()) == {}
    assert make_table(status=Status.FOREIGN).against(make_fingerprint()).lookup(1).status is Status.EXACT


@pytest.mark.parametrize("status", list(Status))
def test_out_of_range_is_never_better_than_the_tables_status(make_table: MakeTable, status: Status) -> None:
    table = make_table(status=status)
    assert table.lookup(1).status is status
    assert table.lookup(65).status is max(status, Status.OUT_OF_RANGE)


def test_a_table_of_another_target_is_foreign(make_table: MakeTable) -> None:
    assert make_table().elsewhere().lookup(1).status is Status.FOREIGN


@pytest.mark.parametrize("name", MEANING)
def test_every_field_changes_the_fingerprints_digest(make_fingerprint: MakeFingerprint, name: str) -> None:
    assert make_fingerprint(**{name: MEANING[name][0]}).digest != make_fingerprint().digest
    assert make_fingerprint().digest == make_fingerprint().digest
    assert len(make_fingerprint().digest) == 16


# --- Digests ----------------------------------------------------------------------------------------------


def content_changes(table: DispatchTable) -> dict[str, DispatchTable]:
    other = Choice.of("fused", {"tile_n": 6, "n_splits": 4})
    first, *rest = table.bands
    return {
        "seam": table.replace(seam="pre"),
        "problem": table.replace(problem={**table.problem, "norm": False}),
        "target": table.replace(target="c"),
        "numerics": table.replace(numerics="rounded/4"),
        "fingerprint": table.replace(fingerprint=table.fingerprint.replace(sm_count=131)),
        "bands": table.replace(bands=(first.replace(choice=other), *rest)),
        "default": table.replace(default=other),
        "evidence": table.replace(evidence={"bound": 0.1}),
    }


def test_the_digest_changes_with_the_content(make_table: MakeTable) -> None:
    table = make_table()
    changed = content_changes(table)
    assert set(changed) | {"status"} == set(DispatchTable.__match_args__)
    digests = {table.digest, *(t.digest for t in changed.values())}
    first, *rest = table.bands
    digests.add(table.replace(bands=(first.replace(evidence={"regret": 0.5}), *rest)).digest)
    digests.add(table.replace(bands=(*table.bands[:-1], table.bands[-1].replace(last=65))).digest)
    assert len(digests) == len(changed) + 3


def test_the_digest_does_not_change_with_the_status(make_table: MakeTable) -> None:
    assert {make_table(status=status).digest for status in Status} == {make_table().digest}
    assert len(make_table().digest) == 64


def test_the_order_of_tunables_and_keys_does_not_matter(make_table: MakeTable) -> None:
    turned = Choice.of("unfused", {"n_splits": 1, "tile_n": 32})
    problem = dict(reversed(make_table().problem.items()))
    assert make_table(default=turned, problem=problem).digest == make_table().digest
    assert str(turned) == "unfused(n_splits=1, tile_n=32)"


# --- Broken tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([], "has no band"),
        ([(2, 8)], "band 2..8 .* must begin at 1"),
        ([(0, 8)], "band 0..8 .* must begin at 1"),
        ([(1, 8), (10, 16)], "band 10..16 .* must begin at 9"),
        ([(1, 8), (8, 16)], "band 8..16 .* must begin at 9"),
        ([(1, 8), (9, 8)], "band 9..8 .* not end before it"),
        ([(9, 16), (1, 8)], "band 9..16 .* must begin at 1"),
    ],
    ids=str,
)
def test_bands_that_are_not_contiguous_from_one_are_refused(
    make_table: MakeTable, ranges: list[tuple[int, int]], message: str
) -> None:
    choice = Choice.of("fused", {"tile_n": 24})
    with pytest.raises(TableError, match=message):
        make_table(bands=tuple(Band(first, last, choice) for first, last in ranges))


def edited(table: DispatchTable, **changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(table.to_dict()))
    return {**data, **changes}


def test_a_table_survives_json(make_table: MakeTable) -> None:
    table = make_table()
    again = DispatchTable.from_dict(edited(table))
    assert again == table
    assert again.digest == table.digest
    assert again.to_dict() == table.to_dict()
    assert [again.lookup(t) for t in range(70)] == [table.lookup(t) for t in range(70)]


def test_a_loaded_tables_status_is_not_the_files(make_table: MakeTable) -> None:
    assert DispatchTable.from_dict(edited(make_table(status=Status.FOREIGN))).status is Status.EXACT


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0, None, "1"])
def test_another_schema_is_refused(make_table: MakeTable, version: object) -> None:
    with pytest.raises(
        TableError, match=f"^here: schema {version!r} is not {SCHEMA_VERSION}; export it again"
    ):
        DispatchTable.from_dict(edited(make_table(), mhctune_table=version), "here")


@pytest.mark.parametrize(
    "changes",
    [{"seam": "pre"}, {"numerics": "rounded/9"}, {"evidence": {}}, {"digest": "0" * 64}, {"digest": None}],
    ids=str,
)
def test_edited_content_is_refused(make_table: MakeTable, changes: dict[str, Any]) -> None:
    with pytest.raises(TableError, match=r"does not match the content .* the file was edited or damaged"):
        DispatchTable.from_dict(edited(make_table(), **changes))


@pytest.mark.parametrize("name", ["seam", "problem", "target", "numerics", "fingerprint", "bands", "default"])
def test_a_missing_field_is_named(make_table: MakeTable, name: str) -> None:
    data = edited(make_table())
    del data[name]
    with pytest.raises(TableError, match=f"^here: field missing or of the wrong type: '{name}'"):
        DispatchTable.from_dict(data, "here")


@pytest.mark.parametrize("name", Fingerprint.__match_args__)
def test_a_fingerprint_without_a_field_is_refused(make_table: MakeTable, name: str) -> None:
    data = edited(make_table())
    del data["fingerprint"][name]
    with pytest.raises(TableError, match=name):
        DispatchTable.from_dict(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bands", {"first": 1}),
        ("bands", "1..8"),
        ("bands", [[1, 8]]),
        ("bands", [{"first": 1, "last": 8}]),
        ("bands", [{"first": "one", "last": 8, "arm": "fused", "config": {}}]),
        ("bands", [{"first": 1, "last": 8, "arm": "fused", "config": [1]}]),
        ("bands", [{"first": 1, "last": None, "arm": "fused", "config": {}}]),
        ("bands", [{"first": 2, "last": 8, "arm": "fused", "config": {}}]),
        ("bands", []),
        ("default", "fused"),
        ("default", None),
        ("fingerprint", []),
        ("fingerprint", {"gpu": "x"}),
        ("problem", 3),
        ("problem", "hidden"),
        ("problem", None),
        ("evidence", 7),
    ],
    ids=str,
)
def test_a_field_of_the_wrong_type_is_a_table_error(make_table: MakeTable, name: str, value: object) -> None:
    with pytest.raises(TableError, match=r"^here: "):
        DispatchTable.from_dict(edited(make_table(), **{name: value}), "here")


def test_a_table_cannot_be_changed(make_table: MakeTable) -> None:
    with pytest.raises(AttributeError):
        make_table().seam = "pre"  # type: ignore[misc]
