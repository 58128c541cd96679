"""What runtimes ship: the loaded files answer as the published tables say."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mhctune.configs import loader
from mhctune.configs.baseline import Baseline, BaselineChoice
from mhctune.configs.errors import ConfigError
from mhctune.configs.loader import load_baseline, names

HIDDEN = (4096, 5120, 7168)
# Published: hidden, SMs, then raw/bucketed splits at up to 64, 65-128, 256, 512, 1024, 2048, 4096 and 8192.
RANGES = ((1, 64), (65, 128), (256, 256), (512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 10**6))
TABLE = (
    (4096, 132, "64/16 64/16 33/16 16/16 8/16 4/4 2/4 1/1"),
    (4096, 152, "64/16 64/16 38/16 19/16 9/16 4/4 2/4 1/1"),
    (5120, 132, "80/16 66/16 33/16 16/16 8/16 4/4 2/4 1/1"),
    (5120, 152, "80/16 76/16 38/16 19/16 9/16 4/4 2/4 1/1"),
    (7168, 132, "112/16 66/16 33/16 16/16 8/16 4/4 2/4 1/1"),
    (7168, 152, "112/16 76/16 38/16 19/16 9/16 4/4 2/4 1/1"),
    (4096, 188, "64/16 64/16 47/16 23/16 11/16 5/16 2/4 1/1"),
    (5120, 188, "80/16 80/16 47/16 23/16 11/16 5/16 2/4 1/1"),
    (7168, 188, "112/16 94/16 47/16 23/16 11/16 5/16 2/4 1/1"),
    *((hidden, 48, "48/16 24/16 12/16 6/16 3/4 1/1 1/1 1/1") for hidden in HIDDEN),
)  # fmt: skip


def splits(name: str, tokens: int, hidden: int, sms: int) -> int:
    found = load_baseline(name).choice(tokens, hidden, sms)
    assert found.arm == "unfused"
    return found.config["n_splits"]


@pytest.mark.parametrize(("hidden", "sms", "row"), TABLE, ids=lambda value: str(value).split(" ")[0])
def test_the_split_rules_give_the_published_table(hidden: int, sms: int, row: str) -> None:
    for (first, last), cell in zip(RANGES, row.split(), strict=True):
        raw, bucket = map(int, cell.split("/"))
        for tokens in (first, last):
            assert splits("split-raw", tokens, hidden, sms) == raw
            assert splits("split-bucket", tokens, hidden, sms) == bucket
            assert splits("split-power-of-two", tokens, hidden, sms) == 2 ** (raw.bit_length() - 1)


def test_the_power_of_two_gives_the_published_optimum_where_the_bucket_does_not() -> None:
    assert [splits(f"split-{rule}", 1, 5120, 152) for rule in ("raw", "bucket", "power-of-two")] == [
        80,
        16,
        64,
    ]


@pytest.mark.parametrize(
    ("tokens", "hidden", "expected"),
    [
        (1, 4096, (2, 8, 128)), (4, 8192, (2, 8, 128)), (8, 5120, (2, 8, 128)), (15, 5120, (2, 8, 128)),
        (16, 5120, (6, 8, 128)), (32, 7168, (6, 8, 128)), (33, 5120, None), (1, 2560, None), (8, 5137, None),
    ],
)  # fmt: skip
def test_the_two_bands_answer_as_published(
    tokens: int, hidden: int, expected: tuple[int, int, int] | None
) -> None:
    found = load_baseline("vllm-two-bands").choice(tokens, hidden, 152)
    if expected is None:
        assert found == BaselineChoice("unfused", {"n_splits": 16})
    else:
        assert found == BaselineChoice(
            "fused", dict(zip(("tile_n", "n_splits", "n_thr"), expected, strict=True))
        )


@pytest.mark.parametrize(
    ("tokens", "hidden", "expected"),
    [
        (1, 4096, (2, 8)), (7, 4096, (2, 8)), (1, 5120, (2, 4)), (7, 7168, (2, 4)), (8, 4096, (3, 4)),
        (8, 5120, (3, 4)), (16, 7168, (3, 4)), (17, 4096, None),
    ],
)  # fmt: skip
def test_the_inherited_constants_answer_as_published(
    tokens: int, hidden: int, expected: tuple[int, int] | None
) -> None:
    found = load_baseline("vllm-inherited").choice(tokens, hidden, 132)
    if expected is None:
        assert found == BaselineChoice("unfused", {"n_splits": 64})
    else:
        assert found.arm == "fused"
        assert found.config == {"tile_n": expected[0], "n_splits": expected[1], "n_thr": 256}


@pytest.mark.parametrize("name", names("baseline"))
def test_every_shipped_baseline_answers_every_token_count_legally(name: str) -> None:
    baseline = load_baseline(name)
    assert baseline.name == name
    assert baseline.about
    assert baseline.source
    for tokens, hidden, sms in itertools.product((*range(1, 130), 4096, 65536), HIDDEN, (48, 132)):
        found = baseline.choice(tokens, hidden, sms)
        n_splits = found.config["n_splits"]
        # What the unfused kernels need: whole blocks of 64, no more splits than blocks.
        assert 1 <= n_splits <= 4 * hidden // 64
        if found.arm == "fused":
            assert 24 % found.config["tile_n"] == 0
            # At hidden 5120 the inherited 4 x 256 divides; a pair that does not would drop a slice of k.
            assert hidden % (n_splits * found.config["n_thr"]) == 0


@pytest.mark.parametrize(
    ("tokens", "hidden", "sms"), [(0, 4096, 132), (1, 0, 132), (1, 4096, 0), (-1, 4096, 132)]
)
def test_a_count_that_is_not_positive_is_refused(tokens: int, hidden: int, sms: int) -> None:
    with pytest.raises(ValueError, match=r"baseline 'split-raw': .* must be positive"):
        load_baseline("split-raw").choice(tokens, hidden, sms)


SPLIT: dict[str, Any] = {"rounding": "steps", "steps": [{"up_to": 1, "n_splits": 1}, {"n_splits": 4}]}
BASELINE: dict[str, Any] = {"name": "mine", "about": "a", "source": "b", "split": SPLIT}
BAND = {"tile_n": 2, "n_splits": 8, "n_thr": 128}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fused": [{"last": 8, **BAND}, {"last": 4, **BAND}]}, "must be in rising order"),
        ({"split": {"rounding": "steps"}}, "steps are given exactly with the rounding 'steps'"),
        ({"split": {"rounding": "none", "steps": SPLIT["steps"]}}, "steps are given exactly"),
        ({"split": {**SPLIT, "steps": SPLIT["steps"][::-1]}}, "only the last may be without up_to"),
        ({"split": {**SPLIT, "steps": SPLIT["steps"][:1]}}, "only the last may be without up_to"),
        ({"split": {"rounding": "up"}}, "none"),
        ({"fused": [{"last": 8, **BAND, "tile": 3}]}, "Extra inputs"),
    ],
)  # fmt: skip
def test_a_baseline_that_says_nothing_clear_is_refused(changes: dict[str, Any], message: str) -> None:
    Baseline.model_validate(BASELINE)
    with pytest.raises(ValidationError, match=message):
        Baseline.model_validate({**BASELINE, **changes})


def test_an_unknown_baseline_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown baseline 'split-row'.*split-raw"):
        load_baseline("split-row")


def test_the_files_are_shipped_with_the_package() -> None:
    folder = Path(loader.__file__).parent / "baselines"
    assert {path.stem for path in folder.glob("*.toml")} == set(names("baseline"))
    assert len(names("baseline")) == 5
