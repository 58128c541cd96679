"""The protocol: how many rounds, and when they are looked at."""

from __future__ import annotations

import pytest

from mhctune.autotuner.protocol import FURTHER, FURTHER_ROUNDS, PROTOCOL_VERSION, UNROLL, Protocol


@pytest.mark.parametrize(
    ("samples", "screening", "looks"),
    [(15, 6, (6, 12)), (9, 6, (6,)), (12, 6, (6,)), (6, 6, ()), (5, 6, ()), (4, 1, (1, 2, 3))],
)
def test_a_look_is_taken_every_screening_rounds_before_the_last(
    samples: int, screening: int, looks: tuple[int, ...]
) -> None:
    assert Protocol(samples, screening=screening).looks == looks


@pytest.mark.parametrize("target", ["c", "cuda"])
@pytest.mark.parametrize(("samples", "confirmation"), [(5, 5), (9, 9), (15, 15), (400, 15)])
def test_finalists_get_as_many_rounds_again_and_fifteen_at_most(
    target: str, samples: int, confirmation: int
) -> None:
    assert Protocol.of(target, samples).confirmation == confirmation


def test_a_gpu_replays_graphs_of_unrolled_launches_and_a_cpu_single_ones() -> None:
    assert (Protocol.of("cuda", 9).unroll, Protocol.of("c", 9).unroll) == (UNROLL, 1)


def test_rounds_and_version_are_kept_with_what_was_measured() -> None:
    kept = Protocol.of("cuda", 15).to_dict()
    expected = {"samples": 15, "screening": 6, "confirmation": 15, "repeats": 10, "placements": 7}
    expected |= {"discarded": 1, "further": FURTHER}
    expected["version"] = PROTOCOL_VERSION
    assert expected.items() <= kept.items()
    assert Protocol(**kept) == Protocol.of("cuda", 15)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("samples", 0),
        ("screening", 0),
        ("confirmation", -1),
        ("repeats", -1),
        ("placements", -1),
        ("discarded", -1),
        ("further", -1),
    ],
)
def test_rounds_that_cannot_be_counted_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}; it must be at least"):
        Protocol(**{"samples": 9, field: value})


@pytest.mark.parametrize(
    ("samples", "shares"), [(15, [3, 2, 2, 2, 2, 2, 2]), (9, [2, 1, 1, 2, 1, 1, 1]), (5, [1] * 5)]
)
def test_the_placements_share_the_confirming_rounds(samples: int, shares: list[int]) -> None:
    protocol = Protocol.of("cuda", samples)
    found = [protocol.placement(confirmed) for confirmed in range(protocol.confirmation)]
    assert [found.count(place) for place in range(1, max(found) + 1)] == shares
    assert found == sorted(found)
    assert Protocol(9, confirmation=9).placement(3) == 0


def test_further_placements_follow_those_of_the_confirmation_on_a_gpu() -> None:
    protocol = Protocol.of("cuda", 15)
    found = [protocol.placement(15 + more) for more in range(protocol.extension)]
    assert found == [8 + more // FURTHER_ROUNDS for more in range(FURTHER * FURTHER_ROUNDS)]
    assert len({0, *map(protocol.placement, range(15)), *found}) == 19
    assert protocol.placement(14) == 7
    assert [Protocol.of(*each).further for each in (("c", 15), ("cuda", 6), ("cuda", 7))] == [0, 0, FURTHER]
    with pytest.raises(ValueError, match="further is 2; without placements it must be 0"):
        Protocol(9, confirmation=9, further=2)


def test_a_protocol_that_was_kept_before_there_were_further_placements_has_none() -> None:
    kept = {name: value for name, value in Protocol.of("cuda", 15).to_dict().items() if name != "further"}
    assert Protocol(**kept).extension == 0  # type: ignore[arg-type]


def test_more_placements_than_rounds_to_share_and_rounds_that_have_no_number_are_refused() -> None:
    with pytest.raises(ValueError, match="placements is 4; with 3 confirming rounds it may be at most 3"):
        Protocol(9, confirmation=3, placements=4)
    assert Protocol(975, confirmation=15).samples == 975
    with pytest.raises(ValueError, match=r"samples is 976; with 15 confirming rounds and 10 repeats .* 975"):
        Protocol(976, confirmation=15)
