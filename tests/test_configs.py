"""What ships loads; what is wrong is said in one line a problem."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from mhctune.configs import loader
from mhctune.configs.errors import ConfigError
from mhctune.configs.recorded import load_recorded, recorded_names
from mhctune.kernels.seam import Problem

GPUS = ("b200", "cpu", "gb200", "gb300", "h100", "h200", "rtx_pro_6000")
MODELS = ("deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v4.1-flash")
PROTOTYPE = "h200_post_pre_hidden5120_prototype"

SWEEP = """
name = "mine"
about = "A test"
token_counts = [4, 1, 2]
samples = 5
max_regret = 0.05
"""


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# What ships


def test_the_shipped_names() -> None:
    assert loader.names("gpu") == GPUS
    assert loader.names("model") == MODELS
    assert loader.names("sweep") == ("decode", "full", "quick", "seams", "topk")


@pytest.mark.parametrize("name", GPUS)
def test_every_shipped_gpu_loads_under_its_own_name(name: str) -> None:
    gpu = loader.load_gpu(name)
    assert gpu.name == name
    assert (gpu.target == "c") == (name == "cpu")
    if gpu.compute_capability is not None:
        assert gpu.arch == "sm_{}{}".format(*gpu.compute_capability)


def test_every_figure_says_where_it_comes_from() -> None:
    for name in GPUS:
        for key, figure in loader.load_gpu(name).figures:
            assert (figure.value is None) == (figure.source == "unknown"), (name, key)
    assert loader.load_gpu("h200").figures.sm_count.source == "device"
    assert loader.load_gpu("h200").figures.sm_count.value == 132


@pytest.mark.parametrize(
    ("name", "hidden_size", "eps"), list(zip(MODELS, (4096, 7168, 5120), (1e-6, 1e-6, 1e-20), strict=True))
)
def test_every_shipped_model_gives_a_problem(name: str, hidden_size: int, eps: float) -> None:
    model = loader.load_model(name)
    problem = Problem(**model.problem_fields())  # type: ignore[arg-type]
    assert model.name == name
    assert problem.hidden_size == hidden_size
    assert problem.rms_eps == problem.norm_eps == eps
    assert (problem.hc_pre_eps, problem.sinkhorn_eps, problem.post_mult) == (1e-6, 1e-6, 2.0)
    assert problem.sinkhorn_iters == 20
    assert set(model.problem_fields()) == set(problem.to_dict())
    assert problem.carried == model.delayed == (name == "deepseek-v4.1-flash")


def test_the_default_problem_is_the_default_model() -> None:
    model = loader.load_model("deepseek-v4.1-flash")
    assert Problem(**model.problem_fields()) == Problem(hidden_size=5120)  # type: ignore[arg-type]


def test_every_shipped_sweep_loads() -> None:
    for name in loader.names("sweep"):
        sweep = loader.load_sweep(name)
        seam = "topk_merge" if name == "topk" else "post_pre_delayed"
        assert (sweep.name, sweep.seam, sweep.model) == (name, seam, "deepseek-v4.1-flash")
    assert loader.load_sweep("full").token_counts[:10] == loader.load_sweep("decode").token_counts


def test_the_grid_of_quick() -> None:
    quick = loader.load_sweep("quick")
    assert quick.token_counts == (1, 2, 4, 8, 16, 32, 64)
    assert (quick.samples, quick.max_regret) == (9, 0.10)
    assert sorted(quick.space["c"]) == ["fused", "unfused"]
    sizes = {arm: math.prod(map(len, limits.values())) for arm, limits in quick.space["c"].items()}
    assert sizes == {"fused": 24, "unfused": 24}
    assert "cuda" not in quick.space


def test_models_are_frozen() -> None:
    with pytest.raises(ValidationError):
        loader.load_sweep("quick").samples = 99  # type: ignore[misc]


# Recognition

DEVICES = [
    (None, "cpu"),
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H200", "h200"),
    ("NVIDIA H200 NVL", "h200"),
    ("NVIDIA B200", "b200"),
    ("NVIDIA GB200", "gb200"),
    ("NVIDIA GB300", "gb300"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx_pro_6000"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx_pro_6000"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000"),
    ("NVIDIA H20", None),
    ("NVIDIA H100 PCIe", None),
    ("NVIDIA H100 NVL", None),
    ("NVIDIA H200 MIG 1g.18gb", None),
    ("NVIDIA GH200 480GB", None),
    ("NVIDIA B300", None),
    ("NVIDIA RTX 6000 Ada Generation", None),
    ("", None),
]


@pytest.mark.parametrize(("device", "name"), DEVICES)
def test_a_device_is_recognised_by_one_target_at_most(device: str | None, name: str | None) -> None:
    found = loader.recognise(device)
    assert (found.name if found else None) == name
    claims = [gpu for gpu in GPUS if loader.load_gpu(gpu).recognises(device)]
    assert claims == ([name] if name else [])


# Token counts


@pytest.mark.parametrize("text", ["1,2,4", "1 2 4", "4, 2,\t1", " 1,2,4, "])
def test_token_counts_are_separated_by_commas_or_spaces(text: str) -> None:
    assert loader.parse_token_counts(text) == (1, 2, 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1,0", "token count 0 is zero; allowed are positive integers, such as 1,2,4"),
        ("1,-8", "token count -8 is negative; allowed are positive integers, such as 1,2,4"),
        ("8 1 8", "token count 8 is repeated; give each count once, such as 1,2,4"),
        ("1,two", "token count 'two' is no integer; allowed are positive integers, such as 1,2,4"),
        ("1.5", "token count '1.5' is no integer"),
        ("1-8", "token count '1-8' is no integer"),
        ("²", "token count '²' is no integer"),
        ("9" * 5000, "is no integer"),
        ("3000000000", "token count 3000000000 is too large; allowed are integers up to 2147483647"),
        (" , ", "no token count given; give at least one positive integer"),
    ],
)
def test_a_wrong_token_count_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        loader.parse_token_counts(text)


# Unknown names


def test_an_unknown_gpu_lists_the_known_and_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        loader.load_gpu("GB-300")
    assert str(caught.value) == (
        "unknown gpu 'GB-300' (did you mean 'gb300'?); "
        "known: b200, cpu, gb200, gb300, h100, h200, rtx_pro_6000"
    )


def test_an_unknown_model_lists_the_known_and_suggests_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown model 'deepseek-v4.1' \(did you mean 'deepseek-v4.1-flash'"
    ):
        loader.load_model("deepseek-v4.1")


def test_an_unknown_sweep_says_that_a_file_may_be_given() -> None:
    with pytest.raises(ConfigError) as caught:
        loader.load_sweep("zzz")
    assert str(caught.value) == (
        "unknown sweep 'zzz'; known: decode, full, quick, seams, topk; or give the path of a .toml file"
    )


def test_a_name_is_no_path() -> None:
    with pytest.raises(ConfigError, match="unknown gpu"):
        loader.load_gpu("../gpus/cpu")


# Sweep files


def test_a_sweep_file_of_ones_own_loads_with_defaults(tmp_path: Path) -> None:
    sweep = loader.load_sweep(write(tmp_path, SWEEP))
    assert sweep.token_counts == (1, 2, 4)
    assert (sweep.seam, sweep.model, sweep.space) == ("post_pre_delayed", "deepseek-v4.1-flash", {})
    assert loader.load_sweep(str(tmp_path / "mine.toml")) == sweep


def changed(old: str, new: str) -> str:
    assert old in SWEEP
    return SWEEP.replace(old, new)


SPACE = SWEEP + "[space.c.fused]\ntile_n = "


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            SWEEP + "sample = 3",
            "unknown key 'sample' (did you mean 'samples'?); known: about, aux, hidden_size, "
            "interleave, l2, max_regret, model, name, ranks, samples, seam, seams, shipped, space, "
            "token_counts, top_k, until",
        ),
        (changed("samples = 5\n", ""), "the key 'samples' is missing"),
        (changed("samples = 5", 'samples = "5"'), "samples is '5'; it must be a valid integer"),
        (changed("samples = 5", "samples = true"), "samples is True; it must be a valid integer"),
        (changed("samples = 5", "samples = 4"), "samples is 4; it must be greater than or equal to 5"),
        (changed("0.05", "1.5"), "max_regret is 1.5; it must be less than 1"),
        (changed("0.05", "nan"), "max_regret is nan; it must be a finite number"),
        (
            changed("[4, 1, 2]", "[4, 0]"),
            "token_counts: token count 0 is zero; allowed are positive integers",
        ),
        (changed("[4, 1, 2]", "[-4]"), "token_counts: token count -4 is negative"),
        (changed("[4, 1, 2]", "[4, 4]"), "token_counts: token count 4 is repeated; give each count once"),
        (changed("[4, 1, 2]", '["4"]'), "token_counts: token count '4' is no integer"),
        (changed("[4, 1, 2]", "[true]"), "token_counts: token count True is no integer"),
        (changed("[4, 1, 2]", "[]"), "token_counts: no token count given"),
        (changed("[4, 1, 2]", "4"), "token_counts is 4; it must be a valid tuple"),
        (SWEEP + 'model = "deepseek-v5"', "model: unknown model 'deepseek-v5'"),
        (SPACE + "[-1]", "space.c.fused.tile_n.0 is -1; it must be greater than or equal to 0"),
        (SPACE + "[]", "space: c.fused.tile_n is []; give at least one value, none twice"),
        (SPACE + "[2, 2]", "space: c.fused.tile_n is [2, 2]; give at least one value, none twice"),
        (SWEEP + "[space.rocm.fused]\ntile_n = [1]", "space.rocm is 'rocm'; it must be 'c' or 'cuda'"),
        (SWEEP + "samples = 6\n", "invalid TOML: Cannot overwrite a value (at line 7,"),
        ("name = ", "invalid TOML: Invalid value (at "),
        ("\n\nname : 3", "invalid TOML: Expected '=' after a key in a key/value pair (at line 3,"),
    ],
)
def test_what_is_wrong_in_a_sweep_file_is_one_line_with_the_file(
    tmp_path: Path, text: str, said: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        loader.load_sweep(path)
    assert str(caught.value).startswith(f"{path}: {said}")
    assert len(str(caught.value).splitlines()) == 1


def test_two_problems_are_two_lines(tmp_path: Path) -> None:
    path = write(tmp_path, changed("samples = 5", "samples = 1") + "colour = 3")
    with pytest.raises(ConfigError) as caught:
        loader.load_sweep(path)
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [str(path)] * 2


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml: No such file"):
        loader.load_sweep(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match=r"latin\.toml: invalid TOML: it is not UTF-8"):
        loader.load_sweep(tmp_path / "latin.toml")


# GPU and model files, through a copy of the shipped folder


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'source = "device"',
            'source = "rumour"',
            "figures.sm_count.source is 'rumour'; it must be 'device',",
        ),
        ("value = 132, ", "", "figures.sm_count: a figure has either a value or the source 'unknown'"),
        (
            "value = 132",
            "valeu = 132",
            "unknown key 'figures.sm_count.valeu' (did you mean 'value'?); known: ",
        ),
        (
            "[figures]",
            "[figures]\nspeed = 1",
            "unknown key 'figures.speed'; known: bandwidth_gb_s, l2_bytes,",
        ),
        ("NVIDIA H200(", "NVIDIA H200((", "match: is no regular expression: missing )"),
        ('arch = "sm_90"', 'arch = ""', "a target 'cuda' needs arch, match and compute_capability"),
        ('target = "cuda"', 'target = "c"', "a target 'c' has no arch, match or compute_capability"),
    ],
)
def test_what_is_wrong_in_a_gpu_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, said: str
) -> None:
    text = (loader.PACKAGE / "gpus" / "h200.toml").read_text()
    assert old in text
    (tmp_path / "gpus").mkdir()
    path = write(tmp_path / "gpus", text.replace(old, new, 1), "h200.toml")
    monkeypatch.setattr(loader, "PACKAGE", tmp_path)
    with pytest.raises(ConfigError) as caught:
        loader.load_gpu("h200")
    assert str(caught.value).splitlines()[0].startswith(f"{path}: {said}")


# Recorded measurements

HEADER = {
    "about": "a",
    "source": "s",
    "columns": ["num_tokens", "latency_us"],
    "fingerprint": {},
    "unit": "us",
}


def test_the_recorded_sweep_of_the_h200() -> None:
    assert PROTOTYPE in recorded_names()
    recorded = load_recorded(PROTOTYPE)
    assert len(recorded.rows) == 2640
    assert recorded.unit == "us"
    assert recorded.fingerprint["gpu_name"] == "NVIDIA H200"
    best = min(
        (r for r in recorded.rows if r["num_tokens"] == 128), key=lambda r: float(str(r["latency_us"]))
    )
    assert (best["tile_n"], best["n_splits"], best["n_thr"], best["vec"]) == (8, 8, 64, 2)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], ", line 1: the file is empty"),
        (["{"], ", line 1: no JSON: "),
        (["[1]"], ", line 1: the header must be an object, got list"),
        ([json.dumps({**HEADER, "colour": 1})], ", line 1: the header has the keys about, colour, columns, "),
        ([json.dumps({**HEADER, "unit": 1})], ", line 1: unit is 1; it must be a string"),
        (
            [json.dumps({**HEADER, "columns": ["a", "a"]})],
            ", line 1: columns is ['a', 'a']; it must be names",
        ),
        (
            [json.dumps(HEADER), "[1, 2.5]", "[1]"],
            ", line 3: 1 values for 2 columns (num_tokens, latency_us)",
        ),
        ([json.dumps(HEADER), '{"num_tokens": 1}'], ", line 2: a row must be a flat array"),
        ([json.dumps(HEADER), "[1, [2]]"], ", line 2: a row must be a flat array"),
        ([json.dumps(HEADER), "[1, NaN]"], ", line 2: no JSON: NaN is no JSON number"),
        ([json.dumps(HEADER), "", "[1, 2]"], ", line 2: no JSON: "),
    ],
)
def test_what_is_wrong_in_a_recorded_file_has_a_line_number(
    tmp_path: Path, lines: list[str], said: str
) -> None:
    path = write(tmp_path, "".join(f"{line}\n" for line in lines), "mine.jsonl")
    with pytest.raises(ConfigError) as caught:
        load_recorded(path)
    assert str(caught.value).startswith(f"{path}{said}")


def test_a_recorded_file_of_ones_own_loads(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(HEADER) + "\n[1, 2.5]\n", "mine.jsonl")
    assert load_recorded(path).rows == ({"num_tokens": 1, "latency_us": 2.5},)


def test_an_unknown_recorded_measurement_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"unknown recorded measurement 'h200'.*known: .*{PROTOTYPE}"):
        load_recorded("h200")
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl"):
        load_recorded(tmp_path / "none.jsonl")
