"""The protocol: how many rounds, and when they are looked at."""

from __future__ import annotations

import pytest

from mhctune.autotuner.protocol import PROTOCOL_VERSION, UNROLL, Protocol


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
    expected = {"samples": 15, "screening": 6, "confirmation": 15, "repeats": 10, "version": PROTOCOL_VERSION}
    assert expected.items() <= kept.items()
    assert Protocol(**kept) == Protocol.of("cuda", 15)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"), [("samples", 0), ("screening", 0), ("confirmation", -1), ("repeats", -1)]
)
def test_rounds_that_cannot_be_counted_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}; it must be at least"):
        Protocol(**{"samples": 9, field: value})
