"""Files that a person wrote: a token histogram and bands by hand, and one clear error for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from mhctune.configs.errors import ConfigError
from mhctune.configs.hand_bands import load_hand_bands
from mhctune.configs.traffic import load_traffic


@pytest.mark.parametrize(
    "text",
    [
        "8,50\n1,900\n",
        "tokens,calls\n1,900\n8,50\n",
        "# from the log\n\n1, 900\n8 ,50\n",
        '{"8": 50, "1": 900}',
    ],
)
def test_a_histogram_is_read_from_csv_or_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "traffic"
    path.write_text(text)
    assert list(load_traffic(path).items()) == [(1, 900), (8, 50)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1,2,3\n", "line 1: 3 values; a line is tokens,calls"),
        ("1,2\nx,3\n", "line 2: token count 'x' is no integer"),
        ("1,2\n0,3\n", "line 2: token count 0 is not in 1 to"),
        ("1,-2\n", "line 1: number of calls -2 is negative"),
        ("1,2\n1,3\n", "line 2: token count 1 is repeated"),
        ("1,0\n", "holds no calls"),
        ("", "holds no calls"),
        ("tokens,calls\n", "holds no calls"),
        ('{"1": 2.5}', "'1': number of calls '2.5' is no integer"),
        ('{"1": true}', "number of calls 'True' is no integer"),
        ("{1: 2}", "no JSON"),
    ],
)
def test_a_wrong_histogram_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "traffic"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_traffic(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for load in (load_traffic, load_hand_bands):
        with pytest.raises(ConfigError, match=r"cannot read .*none"):
            load(tmp_path / "none")


BANDS = '[[band]]\nfirst = 1\nlast = 15\narm = "fused"\nconfig = {tile_n = 2}\n\n'


def test_bands_by_hand_are_read_from_toml_or_json(tmp_path: Path) -> None:
    path, other = tmp_path / "hand.toml", tmp_path / "hand.json"
    path.write_text(BANDS + '[[band]]\nfirst = 32\narm = "unfused"\n')
    other.write_text(
        '{"band": [{"first": 1, "last": 15, "arm": "fused", "config": {"tile_n": 2}},'
        ' {"first": 32, "arm": "unfused"}]}'
    )
    bands = load_hand_bands(path)
    assert bands == load_hand_bands(other)
    assert [(b.first, b.last, b.arm, b.config) for b in bands] == [
        (1, 15, "fused", {"tile_n": 2}),
        (32, None, "unfused", {}),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BANDS + BANDS, "band 2 begins at 1; it must begin at 16 or above"),
        (BANDS.replace("last = 15", "last = 0"), "band 1.last: .*greater than or equal to 1"),
        (BANDS.replace("first = 1", "first = 20"), "band 1 ends at 15, before it begins at 20"),
        (BANDS.replace("last = 15\n", "") + BANDS.replace("first = 1", "first = 2"), "band 1 has no last"),
        (BANDS.replace("tile_n = 2", 'tile_n = "2"'), "band 1.config.tile_n: .*valid integer"),
        (BANDS.replace("arm", "arms"), "band 1.arm: Field required"),
        ("band = []", "at least 1 item"),
        ("[[band", "invalid TOML"),
    ],
)
def test_a_wrong_band_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "hand.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_hand_bands(path)
