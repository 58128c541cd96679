"""Gain: what bands win over what is served today, or that there is nothing to gain."""

from __future__ import annotations

from dataclasses import dataclass

from mhctune.autotuner.derive import Derived
from mhctune.autotuner.words import counted, percent


@dataclass(frozen=True, slots=True)
class Gain:
    """What is lost at one token count by what is served today: its regret, with limits; tied: nothing."""

    num_tokens: int
    point: float
    lower: float
    upper: float
    tied: bool


def gains(derived: Derived) -> list[Gain]:
    """Return what the incumbent loses at each measured token count where it was measured."""
    found = []
    for count, rows in derived.cells.items():
        served = derived.incumbent.candidate(count) if derived.incumbent else None
        for s in rows:
            if s.candidate == served:
                found.append(Gain(count, s.regret.point, s.regret.lower, s.regret.upper, s.tied))
    return found


def gain_note(derived: Derived) -> str:
    """Say what is gained over what is served today; empty where nothing is known of that."""
    if derived.incumbent is None:
        return ""
    found, name, counts = gains(derived), derived.incumbent.name, len(derived.cells)
    if not found:
        return f"gain over {name}: unknown, this sweep did not measure what it serves"
    unknown = f" ({counted(counts - len(found), 'token count')} unknown)" if len(found) < counts else ""
    told = [gain for gain in found if not gain.tied]
    if not told:
        return (
            f"nothing to gain: {name} is within the noise of the best at {len(found)} of "
            f"{counted(counts, 'measured token count')}{unknown}"
        )
    most = max(told, key=lambda gain: (gain.point, -gain.num_tokens))
    return (
        f"to gain over {name}: up to {percent(most.point)} ({percent(most.lower)} to {percent(most.upper)}) "
        f"at {counted(most.num_tokens, 'token')}; {len(found) - len(told)} of {len(found)} are within the "
        f"noise{unknown}"
    )
