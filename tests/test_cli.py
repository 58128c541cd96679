"""The command line: the whole loop, and one clear error with its exit code for every bad input."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import signal
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command

from mhctune import cli
from mhctune.autotuner.bench import HostBench
from mhctune.autotuner.benches import SeamsBench
from mhctune.autotuner.probe import Device, cpu_name
from mhctune.configs.errors import ConfigError
from mhctune.db import schema
from mhctune.db.export import export
from mhctune.db.models import VERSION_TABLE
from mhctune.db.tables import load_table
from mhctune.kernels.compiler import Compiler
from mhctune.kernels.registry import SEAMS

TINY = """
name = "tiny"
about = "two kernels of its own for each arm"
token_counts = [1, 2]
samples = 5
max_regret = 0.9
{extra}
[space.c.fused]
tile_n = [24]
n_splits = [1]
block_h = [64]
block_m = [1]

[space.c.unfused]
tile_n = [24]
n_splits = [1]
block_h = [64]
block_m = [1]
"""


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def said(self) -> str:
        """Everything on standard error, without boxes and line breaks."""
        return " ".join(self.err.replace("│", " ").split())


def mhctune(folder: Path, *arguments: str) -> Ran:
    """Run a command in a folder, in this process, on a machine without a GPU and a terminal of 80 columns."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setenv("COLUMNS", "80")
        patch.delenv("MHCTUNE_DB", raising=False)
        patch.setattr("torch.cuda.is_available", lambda: False)
        patch.setattr("sys.argv", ["mhctune", *arguments])
        patch.setattr(cli, "out", Console(width=80))
        patch.setattr(cli, "err", Console(width=80, stderr=True))
        with pytest.raises(SystemExit) as left:
            cli.main()
    code = left.value.code
    return Ran(code if isinstance(code, int) else int(code is not None), out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """A folder with a complete sweep, and what the sweep printed."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "tiny.toml").write_text(TINY.format(extra=""))
    return folder, mhctune(folder, "sweep", "--sweep", "tiny.toml")


@pytest.fixture(scope="module")
def measured(swept: tuple[Path, Ran]) -> Path:
    """The folder of a complete sweep; only read it."""
    return swept[0]


@pytest.fixture
def in_this_process(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Let sweeps have the real bench here; a worker takes 4 s to start. Other tests have one."""
    # TileLang remarks that this process asked for a kernel before, on standard output.
    caplog.set_level(logging.ERROR, "tilelang.cache.kernel_cache")

    @contextmanager
    def opened(seam_name: str, target: str, l2: str, device: int, until: str) -> Iterator[Any]:
        bench: Any = SeamsBench(seam_name, lambda name: HostBench(SEAMS[name], compiler, until=until))
        bench.compile_all, bench.seconds = compiler.compile_all, {}
        yield bench

    monkeypatch.setattr("mhctune.cli.open_bench", opened)


EARLY = """
name = "early"
about = "an arm that releases its layer input early, beside one that does not"
hidden_size = 256
token_counts = [1, 2]
samples = 5
max_regret = 0.9
until = "layer_input"

[space.c.unfused]
tile_n = [24]
n_splits = [1]
block_h = [64]
block_m = [1]

[space.c.released]
tile_n = [24]
n_splits = [1]
block_h = [64]
block_m = [1]
"""


def test_the_time_to_the_layer_input_stands_beside_the_whole_and_never_for_it(
    tmp_path: Path, in_this_process: None
) -> None:
    (tmp_path / "early.toml").write_text(EARLY)
    early = mhctune(tmp_path, "sweep", "--sweep", "early.toml")
    assert early.code == 0, early.said
    assert "timed to the layer input; launches behind it are not counted" in early.out
    alone = mhctune(tmp_path, "explain", "--tokens", "2", "--json").json
    assert (alone["until"], alone["other"]) == ("layer_input", None)
    refused = mhctune(tmp_path, "lookup", "2")
    assert (refused.code, refused.out) == (7, "")
    assert "that was tuned until end, only until layer_input" in refused.said
    found = mhctune(tmp_path, "lookup", "2", "--until", "layer_input")
    assert (found.code, found.out.rstrip().endswith("tuned until layer_input")) == (0, True)

    whole = mhctune(tmp_path, "sweep", "--sweep", "early.toml", "--until", "end")
    assert whole.code == 0, whole.said
    assert "timed to the end of the last launch" in whole.out
    lines = " ".join(mhctune(tmp_path, "status").out.split())
    assert f"sweep 1: {cpu_name()}, timed to the layer input; 4 trials measured" in lines
    assert f"sweep 2: {cpu_name()}, timed to the end; 4 trials measured" in lines
    told = mhctune(tmp_path, "bands", "--id", "1").out
    assert "timed to the layer input" in told
    assert mhctune(tmp_path, "lookup", "2").code == 0

    both = mhctune(tmp_path, "explain", "--tokens", "2", "--json").json
    assert (both["sweep"], both["until"]) == (2, "end")
    assert both["other"] == {"until": "layer_input", "sweep": 1}
    turned = mhctune(tmp_path, "explain", "--tokens", "2", "--id", "1", "--json").json
    assert (turned["sweep"], turned["other"]) == (1, {"until": "end", "sweep": 2})
    for one, other in ((both, turned), (turned, both)):
        latencies = {row["candidate"]: row["latency_us"] for row in one["candidates"]}
        assert {row["candidate"]: row["other_us"] for row in other["candidates"]} == latencies
    released = next(row for row in both["candidates"] if row["candidate"].startswith("released"))
    assert released["other_us"] < released["latency_us"]
    shown = mhctune(tmp_path, "explain", "--tokens", "2").out
    (heads,) = [line.split() for line in shown.splitlines() if line.startswith("arm ")]
    assert heads == ["arm", "config", *"us to end us to input".split(), "regret", "lower", "upper"]
    assert "timed to the end of the last launch" in shown
    words = " ".join(shown.split())
    assert "us to input: by sweep 1, timed to the layer input; launches behind it are not counted" in words
    assert re.search(r"least us to input: [\d.]+, released\(.*\); regret and limits are of us to end ", words)
    assert mhctune(tmp_path, "check", "--no-measure").code == 0
    differ = mhctune(tmp_path, "diff", "mhctune.db", "mhctune.db")
    assert (differ.code, differ.out.count("every token count is answered alike")) == (0, 2)


FAMILY = """
name = "family"
about = "two seams, one of V4.1 and one of V4"
seams = ["collapse", "pre"]
hidden_size = 256
token_counts = [1, 2]
samples = 5
max_regret = 0.9

[space.c.one_pass]
block_h = [64]

[space.c.unfused]
tile_n = [24]
n_splits = [1]
block_h = [64]
block_m = [1]
"""


def test_a_family_of_seams_is_tuned_into_one_database(tmp_path: Path, in_this_process: None) -> None:
    (tmp_path / "family.toml").write_text(FAMILY)
    alone = mhctune(tmp_path, "sweep", "--sweep", "family.toml", "--seam", "collapse")
    assert alone.code == 0, alone.err
    rest = mhctune(tmp_path, "sweep", "--sweep", "family.toml")
    assert "1 of 2 seams are complete; --new sweeps them again" in rest.said
    assert "bands of collapse" not in rest.out
    assert "bands of pre, hidden 256" in rest.out
    assert "2 trials measured, 0 failed" in rest.out
    ran = mhctune(tmp_path, "sweep", "--sweep", "family.toml", "--json")
    assert ran.code == 0, ran.err
    assert [each["table"]["seam"] for each in ran.json] == ["collapse", "pre"]
    for seam in ("collapse", "pre"):
        looked = mhctune(tmp_path, "lookup", "2", "--seam", seam)
        assert looked.code == 0, looked.err
    planned = mhctune(tmp_path, "plan", "--sweep", "family.toml", "--json").json
    assert [each["seam"] for each in planned] == ["collapse", "pre"]
    (tmp_path / "family.toml").write_text(FAMILY.replace("block_m", "block_n"))
    ran = mhctune(tmp_path, "sweep", "--sweep", "family.toml")
    assert ran.code == 2
    assert "unknown tunable of arm unfused 'block_n'" in ran.said


# The loop.


def test_a_sweep_ends_with_the_bands_and_the_path_of_the_database(swept: tuple[Path, Ran]) -> None:
    folder, ran = swept
    assert ran.code == 0, ran.err
    assert "bands of post_pre_delayed, hidden 5120" in ran.out
    assert "4 trials measured, 0 failed" in ran.out
    assert ran.out.splitlines()[-1] == f"database: {folder / 'mhctune.db'}"


def test_a_sweep_shows_its_progress_on_standard_error(swept: tuple[Path, Ran]) -> None:
    _, ran = swept
    assert "compile" in ran.err
    assert "4/4" in ran.err
    assert "2 tokens, best" in ran.err
    assert all(len(line) <= 80 for line in ran.err.splitlines())


def test_the_tables_of_a_sweep_fit_eighty_columns(swept: tuple[Path, Ran]) -> None:
    _, ran = swept
    rows = [line for line in ran.out.splitlines() if "block_h=64" in line and "default" not in line]
    assert rows
    assert all("block_h=64 block_m=1 n_splits=1 tile_n=24" in row and len(row) <= 80 for row in rows)


def test_status_tells_how_far_the_sweep_has_come(measured: Path) -> None:
    ran = mhctune(measured, "status")
    assert ran.code == 0
    (row,) = [line.split() for line in ran.out.splitlines() if "complete" in line]
    assert row[:6] == ["1", "complete", "post_pre_delayed", "hidden", "5120", "4/4"]
    assert f"sweep 1: {cpu_name()}, timed to the end; 4 trials measured, 0 failed" in ran.out
    (line,) = mhctune(measured, "status", "--json").json
    assert (line["sweep"], line["state"], line["measured"], line["failures"]) == (1, "complete", 4, {})
    assert line["record"]["token_counts"] == [1, 2]
    assert "variants" not in line["record"]


def test_bands_are_the_sweeps(swept: tuple[Path, Ran]) -> None:
    folder, sweep = swept
    ran = mhctune(folder, "bands")
    assert ran.code == 0
    bands, costs = ran.out.split("what bands cost")
    assert bands in sweep.out
    assert "chosen" in costs
    assert mhctune(folder, "bands", "--json").json == load_table(folder / "mhctune.db").to_dict()


def test_bands_under_another_bound_are_kept_only_when_asked(measured: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    with closing(sqlite3.connect(measured / "mhctune.db")) as connection:
        connection.execute("VACUUM INTO ?", (str(copy),))
    shown = mhctune(tmp_path, "bands", "--db", "copy.db", "--max-regret", "0", "--json").json
    assert shown["evidence"]["max_regret"] == 0
    assert load_table(copy).evidence["max_regret"] == 0.9
    ran = mhctune(tmp_path, "bands", "--db", "copy.db", "--max-regret", "0", "--save")
    assert ran.out.splitlines()[-1] == f"database: {copy}"
    assert load_table(copy).to_dict() == shown
    ran = mhctune(tmp_path, "bands", "--db", "copy.db", "--save", "--json")
    assert ran.json == load_table(copy).to_dict() != shown
    assert ran.err == f"database: {copy}\n"


def test_lookup_answers_with_choice_range_and_status(measured: Path) -> None:
    ran = mhctune(measured, "lookup", "2")
    assert ran.code == 0
    answer = mhctune(measured, "lookup", "2", "--json").json
    assert answer["status"] == "exact"
    assert answer["config"] == {"block_h": 64, "block_m": 1, "n_splits": 1, "tile_n": 24}
    assert f"{answer['arm']}(block_h=64, block_m=1, n_splits=1, tile_n=24)" in ran.out
    assert "status exact" in ran.out
    assert mhctune(measured, "lookup", "3", "--json").json["status"] == "out_of_range"


@pytest.mark.parametrize(("option", "status"), [((), "foreign"), (("--as-measured",), "exact")])
def test_lookup_judges_a_table_of_another_machine_unless_told_not_to(
    measured: Path, monkeypatch: pytest.MonkeyPatch, option: Sequence[str], status: str
) -> None:
    monkeypatch.setattr(cli, "detect", lambda: Device("NVIDIA H200", "cuda", 1))
    assert mhctune(measured, "lookup", "2", "--json", *option).json["status"] == status


def test_explain_shows_the_candidates_and_their_bytes(measured: Path) -> None:
    ran = mhctune(measured, "explain", "--tokens", "2")
    assert ran.code == 0
    assert ran.out.startswith("2 tokens: ")
    assert "2 candidates measured at 2 tokens" in ran.out
    assert "bytes there: inputs" in ran.out
    data = mhctune(measured, "explain", "--tokens", "2", "--limit", "1", "--json").json
    shown = [candidate["candidate"] for candidate in data["candidates"]]
    assert len(shown) == (1 if data["place"] == 1 else 2)  # the best, and the served one where it is another
    assert data["choice"] in shown
    assert data["candidates"][0]["point"] == 0
    assert data["bytes"]["output_bytes"] > 0


def test_export_writes_files_that_look_up_the_same(measured: Path, tmp_path: Path) -> None:
    db = str(measured / "mhctune.db")
    ran = mhctune(tmp_path, "export", "--db", db, "--format", "json,python", "-o", "out")
    assert ran.code == 0
    paths = [Path(line) for line in ran.out.splitlines()]
    assert [path.suffixes for path in paths] == [[".json"], [".py"], [".manifest", ".json"]]
    before = [(tmp_path / path).read_bytes() for path in paths]
    answers = [mhctune(tmp_path, "lookup", "2", "--db", each, "--json").json for each in (db, str(paths[0]))]
    assert answers[0] == answers[1]
    again = mhctune(tmp_path, "export", "--db", db, "-o", "out", "--json")
    assert again.json == [str(path) for path in paths]
    assert [(tmp_path / path).read_bytes() for path in paths] == before


def test_export_overwrites_a_foreign_file_when_forced(measured: Path, tmp_path: Path) -> None:
    db = str(measured / "mhctune.db")
    name, _ = mhctune(tmp_path, "export", "--db", db, "--format", "json", "--json").json
    (tmp_path / name).write_text("mine")
    assert mhctune(tmp_path, "export", "--db", db, "--format", "json", "--force").code == 0
    assert load_table(tmp_path / name).digest == load_table(db).digest


def test_a_copy_answers_alike_and_a_table_with_another_edge_does_not(measured: Path, tmp_path: Path) -> None:
    db = str(measured / "mhctune.db")
    assert mhctune(tmp_path, "diff", db, db).code == 0
    name, _ = mhctune(tmp_path, "export", "--db", db, "--format", "json", "--json").json
    assert mhctune(tmp_path, "diff", name, db, "--json").json[0]["same"] is True
    table = load_table(tmp_path / name)
    longer = table.replace(bands=(table.bands[-1].replace(first=1, last=9),))
    moved = export(longer, "json", tmp_path / "moved")
    ran = mhctune(tmp_path, "diff", db, str(moved))
    assert ran.code == 1
    assert "the bands end at 9, ended at 2" in ran.out
    assert "they answer differently" in ran.out


def steady_copy(measured: Path, folder: Path) -> str:
    """Copy a real sweep with times that a busy machine cannot spread: what is within a bound stays so."""
    copy = folder / "copy.db"
    shutil.copy(measured / "mhctune.db", copy)
    with sqlite3.connect(copy) as connection:
        connection.execute("update samples set latency_us = 100 + trial_id + 0.1 * (round % 3)")
        for name in ("bands", "dispatch_tables"):  # of the times that it had
            connection.execute(f"delete from {name}")
    connection.close()
    return str(copy)


def test_bands_on_other_terms_show_three_costs_and_what_is_gained(measured: Path, tmp_path: Path) -> None:
    db = steady_copy(measured, tmp_path)
    config = '{"tile_n": 24, "n_splits": 1, "block_h": 64, "block_m": 1}'
    (tmp_path / "hand.json").write_text(f'{{"band": [{{"first": 1, "arm": "unfused", "config": {config}}}]}}')
    (tmp_path / "traffic.csv").write_text("1,900\n2,50\n9,50\n")
    arguments = ("--incumbent", "hand.json", "--traffic", "traffic.csv", "--max-variants", "3")
    ran = mhctune(tmp_path, "bands", "--db", db, *arguments, "--batch-invariant")
    assert ran.code == 0, ran.err
    assert "chosen" in ran.out
    assert "5.0 % of the traffic is above the bands" in ran.out
    assert "batch-invariant: only rounded/1; " in ran.out
    assert "gain over hand.json" in ran.out or "nothing to gain: hand.json" in ran.out
    data = mhctune(tmp_path, "bands", "--db", db, *arguments, "--json", "--pareto").json
    assert data["evidence"]["max_variants"] == 3
    assert data["evidence"]["incumbent"]["name"] == "hand.json"
    assert [point["variants"] for point in data["front"]]
    assert [gain["num_tokens"] for gain in data["gain"]] == [1, 2]


def test_a_table_on_terms_is_kept_and_replays_to_the_byte(measured: Path, tmp_path: Path) -> None:
    steady_copy(measured, tmp_path)
    assert mhctune(tmp_path, "bands", "--db", "copy.db", "--save").code == 0
    (tmp_path / "traffic.json").write_text('{"1": 3, "2": 1}')
    kept = mhctune(
        tmp_path, "bands", "--db", "copy.db", "--traffic", "traffic.json", "--batch-invariant", "--save"
    )
    assert kept.code == 0, kept.err
    ran = mhctune(tmp_path, "replay", "copy.db", "--json")
    assert ran.code == 0
    assert [table["numerics"] for table in ran.json["tables"]] == ["rounded", "rounded/1"]


def test_merged_databases_are_listed_and_derive_the_same_bands(measured: Path, tmp_path: Path) -> None:
    db = str(measured / "mhctune.db")
    ran = mhctune(tmp_path, "merge", "out.db", db)
    assert ran.code == 0
    assert ran.out.splitlines()[-1] == f"database: {tmp_path / 'out.db'}"
    again = mhctune(tmp_path, "merge", "out.db", db, "--json").json
    assert (again["changed"], again["conflicts"]) == (False, [])
    assert mhctune(tmp_path, "bands", "--db", "out.db").out == mhctune(tmp_path, "bands", "--db", db).out
    replayed = mhctune(tmp_path, "replay", "out.db")
    assert replayed.code == 0
    assert "the samples give the table to the byte" in " ".join(replayed.out.split())


def test_a_replay_that_is_not_the_kept_table_fails(measured: Path, tmp_path: Path) -> None:
    db = str(measured / "mhctune.db")
    table = load_table(db)
    other = export(table.replace(evidence={**table.evidence, "max_regret": 0.2}), "json", tmp_path)
    ran = mhctune(tmp_path, "replay", db, "--table", str(other))
    assert ran.code == 1
    assert "but other evidence (max_regret)" in " ".join(ran.out.split())
    foreign = table.replace(fingerprint=table.fingerprint.replace(gpu_name="NVIDIA B200"))
    other = export(foreign, "json", tmp_path)
    assert mhctune(tmp_path, "replay", db, "--table", str(other)).code == 3


def test_a_recording_replays_without_a_database(tmp_path: Path) -> None:
    ran = mhctune(tmp_path, "replay", "cpu_quick_hidden5120", "--json")
    assert ran.code == 0
    assert ran.json["tables"][0]["bands"][-1]["last"] == 64
    assert list(tmp_path.iterdir()) == []


def test_db_verify_reads_everything_back(measured: Path) -> None:
    ran = mhctune(measured, "db", "verify")
    assert ran.code == 0
    assert ran.out == f"mhctune.db: schema {schema.head()}, 1 sweep, 4 trials, 1 table: intact\n"


def test_db_upgrade_makes_a_database_and_says_its_schema(tmp_path: Path) -> None:
    ran = mhctune(tmp_path, "db", "upgrade", "--db", "new.db")
    assert (ran.code, ran.out) == (0, f"new.db: schema {schema.head()}\n")
    assert mhctune(tmp_path, "status", "--db", "new.db").out.count("none yet: run `mhctune sweep`") == 1


def test_the_environment_names_the_database(measured: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytest.MonkeyPatch, "delenv", lambda *arguments, **options: None)
        patch.setenv("MHCTUNE_DB", str(measured / "mhctune.db"))
        assert mhctune(tmp_path, "status").code == 0
    assert mhctune(tmp_path, "status").code == 7


@pytest.mark.slow
def test_edges_are_probed_for_real_and_the_table_replays(tmp_path: Path) -> None:
    """On the processor: one row of tokens a program, or eight; a sweep without probes, then the command.

    The sweep's own samples are made to cross, which the noise of a busy machine may not let them; the probes
    are real, whatever they say.
    """
    pair = TINY.replace("[1, 2]", "[1, 16]").replace("max_regret = 0.9", "max_regret = 0.05")
    pair = pair.format(extra="").split("[space.c.unfused]")[0].replace("block_m = [1]", "block_m = [1, 8]")
    (tmp_path / "pair.toml").write_text(pair)
    assert mhctune(tmp_path, "sweep", "--sweep", "pair.toml").code == 0
    assert "probed" not in mhctune(tmp_path, "status").out  # without a GPU only when asked
    with closing(sqlite3.connect(tmp_path / "mhctune.db")) as database, database:
        rows = "SELECT t.id, t.num_tokens, c.config FROM trials t JOIN candidates c ON c.id = t.candidate_id"
        for trial, tokens, config in database.execute(rows).fetchall():
            ahead = (tokens == 1) == (json.loads(config)["block_m"] == 1)
            for table in ("samples", "twins"):
                change = f"UPDATE {table} SET latency_us = ? WHERE trial_id = ?"
                database.execute(change, (100.0 if ahead else 300.0, trial))
    ran = mhctune(tmp_path, "probe", "--json")
    assert ran.code == 0, ran.err
    (edge,) = ran.json["edges"]
    assert (edge["before"], edge["above"]) == (1, 16)
    assert edge["probed"][0]["num_tokens"] == 8
    assert edge["state"] in ("exact", "inside the noise")
    assert 1 <= edge["last"] <= 15
    assert [band["last"] for band in ran.json["table"]["bands"]] == [edge["last"], 16]
    assert "edges between bands" in mhctune(tmp_path, "bands").out
    assert mhctune(tmp_path, "check", "--no-measure").code == 0
    assert mhctune(tmp_path, "replay", "mhctune.db").code == 0
    assert mhctune(tmp_path, "probe", "--json").json["edges"] == [edge]  # nothing is left to measure


@pytest.mark.slow
def test_another_pass_configuration_is_named_as_what_made_a_choice_slower(
    measured: Path, tmp_path: Path
) -> None:
    """The samples of the sweep are made ten times shorter: what both candidates lost may be the machine's."""
    shutil.copy(measured / "mhctune.db", tmp_path)
    with closing(sqlite3.connect(tmp_path / "mhctune.db")) as database, database:
        database.execute("UPDATE samples SET latency_us = latency_us / 10")
    legalized = ("--pass-config", "tl.disable_safe_memory_legalize=false")
    arguments = ("check", "--tolerance", "2", "--json")
    slower, same = (mhctune(tmp_path, *arguments, *more) for more in (legalized, ()))
    speed = [f for f in slower.json["findings"] if f["what"].startswith("speed")]
    assert (slower.code, {f["verdict"] for f in speed}) == (1, {"regressed"})
    assert len(speed) == 2
    for finding in speed:
        assert (
            "other_toolchain: pass_config '{\"tl.disable_safe_memory_legalize\":true}', now '{"
            in (finding["sentence"])
        )
    speed = [f for f in same.json["findings"] if f["what"].startswith("speed")]
    assert (len(speed), "regressed" in {f["verdict"] for f in speed}) == (2, False)


def test_probes_are_not_added_to_the_samples_of_another_machine(measured: Path, tmp_path: Path) -> None:
    shutil.copy(measured / "mhctune.db", tmp_path)
    with closing(sqlite3.connect(tmp_path / "mhctune.db")) as database, database:
        database.execute("UPDATE toolchains SET tilelang = '0.0.1'")
    ran = mhctune(tmp_path, "probe")
    assert ran.code == cli.OTHER_DEVICE
    assert "another fingerprint: tilelang '0.0.1', now" in ran.said
    assert "Samples are not mixed; nothing was run" in ran.said


def test_plan_forecasts_without_writing_anything(tmp_path: Path) -> None:
    ran = mhctune(tmp_path, "plan")
    assert ran.code == 0
    assert "tokens 1 2 4 8 16 32 64, 9 samples" in ran.out
    assert "kernels to compile" in ran.out
    data = mhctune(tmp_path, "plan", "--tokens", "1,2", "--json").json
    assert data["gpu"] == "cpu"
    assert data["token_counts"] == [1, 2]
    assert data["trials"] == 2 * sum(arm["candidates"] for arm in data["arms"])
    assert list(tmp_path.iterdir()) == []


def test_doctor_shows_the_machine(tmp_path: Path) -> None:
    ran = mhctune(tmp_path, "doctor")
    assert ran.code == 0
    assert cpu_name() in ran.out
    data = mhctune(tmp_path, "doctor", "--json").json
    assert data["target"] == "cpu"
    assert data["arms of post_pre_delayed"] == "fused, unfused, released"
    assert "gb300" in data["known targets"]


def test_a_budget_for_part_of_the_grid_is_incomplete_and_the_same_command_completes_it(
    tmp_path: Path, in_this_process: None
) -> None:
    (tmp_path / "tiny.toml").write_text(TINY.format(extra=""))
    command = ("sweep", "--sweep", "tiny.toml", "--tokens", "1,64", "--json")
    cut = mhctune(tmp_path, *command, "--vram-budget", "2.3MB")
    assert cut.code == 5
    assert "no band covers 64 tokens: 0 of 2 candidates measured, 2 found no memory, 0 not run" in cut.said
    assert cut.json["state"] == "incomplete"
    assert [band["last"] for band in cut.json["table"]["bands"]] == [1]
    whole = mhctune(tmp_path, *command)
    assert whole.code == 0, whole.err
    assert (whole.json["sweep"], whole.json["state"]) == (cut.json["sweep"], "complete")
    assert whole.json["table"]["bands"][-1]["last"] == 64
    again = mhctune(tmp_path, *command, "--vram-budget", "2.3MB", "--new")
    assert (again.code, again.json["sweep"]) == (5, cut.json["sweep"] + 1)
    shrunk = f"the bands now end at 1 token; those of sweep {whole.json['sweep']}, which"
    assert f"{shrunk} they take the place of, end at 64" in again.said
    assert shrunk not in whole.said


def test_a_sweep_that_measured_nothing_says_where_its_rows_are(tmp_path: Path, in_this_process: None) -> None:
    (tmp_path / "tiny.toml").write_text(TINY.format(extra=""))

    def refuse(*arguments: object, **options: object) -> None:
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mhctune.autotuner.bench.OutputBuffers", refuse)
        ran = mhctune(tmp_path, "sweep", "--sweep", "tiny.toml")
    assert ran.code == 5
    assert f"the measurements are kept in {tmp_path / 'mhctune.db'}" in ran.err.replace("\n", "")
    assert "error: the sweep is incomplete: sweep 1 has nothing to derive bands from" in ran.said
    assert "2 found no memory" in ran.said


# Bad input: one clear error, the documented exit code, nothing written.

SWEEP = ("sweep", "--sweep", "tiny.toml")
BAD: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "another device": (
        ("sweep", "--gpu", "gb300"), 6,
        ("--gpu gb300 asks for NVIDIA GB300", "no GPU, only the processor", "(target cpu)", "Nothing was run",
         "`--gpu auto`", "`mhctune plan --gpu gb300`"),
    ),
    "unknown gpu": (("sweep", "--gpu", "gb3000"), 2, ("unknown gpu 'gb3000'", "'gb300'", "known: b200, cpu")),
    "a cold processor": (
        (*SWEEP, "--l2", "cold"), 2, ("l2 'cold' is for GPUs; the target 'c' (cpu) is timed 'warm'",),
    ),
    "unknown gpu of a plan": (("plan", "--gpu", "abacus"), 2, ("unknown gpu 'abacus'; known: b200, cpu",)),
    "unknown model": (
        (*SWEEP, "--model", "deepseek-v5"), 2, ("unknown model 'deepseek-v5'", "deepseek-v4.1-flash"),
    ),
    "model that does not delay": (
        (*SWEEP, "--model", "deepseek-v4-pro"), 2, ("does not delay its pre block", "deepseek-v4.1-flash"),
    ),
    "unknown seam": ((*SWEEP, "--seam", "pots"), 2, ("unknown seam 'pots'", "known: collapse, hc_head")),
    "unknown sweep": (
        ("sweep", "--sweep", "quik"), 2,
        ("unknown sweep 'quik' (did you mean 'quick'?)", "decode, full, quick, seams, topk", "a .toml file"),
    ),
    "missing sweep file": (("sweep", "--sweep", "none.toml"), 2, ("cannot read none.toml", "No such file")),
    "unknown key": (
        ("sweep", "--sweep", "typo.toml"), 2, ("typo.toml: unknown key 'smaples' (did you mean 'samples'?)",),
    ),
    "unknown arm": (("sweep", "--sweep", "arm.toml"), 2, ("unknown arm 'fussed' (did you mean 'fused'?)",)),
    "unknown tunable": (("sweep", "--sweep", "tunable.toml"), 2, ("fused has no tunable 'tile_m'", "tile_n")),
    "no legal config": (("sweep", "--sweep", "illegal.toml"), 2, ("'fused' has no legal config", "tile_n 7")),
    "broken TOML": (("sweep", "--sweep", "broken.toml"), 2, ("broken.toml: invalid TOML",)),
    "token count of zero": ((*SWEEP, "--tokens", "0,1"), 2, ("token count 0 is zero; allowed are positive",)),
    "negative token count": ((*SWEEP, "--tokens=-4"), 2, ("token count -4 is negative",)),
    "repeated token count": ((*SWEEP, "--tokens", "4,8,4"), 2, ("token count 4 is repeated",)),
    "token count that is no number": ((*SWEEP, "--tokens", "1,two"), 2, ("token count 'two' is no integer",)),
    "fractional token count": ((*SWEEP, "--tokens", "1.5"), 2, ("token count '1.5' is no integer",)),
    "no token count": ((*SWEEP, "--tokens", " "), 2, ("no token count given",)),
    "huge token count": ((*SWEEP, "--tokens", "2147483648"), 2, ("2147483648 is too large",)),
    "token counts of a plan": (("plan", "--tokens", "0"), 2, ("token count 0 is zero",)),
    "budget smaller than one candidate": (
        (*SWEEP, "--vram-budget", "1KiB"), 2,
        ("at 1 token inputs of", "one buffer set of", "the budget is 1.0 KiB", "are free", "--vram-budget"),
    ),
    "budget that is no size": ((*SWEEP, "--vram-budget", "much"), 2, ("'much' is not a size", "4GiB", "60%")),
    "budget of nothing": ((*SWEEP, "--vram-budget", "0%"), 2, ("0% is 0 B; it must be more than 0",)),
    "budget above what is free": ((*SWEEP, "--vram-budget", "900TiB"), 2, ("at most the", "that are free")),
    "too many samples": ((*SWEEP, "--samples", "2000"), 2, ("samples is 2000", "at most 97", "--samples")),
    "too few samples": ((*SWEEP, "--samples", "4"), 2, ("--samples", "greater than or equal to 5")),
    "negative bound": ((*SWEEP, "--max-regret", "-0.1"), 2, ("--max-regret", "greater than or equal to 0")),
    "bound that is no number": (("bands", "--max-regret", "nan"), 2, ("--max-regret",)),
    "unknown command": (("swep",), 2, ("No such command 'swep'",)),
    "unknown option": (("sweep", "--gpus", "auto"), 2, ("No such option", "--gpus")),
    "missing argument": (("lookup",), 2, ("Missing argument", "TOKENS")),
    "lookup of zero": (("lookup", "0"), 2, ("greater than or equal to 1",)),
    "lookup of a word": (("lookup", "many"), 2, ("valid integer",)),
    "newer schema": (
        (*SWEEP, "--db", "newer.db"), 7, ("newer.db has schema 9999, newer than this mhctune", "or a newer"),
    ),
    "newer schema, read": (("status", "--db", "newer.db"), 7, ("newer.db has schema 9999, newer than",)),
    "newer schema, upgraded": (("db", "upgrade", "--db", "newer.db"), 7, ("schema 9999, newer than",)),
    "file that is no database": ((*SWEEP, "--db", "notes.txt"), 7, ("notes.txt",)),
    "file that is no database, read": (("bands", "--db", "notes.txt"), 7, ("notes.txt",)),
    "file that is no table": (("lookup", "1", "--db", "notes.txt"), 7, ("neither an SQLite database nor",)),
    "another program's database": ((*SWEEP, "--db", "other.db"), 7, ("is a database, but not mhctune's",)),
    "folder that cannot be written": ((*SWEEP, "--db", "/proc/a.db"), 7, ("/proc", "may be written")),
    "folder of the kernel": ((*SWEEP, "--db", "/sys/mhctune.db"), 7, ("/sys/mhctune.db",)),
    "missing folder": ((*SWEEP, "--db", "no/such/a.db"), 7, ("no folder no/such for the database a.db",)),
    "database of another kind": ((*SWEEP, "--db", "mysql://host/db"), 7, ("database URL of kind 'mysql'",)),
    "URL without its driver, lookup": (
        ("lookup", "1", "--db", "postgresql://me:secret@host/fleet"), 7,
        ("PostgreSQL needs psycopg, which is not installed; run `pip install 'mhctune[postgres]'`",),
    ),
    "URL without its driver, export": (
        ("export", "--db", "postgresql://me:secret@host/fleet"), 7, ("PostgreSQL needs psycopg",),
    ),
    "URL of another kind, lookup": (
        ("lookup", "1", "--db", "mysql://me:secret@host/db"), 7, ("database URL of kind 'mysql'",),
    ),
    "missing database, status": (("status", "--db", "none.db"), 7, ("no database at none.db; run `mhctune",)),
    "missing database, bands": (("bands", "--db", "none.db"), 7, ("no database at none.db",)),
    "pass option without a value": (
        ("check", "--pass-config", "tl.x"), 2, ("'tl.x' must be NAME=true or NAME=false",),
    ),
    "pass option twice": (
        ("check", "--pass-config", "tl.x=true", "--pass-config", "tl.x=false"), 2, ("given twice",),
    ),
    "missing database, explain": (("explain", "--tokens", "1", "--db", "none.db"), 7, ("no database at",)),
    "missing database, verify": (("db", "verify", "--db", "none.db"), 7, ("no database at none.db",)),
    "missing database, lookup": (("lookup", "1", "--db", "none.db"), 7, ("none.db: no such file",)),
    "missing database, merge": (("merge", "out.db", "none.db"), 7, ("no database at none.db",)),
    "missing database, diff": (("diff", "none.db", "none.db"), 7, ("none.db: no such file",)),
    "missing database, replay": (("replay", "none.db"), 7, ("no database at none.db",)),
    "unknown recording": (("replay", "none.jsonl"), 2, ("cannot read none.jsonl",)),
    "merge into a URL": (("merge", "postgresql://host/fleet", "MEASURED"), 7, ("is no file",)),
    "missing database, export": (("export", "--db", "none.db"), 7, ("none.db: no such file",)),
    "empty database, lookup": (("lookup", "1", "--db", "empty.db"), 7, ("empty.db: holds no table",
                               "run `mhctune sweep`")),
    "empty database, bands": (("bands", "--db", "empty.db"), 3, ("no sweep in this database has ended",)),
    "unknown sweep number": (("bands", "--id", "9", "--db", "empty.db"), 7, ("no sweep 9; it holds none",)),
    "unknown format": (("export", "--format", "json,yaml", "--db", "MEASURED"), 2,
                       ("unknown format 'yaml'; known: json, python",)),
    "export onto a foreign file": (("export", "-o", "taken", "--db", "MEASURED"), 7,
                                   ("exists and was not written by mhctune", "--force")),
    "export that cannot be written": (("export", "-o", "/proc/out", "--db", "MEASURED"), 7,
                                      ("/proc/out", "cannot be written", "choose another folder")),
    "unknown problem": (("lookup", "1", "--problem", "beef", "--db", "MEASURED"), 7, ("problem beef",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def named(measured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the bad inputs name, made once."""
    folder = tmp_path_factory.mktemp("named")
    for name, text in {
        "tiny": TINY.format(extra=""),
        "typo": TINY.format(extra="smaples = 9"),
        "arm": TINY.format(extra="").replace("c.fused", "c.fussed"),
        "tunable": TINY.format(extra="").replace("tile_n", "tile_m", 1),
        "illegal": TINY.format(extra="").replace("tile_n = [24]", "tile_n = [7]", 1),
        "broken": "name = ",
    }.items():
        (folder / f"{name}.toml").write_text(text)
    (folder / "notes.txt").write_text("what I did today\n")
    for name in ("newer.db", "empty.db"):
        schema.upgrade(folder / name)
    with closing(sqlite3.connect(folder / "newer.db")) as connection, connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    with closing(sqlite3.connect(folder / "other.db")) as connection, connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
    name, manifest = mhctune(
        folder, "export", "--db", str(measured / "mhctune.db"), "--format", "json", "--json"
    ).json
    (folder / manifest).unlink()
    (folder / "taken").mkdir()
    (folder / name).unlink()
    (folder / "taken" / name).write_text('{"somebody": "else"}')
    return folder


@pytest.fixture
def folder(named: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(named, tmp_path, dirs_exist_ok=True))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the ones that SQLite keeps beside a database while it is read."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error_and_writes_nothing(
    folder: Path, measured: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    arguments, code, fragments = BAD[name]
    database, before = str(measured / "mhctune.db"), contents(folder)
    ran = mhctune(folder, *(argument.replace("MEASURED", database) for argument in arguments))
    for fragment in fragments:
        assert fragment in ran.said
    assert ran.code == code
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert "secret" not in ran.err
    assert ran.said.count("error:") + ran.said.count("─ Error ─") == 1
    assert contents(folder) == before


def test_text_that_looks_like_markup_is_printed_as_it_is(tmp_path: Path) -> None:
    ran = mhctune(tmp_path, "status", "--db", "[bold]a[/bold].db")
    assert "no database at [bold]a[/bold].db" in ran.said


def test_every_problem_of_a_file_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TINY.format(extra="smaples = 9\nmodle = 'x'"))
    ran = mhctune(tmp_path, "sweep", "--sweep", "two.toml")
    assert ran.code == 2
    assert "'smaples'" in ran.said
    assert "'modle'" in ran.said


def test_a_bug_leaves_its_traceback_and_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Device:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(cli, "detect", broken)
    ran = mhctune(tmp_path, "doctor")
    assert ran.code == 70
    assert "ZeroDivisionError: oops" in ran.err
    assert "this is a bug of mhctune" in ran.said


# Signals.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_any_command_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    def interrupted() -> Device:
        signal.raise_signal(number)
        raise AssertionError("went on after the signal")

    before = signal.getsignal(number)
    monkeypatch.setattr(cli, "detect", interrupted)
    assert mhctune(tmp_path, "doctor").code == code
    assert signal.getsignal(number) is before


def test_the_first_signal_is_a_question_and_the_second_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left, cli.stop_on_signals() as came:
        assert came() == 0
        signal.raise_signal(signal.SIGTERM)
        assert came() == 15
        signal.raise_signal(signal.SIGTERM)
    assert left.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


# Help.


def commands() -> dict[str, Any]:
    top: dict[str, Any] = get_command(cli.app).commands  # type: ignore[attr-defined]
    return {
        **{n: c for n, c in top.items() if n != "db"},
        **{f"db {n}": c for n, c in top["db"].commands.items()},
    }


@pytest.mark.parametrize("name", commands())
def test_the_help_of_every_command_teaches(tmp_path: Path, name: str) -> None:
    command = commands()[name]
    ran = mhctune(tmp_path, *name.split(), "--help")
    assert ran.code == 0
    assert len(command.help.split()) >= 8
    assert " ".join(command.help.split())[:40] in " ".join(ran.out.split())
    assert [param.name for param in command.params if not param.help] == []
    for param in command.params:
        assert (param.metavar or param.opts[0]) in ran.out


def test_the_help_lists_every_command_first_steps_and_exit_codes(tmp_path: Path) -> None:
    ran = mhctune(tmp_path, "--help")
    text = " ".join(ran.out.replace("│", " ").split())
    for name in ("sweep", "plan", "status", "bands", "lookup", "explain", "export", "doctor", "db"):
        assert name in text
    assert "First steps" in text
    for code in (
        "0 done",
        "2 bad usage",
        "5 sweep incomplete",
        "6 the device",
        "7 database",
        "70 a bug",
        "130 SIGINT",
    ):
        assert code in text


def test_without_a_command_the_help_is_shown(tmp_path: Path) -> None:
    ran = mhctune(tmp_path)
    assert ran.code in (0, 2)  # typer before 0.16 left with 0
    assert "Usage: mhctune" in ran.out + ran.err


def test_every_foreseen_error_has_a_documented_code() -> None:
    codes = {code for _, code in cli._CODES}
    assert codes <= {2, 3, 4, 5, 6, 7}
    for code in codes | {cli.INCOMPLETE, cli.BUG, 130, 143}:
        assert f"{code} " in cli.EXIT_CODES
    assert issubclass(ConfigError, Exception)
