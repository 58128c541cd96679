"""What spoils a round, and what a sweep's rounds were like."""

from __future__ import annotations

import pytest

from mhctune.autotuner.conditions import NVML, Conditions, not_applicable, reasons_of, summary


@pytest.mark.parametrize(
    ("mask", "throttled"),
    [
        (0x000, False), (0x001, False), (0x002, False), (0x010, False), (0x100, False),
        (0x004, True), (0x008, True), (0x020, True), (0x040, True), (0x080, True), (0x101 | 0x040, True),
    ],
)  # fmt: skip
def test_power_and_heat_throttle_and_idling_or_set_clocks_do_not(mask: int, throttled: bool) -> None:
    assert Conditions(NVML, 1980, 40, reasons_of(mask)).throttled is throttled


def test_reasons_have_the_names_of_nvml_and_an_unknown_one_its_number() -> None:
    assert reasons_of(0) == ()
    assert reasons_of(0x005) == ("gpu_idle", "sw_power_cap")
    assert reasons_of(0x1000) == ("reason_0x1000",)


def test_a_round_is_as_bad_as_either_of_its_ends() -> None:
    before = Conditions(NVML, 1980, 40, ("sw_power_cap",))
    after = Conditions(NVML, 1830, 71, ("gpu_idle",), 1)
    assert after.since(before) == Conditions(NVML, 1830, 71, ("gpu_idle", "sw_power_cap"), 1)
    assert after.since(before).throttled
    assert not after.since(after).throttled


def test_a_sweep_without_a_gpu_has_nothing_to_tell() -> None:
    assert not_applicable() == Conditions("not applicable")
    assert summary([not_applicable()] * 9) == ""
    assert summary([]) == ""


def test_a_summary_tells_clocks_heat_throttled_rounds_and_company() -> None:
    cool = Conditions(NVML, 1980, 45, ("gpu_idle",), 0)
    hot = Conditions(NVML, 1410, 87, ("gpu_idle", "hw_thermal_slowdown"), 2)
    assert summary([cool] * 3) == "3 rounds, 0 throttled, SM clock 1980-1980 MHz, up to 45 degrees"
    assert summary([cool, hot, cool]) == (
        "3 rounds, 1 throttled, SM clock 1410-1980 MHz, up to 87 degrees, other processes on the GPU in 1 "
        "(hw_thermal_slowdown)"
    )
    assert summary([Conditions(NVML)]) == "1 round, 0 throttled"
