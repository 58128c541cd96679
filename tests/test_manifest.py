"""The manifest: exactly what calls can reach. After it nothing compiles; with one key less, that one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mhctune.kernels import serving
from mhctune.kernels.dispatch import Band, Choice, DispatchTable
from mhctune.kernels.manifest import Manifest, manifest_of
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Problem, Variant

NAME, PROBLEM = "post_pre_delayed", Problem(768)
SEAM = SEAMS[NAME]
FUSED = Choice.of("fused", {"tile_n": 24, "n_splits": 1, "block_h": 64, "block_m": 4})
UNFUSED = Choice.of("unfused", {"tile_n": 24, "n_splits": 2, "block_h": 64, "block_m": 8})
DEFAULT = Choice.of("unfused", {"tile_n": 12, "n_splits": 2, "block_h": 128, "block_m": 2})
MOST = 4096


@pytest.fixture
def table(make_table: Callable[..., DispatchTable]) -> DispatchTable:
    """Fused to 4 tokens, unfused to 16, fused again to 64, another unfused above."""
    bands = (Band(1, 4, FUSED), Band(5, 16, UNFUSED), Band(17, 64, FUSED))
    return make_table(problem=PROBLEM.to_dict(), target="c", bands=bands, default=DEFAULT)


def variants_of(*choices: Choice) -> set[Variant]:
    return {v for c in choices for v in SEAM.arm("c", c.arm).variants(PROBLEM, dict(c.config))}


@pytest.mark.parametrize(
    ("max_tokens", "sizes", "choices"),
    [
        (None, (), (FUSED, UNFUSED, DEFAULT)),
        (1, (), (FUSED,)),
        (4, (), (FUSED,)),
        (5, (), (FUSED, UNFUSED)),
        (64, (), (FUSED, UNFUSED)),
        (65, (), (FUSED, UNFUSED, DEFAULT)),
        (4, (1, 2, 4), (FUSED,)),
        (4, (1, 8), (FUSED, UNFUSED)),
        (4, (512,), (FUSED, DEFAULT)),
    ],
)
def test_a_manifest_is_the_image_of_the_lookup(
    max_tokens: int | None, sizes: tuple[int, ...], choices: tuple[Choice, ...], table: DispatchTable
) -> None:
    found = manifest_of(table, max_tokens, sizes)
    assert found.choices == choices
    assert set(found.variants) == variants_of(*choices)
    assert len(found.variants) == len(set(found.variants))
    counts = {*range(1, (max_tokens or MOST) + 1), *sizes}
    assert set(choices) == {table.lookup(count).choice for count in counts}
    assert (found.table, found.max_tokens, found.capture_sizes) == (table.digest, max_tokens, sizes)


@pytest.mark.parametrize("value", [0, -1])
def test_a_token_count_that_is_not_positive_is_refused(value: int, table: DispatchTable) -> None:
    for arguments in ((value,), (4, (1, value))):
        with pytest.raises(ValueError, match=f"token count {value} is not positive"):
            manifest_of(table, *arguments)  # type: ignore[arg-type]


def compiled_after(manifest: Manifest, most: int, fresh_serving: list[Variant]) -> list[Variant]:
    """Compile a manifest, then dispatch every token count; return what had to be compiled for that."""
    for variant in manifest.variants:
        serving._kernel(variant)
    before = len(fresh_serving)
    for count in (*range(1, most + 1), *manifest.capture_sizes):
        serving.dispatch(manifest.table, NAME, PROBLEM, "c", count)
    return fresh_serving[before:]


@pytest.mark.parametrize(("most", "sizes"), [(MOST, ()), (16, (1, 2, 64)), (4, (4096,))])
def test_nothing_compiles_after_a_manifest_and_one_key_less_shows(
    most: int, sizes: tuple[int, ...], table: DispatchTable, fresh_serving: list[Variant],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    serving.serve(table)
    whole = manifest_of(table, most, sizes)
    assert compiled_after(whole, most, fresh_serving) == []
    assert set(fresh_serving) == set(whole.variants)
    for missing in whole.variants:
        for name in ("_kernels", "_launches"):
            monkeypatch.setattr(serving, name, {})
        kept = tuple(variant for variant in whole.variants if variant != missing)
        less = Manifest(whole.table, most, sizes, whole.choices, kept)
        assert compiled_after(less, most, fresh_serving) == [missing]


@pytest.mark.parametrize(("arguments", "choices"), [((4,), (FUSED,)), ((4, (8,)), (FUSED, UNFUSED))])
def test_warming_up_compiles_the_manifest_and_nothing_more(
    arguments: Any, choices: tuple[Choice, ...], table: DispatchTable, fresh_serving: list[Variant]
) -> None:
    digest = serving.serve(table)
    assert serving.warm_up(digest, *arguments) == len(variants_of(*choices))
    assert set(fresh_serving) == variants_of(*choices)
    assert serving.warm_up(digest, *arguments) == 0


@pytest.mark.parametrize("seam", SEAMS)
def test_every_seams_built_in_choice_has_a_manifest(
    seam: str, make_table: Callable[..., DispatchTable]
) -> None:
    owner = SEAMS[seam]
    problem = owner.canonical(Problem(768))
    choice = serving.builtin(seam, problem, "c")
    table = make_table(
        seam=seam, problem=problem.to_dict(), target="c", bands=(Band(1, 8, choice),), default=choice
    )
    found = manifest_of(table, 8)
    assert found.variants == owner.arm("c", choice.arm).variants(problem, dict(choice.config))
