"""Numbers as people read them."""

from __future__ import annotations

import pytest

from mhctune.autotuner.words import counted, percent


@pytest.mark.parametrize(("number", "text"), [(0, "0 bands"), (1, "1 band"), (2, "2 bands")])
def test_a_count_agrees_with_its_noun(number: int, text: str) -> None:
    assert counted(number, "band") == text


@pytest.mark.parametrize(("share", "text"), [(0.0, "0.0 %"), (0.125, "12.5 %"), (-0.05, "-5.0 %")])
def test_a_share_is_a_percentage(share: float, text: str) -> None:
    assert percent(share) == text
