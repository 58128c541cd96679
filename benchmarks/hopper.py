"""The kernels at the limit beside what ships: `python benchmarks/hopper.py DB [--measure] [--seams]`.

Two numbers, a table each: the whole device time, and the time to the layer input (`--until layer_input`),
from sweeps of their own.

With `--measure`, on a GPU: sweeps `benchmarks/hopper.toml` at the hidden size of each model (`--models`; the
delayed seam, whatever the model), `--runs` times with other seeds, into DB. The baselines of our kernels race
in the same sweeps; before each run yardsticks are timed and kept in DB.yardsticks.json: an empty kernel,
copies, and what ships as it is described, its epilogue included. Run again it goes on with what is not
complete; another candidate or another source is another sweep. With `--until layer_input` it sweeps
`benchmarks/hopper_early.toml`, without yardsticks and baselines: theirs is complete at their end.

Then, and without `--measure` on any machine: the tables of each hidden size, from the newest sweep and those
of other seeds that raced the same. `--seams` instead: the other seams, from the newest sweep of each in DB,
which `mhctune sweep --sweep seams --tokens 1,8,32,128,512,1024,4096` makes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hopper_baselines import baselines, described
from hopper_early import early_lines, early_row_of
from hopper_early import to_data as early_data
from hopper_seams import seams
from hopper_table import LEGEND, RECORDED_ON, Row, Run, limits_of, lines, row_of, run_of, to_data
from hopper_yardstick import Asked, NoReproduction, Yardstick
from shipped import shipped as recorded_us
from shipped import stored

from mhctune.autotuner.bands import NoBands
from mhctune.autotuner.benches import open_bench
from mhctune.autotuner.budget import BudgetError, VramBudget
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.planner import NoArm, OtherDevice, plan_sweep, target_of
from mhctune.autotuner.probe import detect
from mhctune.autotuner.race import Stopped
from mhctune.autotuner.records import SweepState
from mhctune.autotuner.signals import stop_on_signals
from mhctune.autotuner.stats import TooFewSamples
from mhctune.autotuner.store import SweepRecord
from mhctune.autotuner.sweep import Watcher
from mhctune.configs.errors import ConfigError
from mhctune.configs.loader import load_model
from mhctune.configs.schema import GpuTarget
from mhctune.db.engine import DatabaseError
from mhctune.db.repository import Repository
from mhctune.db.rows import StoredSweep
from mhctune.db.tuning import Incomplete, Racing, Tuned, Tuning
from mhctune.kernels.compiler import CompileError
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.until import END, LAYER_INPUT, UNTIL, brief, until_of

SWEEPS = {
    END: str(Path(__file__).with_name("hopper.toml")),
    LAYER_INPUT: str(Path(__file__).with_name("hopper_early.toml")),
}
SEAM = "post_pre_delayed"
MODELS = ("deepseek-v4-flash", "deepseek-v4.1-flash", "deepseek-v4-pro")
ENDED = (SweepState.COMPLETE, SweepState.INCOMPLETE)


def plans_of(
    gpu: GpuTarget, sweep: str, hidden_sizes: Sequence[int], runs: int, until: str = END
) -> list[SweepPlan]:
    """Return the sweeps, run by run: each with a seed of its run, and with baselines if timed to the end."""
    first = [plan_sweep(gpu, sweep, hidden_size=hidden, until=until) for hidden in hidden_sizes]
    found = []
    for run in range(runs):
        for plan in first:
            protocol = replace(plan.protocol, seed=plan.protocol.seed + run)
            machine = plan.fingerprint.sm_count, plan.token_counts
            compared = baselines(plan.seam, plan.problem, plan.target, *machine) if until == END else ()
            found.append(replace(plan, protocol=protocol, shipped=compared))
    return found


def left(db: str, plans: Sequence[SweepPlan]) -> list[SweepPlan]:
    """Return the plans whose newest sweep is not complete."""
    if not Path(db).exists():
        return list(plans)
    with Repository.open(db, readonly=True) as store:
        states = {s.record.digest: s.state for s in reversed(store.sweeps())}  # stored newest first
    return [plan for plan in plans if states.get(plan.record().digest) is not SweepState.COMPLETE]


def measure(db: str, plans: Sequence[SweepPlan], free_bytes: int, yardsticks: Path) -> None:
    """Run what is left of some plans, those of a seed behind its yardsticks; what gives no bands is said.

    All plans are timed until the same moment; only those to the end have yardsticks.

    The yardsticks are timed in a process that ends before candidates are: none but theirs is on the GPU then.

    Raises:
        Stopped: asked to; every finished round is kept.
        BudgetError: no room for any candidate.
        CompileError, NoReproduction: what ships was not reproduced.
    """
    todo = left(db, plans)
    print(f"{len(plans) - len(todo)} of {len(plans)} sweeps are complete", flush=True)
    if not todo:
        return
    target, until = todo[0].target, todo[0].protocol.until

    @contextmanager
    def listen() -> Iterator[Callable[[], bool]]:
        with stop_on_signals() as came:
            yield lambda: bool(came())

    @contextmanager
    def watch() -> Iterator[Watcher]:
        yield Watcher()

    def tell(tuned: Tuned) -> None:
        print("\n".join(tuned.notes), flush=True)

    tuning = Tuning(db, listen, watch, lambda text: print(text, file=sys.stderr) if text else None, tell)
    tuning.check()
    with open_bench(SEAM, target, todo[0].protocol.l2, until=until) as bench:
        racing = Racing.alone(todo, bench, VramBudget.parse("60%", free_bytes))
        for before, plan in zip([None, *todo], todo, strict=False):
            if until == END and (before is None or before.protocol.seed != plan.protocol.seed):
                keep_yardsticks(yardsticks, [p for p in todo if p.protocol.seed == plan.protocol.seed])
            hidden, seed = plan.problem.hidden_size, plan.protocol.seed
            print(f"hidden {hidden}, seed {seed}, {brief(until)}: {len(plan.candidates)} candidates at "
                  f"{len(plan.token_counts)} token counts", flush=True)  # fmt: skip
            try:
                tuning.run([plan], racing, probe=False)
            except (Incomplete, NoBands, TooFewSamples) as error:
                print(f"hidden {hidden}, seed {seed}: {error}", file=sys.stderr)


def keep_yardsticks(path: Path, plans: Sequence[SweepPlan]) -> None:
    """Time the yardsticks of some sweeps in a process of their own; one that goes on gets the newer ones."""
    asked = {
        plan.record().digest: Asked(
            plan.seam.name, plan.problem, tuple(plan.token_counts), plan.fingerprint.sm_count,
            plan.protocol.seed,
        )
        for plan in plans
    }  # fmt: skip
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        found = process.submit(_timed, plans[0].target, asked).result()
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    text = json.dumps({**known, **{digest: each.to_data() for digest, each in found.items()}}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def _timed(target: str, asked: Mapping[str, Asked]) -> dict[str, Yardstick]:
    """Time yardsticks where this is called: what they are timed with takes seconds to import."""
    from yardsticks import yardsticks_of

    return yardsticks_of(target, asked)


def load_yardsticks(path: Path) -> dict[str, Yardstick]:
    """Return the yardsticks that were kept, by the digest of their sweep; none without a file."""
    if not path.exists():
        return {}
    return {d: Yardstick.of(each) for d, each in json.loads(path.read_text(encoding="utf-8")).items()}


def alike(sweeps: Sequence[StoredSweep], hidden_size: int, runs: int, until: str = END) -> list[StoredSweep]:
    """Return the newest ended sweep of a hidden size `until` then, and those that differ in seed alone.

    `sweeps` come newest first; of one seed the newest counts, and at most `runs` are returned, by seed.
    """

    def raced(record: SweepRecord) -> tuple[Any, ...]:
        protocol = {name: value for name, value in record.protocol.items() if name != "seed"}
        return record.fingerprint, frozenset(record.variants), record.token_counts, protocol, record.problem

    ended = [
        s for s in sweeps
        if s.state in ENDED and s.record.seam == SEAM and s.record.problem.hidden_size == hidden_size
        and until_of(s.record.protocol) == until
    ]  # fmt: skip
    found: dict[int, StoredSweep] = {}
    for sweep in ended:
        if raced(sweep.record) == raced(ended[0].record):
            found.setdefault(int(sweep.record.protocol["seed"]), sweep)
    return [found[seed] for seed in sorted(found)][:runs]


def runs_of(store: Repository, sweeps: Sequence[StoredSweep], yards: Mapping[str, Yardstick]) -> list[Run]:
    """Return the runs of some sweeps of a store."""
    return [
        run_of(
            s.id, int(s.record.protocol["seed"]), s.record.without_probes(store.trials(s.id)),
            yards.get(s.record.digest),
        )
        for s in sweeps
    ]  # fmt: skip


def rows_of(record: SweepRecord, runs: Sequence[Run]) -> list[Row]:
    """Return the rows of one hidden size."""
    seam, problem, machine = find_seam(record.seam), record.problem, record.fingerprint
    known = recorded_us(problem.hidden_size) if machine.gpu_name == RECORDED_ON else {}
    rows = (
        row_of(runs, n, known.get(n), described(seam, problem, record.target, machine.sm_count, n))
        for n in record.token_counts
    )
    return [row for row in rows if row is not None]


def early_table(store: Repository, sweeps: Sequence[StoredSweep]) -> dict[str, Any] | None:
    """Print the time to the layer input of one hidden size beside what ships; None where none was swept."""
    if not sweeps:
        return None
    record, found = sweeps[0].record, runs_of(store, sweeps, {})
    here = record.fingerprint.gpu_name
    known = recorded_us(record.problem.hidden_size) if here == RECORDED_ON else {}
    counts = ((count, known.get(count)) for count in record.token_counts)
    rows = [row for row in (early_row_of(found, *each) for each in counts) if row is not None]
    numbers = ", ".join(str(run.sweep) for run in found)
    print(f"hidden {record.problem.hidden_size}, {here}, {brief(LAYER_INPUT)}: {len(found)} runs, sweeps "
          f"{numbers}")  # fmt: skip
    print("\n".join([*_incomplete(sweeps), *early_lines(rows), ""]))
    return {"sweeps": [run.sweep for run in found], "rows": [early_data(row) for row in rows]}


def tables(db: str, hidden_sizes: Sequence[int], runs: int, yardsticks: Path) -> dict[str, Any]:
    """Print the tables of each hidden size and return all of it as JSON-able data."""
    yards: dict[str, Yardstick] = load_yardsticks(yardsticks)
    data: dict[str, Any] = {}
    with Repository.open(db, readonly=True) as store:
        stored_sweeps = store.sweeps()
        for hidden in hidden_sizes:
            sweeps = alike(stored_sweeps, hidden, runs)
            if early := early_table(store, alike(stored_sweeps, hidden, runs, LAYER_INPUT)):
                data[str(hidden)] = {"layer_input": early}
            if not sweeps:
                print(f"hidden {hidden}: no sweep of {SEAM} has ended in {db}; run with --measure\n")
                continue
            record, found = sweeps[0].record, runs_of(store, sweeps, yards)
            rows = rows_of(record, found)
            limits = limits_of(found, rows)
            numbers = ", ".join(str(run.sweep) for run in found)
            print(f"hidden {hidden}, {record.fingerprint.gpu_name}: {len(found)} runs, sweeps {numbers}, "
                  f"{len(record.variants)} candidates")  # fmt: skip
            print("\n".join([*_incomplete(sweeps), *_yards(found), *lines(rows, limits), ""]))
            data[str(hidden)] = {
                **data.get(str(hidden), {}),
                "gpu": record.fingerprint.gpu_name,
                "runs": [
                    {"sweep": r.sweep, "seed": r.seed, "yardstick": r.yardstick and r.yardstick.to_data()}
                    for r in found
                ],
                "rows": [to_data(row) for row in rows],
                "limits": [
                    {"num_tokens": each.num_tokens, "what": each.what, "yardstick_us": each.yardstick_us,
                     "multiples": each.multiples, "target": each.target, "verdict": each.verdict}
                    for each in limits
                ],
            }  # fmt: skip
    print(LEGEND)
    return data


def _incomplete(sweeps: Sequence[StoredSweep]) -> list[str]:
    names = [str(s.id) for s in sweeps if s.state is SweepState.INCOMPLETE]
    return [f"incomplete: sweep {', '.join(names)}; run again with --measure"] if names else []


def _yards(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.yardstick is None:
            yield f"sweep {run.sweep}: no yardsticks were kept, so no limits are shown"
        else:
            empty = f"{run.yardstick.empty_us:.3f} us" if run.yardstick.empty_us else "-"
            yield f"sweep {run.sweep}: empty kernel {empty}, ceiling {run.yardstick.ceiling_tb_s:.2f} TB/s"


def main() -> None:
    """Measure if asked, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("db")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL")
    parser.add_argument("--until", choices=UNTIL, default=END, help="what --measure times")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sweep", metavar="TOML", help="default: that of --until")
    parser.add_argument("--seams", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.runs < 1:
        parser.error(f"--runs {given.runs} must be positive")
    try:
        data = run(given)
    except Stopped:
        sys.exit(f"stopped cleanly; finished rounds are in {given.db}. Run the same command to resume.")
    except (
        BudgetError, CompileError, ConfigError, DatabaseError, NoArm, NoReproduction, OtherDevice,
    ) as error:  # fmt: skip
        sys.exit(str(error))
    if given.json:
        given.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Measure if asked, print, and return what was printed as JSON-able data.

    Raises:
        Stopped: asked to.
        BudgetError, CompileError, ConfigError, DatabaseError, NoArm, NoReproduction, OtherDevice: what
            cannot be measured or read.
    """
    hidden_sizes = [load_model(name).hidden_size for name in given.models]
    yardsticks = Path(f"{given.db}.yardsticks.json")
    if given.measure:
        device = detect()
        sweep = given.sweep or SWEEPS[given.until]
        plans = plans_of(target_of("auto", device), sweep, hidden_sizes, given.runs, given.until)
        measure(given.db, plans, device.free_bytes, yardsticks)
    if given.seams:
        return seams(list(stored(given.db)))
    return tables(given.db, hidden_sizes, given.runs, yardsticks)


if __name__ == "__main__":
    main()
