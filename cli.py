"""The command line: the only place where the floors are put together."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import click
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mhctune.autotuner import report
from mhctune.autotuner.bands import NoBands
from mhctune.autotuner.budget import BudgetError, VramBudget
from mhctune.autotuner.derive import Derived
from mhctune.autotuner.planner import NoArm, forecast, known_seam, plan_sweep
from mhctune.autotuner.probe import Device, detect, doctor_rows, fingerprint
from mhctune.autotuner.records import Cell, Failure, SweepState
from mhctune.autotuner.report import Sheet
from mhctune.autotuner.stats import TooFewSamples
from mhctune.autotuner.sweep import Sweep, SweepPlan, SweepResult, Watcher, require_room
from mhctune.configs import loader
from mhctune.configs.errors import ConfigError
from mhctune.configs.schema import GpuTarget
from mhctune.db import schema
from mhctune.db.derivation import chosen_sweep, derive_stored
from mhctune.db.engine import DatabaseError
from mhctune.db.export import FORMATS, ExportError, export
from mhctune.db.repository import Repository
from mhctune.db.tables import load_table
from mhctune.kernels.dispatch import TableError
from mhctune.kernels.space import Candidate

EXIT_CODES = """
Exit codes: 0 done, passed, improved; 1 regressed, or a check found a disagreement; 2 bad usage or input,
nothing written; 3 missing: nothing compared, or less than the declared grid; 4 cannot tell; 5 sweep
incomplete: run it again; 6 the device is not the target; 7 database or file unusable; 70 a bug;
130 SIGINT, 143 SIGTERM: stopped cleanly, run the same command to resume.
"""
MISSING, INCOMPLETE, OTHER_DEVICE, UNUSABLE, BUG = 3, 5, 6, 7, 70

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the fastest arm and config of each fused mHC seam, remember why, and hand over a small table."
    "\n\nFirst steps: `mhctune doctor` shows the machine, `mhctune plan` what a sweep will cost, "
    "`mhctune sweep` measures, `mhctune bands` shows what was found.",
    epilog=EXIT_CODES,
)
db_app = typer.Typer(no_args_is_help=True, help="Look after the database file.")
app.add_typer(db_app, name="db")
out, err = Console(), Console(stderr=True)

Gpu = Annotated[
    str, typer.Option("--gpu", help="A target of `mhctune doctor`, or auto: what this machine has.")
]
SweepName = Annotated[
    str | None,
    typer.Option("--sweep", help="quick, decode, full or a .toml file. [default: quick on cpu, else decode]"),
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="Model whose seams are tuned, such as deepseek-v4.1-flash.")
]
SeamName = Annotated[str | None, typer.Option("--seam", help="Seam to tune. [default: the sweep's]")]
Tokens = Annotated[str | None, typer.Option("--tokens", help="Token counts, such as 1,2,4,8.")]
Regret = Annotated[
    float | None, typer.Option("--max-regret", min=0.0, help="Bound on what a band may lose: 0.05 is 5 %.")
]
Db = Annotated[str, typer.Option("--db", envvar="MHCTUNE_DB", help="Database file or postgresql:// URL.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
SweepId = Annotated[
    int | None, typer.Option("--id", help="Sweep number. [default: the newest that has results]")
]
DB = "mhctune.db"


def show(sheet: Sheet) -> None:
    """Print a sheet as a table."""
    table = Table(title=sheet.title, title_justify="left", title_style="bold", header_style="bold")
    for index, column in enumerate(sheet.columns):
        numbers = all(isinstance(row[index], int | float) for row in sheet.rows)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in sheet.rows:
        table.add_row(*(str(value) for value in row))
    out.print(table)
    for note in sheet.notes:
        out.print(note, highlight=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """Print JSON on standard output."""
    sys.stdout.write(json.dumps(data, indent=1, sort_keys=True, default=str) + "\n")


def fail(message: str, code: int) -> NoReturn:
    """Print one error and leave with its documented exit code."""
    err.print(f"[bold red]error:[/] {message}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def target_of(gpu: str, device: Device | None) -> GpuTarget:
    """Return the named target; with a device, it must be that one (exit code 6)."""
    found = loader.recognise(device.gpu_name) if device else None
    if gpu == "auto":
        if found is None:
            name = device.name if device else "this machine"
            fail(f"no target is written for {name}; known: {', '.join(loader.names('gpu'))}", OTHER_DEVICE)
        return found
    wanted = loader.load_gpu(gpu)
    if device and (found is None or found.name != wanted.name):
        has = (
            f"{device.name} (target {found.name})"
            if found
            else f"{device.name}, for which no target is written"
        )
        has = has if device.gpu_name else f"no GPU, only the processor {has}"
        fail(
            f"--gpu {gpu} asks for {wanted.match or 'a machine without a GPU'}, this machine has {has}. "
            f"Nothing was run. `--gpu auto` tunes what is here; `mhctune plan --gpu {gpu}` shows what the "
            f"sweep will cost there.",
            OTHER_DEVICE,
        )
    return wanted


class Bar(Watcher):
    """Shows a sweep's progress: cells, candidates, the best so far and the time left."""

    def __init__(self, progress: Progress) -> None:
        """Draw on a progress display."""
        self._progress, self._best = progress, ("", float("inf"))
        self._compile = progress.add_task("compile", total=None, note="")
        self._race = progress.add_task("race", total=None, note="")

    def begun(self, sweep_id: int, finished: int, grid: int) -> None:
        """Show what was done before."""
        note = f"sweep {sweep_id}" + (f", resumed at {finished} of {grid} trials" if finished else "")
        self._progress.update(self._race, total=grid, completed=finished, note=note)

    def compiled(self, done: int, total: int) -> None:
        """Show how many kernels are compiled."""
        self._progress.update(self._compile, total=total, completed=done, note="kernels")

    def entered(self, cell: Cell, index: int, total: int) -> None:
        """Show which cell is raced."""
        self._best = ("", float("inf"))
        self._progress.update(self._race, note=f"cell {index + 1}/{total}: {cell.num_tokens} tokens")

    def told(self, cell: Cell, candidate: Candidate, outcome: float | Failure) -> None:
        """Count a trial and show the best so far."""
        if not isinstance(outcome, Failure) and outcome < self._best[1]:
            self._best = (str(candidate), outcome)
        note = f"{cell.num_tokens} tokens, best {self._best[1]:.1f} us {self._best[0]}"
        self._progress.update(self._race, advance=1, note=note)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], int]]:
    """Turn SIGINT and SIGTERM into a question: the signal that came, or 0. A second one ends at once."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: came[0] if came else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@app.command()
def sweep(
    gpu: Gpu = "auto", sweep: SweepName = None, model: ModelName = None, seam: SeamName = None,
    tokens: Tokens = None, max_regret: Regret = None,
    samples: Annotated[int | None, typer.Option("--samples", min=5, help="Timed rounds a candidate.")] = None,
    vram_budget: Annotated[str, typer.Option("--vram-budget", help="4GiB, or a share of what is free.")] = "60%",
    db: Db = DB, new: Annotated[bool, typer.Option("--new", help="Start over instead of resuming.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure every candidate of every cell, then derive the bands. Interrupt it and run it again: it resumes."""
    from mhctune.autotuner.bench import HostBench
    from mhctune.kernels.compiler import Compiler, quiet

    quiet()
    device = detect()
    plan = plan_sweep(target_of(gpu, device), sweep, model=model, seam=seam, tokens=tokens,
                      max_regret=max_regret, samples=samples)  # fmt: skip
    budget = VramBudget.parse(vram_budget, device.free_bytes)
    compiler = Compiler()
    bench = HostBench(plan.seam, compiler)
    require_room(plan, bench, budget)
    columns = (TextColumn("{task.description:7}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(),
               TextColumn("{task.fields[note]}"))  # fmt: skip
    with Repository.open(db) as store, stop_on_signals() as came:
        with Progress(*columns, console=err, disable=as_json) as progress:
            runner = Sweep(
                plan, store, bench, budget, compiler.compile_all, lambda: bool(came()), Bar(progress)
            )
            try:
                result = runner.run(new=new)
            finally:
                compiler.close()
        finish(store, db, plan, result, came(), as_json)


def finish(
    store: Repository, db: str, plan: SweepPlan, result: SweepResult, came: int, as_json: bool
) -> None:
    """Derive and keep the bands of a sweep that ended, print them, and leave with the right code."""
    if result.state is SweepState.INTERRUPTED:
        err.print(f"stopped cleanly; every finished round is in {db}. Run the same command to resume.")
        raise typer.Exit(128 + came)
    stored = store.sweep(result.sweep_id)
    derived = derive_stored(store, stored, plan.max_regret)
    store.save_table(result.sweep_id, derived.table)
    if as_json:
        print_json({"sweep": result.sweep_id, "state": result.state.value, "db": os.path.abspath(db),
                    "missing": result.missing, "table": derived.table.to_dict()})  # fmt: skip
    else:
        show_bands(derived)
        counts = store.counts(result.sweep_id)
        out.print(
            f"{counts.measured} measured, {counts.failed} failed {_kinds(counts.failures)}", highlight=False
        )
        out.print(f"database: {os.path.abspath(db)}", highlight=False, soft_wrap=True)
    if result.state is SweepState.INCOMPLETE:
        fail(f"the sweep is incomplete, no band covers: {'; '.join(result.missing)}", INCOMPLETE)


def _kinds(failures: Any) -> str:
    return (
        "(" + ", ".join(f"{kind.value}: {count}" for kind, count in failures.items()) + ")"
        if failures
        else ""
    )


def show_bands(derived: Derived) -> None:
    """Print the bands, and what each arm's best would do."""
    show(report.bands_sheet(derived.table))
    show(report.arms_sheet(derived))
    for reason in derived.missing.values():
        err.print(f"no band over {reason}", highlight=False)


@app.command()
def plan(
    gpu: Gpu = "auto", sweep: SweepName = None, model: ModelName = None, seam: SeamName = None,
    tokens: Tokens = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Forecast candidates, kernels, bytes and seconds of a sweep. Needs no GPU and writes nothing."""
    target = target_of(gpu, detect() if gpu == "auto" else None)
    made = plan_sweep(target, sweep, model=model, seam=seam, tokens=tokens)
    bandwidth = target.figures.bandwidth_gb_s.value
    cost = forecast(made, os.cpu_count() or 1, float(bandwidth) if bandwidth else None)
    if as_json:
        print_json({"gpu": target.name, "token_counts": made.token_counts, **asdict(cost)})
        return
    out.print(f"{target.name}: {made.seam.name}, {made.problem}", highlight=False)
    out.print(
        f"tokens {' '.join(map(str, made.token_counts))}, {made.protocol.samples} samples", highlight=False
    )
    show(report.forecast_sheet(cost))


@app.command()
def status(db: Db = DB, as_json: Json = False) -> None:
    """List the sweeps of a database: how far each has come and what failed."""
    with Repository.open(db, readonly=True) as store:
        rows = []
        for found in store.sweeps():
            counts, record = store.counts(found.id), found.record
            rows.append((found.id, found.state.value, record.seam, record.problem.hidden_size,
                         record.fingerprint.gpu_name, f"{counts.measured + counts.failed}/{record.grid}",
                         f"{counts.failed} {_kinds(counts.failures)}".strip(),
                         found.started_at.strftime("%Y-%m-%d %H:%M")))  # fmt: skip
    columns = ("sweep", "state", "seam", "hidden", "device", "trials", "failed", "started (UTC)")
    sheet = Sheet(f"sweeps of {db}", columns, tuple(rows))
    print_json(sheet.to_dicts()) if as_json else show(sheet)


@app.command()
def bands(db: Db = DB, sweep_id: SweepId = None, max_regret: Regret = None,
          save: Annotated[bool, typer.Option("--save", help="Keep the table: lookups use it.")] = False,
          as_json: Json = False) -> None:  # fmt: skip
    """Derive the bands of a sweep again, under another bound if you like, and show what they cost."""
    with Repository.open(db, readonly=not save) as store:
        derived = derive_stored(store, chosen_sweep(store, sweep_id), max_regret)
        if save:
            store.save_table(derived.table.evidence["sweep"], derived.table)
    if as_json:
        print_json(derived.table.to_dict())
    else:
        show_bands(derived)
        if save:
            out.print(f"database: {os.path.abspath(db)}", highlight=False, soft_wrap=True)


TablePath = Annotated[
    Path, typer.Option("--db", envvar="MHCTUNE_DB", help="Database or exported .json file.")
]
ProblemDigest = Annotated[
    str | None, typer.Option("--problem", help="Problem digest, if the file holds several.")
]


@app.command()
def lookup(
    num_tokens: Annotated[int, typer.Argument(min=1, help="Token count.")], db: TablePath = Path(DB),
    seam: SeamName = None, problem: ProblemDigest = None,
    any_device: Annotated[bool, typer.Option("--as-measured", help="Do not judge the table against this machine.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Say which arm and config is served for a token count, and how far the answer can be trusted."""
    table = load_table(db, seam=seam, problem_digest=problem)
    if not any_device:
        device = detect()
        if device.target == table.target:
            table = load_table(
                db, fingerprint(known_seam(table.seam), device.target), seam=seam, problem_digest=problem
            )
        else:
            table = table.elsewhere()
    answer = table.lookup(num_tokens)
    if as_json:
        print_json({"arm": answer.choice.arm, "config": dict(answer.choice.config), "status": str(answer.status),
                    "first": answer.first, "last": answer.last, "table": table.digest})  # fmt: skip
        return
    until = answer.last if answer.last is not None else "up"
    out.print(f"{answer.choice}  tokens {answer.first} to {until}  status {answer.status}  "
              f"table {table.digest[:12]}", highlight=False, soft_wrap=True)  # fmt: skip


@app.command()
def explain(
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="A measured token count, or one between.")],
    db: Db = DB, sweep_id: SweepId = None, max_regret: Regret = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Candidates to show.")] = 8, as_json: Json = False,
) -> None:  # fmt: skip
    """Say why this config is served at this token count: runner-ups, intervals, failures, bytes."""
    with Repository.open(db, readonly=True) as store:
        stored = chosen_sweep(store, sweep_id)
        derived, trials = derive_stored(store, stored, max_regret), store.trials(stored.id)
    answer = derived.table.lookup(tokens)
    count = next((n for n in derived.cells if n >= tokens), max(derived.cells))
    failed = [t for t in trials if t.cell.num_tokens == count and isinstance(t.outcome, Failure)]
    footprint = next(t.footprint for t in trials if t.cell.num_tokens == count
                     and str(t.candidate) == str(answer.choice))  # fmt: skip
    if as_json:
        print_json({"choice": str(answer.choice), "measured_at": count, "bytes": asdict(footprint),
                    "candidates": [asdict(s) for s in derived.cells[count][:limit]],
                    "failures": [{"candidate": str(t.candidate), **asdict(t.outcome)} for t in failed]})  # type: ignore[arg-type]  # fmt: skip
        return
    until = answer.last if answer.last is not None else "up"
    out.print(f"{tokens} tokens: {answer.choice}, band {answer.first} to {until}", highlight=False)
    show(report.explain_sheet(derived.cells[count], count, limit))
    out.print(f"bytes: inputs {footprint.input_bytes:,}, outputs {footprint.output_bytes:,}, scratch "
              f"{footprint.scratch_bytes:,}, graph {footprint.graph_bytes:,}", highlight=False)  # fmt: skip
    for trial in failed:
        out.print(f"failed: {trial.candidate}: {trial.outcome}", highlight=False, soft_wrap=True)


@app.command("export")
def export_command(
    formats: Annotated[str, typer.Option("--format", help=f"Formats, comma separated: {', '.join(FORMATS)}.")] = "json,python",
    folder: Annotated[Path, typer.Option("-o", "--output", help="Folder to write into.")] = Path("."),
    db: TablePath = Path(DB), seam: SeamName = None, problem: ProblemDigest = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that mhctune did not write.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Write the newest table as files to check in; the same table gives the same bytes."""
    names = [name.strip() for name in formats.split(",")]
    unknown = [name for name in names if name not in FORMATS]
    if unknown:
        raise ConfigError(f"unknown format {unknown[0]!r}; known: {', '.join(FORMATS)}")
    table = load_table(db, seam=seam, problem_digest=problem)
    written = [str(export(table, name, folder, force=force)) for name in names]
    print_json(written) if as_json else [out.print(path, highlight=False, soft_wrap=True) for path in written]


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show the device, the toolchain, the arms on it and what is missing."""
    device = detect()
    found = loader.recognise(device.gpu_name)
    rows = [("target", found.name if found else f"none is written for {device.name}"), *doctor_rows(device)]
    rows.append(("known targets", ", ".join(loader.names("gpu"))))
    rows.append(("known models", ", ".join(loader.names("model"))))
    rows.append(("known sweeps", ", ".join(loader.names("sweep"))))
    sheet = Sheet("doctor", ("what", "found"), tuple(rows))
    print_json(dict(rows)) if as_json else show(sheet)


@db_app.command("upgrade")
def db_upgrade(db: Db = DB) -> None:
    """Bring a database to this version's schema; makes the file if there is none."""
    out.print(f"{db}: schema {schema.upgrade(db)}", highlight=False, soft_wrap=True)


@db_app.command("verify")
def db_verify(db: Db = DB) -> None:
    """Read everything back: schema, sweeps, trials and tables."""
    with Repository.open(db, readonly=True) as store:
        sweeps, tables = store.sweeps(), store.tables()
        trials = sum(len(store.trials(found.id)) for found in sweeps)
    out.print(f"{db}: schema {schema.head()}, {len(sweeps)} sweeps, {trials} trials, {len(tables)} tables: intact",
              highlight=False, soft_wrap=True)  # fmt: skip


_CODES: tuple[tuple[type[Exception], int], ...] = (
    (ConfigError, 2), (BudgetError, 2), (NoBands, MISSING), (NoArm, MISSING), (TooFewSamples, 4),
    (DatabaseError, UNUSABLE), (ExportError, UNUSABLE), (TableError, UNUSABLE),
)  # fmt: skip


def main() -> None:
    """Run the command line; every foreseen error is one line and its documented exit code."""
    try:
        code = app(standalone_mode=False)
    except tuple(kind for kind, _ in _CODES) as error:
        err.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        code = next(number for kind, number in _CODES if isinstance(error, kind))
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    sys.exit(code or 0)
