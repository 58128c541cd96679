"""The budget reads sizes and shares, and says with numbers why something does not fit."""

from __future__ import annotations

import pytest

from mhctune.autotuner.budget import BudgetError, VramBudget, size
from mhctune.autotuner.records import Footprint

FREE = 16 * 2**30


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("4GiB", 4 * 2**30),
        ("500MB", 500 * 10**6),
        ("60%", int(0.6 * FREE)),
        ("100 %", FREE),
        ("12.5%", FREE // 8),
        (" 1.5 gib ", 3 * 2**29),
        ("512kib", 512 * 2**10),
        ("2GB", 2 * 10**9),
        ("3KB", 3000),
        ("4096", 4096),
        ("4096B", 4096),
        (str(FREE), FREE),
    ],
)
def test_a_size_or_a_share_is_read(text: str, limit: int) -> None:
    assert VramBudget.parse(text, FREE) == VramBudget(limit, FREE)


@pytest.mark.parametrize(
    "text", ["", "much", "4 apples", "-1GiB", "4GiBs", "4G4", "60%%", "0x10", "nan%", "1e9"]
)
def test_what_is_no_size_is_refused_with_the_forms_that_are(text: str) -> None:
    with pytest.raises(BudgetError) as refused:
        VramBudget.parse(text, FREE)
    assert f"VRAM budget {text!r} is not a size" in str(refused.value)
    assert "4GiB" in str(refused.value)
    assert "60%" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [("0", "0 B"), ("0%", "0 B"), ("17GiB", "17.0 GiB"), ("101%", "16.2 GiB"), ("1TiB", "1024.0 GiB")],
)
def test_a_budget_of_nothing_or_of_more_than_is_free_is_refused_with_both_numbers(
    text: str, meaning: str
) -> None:
    with pytest.raises(BudgetError) as refused:
        VramBudget.parse(text, FREE)
    assert f"VRAM budget {text} is {meaning}; it must be more than 0" in str(refused.value)
    assert "16.0 GiB that are free" in str(refused.value)


def test_nineteen_sets_fit_into_half_of_what_a_shared_gpu_has_free_and_a_twentieth_does_not() -> None:
    # Hidden 5120 at 8192 tokens, 13.2 GB free: 6.6 GB; 19 sets are 6.39 GB, 20 are 6.72 GB.
    budget = VramBudget.parse("50%", 13_200_000_000)
    one = Footprint(0, output_bytes=336_000_000, scratch_bytes=199_680)
    assert one.forecast_bytes == 336_199_680
    assert budget.limit_bytes == 6_600_000_000
    assert budget.fits(0, [one] * 19)
    assert not budget.fits(0, [one] * 20)
    assert budget.fits(budget.limit_bytes - 19 * one.forecast_bytes, [one] * 19)
    assert not budget.fits(budget.limit_bytes - 19 * one.forecast_bytes + 1, [one] * 19)


def test_outputs_scratch_and_graph_count_and_the_inputs_count_once() -> None:
    budget = VramBudget(100, 1000)
    assert budget.fits(40, [Footprint(40, 10, 15, 5), Footprint(40, 10, 15, 5)])
    assert not budget.fits(41, [Footprint(41, 10, 15, 5), Footprint(41, 10, 15, 5)])


def test_a_shortfall_gives_every_number_and_what_to_do() -> None:
    text = VramBudget(4 * 2**30, FREE).shortfall(2**30, Footprint(0, 5 * 2**30, 2**29))
    assert text == (
        "inputs of 1,073,741,824 bytes and one buffer set of 5,905,580,032 bytes need 6.5 GiB, "
        "the budget is 4.0 GiB (16.0 GiB are free). Raise --vram-budget"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**19, "1.5 MiB"), (2**40, "1024.0 GiB")],
)
def test_a_size_is_shown_in_the_largest_unit_that_it_reaches(count: int, text: str) -> None:
    assert size(count) == text
