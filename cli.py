"""The command line: the only place where the floors are put together."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text
from typer import Option

from mhctune.autotuner import check_files, report
from mhctune.autotuner.bands import NoBands
from mhctune.autotuner.bands_report import bands_dict, bands_sheets, uncovered_note
from mhctune.autotuner.bench import BenchLost
from mhctune.autotuner.benches import open_bench
from mhctune.autotuner.budget import BudgetError, VramBudget
from mhctune.autotuner.check import Check, Finding
from mhctune.autotuner.derive import Derived
from mhctune.autotuner.explanation import explain as why_served
from mhctune.autotuner.planner import ColdHost, NoArm, OtherDevice, forecast, plan_sweeps, target_of
from mhctune.autotuner.probe import detect
from mhctune.autotuner.progress import Bar
from mhctune.autotuner.race import Stopped
from mhctune.autotuner.ranks import Ranks
from mhctune.autotuner.report import Sheet
from mhctune.autotuner.signals import leave, on_signals, stop_on_signals
from mhctune.autotuner.speed import Then, elsewhere, l2_of, remeasure
from mhctune.autotuner.stats import TooFewSamples
from mhctune.autotuner.terms import Terms
from mhctune.configs.errors import ConfigError
from mhctune.configs.passes import parse_passes
from mhctune.configs.traffic import load_traffic
from mhctune.db import schema
from mhctune.db.checks import check_tables, finish, save_runs
from mhctune.db.derivation import chosen_sweep, derive_stored, keep, load_incumbent, other_times
from mhctune.db.diff import diff as diff_tables
from mhctune.db.engine import DatabaseError, Place
from mhctune.db.export import FORMATS, ExportError, formats_of, write
from mhctune.db.group_tuning import tune
from mhctune.db.here import fingerprint_for, load_here, load_measured
from mhctune.db.manifest import export_all, manifests_beside
from mhctune.db.merge import merge
from mhctune.db.replay import replay as replay_samples
from mhctune.db.repository import Repository
from mhctune.db.status import read_back, sweep_lines
from mhctune.db.tuning import Incomplete, Tuned, Tuning
from mhctune.kernels.dispatch import DispatchTable, TableError

# A line each they would be 46.
# isort: off
from mhctune.configs.options import (
    After, AsMeasured, AtTokens, Baseline, BatchInvariant, Before, Budget, Db, Exported, Folder, Force, Gpu,
    IncumbentFile, Json, Junit, Kept, L2State, Limit, Markdown, MaxVariants, ModelName, New, NoMeasure,
    NumTokens, Pareto, PassConfig, ProbeEdges, Recording, Regret, Samples, Save, SaveRun, SeamName, Seed,
    Sources, SweepId, SweepName, TableDb, TableProblem, TableSeam, TableUntil, Target, Tokens, Tolerance,
    Traffic, Until,
)  # fmt: skip
# isort: on

EXIT_CODES = (
    "Exit codes: 0 done, passed, improved; 1 regressed, or a check found a disagreement; 2 bad usage or "
    "input, nothing written; 3 missing: nothing compared, or less than the declared grid; 4 cannot tell; "
    "5 sweep incomplete: run it again; 6 the device is not the target; 7 database or file unusable; "
    "70 a bug; 130 SIGINT, 143 SIGTERM: stopped cleanly, run the same command to resume."
)
DISAGREES, MISSING, CANNOT_TELL, INCOMPLETE, OTHER_DEVICE, UNUSABLE, BUG = 1, 3, 4, 5, 6, 7, 70

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

DB = "mhctune.db"
Formats = Annotated[str, Option("--format", help=f"Formats, comma separated: {', '.join(FORMATS)}.")]


def show(*sheets: Sheet) -> None:
    """Print sheets as tables."""
    for sheet in sheets:
        table = Table(title=sheet.title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
        table.show_edge = False
        for index, column in enumerate(sheet.columns):
            numbers = all(isinstance(row[index], int | float) for row in sheet.rows)
            table.add_column(column, justify="right" if numbers else "left", overflow="fold")
        for row in sheet.rows:
            table.add_row(*(str(value) for value in row))
        out.print(table)
        say("\n".join((*sheet.notes, "")))


def say(text: str) -> None:
    """Print a line as it is: no markup, no colours, no line breaks."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Print a line on standard error, unless there is nothing to say."""
    if text:
        err.print(Text(text), soft_wrap=True)


def print_json(data: Any) -> None:
    """Print JSON on standard output."""
    sys.stdout.write(json.dumps(data, indent=1, sort_keys=True, default=str) + "\n")


def print_documents(documents: Sequence[Mapping[str, Any]], seams: int) -> None:
    """Print one document of JSON, of the seam or of all seams of a family; nothing if there is none."""
    if documents:
        print_json(documents[0] if seams == 1 else documents)


def fail(message: str, code: int) -> NoReturn:
    """Print one error and leave with its documented exit code."""
    err.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    raise SystemExit(code)


@contextmanager
def progress_bar(shown: bool) -> Iterator[Bar]:
    """Draw a sweep's progress on standard error; the last column gives way first."""
    fixed, rest = Column(no_wrap=True), Column(no_wrap=True, overflow="ellipsis", ratio=1)
    with Progress(
        TextColumn("{task.description:7}", table_column=fixed.copy()), BarColumn(12),
        MofNCompleteColumn(table_column=fixed.copy()), TimeRemainingColumn(table_column=fixed.copy()),
        TextColumn("{task.fields[note]}", table_column=rest, markup=False),
        console=err, expand=True, disable=not shown,
    ) as progress:  # fmt: skip
        yield Bar(progress)


def show_bands(derived: Derived) -> None:
    """Print the bands, and what each arm's best would do."""
    show(*bands_sheets(derived))
    note(uncovered_note(derived))


def tuning_of(
    db: str, again: str, as_json: bool, tell: Callable[[Tuned], None] = lambda tuned: None
) -> Tuning:
    """Return what tunes into a database and speaks here; `again` says what to do once it was stopped."""

    @contextmanager
    def listen() -> Iterator[Callable[[], bool]]:
        with stop_on_signals() as came:
            try:
                yield lambda: bool(came())
            except Stopped:
                note(f"stopped cleanly; every finished round is in {Place.of(db).location}. {again}")
                raise SystemExit(128 + came()) from None

    return Tuning(db, listen, lambda: progress_bar(not as_json), note, tell)


@app.command()
def sweep(
    gpu: Gpu = "auto", sweep: SweepName = None, model: ModelName = None, seam: SeamName = None,
    tokens: Tokens = None, max_regret: Regret = None, samples: Samples = None, l2: L2State = None,
    until: Until = None, seed: Seed = None, probe: ProbeEdges = None, vram_budget: Budget = "60%",
    db: Db = DB, new: New = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Measure every candidate of every cell, then derive the bands; stopped, the same command resumes it."""
    device = detect()
    plans = plan_sweeps(target_of(gpu, device), sweep, model=model, seam=seam, tokens=tokens,
                        max_regret=max_regret, samples=samples, l2=l2, until=until, seed=seed)  # fmt: skip

    documents: list[dict[str, Any]] = []

    def tell(tuned: Tuned) -> None:
        if as_json:
            documents.append(tuned.to_dict())
        else:
            show_bands(tuned.derived)
            say("\n".join((*tuned.notes, f"database: {tuned.where}")))

    tuning = tuning_of(db, "Run the same command to resume.", as_json, tell)
    ranks, first = Ranks.of(os.environ), plans[0]
    if not ranks.rank:  # who owns the database
        tuning.check()
        VramBudget.parse(vram_budget, device.free_bytes)  # before a worker starts, which takes seconds
    try:
        named = first.seam.name, first.target, first.protocol.l2
        with open_bench(*named, device=ranks.local, until=first.protocol.until) as bench:
            tune(tuning, plans, bench, device.free_bytes, vram_budget, ranks=ranks, new=new, probe=probe)
    finally:
        print_documents(documents, len(plans))


@app.command()
def probe(
    db: Db = DB, sweep_id: SweepId = None, max_regret: Regret = None, vram_budget: Budget = "60%",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure between a sweep's token counts where the choice changes, until each edge is exact."""
    tuning, where = tuning_of(db, "Run it again to go on.", as_json), Place.of(db).location
    number, found = tuning.probe(detect(), sweep_id, max_regret, vram_budget)
    if as_json:
        edges = [edge.to_data() for edge in found.edges]
        print_json({"sweep": number, "db": where, "edges": edges, "table": found.table.to_dict()})
    else:
        show_bands(found)
        say(f"database: {where}")


@app.command()
def plan(
    gpu: Gpu = "auto", sweep: SweepName = None, model: ModelName = None, seam: SeamName = None,
    tokens: Tokens = None, l2: L2State = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Forecast candidates, kernels, bytes and seconds of a sweep. Needs no GPU and writes nothing."""
    target, cores = target_of(gpu, None), os.cpu_count() or 1
    bandwidth_gb_s, l2_bytes = target.figures.bandwidth_gb_s.value, target.figures.l2_bytes.value
    plans = plan_sweeps(target, sweep, model=model, seam=seam, tokens=tokens, l2=l2, here=False)
    documents: list[dict[str, Any]] = []
    for made in plans:
        cost = forecast(made, cores, bandwidth_gb_s, int(l2_bytes or 0))
        if as_json:
            named = {"gpu": target.name, "seam": made.seam.name, "token_counts": made.token_counts}
            documents.append({**named, **asdict(cost)})
            continue
        counts, label = " ".join(map(str, made.token_counts)), made.seam.label(made.problem)
        say(f"{target.name}: {made.seam.name}, {label}\ntokens {counts}, {made.protocol.samples} samples")
        show(report.forecast_sheet(cost, cores))
    print_documents(documents, len(plans))


@app.command()
def status(db: Db = DB, as_json: Json = False) -> None:
    """List the sweeps of a database: how far each has come and what failed."""
    with Repository.open(db, readonly=True) as store:
        lines, name = sweep_lines(store), str(store.place)
    print_json([line.to_dict() for line in lines]) if as_json else show(report.sweeps_sheet(lines, name))


@app.command()
def bands(
    db: Db = DB, sweep_id: SweepId = None, max_regret: Regret = None, max_variants: MaxVariants = None,
    traffic: Traffic = None, batch_invariant: BatchInvariant = False, incumbent: IncumbentFile = None,
    pareto: Pareto = False, save: Save = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Derive the bands of a sweep again, on other terms if you like, and show what they cost."""
    terms = Terms(max_variants, batch_invariant, load_traffic(traffic) if traffic else None)
    today = load_incumbent(incumbent) if incumbent else None
    with Repository.open(db, readonly=not save) as store:
        chosen = chosen_sweep(store, sweep_id)
        derived = derive_stored(store, chosen, max_regret, incumbent=today, terms=terms)
        note(keep(store, derived.table) if save else "")
    if as_json:
        print_json(bands_dict(derived, pareto=pareto))
    else:
        show_bands(derived)
        show(report.front_sheet(derived))
    if save:
        (note if as_json else say)(f"database: {store.place.location}")


@app.command()
def lookup(
    num_tokens: NumTokens, db: TableDb = DB, seam: TableSeam = None, problem: TableProblem = None,
    until: TableUntil = "end", as_measured: AsMeasured = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Say which arm and config is served for a token count, and how far the answer can be trusted."""
    named = seam, problem, until
    table = load_measured(db, *named) if as_measured else load_here(db, detect(), *named)
    answer = table.lookup(num_tokens)
    print_json(report.answer_dict(table, answer)) if as_json else say(report.answer_text(table, answer))


@app.command()
def explain(
    tokens: AtTokens, db: Db = DB, sweep_id: SweepId = None, max_regret: Regret = None, limit: Limit = 8,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Say why this config is served at this token count: runner-ups, intervals, failures, bytes."""
    with Repository.open(db, readonly=True) as store:
        stored = chosen_sweep(store, sweep_id)
        derived, trials = derive_stored(store, stored, max_regret), store.trials(stored.id)
        others = other_times(store, stored)
    why = why_served(derived, trials, tokens, others)
    print_json(why.to_dict(limit)) if as_json else show(why.sheet(limit))


@app.command("export")
def export_command(
    formats: Formats = "json,python", folder: Folder = Path("."), db: TableDb = DB,
    seam: TableSeam = None, problem: TableProblem = None, until: TableUntil = "end", force: Force = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Write the newest table as files to check in, and its manifest; the same table gives the same bytes."""
    names = formats_of(formats)
    paths, missing = export_all(load_measured(db, seam, problem, until), names, folder, force=force)
    note(missing)
    written = [str(path) for path in paths]
    print_json(written) if as_json else say("\n".join(written))


@app.command()
def check(
    db: Db = DB, table: Exported = None, baseline: Baseline = None, tolerance: Tolerance = 0.1,
    no_measure: NoMeasure = False, passes: PassConfig = None, junit: Junit = None, markdown: Markdown = None,
    save: SaveRun = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Check that tables are legal, agree with file, samples and sources, and are still as fast."""
    against = load_measured(str(baseline), until=None) if baseline else None
    changed = parse_passes(passes or ())
    with Repository.open(db, readonly=not save) as store:
        checked = check_tables(store, load_measured(str(table), until=None) if table else None)
        device, beside = detect(), manifests_beside(table, checked[0].table) if table else []

        def timed(each: DispatchTable, then: Then) -> list[Finding]:
            here, named = fingerprint_for(each, changed), (each.seam, each.target, l2_of(each))
            opened = open_bench(*named, passes=changed, until=each.until)
            with opened as bench, progress_bar(not as_json) as bar:
                return remeasure(each, bench, bench.compile_all, tolerance, bar, then=then, here=here)

        reason = partial(elsewhere, device=device) if not no_measure else lambda _: "--no-measure"
        done = finish(store, checked, against, tolerance, reason, timed, beside)
        if save:
            save_runs(store, checked, done)
    for path, text in ((junit, check_files.junit), (markdown, check_files.markdown)):
        if path:
            write(path, text(done), lambda _: True, force=True)
    print_json(done.to_dict()) if as_json else show(*report.check_sheets(done))
    raise SystemExit(done.exit_code)


@app.command()
def diff(before: Before, after: After, as_json: Json = False) -> None:
    """Show what two databases or exported tables differ by; 0: they answer alike, 1: they do not."""
    compared = diff_tables(before, after)
    if as_json:
        print_json([each.to_dict() for each in compared])
    else:
        show(*(report.difference_sheet(each.name, each.lines) for each in compared))
    raise SystemExit(0 if all(each.same for each in compared) else DISAGREES)


@app.command("merge")
def merge_command(target: Target, sources: Sources, as_json: Json = False) -> None:
    """Write all sweeps of several databases into one file; the order changes nothing. 1: with conflicts."""
    merged, where = merge(target, sources), Place.of(target).location
    if as_json:
        print_json({**merged.to_dict(), "db": where})
    else:
        show(report.merged_sheet([sweep.row for sweep in merged.sweeps], target))
        held = "" if merged.changed else " (held all of it before)"
        say("\n".join((*merged.lines, f"database: {where}{held}")))
    raise SystemExit(DISAGREES if merged.conflicts else 0)


@app.command()
def replay(source: Recording, table: Kept = None, as_json: Json = False) -> None:
    """Derive bands again from a recording's or a database's samples; 1: not the kept table to the byte."""
    replayed = replay_samples(source, load_measured(str(table), until=None) if table else None)
    done = Check([each.finding for each in replayed if each.finding])
    if as_json:
        tables = [each.derived.table.to_dict() for each in replayed]
        print_json({"tables": tables, "findings": done.to_dict()["findings"]})
    else:
        for each in replayed:
            show_bands(each.derived)
        show(*(report.check_sheets(done) if done.findings else ()))
    if table and not replayed:
        fail(f"{source} holds no table of the seam, problem and device of {table}", MISSING)
    raise SystemExit(done.exit_code if done.findings else 0)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show the device, the toolchain, the arms on it and what is missing."""
    sheet = report.doctor_sheet(detect())
    print_json({what: found for what, found in sheet.rows}) if as_json else show(sheet)


@db_app.command("upgrade")
def db_upgrade(db: Db = DB) -> None:
    """Bring a database to this version's schema; makes the file if there is none."""
    say(f"{Place.of(db)}: schema {schema.upgrade(db)}")


@db_app.command("verify")
def db_verify(db: Db = DB) -> None:
    """Read everything back: schema, sweeps, trials and tables."""
    with Repository.open(db, readonly=True) as store:
        say(f"{store.place}: schema {schema.head()}, {read_back(store)}: intact")


_CODES: tuple[tuple[type[Exception], int], ...] = (
    (ConfigError, 2), (ColdHost, 2), (BudgetError, 2), (NoBands, MISSING), (NoArm, MISSING),
    (TooFewSamples, CANNOT_TELL), (BenchLost, INCOMPLETE), (Incomplete, INCOMPLETE),
    (OtherDevice, OTHER_DEVICE), (DatabaseError, UNUSABLE), (ExportError, UNUSABLE), (TableError, UNUSABLE),
)  # fmt: skip


def main() -> None:
    """Run the command line; every foreseen error is one line and its documented exit code."""
    try:
        with on_signals(leave):
            app()
    except Exception as error:
        code = next((number for kind, number in _CODES if isinstance(error, kind)), BUG)
        if code == BUG:
            traceback.print_exc()
            fail("this is a bug of mhctune; please report it with the lines above", BUG)
        fail(str(error), code)
