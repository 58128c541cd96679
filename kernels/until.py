"""Until when a launch is timed: to its end, or to the layer input, which may be complete before.

A sublayer needs the layer input alone to begin; post- and comb-mix are needed behind it. So the time to the
layer input and the whole device time are two numbers, and neither stands for the other. Standard library
only: dispatch tables read it.
"""

from __future__ import annotations

from collections.abc import Mapping

END, LAYER_INPUT = "end", "layer_input"
UNTIL = (END, LAYER_INPUT)
"""What a sweep may time a launch to."""

_BRIEF = {END: "to the end", LAYER_INPUT: "to the layer input"}
_MEANING = {END: " of the last launch", LAYER_INPUT: "; launches behind it are not counted"}


def until_of(protocol: object) -> str:
    """Return until when a stored protocol's samples were timed: one that does not say so, to the end."""
    return str(protocol.get("until", END)) if isinstance(protocol, Mapping) else END


def brief(until: str) -> str:
    """Return in words until when was timed, such as `to the layer input`."""
    return _BRIEF.get(until, f"to {until}")


def told(until: str) -> str:
    """Return in words what a latency that was timed until then is, and what is not in it."""
    return brief(until) + _MEANING.get(until, "")
