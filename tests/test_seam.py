"""Problems, variants, scratch, deviations and source hashes."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mhctune.kernels import seam as seam_module
from mhctune.kernels.buffers import Role, total_bytes
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Arm, Deviation, Problem, Seam, Variant

SEAM = find_seam("post_pre_delayed")
ARMS = SEAM.arms("c")

# A change of each field; a new field must be added here.
CHANGES: dict[str, Any] = {
    "hidden_size": 4096,
    "carried": False,
    "norm": False,
    "sinkhorn_iters": 19,
    "rms_eps": 1e-6,
    "hc_pre_eps": 1e-5,
    "sinkhorn_eps": 1e-5,
    "post_mult": 1.5,
    "norm_eps": 1e-6,
    "aux": True,
    "delayed": False,
    "top_k": 512,
    "ranks": 2,
    "interleave": 16,
}
FIXED = {"hc_mult"}  # one legal value


def test_the_digest_of_a_problem_is_what_it_was() -> None:
    """Tables and databases hold it: a change orphans every one of them."""
    assert Problem(hidden_size=5120).digest == "85e114e7ada19647"
    assert Problem(7168, carried=False, norm=False, rms_eps=1e-6).digest == "2e3382f67e3ea021"


def test_every_field_of_a_problem_changes_its_digest() -> None:
    assert set(CHANGES) | FIXED == {f.name for f in fields(Problem)}
    problem = Problem(hidden_size=5120)
    digests = {replace(problem, **{name: value}).digest for name, value in CHANGES.items()}
    assert len(digests | {problem.digest}) == len(CHANGES) + 1


def test_equal_problems_have_equal_digests_however_the_numbers_are_written() -> None:
    written = Problem(5120, carried=1, norm=1, post_mult=2)  # type: ignore[arg-type]
    assert written == Problem(5120)
    assert written.digest == Problem(5120).digest
    assert str(written) == str(Problem(5120))


def test_a_problem_survives_json() -> None:
    problem = Problem(7168, carried=False, norm_eps=1e-6)
    again = Problem(**json.loads(json.dumps(problem.to_dict())))
    assert again == problem
    assert again.digest == problem.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hc_mult": 2}, "hc_mult 2 is not supported; the kernels mix 4 streams"),
        ({"hidden_size": 0}, "hidden_size 0 must be positive"),
        ({"hidden_size": -4096}, "hidden_size -4096 must be positive"),
        ({"sinkhorn_iters": 0}, "sinkhorn_iters 0 must be at least 1"),
        ({"rms_eps": 0.0}, "rms_eps 0.0 must be a normal positive float32"),
        ({"norm_eps": 1e-39}, "norm_eps 1e-39 must be a normal positive float32"),
        ({"sinkhorn_eps": -1e-6}, "sinkhorn_eps -1e-06 must be a normal positive float32"),
        ({"hc_pre_eps": float("nan")}, "hc_pre_eps nan must be a normal positive float32"),
        ({"hc_pre_eps": float("inf")}, "hc_pre_eps inf must be a normal positive float32"),
        ({"norm_eps": 1e39}, "norm_eps 1e[+]39 must be a normal positive float32"),
        ({"post_mult": float("nan")}, "post_mult nan must be a finite float32"),
    ],
    ids=str,
)
def test_a_problem_that_no_kernel_computes_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(**{"hidden_size": 4096, **changes})


def test_a_variant_does_not_depend_on_the_order_of_its_parameters() -> None:
    one, other = (
        Variant.of("post", "c", block_h=256, hidden_size=512),
        Variant.of("post", "c", hidden_size=512, block_h=256),
    )
    assert one == other
    assert str(one) == "c:post(block_h=256, hidden_size=512)"


def test_configs_share_the_post_kernel_and_the_epilogue() -> None:
    unfused, problem = SEAM.arm("c", "unfused"), Problem(5120)
    one, other = (unfused.variants(problem, {**unfused.preferred, "block_m": block_m}) for block_m in (1, 8))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, True]
    fused = SEAM.arm("c", "fused").variants(problem, dict(unfused.preferred))
    assert fused[-1] == one[-1]


def test_eps_values_change_no_variant_and_everything_else_does() -> None:
    scalars = {"rms_eps", "hc_pre_eps", "sinkhorn_eps", "post_mult", "norm_eps"}
    problem = Problem(5120)
    for arm in ARMS:
        usual = arm.variants(problem, dict(arm.preferred))
        for name in {"hidden_size", *SEAM.depends_on}:
            value = CHANGES[name]
            changed = arm.variants(replace(problem, **{name: value}), dict(arm.preferred))
            assert (changed == usual) == (name in scalars), name


def test_the_numerics_class_names_the_rounding_and_the_number_of_sums() -> None:
    assert {arm.numerics({**arm.preferred, "n_splits": 5}) for arm in ARMS} == {"rounded/5"}


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 64])
def test_scratch_views_lie_apart_on_lines_of_256_bytes_and_fill_what_was_asked_for(
    arm: Arm, num_tokens: int
) -> None:
    problem, config = Problem(768), {**arm.preferred, "n_splits": 3}
    layout = arm.scratch_layout(problem, config, num_tokens)
    numel = layout.numel
    scratch = torch.zeros(numel)
    views = layout.views(scratch)
    specs = {s.name: s for s in arm.plan(problem, config, num_tokens) if s.role is Role.SCRATCH}
    assert {name: tuple(view.shape) for name, view in views.items()} == {n: s.shape for n, s in specs.items()}
    ends = 0
    for view in views.values():
        first = view.storage_offset()
        assert view.untyped_storage().data_ptr() == scratch.untyped_storage().data_ptr()
        assert first % 64 == 0
        assert ends <= first
        ends = first + view.numel()
    assert ends <= numel
    assert numel * 4 >= total_bytes(tuple(specs.values()))


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_scratch_sized_for_many_tokens_serves_fewer(arm: Arm) -> None:
    problem = Problem(768)
    sizes = [arm.scratch_layout(problem, dict(arm.preferred), tokens).numel for tokens in range(200)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("target", ["c", "cuda"])
def test_the_built_in_choice_is_sought_in_every_arm_once(target: str) -> None:
    assert sorted(a.name for a in SEAM.preference(target)) == sorted(a.name for a in SEAM.arms(target))
    assert SEAM.preference("abacus") == ()


def test_a_deviation_is_ok_only_if_all_is_written_and_within_the_bound() -> None:
    assert Deviation("y", 1.0, 1.0).ok
    assert not Deviation("y", 1.0000001, 1.0).ok
    assert not Deviation("y", float("nan"), 1.0).ok
    assert not Deviation("y", float("inf"), 1.0).ok
    assert not Deviation("y", 0.0, 1.0, unwritten=1).ok
    assert str(Deviation("y", 0.0, 1.0, unwritten=7)) == "y: 7 elements not written"
    assert str(Deviation("y", 2.5, 1.0, where=" (3 NaN)")) == "y: error 2.5, bound 1 (3 NaN)"


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"unknown seam 'pots'; known: collapse, .*post_pre_delayed"):
        find_seam("pots")
    with pytest.raises(KeyError, match="no arm 'mega' on target 'c'; it has fused, unfused, released"):
        SEAM.arm("c", "mega")
    with pytest.raises(KeyError, match="no arm 'fused' on target 'abacus'; it has none"):
        SEAM.arm("abacus", "fused")
    assert SEAMS[SEAM.name] is SEAM


def test_a_label_tells_what_a_seam_depends_on() -> None:
    labels = {name: each.label(each.canonical(Problem(5120, aux=True))) for name, each in SEAMS.items()}
    assert labels["post_pre_delayed"] == str(Problem(5120, aux=True))
    assert labels["post_pre"] == "hidden 5120, own pre-mix, norm 1e-20, 20 iterations, aux"
    assert labels["pre_broadcast"] == "hidden 5120, absent pre-mix, norm 1e-20, 20 iterations"
    assert labels["hc_head"] == "hidden 5120, own pre-mix"
    assert labels["post"] == "hidden 5120, aux"
    assert labels["collapse"] == "hidden 5120"


@pytest.mark.parametrize("seam", SEAMS.values(), ids=lambda seam: seam.name)
def test_the_canonical_problem_keeps_what_a_seam_depends_on_and_nothing_else(seam: Seam) -> None:
    usual = seam.canonical(Problem(768))
    assert seam.canonical(usual) == usual
    for name, value in CHANGES.items():
        # From the seam's own usual problem: V4 seams have no carried mix to take away.
        changed = seam.canonical(replace(Problem(768), **{name: value}))
        # The top-k of a cache does not know the model's hidden size.
        kept = seam.depends_on if seam.name == "topk_merge" else {"hidden_size", *seam.depends_on}
        assert (changed != usual) == (name in kept), name


# --- Source hashes ----------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the kernels' sources that the arms read from."""
    folder = tmp_path / "kernels"
    shutil.copytree(seam_module.PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(seam_module, "PACKAGE", folder)
    return folder


def test_the_source_hash_is_over_names_and_bytes(sources: Path) -> None:
    for arm in ARMS:
        digest = hashlib.sha256()
        for name in arm.sources:
            digest.update(name.encode() + b"\0" + (sources / name).read_bytes() + b"\0")
        assert arm.source_hash == digest.hexdigest()


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_byte_of_any_source_changes_the_hash_and_putting_it_back_restores_it(
    arm: Arm, sources: Path
) -> None:
    before, seam_before = arm.source_hash, SEAM.source_hash("c")
    for name in arm.sources:
        path = sources / name
        content = path.read_bytes()
        path.write_bytes(content + b"\n")
        assert arm.source_hash != before, name
        assert SEAM.source_hash("c") != seam_before, name
        path.write_bytes(content)
        assert arm.source_hash == before


def test_a_file_that_an_arm_does_not_list_leaves_its_hash(sources: Path) -> None:
    unfused = SEAM.arm("c", "unfused").source_hash
    with (sources / "c" / "post_pre.py").open("a") as file:
        file.write("# changed\n")
    assert SEAM.arm("c", "unfused").source_hash == unfused


@pytest.mark.parametrize("seam", SEAMS.values(), ids=lambda seam: seam.name)
def test_every_arm_lists_every_source_that_its_kernels_come_from(seam: Seam) -> None:
    """Each kernel's file, and what these files import from the same folder."""
    for arm in seam.arms("c"):
        _check_sources(arm, seam.canonical(Problem(768)))


def _check_sources(arm: Arm, problem: Problem) -> None:
    listed = set(arm.sources)
    for variant in arm.variants(problem, dict(arm.preferred)):
        assert f"c/{variant.kernel}.py" in listed
    for name in sorted(listed):
        for line in (seam_module.PACKAGE / name).read_text().splitlines():
            if line.startswith("from mhctune.kernels.c."):
                assert f"c/{line.split()[1].rpartition('.')[2]}.py" in listed, (name, line)


def test_reading_the_source_hash_runs_no_source(sources: Path) -> None:
    for arm in ARMS:
        for name in arm.sources:
            (sources / name).write_bytes(b"raise RuntimeError('imported')\n\xff")
        assert len(arm.source_hash) == 64


def test_a_missing_source_is_an_error_and_no_hash(sources: Path) -> None:
    (sources / "c" / "post.py").unlink()
    with pytest.raises(FileNotFoundError):
        _ = ARMS[0].source_hash
