"""`mhctune sweep` in a group that torchrun starts: rank 0 speaks and remembers, the others follow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mhctune.autotuner.ranks import Ranks
from mhctune.configs.errors import ConfigError
from mhctune.db.tables import load_table

TINY = """
name = "tiny"
about = "The global top-k of two ranks, restricted to be short"
seam = "topk_merge"
top_k = 64
ranks = 2
token_counts = [1, 2]
samples = 5
max_regret = 0.9

[space.c]
radix = {select_bits = [11], digit_bits = [11]}
bitonic = {run_k = [1]}
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_two_ranks_sweep_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "logs").mkdir()
    command = [*TORCHRUN, "--log-dir", "logs", "--redirects", "3", "-m", "mhctune", "sweep"]
    command += ["--sweep", "tiny.toml", "--json"]
    environ = {name: value for name, value in os.environ.items() if name != "MHCTUNE_DB"}
    ran = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=180, check=False
    )
    out = {int(path.parent.name): path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")}
    err = {int(path.parent.name): path.read_text() for path in (tmp_path / "logs").rglob("stderr.log")}
    assert ran.returncode == 0, (ran.stderr[-2000:], err)
    said = json.loads(out[0])
    assert said["state"] == "complete"
    assert said["table"]["bands"][0]["first"] == 1
    assert load_table(tmp_path / "mhctune.db").digest
    assert out[1] == ""
    assert err[1] == ""


def test_a_process_without_a_launcher_is_alone() -> None:
    assert Ranks.of({}) == Ranks.of({"WORLD_SIZE": "1", "RANK": "0"}) == Ranks()


def test_a_launcher_says_who_a_process_is() -> None:
    environ = {"RANK": "9", "WORLD_SIZE": "16", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
    assert Ranks.of(environ) == Ranks(9, 16, 9, "here", 29500)
    torchrun = {"LOCAL_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert Ranks.of(environ | torchrun) == Ranks(9, 16, 1, "here", 29500, True, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"MASTER_ADDR": None}, "WORLD_SIZE 2 asks for a group of ranks, but 'MASTER_ADDR' of RANK"),
        ({"MASTER_PORT": "x"}, "is missing or no number; start it by torchrun, or unset WORLD_SIZE"),
        ({"RANK": "2"}, "RANK 2 is none of WORLD_SIZE 2 ranks; ranks are 0 to 1"),
    ],
)
def test_half_a_launcher_is_refused(change: dict[str, str | None], said: str) -> None:
    whole = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
    environ = {name: value for name, value in (whole | change).items() if value is not None}
    with pytest.raises(ConfigError, match=said):
        Ranks.of(environ)
