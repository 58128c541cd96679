"""TileLang's own AutoTuner beside a sweep: `python benchmarks/tilelang_autotuner.py [COUNT] [--db DB]`.

The fused kernels (post and projection, without the epilogue) of `benchmarks/target.toml`, at 1 and 32 tokens:
COUNT of them, drawn by a seed (64 unless said; 0 is all). Each cell is tuned in a process of its own from an
empty kernel cache, by the AutoTuner as it comes (its compile threads on 0.9 of the cores, its first compile
then its timing, 25 warm-ups and 100 repeats) with its cudagraph backend. It checks nothing here: our seconds
include a check of every candidate. With `--db` (a sweep of target.toml, compiled from an empty cache) our
winner is among the kernels drawn, and its seconds and the ratio are printed. From fewer kernels than all the
AutoTuner's seconds are scaled up in proportion, which the last column says.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mhctune.kernels.space import Candidate

HIDDEN, COUNT, TOKENS, SEED = 5120, 64, (1, 32), 20261129
TARGET = str(Path(__file__).with_name("target.toml"))
Config = dict[str, int]


def kernel(
    tile_n: int = 4, n_splits: int = 20, n_thr: int = 128, vec: int = 2, block_m: int = 1, ahead: int = 4,
    collapse: int = 1,
) -> object:  # fmt: skip
    """Build the fused kernel with one config; the AutoTuner reads the tunables off this signature."""
    from mhctune.kernels.cuda.post_pre import post_pre

    return post_pre(HIDDEN, tile_n, n_splits, n_thr, vec, block_m, ahead, collapse)


def kernels() -> dict[str, tuple[Config, list[Candidate]]]:
    """Return, by name, each distinct fused kernel of target.toml with its config and its candidates."""
    from mhctune.autotuner.planner import plan_sweep
    from mhctune.configs.loader import load_gpu

    plan = plan_sweep(load_gpu("h200"), TARGET, here=False)
    found: dict[str, tuple[Config, list[Candidate]]] = {}
    for candidate in plan.candidates:
        variant = plan.variants_of(candidate)[0]
        config = {name: int(value) for name, value in variant.params if name != "hidden_size"}
        found.setdefault(str(variant), (config, []))[1].append(candidate)
    return found


def drawn(names: Sequence[str], count: int, wanted: str | None) -> list[str]:
    """Return `count` of the kernels (all of them for 0), by the seed, `wanted` among them."""
    others = [name for name in names if name != wanted]
    number = min(count or len(names), len(names)) - (wanted is not None)
    return ([wanted] if wanted is not None else []) + random.Random(SEED).sample(others, number)


def arguments(config: Config, tokens: int, device: str) -> list[torch.Tensor]:
    """Return what the kernel of one config takes, in the order of its parameters."""
    from mhctune.kernels.buffers import OutputBuffers
    from mhctune.kernels.registry import seam as find_seam
    from mhctune.kernels.seam import Problem

    seam, problem = find_seam("post_pre_delayed"), Problem(HIDDEN)
    inputs = seam.inputs(problem, tokens, tokens, device)
    specs = seam.arm("cuda", "fused").plan(problem, {**config, "epilogue_thr": 128}, tokens)
    views = OutputBuffers(specs, device).bind(tokens)
    taken: list[torch.Tensor] = []
    launch = seam.arm("cuda", "fused").bind(
        problem, {**config, "epilogue_thr": 128}, [lambda *given: taken.extend(given), lambda *_: None]
    )
    launch(inputs, views)
    return taken


def tune(configs: list[Config], tokens: int) -> dict[str, Any]:
    """Tune one cell with the AutoTuner; return its seconds, winner and microseconds."""
    os.environ["TILELANG_AUTO_TUNING_DISABLE_CACHE"] = "1"
    from tilelang.autotuner import AutoTuner

    from mhctune.kernels.compiler import PASS_CONFIG, cuda_arch

    by_splits = {c["n_splits"]: arguments(c, tokens, "cuda") for c in configs}

    def supply(params: list[Any]) -> list[torch.Tensor]:
        return by_splits[int(params[8].shape[0])]

    tuner = (
        AutoTuner.from_kernel(kernel=kernel, configs=configs)
        .set_compile_args(target={"kind": "cuda", "arch": cuda_arch()}, pass_configs=dict(PASS_CONFIG))
        .set_profile_args(supply_prog=supply, skip_check=True, backend="cudagraph")
    )
    begin = time.monotonic()
    result = tuner.run()
    taken = time.monotonic() - begin
    return {"seconds": taken, "config": result.config, "us": 1e3 * (result.latency or float("nan"))}


def cell(configs: list[Config], tokens: int) -> dict[str, Any]:
    """Tune one cell in a fresh process, with a kernel cache that is empty and goes away.

    Raises:
        RuntimeError: the process failed; with the end of what it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        cache, answer = Path(folder, "cache"), Path(folder, "answer.json")
        environment = {**os.environ, "TILELANG_CACHE_DIR": str(cache)}
        command = [sys.executable, __file__, "--cell", str(tokens), "--answer", str(answer)]
        done = subprocess.run(
            command, input=json.dumps(configs), env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        if done.returncode or not answer.exists():
            raise RuntimeError(
                f"the AutoTuner's process at {tokens} tokens left with {done.returncode}:\n"
                f"{done.stdout[-3000:]}"
            )
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


class Ours:
    """What the newest sweep of a database found and took."""

    def __init__(self, path: str) -> None:
        """Read it.

        Raises:
            ValueError: that sweep did not end, so that its seconds say nothing.
        """
        from mhctune.autotuner.standings import standings
        from mhctune.db.derivation import chosen_sweep
        from mhctune.db.repository import Repository

        with Repository.open(path, readonly=True) as store:
            sweep = chosen_sweep(store)
            trials = sweep.record.without_probes(store.trials(sweep.id))
        if sweep.ended_at is None:
            raise ValueError(f"sweep {sweep.id} of {path} has not ended; run it to its end")
        self.seconds = (sweep.ended_at - sweep.started_at).total_seconds()
        self.cells, self.trials = len(sweep.record.token_counts), len(trials)
        self.rows = {
            count: standings([t for t in trials if t.cell.num_tokens == count])
            for count in sweep.record.token_counts
        }

    def kernel_of_winner(self, tokens: int, known: Mapping[str, tuple[Config, list[Candidate]]]) -> str:
        """Return the name of the fused kernel of the best candidate."""
        best = self.rows[tokens][0].candidate
        return next(name for name, (_, candidates) in known.items() if best in candidates)

    def loss(self, tokens: int, candidates: Sequence[Candidate]) -> float | None:
        """Return the regret of the best candidate with a kernel, None if none was raced."""
        return min((s.regret.point for s in self.rows[tokens] if s.candidate in candidates), default=None)


def main(count: int, token_counts: Sequence[int], db: str | None) -> None:
    """Tune each cell and print both sides."""
    known, ours = kernels(), Ours(db) if db else None
    if ours:
        each = ours.seconds / ours.trials
        print(
            f"mhctune: {ours.trials} trials in {ours.cells} cells, {ours.seconds:.1f} s without the start of "
            f"Python: {ours.seconds / ours.cells:.2f} s a cell, {each:.3f} s a candidate and cell"
        )
    for tokens in token_counts:
        wanted = ours.kernel_of_winner(tokens, known) if ours and tokens in ours.rows else None
        configs = [known[name][0] for name in drawn(list(known), count, wanted)]
        found = cell(configs, tokens)
        each, whole = found["seconds"] / len(configs), len(known) * found["seconds"] / len(configs)
        print(
            f"{tokens} tokens: AutoTuner {len(configs)} of {len(known)} kernels in {found['seconds']:.1f} s, "
            f"{each:.2f} s each; winner {found['config']} at {found['us']:.2f} us (kernel alone)",
            flush=True,
        )
        if not ours or wanted is None:
            continue
        theirs = next(candidates for config, candidates in known.values() if config == found["config"])
        loss, best = ours.loss(tokens, theirs), ours.rows[tokens][0]
        by_us = "was not raced" if loss is None else f"loses {loss:.2%} with its best epilogue"
        same = known[wanted][0] == found["config"]
        print(f"    our winner: {best.candidate}, {best.latency_us:.2f} us a seam")
        print(
            f"    the AutoTuner's is {'the same kernel' if same else f'another: by our samples it {by_us}'}"
        )
        scaled = "" if len(configs) == len(known) else f", scaled from {len(configs)} kernels"
        print(
            f"    the cell: AutoTuner {whole:.1f} s for {len(known)} kernels{scaled}; ours "
            f"{ours.seconds / ours.cells:.2f} s for {ours.trials // ours.cells} candidates, checked: "
            f"{whole * ours.cells / ours.seconds:.1f} times; a kernel against a candidate: "
            f"{each * ours.trials / ours.seconds:.1f} times",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", nargs="?", type=int, default=COUNT)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--db")
    parser.add_argument("--cell", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cell:
        Path(given.answer).write_text(json.dumps(tune(json.load(sys.stdin), given.cell)))
    else:
        main(given.count, given.tokens, given.db)
