"""Killed at any moment, the same command goes on: the grid is measured once and the bands are the same."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mhctune.autotuner.records import Failure, Measurement, SweepState, Trial
from mhctune.db.derivation import derive_stored
from mhctune.db.repository import Repository
from mhctune.db.rows import StoredSweep
from mhctune.kernels.dispatch import DispatchTable

ROOT = Path(__file__).resolve().parents[1]
TOKENS, ROUNDS, CONFIRMATION = (1, 2, 3, 4, 5, 6, 8, 16), 9, 5

# A real sweep of two kernels through the Python API; the samples are replayed, so that bands can be compared.
CHILD = f"""
import random, sys
from mhctune.autotuner.bench import HostBench
from mhctune.autotuner.budget import VramBudget
from mhctune.autotuner.protocol import Protocol
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.sweep import Sweep
from mhctune.autotuner.timer import ReplayTimer
from mhctune.autotuner.twin import Twin
from mhctune.db.repository import Repository
from mhctune.kernels.compiler import Compiler, quiet
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Problem

quiet()
seam, problem = SEAMS["post_pre_delayed"], Problem(hidden_size=256)
values = {{"tile_n": [24], "n_splits": [1], "block_h": [64], "block_m": [1, 2]}}
fingerprint = Fingerprint("test", 1, 1, "", "", "", "", "", "", "", "", 1, "")
protocol = Protocol({ROUNDS}, confirmation={CONFIRMATION})
plan = SweepPlan(seam, problem, "c", {TOKENS}, {{arm.name: arm.space(problem).restricted(values)
                 for arm in seam.arms("c")[:2]}}, protocol, fingerprint, 0.05)


def recorded(tokens, candidate, round):
    noise = random.Random(f"{{tokens}} {{candidate}} {{round}}").uniform(1, 1.02)
    slow = (candidate.arm == "fused") == (tokens > 4)
    return noise * tokens * (13 if slow else 10) * (1.2 if candidate.config["block_m"] == 1 else 1)


twins = [Twin.to(candidate) for candidate in plan.candidates]
timer = ReplayTimer({{(n, c, r): recorded(n, c, r) for n in plan.token_counts
                     for c in (*plan.candidates, *twins) for r in range({ROUNDS + CONFIRMATION})}})
compiler = Compiler()
# Two sets of 256 x 16 fit, so every cell takes several batches.
bench = HostBench(seam, compiler, timer)
inputs = bench.enter(plan.cells[-1], 0)
room = inputs + 3 * bench.forecast(plan.candidates[0]).forecast_bytes
bench.leave()
with Repository.open(sys.argv[1]) as store:
    print("begin", flush=True)
    print(Sweep(plan, store, bench, VramBudget(room, 10**12), compiler.compile_all).run().state, flush=True)
compiler.close()
"""


def start(database: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONSAFEPATH": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(database)],
        env=environment, cwd=database.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run_to_the_end(database: Path) -> float:
    """Return the seconds from the opened database to the end."""
    with start(database) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begin\n"
        begun = time.monotonic()
        text, errors = child.communicate(timeout=100)
    assert (text, child.returncode) == ("complete\n", 0), errors
    return time.monotonic() - begun


def kill_after(database: Path, samples: int, pause: float) -> bool:
    """Start a sweep and kill -9 it once it has stored so many samples more; return whether it still ran."""
    before = stored_samples(database)
    with start(database) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begin\n"
        while child.poll() is None and stored_samples(database) < before + samples:
            time.sleep(0.0005)
        time.sleep(pause)
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=30)
        return child.returncode == -signal.SIGKILL


def stored_samples(database: Path) -> int:
    if not database.exists():
        return 0
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
            (count,) = connection.execute("SELECT count(*) FROM samples").fetchone()
            return int(count)
    except sqlite3.OperationalError:  # the schema is not there yet
        return 0


def newest(database: Path) -> tuple[StoredSweep, list[Trial], DispatchTable]:
    with Repository.open(database, readonly=True) as store:
        (sweep,) = store.sweeps()
        return sweep, list(store.trials(sweep.id)), derive_stored(store, sweep).table


@pytest.mark.slow
def test_a_sweep_of_real_kernels_killed_twice_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """Random moments are the matter of the fifty kills below: there a kill costs no start of a process."""
    whole, cut = tmp_path / "whole.db", tmp_path / "cut.db"
    run_to_the_end(whole)
    total = stored_samples(whole)
    rng = random.Random(20261129)
    assert all([kill_after(cut, rng.randint(1, total // 4), rng.uniform(0, 0.005)) for _ in range(2)])
    left = stored_samples(cut)
    assert 0 < left < total
    run_to_the_end(cut)

    sweep, trials, table = newest(cut)
    assert sweep.state is SweepState.COMPLETE
    grid = [(n, c) for n in TOKENS for c in sweep.record.candidates]
    measured = [(t.cell.num_tokens, t.candidate) for t in trials if isinstance(t.outcome, Measurement)]
    assert sorted(measured) == sorted(grid)
    assert len(trials) == len(grid) == sweep.record.grid
    for trial in trials:
        rounds = [(s.batch, s.round) for s in trial.samples]
        assert len(set(rounds)) == len(rounds) >= 6
    with closing(sqlite3.connect(cut)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        once = "SELECT count(*), count(DISTINCT num_tokens || '/' || candidate_id) FROM trials"
        assert connection.execute(once).fetchall() == [(len(grid), len(grid))]

    _, uncut, expected = newest(whole)
    assert table.bands == expected.bands
    assert {band.choice.arm for band in table.bands} == {"fused", "unfused"}
    assert key(trials) == key(uncut)


def key(trials: list[Trial]) -> dict[Any, Any]:
    """The samples by trial, twins' too, less their launches: those follow from the machine's clock."""
    return {
        (t.cell.num_tokens, t.candidate): [
            [(s.batch, s.round, s.latency_us) for s in taken] for taken in (t.samples, t.twins)
        ]
        for t in trials
    }


def stored(database: Path) -> set[str]:
    """Every timing that the database holds, as the log of `killable` names them."""
    query = """
        SELECT num_tokens || ' ' || batch || ' ' || round || ' ' || arm || ' ' || config || ' ' || twin
        FROM (SELECT *, 0 AS twin FROM samples UNION ALL SELECT *, 1 AS twin FROM twins) AS timed
        JOIN trials ON trials.id = timed.trial_id JOIN candidates ON candidates.id = trials.candidate_id
    """
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
            return {line for (line,) in connection.execute(query)}
    except sqlite3.OperationalError:  # the file or the schema is not there yet
        return set()


@pytest.mark.slow
def test_fifty_kills_lose_at_most_the_round_that_was_running(tmp_path: Path) -> None:
    """Real races and a real database at some 3,000 timings a second, killed at random moments (seeded)."""
    whole, cut = tmp_path / "whole.db", tmp_path / "cut.db"
    rng, kills, lost = random.Random(20261129), 50, 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONSAFEPATH": "1"}
    with subprocess.Popen(
        [sys.executable, ROOT / "tests" / "support" / "killable.py"],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None

        def begin(database: Path, log: Path) -> int:
            print(database, log, file=server.stdin, flush=True)
            return int(server.stdout.readline())  # type: ignore[union-attr]

        begin(whole, tmp_path / "whole.log")
        assert server.stdout.readline() == "0\n"
        for number in range(kills):
            log = tmp_path / f"{number}.log"
            child = begin(cut, log)
            timings = rng.randint(0, 40)
            while lines(log) < timings:
                time.sleep(0.0002)
            time.sleep(rng.uniform(0, 0.004))
            os.kill(child, signal.SIGKILL)
            assert server.stdout.readline() == f"{-signal.SIGKILL}\n"
            made = set(log.read_text().splitlines()) if log.exists() else set()
            unkept = {tuple(line.split()[:3]) for line in made - stored(cut)}
            assert len(unkept - falling(made)) <= 1, f"kill {number} lost {unkept}"
            lost += bool(unkept)
        begin(cut, tmp_path / "last.log")
        assert server.stdout.readline() == "0\n"
        server.stdin.close()
    assert lost >= 10  # so the kills hit rounds, not only what lies between them

    sweep, trials, table = newest(cut)
    _, uncut, expected = newest(whole)
    assert sweep.state is SweepState.COMPLETE
    assert key(trials) == key(uncut)
    assert [t.outcome for t in trials if isinstance(t.outcome, Failure)] == [
        t.outcome for t in uncut if isinstance(t.outcome, Failure)
    ]
    assert any(trial.twins for trial in trials)
    assert any(s.placement > 7 for trial in trials for s in trial.samples)  # some went on
    assert table.bands == expected.bands
    assert {band.choice.arm for band in table.bands} == {"fused", "unfused"}


def lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def falling(made: set[str]) -> set[tuple[str, ...]]:
    """The round in which a candidate of `killable` fails: that timing is kept by nobody."""
    return {tuple(line.split()[:3]) for line in made if line.startswith("16 ") and line.split()[2] == "3"}


SWEEP = """
name = "tiny"
about = "long enough to be interrupted"
token_counts = [1, 2]
samples = 150
max_regret = 0.9

[space.c.fused]
tile_n = [24]
n_splits = [1]
block_h = [64]
block_m = [1]
"""


@pytest.mark.slow
def test_signals_stop_the_command_cleanly_and_the_same_command_completes_it(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(SWEEP)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "mhctune", "sweep", "--sweep", "tiny.toml", "--json"]
    database, before = tmp_path / "mhctune.db", 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            while child.poll() is None and stored_samples(database) < before + 20:
                time.sleep(0.002)
            child.send_signal(number)
            text, errors = child.communicate(timeout=60)
        assert child.returncode == code, errors
        assert text == ""
        assert "stopped cleanly" in errors
        assert "Run the same command to resume." in errors
        with Repository.open(database) as store:
            assert [s.state for s in store.sweeps()] == [SweepState.INTERRUPTED]
        assert before + 20 <= stored_samples(database) < 300
        before = stored_samples(database)

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert '"state": "complete"' in done.stdout
    # 150 rounds and 15 to confirm, of one candidate at two token counts.
    assert stored_samples(database) == 330
    with Repository.open(database) as store:
        assert [s.state for s in store.sweeps()] == [SweepState.COMPLETE]
