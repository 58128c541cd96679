"""The conditions: what the device was like while a round was timed, and whether that spoils it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mhctune.autotuner.words import counted

NVML, NOT_APPLICABLE, UNREADABLE = "nvml", "not applicable", "unreadable"

REASONS = {
    0x001: "gpu_idle",
    0x002: "application_clocks",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
}
"""Why a GPU does not run at its highest clock, by the bits of nvml.h's clock event reasons."""

THROTTLING = frozenset(
    {"sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"}
)
"""Those that come and go with heat and power. Idling, and clocks that somebody set, hold for all alike."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a device was like.

    Attributes:
        source: `nvml`; `not applicable` where there is nothing to read, as on the target `c`; or
            `unreadable`.
        sm_clock_mhz: Of the multiprocessors, right after the timed work.
        temperature_c: Of the GPU.
        reasons: Why it did not run at its highest clock, as `REASONS` names them.
        other_processes: Compute processes on the GPU beside the worker.
    """

    source: str
    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    reasons: tuple[str, ...] = ()
    other_processes: int | None = None

    @property
    def throttled(self) -> bool:
        """Whether power or heat held the clocks back."""
        return not THROTTLING.isdisjoint(self.reasons)

    def since(self, before: Conditions) -> Conditions:
        """Return this reading with the reasons of an earlier one: what held at either end of a round."""
        return replace(self, reasons=tuple(sorted({*before.reasons, *self.reasons})))


Reader = Callable[[], Conditions]
"""Reads the conditions as they are now. One reading takes microseconds and disturbs no timing."""


def not_applicable() -> Conditions:
    """Return the conditions of a device that tells none."""
    return Conditions(NOT_APPLICABLE)


def reasons_of(mask: int) -> tuple[str, ...]:
    """Return the names of the reasons in NVML's bit mask; a bit without a name is called by its number."""
    bits = [1 << place for place in range(mask.bit_length()) if mask >> place & 1]
    return tuple(sorted(REASONS.get(bit, f"reason_{bit:#x}") for bit in bits))


def summary(readings: Sequence[Conditions]) -> str:
    """Return what the rounds of a sweep were like, for people; empty when there was nothing to read."""
    told = [reading for reading in readings if reading.source == NVML]
    if not told:
        return ""
    throttled = sum(reading.throttled for reading in told)
    parts = [f"{counted(len(told), 'round')}, {throttled} throttled"]
    clocks = [reading.sm_clock_mhz for reading in told if reading.sm_clock_mhz is not None]
    if clocks:
        parts.append(f"SM clock {min(clocks)}-{max(clocks)} MHz")
    heat = [reading.temperature_c for reading in told if reading.temperature_c is not None]
    if heat:
        parts.append(f"up to {max(heat)} degrees")
    shared = sum(bool(reading.other_processes) for reading in told)
    if shared:
        parts.append(f"other processes on the GPU in {shared}")
    why = sorted({reason for reading in told for reason in reading.reasons if reason in THROTTLING})
    return ", ".join(parts) + (f" ({', '.join(why)})" if why else "")
