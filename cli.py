"""The command line: the only place where the floors are put together."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text
from typer import Argument, Option

from mhctune.autotuner import check_files, report
from mhctune.autotuner.ahead import AheadBench
from mhctune.autotuner.bands import NoBands
from mhctune.autotuner.bench import Bench, BenchLost
from mhctune.autotuner.benches import open_bench
from mhctune.autotuner.beside import beside, beside_sheet
from mhctune.autotuner.budget import BudgetError, VramBudget
from mhctune.autotuner.check import Check, Finding
from mhctune.autotuner.conditions import Reader
from mhctune.autotuner.derive import Derived
from mhctune.autotuner.difference import sentences
from mhctune.autotuner.explanation import explain as why_served
from mhctune.autotuner.exploration import Exploration
from mhctune.autotuner.gain import gains
from mhctune.autotuner.group_bench import GroupBench, Station, follow
from mhctune.autotuner.naive import naive_cutovers, naive_sheet
from mhctune.autotuner.nvidia import conditions_reader
from mhctune.autotuner.plan import SweepPlan
from mhctune.autotuner.planner import (
    ColdHost,
    NoArm,
    OtherDevice,
    forecast,
    known_seam,
    plan_sweeps,
    require_same,
    target_of,
)
from mhctune.autotuner.probe import detect, fingerprint
from mhctune.autotuner.prober import Prober
from mhctune.autotuner.race import Stopped
from mhctune.autotuner.ranks import Ranks, open_mail
from mhctune.autotuner.records import Cell, Failure, SweepState
from mhctune.autotuner.report import Sheet
from mhctune.autotuner.speed import Then, elsewhere, l2_of, remeasure
from mhctune.autotuner.stats import TooFewSamples
from mhctune.autotuner.sweep import CompileAll, Sweep, SweepResult, Watcher, require_room
from mhctune.autotuner.terms import Terms
from mhctune.autotuner.worker import RemoteBench
from mhctune.configs import loader
from mhctune.configs.errors import ConfigError
from mhctune.configs.passes import parse_passes
from mhctune.configs.recorded import recorded_names
from mhctune.configs.traffic import load_traffic
from mhctune.db import schema
from mhctune.db.checks import check_tables, gate, other_problem, save_runs, then_of
from mhctune.db.derivation import chosen_sweep, derive_stored, keep, load_incumbent
from mhctune.db.diff import diff as diff_tables
from mhctune.db.diff import same
from mhctune.db.engine import DatabaseError, Place
from mhctune.db.export import FORMATS, ExportError, export, formats_of, write
from mhctune.db.here import load_here, load_measured
from mhctune.db.lock import exclusive
from mhctune.db.manifest import export_manifest, manifests_beside
from mhctune.db.merge import merge
from mhctune.db.replay import replay_database, replay_recording
from mhctune.db.repository import Repository
from mhctune.db.status import read_back, sweep_lines
from mhctune.kernels.compiler import Passes
from mhctune.kernels.dispatch import DispatchTable, TableError
from mhctune.kernels.legality import refusals
from mhctune.kernels.space import Candidate

EXIT_CODES = (
    "Exit codes: 0 done, passed, improved; 1 regressed, or a check found a disagreement; 2 bad usage or "
    "input, nothing written; 3 missing: nothing compared, or less than the declared grid; 4 cannot tell; "
    "5 sweep incomplete: run it again; 6 the device is not the target; 7 database or file unusable; "
    "70 a bug; 130 SIGINT, 143 SIGTERM: stopped cleanly, run the same command to resume."
)
DISAGREES, MISSING, CANNOT_TELL, INCOMPLETE, OTHER_DEVICE, UNUSABLE, BUG = 1, 3, 4, 5, 6, 7, 70

Racing = RemoteBench | AheadBench | GroupBench
"""What a sweep times with: a worker, one that compiles ahead, or the workers of a group."""

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
# fmt: off
Gpu = Annotated[str, Option("--gpu", help=f"{', '.join(loader.names('gpu'))}, or auto: this machine's.")]
SweepName = Annotated[str | None, Option(
    "--sweep", help=f"{', '.join(loader.names('sweep'))} or a .toml file (default: quick; on GPUs decode).")]
ModelName = Annotated[str | None, Option(
    "--model", help=f"{', '.join(loader.names('model'))} (default: the sweep's).")]
SeamName = Annotated[str | None, Option(
    "--seam", help="Seam to tune (default: the sweep's). A V4 seam takes a V4 model, or --model.")]
Tokens = Annotated[str | None, Option("--tokens", help="Token counts, such as 1,2,4 (default: the sweep's).")]
Samples = Annotated[int | None, Option("--samples", min=5, help="Timed rounds (default: the sweep's).")]
Regret = Annotated[float | None, Option(
    "--max-regret", min=0.0, max=1.0, help="What a band may lose: 0.05 is 5 % (default: the sweep's).")]
Budget = Annotated[str, Option("--vram-budget", help="4GiB, or a share of what is free (cpu: of the host).")]
L2State = Annotated[Literal["warm", "cold"] | None, Option("--l2", help="L2 when timed.")]
ProbeEdges = Annotated[bool | None, Option(
    "--probe/--no-probe", help="Measure between token counts where the choice changes (default: on a GPU).")]
Seed = Annotated[int | None, Option("--seed", min=0, max=2**31, help="Of the inputs and the race's order.")]
New = Annotated[bool, Option("--new", help="Start over instead of resuming.")]
MaxVariants = Annotated[int | None, Option(
    "--max-variants", min=1, help="At most so many compiled kernels, with the least worst regret.")]
Traffic = Annotated[Path | None, Option("--traffic", help="Token histogram, .json or .csv: tokens,calls.")]
BatchInvariant = Annotated[bool, Option(
    "--batch-invariant", help="One numerics class and one n_splits over all token counts.")]
Pareto = Annotated[bool, Option("--pareto", help="Add Pareto front, gain, naive cut-overs to --json, too.")]
IncumbentFile = Annotated[Path | None, Option(
    "--incumbent", help="What is served today: an exported .json, or bands by hand (.toml, .json).")]
Save = Annotated[bool, Option("--save", help="Keep the table: lookups and exports use it.")]
Db = Annotated[str, Option("--db", envvar="MHCTUNE_DB", help="Database file or postgresql:// URL.")]
Json = Annotated[bool, Option("--json", help="Print JSON for machines.")]
SweepId = Annotated[int | None, Option("--id", help="Sweep number (default: the newest that has ended).")]
TableDb = Annotated[str, Option("--db", envvar="MHCTUNE_DB", help="Database, its URL or an exported .json.")]
TableSeam = Annotated[str | None, Option("--seam", help="Seam, if the file holds several.")]
TableProblem = Annotated[str | None, Option("--problem", help="Problem's digest, if the file holds several.")]
AsMeasured = Annotated[bool, Option("--as-measured", help="Do not judge the table against this machine.")]
NumTokens = Annotated[int, Argument(min=1, help="Token count.", metavar="TOKENS")]
AtTokens = Annotated[int, Option("--tokens", min=1, help="A measured token count, or one between.")]
Limit = Annotated[int, Option("--limit", min=1, help="Candidates to show.")]
Formats = Annotated[str, Option("--format", help=f"Formats, comma separated: {', '.join(FORMATS)}.")]
Folder = Annotated[Path, Option("-o", "--output", help="Folder to write into.")]
Force = Annotated[bool, Option("--force", help="Overwrite files that mhctune did not write.")]
Exported = Annotated[Path | None, Option("--table", help="Exported .json to compare with the database.")]
Tolerance = Annotated[float, Option("--tolerance", min=0.0, help="Slower by more is regressed: 0.1 is 10 %.")]
NoMeasure = Annotated[bool, Option("--no-measure", help="Time nothing, also where the device is here.")]
Baseline = Annotated[Path | None, Option(
    "--baseline", help="Exported .json: each choice is compared with its choice.")]
PassConfig = Annotated[list[str] | None, Option("--pass-config", metavar="NAME=BOOL", help=(
    "Compile with this pass option, such as tl.disable_safe_memory_legalize=false: another toolchain may."))]
Junit = Annotated[Path | None, Option("--junit", help="Write what was found as JUnit XML.")]
Markdown = Annotated[Path | None, Option("--markdown", help="Write it as Markdown.")]
SaveRun = Annotated[bool, Option("--save", help="Keep the verdict in the database.")]
Before = Annotated[str, Argument(help="Database, its URL or an exported .json: how it was.", metavar="A")]
After = Annotated[str, Argument(help="The same, how it is.", metavar="B")]
Target = Annotated[str, Argument(help="Database file to write; what it holds stays.", metavar="OUT")]
Sources = Annotated[list[str], Argument(help="Databases to take sweeps from.", metavar="IN...")]
Recording = Annotated[str, Argument(
    help=f"A .jsonl file, a database, or {', '.join(recorded_names())}.", metavar="RECORDING|DB")]
Kept = Annotated[Path | None, Option("--table", help="Exported .json that the bands must equal.")]
# fmt: on


def show(sheet: Sheet) -> None:
    """Print a sheet as a table."""
    table = Table(title=sheet.title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.show_edge = False
    for index, column in enumerate(sheet.columns):
        numbers = all(isinstance(row[index], int | float) for row in sheet.rows)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in sheet.rows:
        table.add_row(*(str(value) for value in row))
    out.print(table)
    for note in (*sheet.notes, ""):
        say(note)


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


def fail(message: str, code: int) -> NoReturn:
    """Print one error and leave with its documented exit code."""
    err.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    raise SystemExit(code)


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

    def proposed(self, search: Exploration, grid: int) -> None:
        """Show how far a search has come; its end says how many trials there are."""
        note = f"search: generation {search.begun} of {search.generations}"
        self._progress.update(self._race, total=grid, note="shortlist" if search.finished else note)

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
            self._best = (f"{candidate.arm} {report.config_text(candidate.items)}", outcome)
        best = f", best {self._best[1]:.1f} us: {self._best[0]}" if self._best[0] else ""
        self._progress.update(self._race, advance=1, note=f"{cell.num_tokens} tokens{best}")


def progress_bar(shown: bool) -> Progress:
    """Return a progress bar on standard error whose last column gives way first."""
    fixed, rest = Column(no_wrap=True), Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return Progress(
        TextColumn("{task.description:7}", table_column=fixed.copy()), BarColumn(12),
        MofNCompleteColumn(table_column=fixed.copy()), TimeRemainingColumn(table_column=fixed.copy()),
        TextColumn("{task.fields[note]}", table_column=rest, markup=False),
        console=err, expand=True, disable=not shown,
    )  # fmt: skip


def leave(number: int, frame: FrameType | None = None) -> None:
    """Leave at once with a signal's exit code."""
    raise SystemExit(128 + number)


@contextmanager
def on_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM."""
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], int]]:
    """Turn SIGINT and SIGTERM into a question: the signal that came, or 0. A second one ends at once."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            leave(number)
        came.append(number)

    with on_signals(note):
        yield lambda: came[0] if came else 0


@app.command()
def sweep(
    gpu: Gpu = "auto", sweep: SweepName = None, model: ModelName = None, seam: SeamName = None,
    tokens: Tokens = None, max_regret: Regret = None, samples: Samples = None, l2: L2State = None,
    seed: Seed = None, probe: ProbeEdges = None, vram_budget: Budget = "60%", db: Db = DB, new: New = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure every candidate of every cell, then derive the bands; stopped, the same command resumes it."""
    device = detect()
    plans = plan_sweeps(target_of(gpu, device), sweep, model=model, seam=seam, tokens=tokens,
                        max_regret=max_regret, samples=samples, l2=l2, seed=seed)  # fmt: skip
    ranks, first = Ranks.of(os.environ), plans[0]
    with open_bench(first.seam.name, first.target, first.protocol.l2, device=ranks.local) as bench:
        if ranks.size > 1:
            sweep_in_group(ranks, plans, bench, device.free_bytes, vram_budget, db, new, probe, as_json)
            return
        budget = VramBudget.parse(vram_budget, device.free_bytes)
        for plan in plans:
            require_room(plan, bench, budget)

        def bench_of(plan: SweepPlan) -> Racing:
            return bench if plan.target == "c" else AheadBench(bench, bench, plan.variants_of)

        race(plans, bench_of, budget, db, new, probe, as_json, bench.seconds)


def sweep_in_group(
    ranks: Ranks, plans: Sequence[SweepPlan], bench: RemoteBench, free_bytes: int, vram_budget: str, db: str,
    new: bool, probe: bool | None, as_json: bool,
) -> None:  # fmt: skip
    """Lead the group as rank 0, which owns database and terminal; as another rank follow in silence."""
    if len(plans) > 1:
        names = ", ".join(plan.seam.name for plan in plans)
        raise ConfigError(
            f"{ranks.size} ranks tune one seam together, not {len(plans)}; add --seam with one of {names}"
        )
    station = Station(plans[0].fingerprint, free_bytes)
    with open_mail(ranks) as mail:
        if ranks.rank:
            with stop_on_signals():  # rank 0 hears it too and decides
                follow(bench, bench, mail, station)
            return
        with GroupBench(bench, bench, mail) as lead:
            budget = VramBudget.parse(vram_budget, lead.meet(station))
            require_room(plans[0], lead, budget)
            race(plans, lambda plan: lead, budget, db, new, probe, as_json, bench.seconds, lead.publish)


def race(
    plans: Sequence[SweepPlan], bench_of: Callable[[SweepPlan], Racing], budget: VramBudget, db: str,
    new: bool, probe: bool | None, as_json: bool, seconds: dict[str, float],
    publish: Callable[[DispatchTable], object] = lambda table: None,
) -> None:  # fmt: skip
    """Run plans one after another, remember them, and derive the bands of each."""
    failed: list[BaseException] = []
    with Repository.open(db) as store, exclusive(db), stop_on_signals() as came:
        for plan in plans if new else not_ended(store, plans):
            with progress_bar(not as_json) as progress, conditions_reader(plan.target) as read:
                bar, stop, racing = Bar(progress), lambda: bool(came()), bench_of(plan)
                tools, watch = (store, racing, budget, racing.compile_all), (stop, bar, read)
                wanted = plan.target != "c" if probe is None else probe
                prober = probing(plan, tools, watch) if wanted else None
                result = Sweep(plan, *tools, *watch).run(new=new, probe=prober)
            try:
                finish(store, plan, result, came(), as_json, seconds, publish)
            except (SystemExit, NoBands, TooFewSamples) as error:
                if came() or len(plans) == 1:
                    raise
                failed.append(error)
                note(f"no bands of {plan.seam.name} ({error}); the seams after it go on")
            seconds.clear()  # each seam's own
    if failed:
        raise failed[0]


def probing(
    plan: SweepPlan,
    tools: tuple[Repository, Bench, VramBudget, CompileAll],
    watch: tuple[Callable[[], bool], Bar, Reader],
) -> Callable[[int], None]:
    """Return what probes the edges between the bands of a measured sweep."""

    def probe(sweep_id: int) -> None:
        def derived() -> Derived:
            return derive_stored(tools[0], tools[0].sweep(sweep_id), plan.max_regret)

        Prober(tools[0].record(sweep_id), *tools, derived, *watch).run(sweep_id)

    return probe


def not_ended(store: Repository, plans: Sequence[SweepPlan]) -> Sequence[SweepPlan]:
    """Return the seams of a family that have no complete sweep yet; once all have, all are swept again."""
    ended = {sweep.record.digest for sweep in store.sweeps() if sweep.state is SweepState.COMPLETE}
    left = [plan for plan in plans if plan.record().digest not in ended]
    if left and len(left) < len(plans):
        note(f"{len(plans) - len(left)} of {len(plans)} seams are complete; --new sweeps them again")
    return left or plans


def finish(
    store: Repository, plan: SweepPlan, result: SweepResult, came: int, as_json: bool,
    seconds: dict[str, float], publish: Callable[[DispatchTable], object],
) -> None:  # fmt: skip
    """Derive and keep the bands of a sweep that ended, print them, and leave with the right code."""
    where = store.place.location
    if result.state is SweepState.INTERRUPTED:
        note(f"stopped cleanly; every finished round is in {where}. Run the same command to resume.")
        raise SystemExit(128 + came)
    try:
        derived = derive_stored(store, store.sweep(result.sweep_id), plan.max_regret)
    except (NoBands, TooFewSamples) as error:
        note(f"the measurements are kept in {where}")
        if result.state is SweepState.INCOMPLETE:
            fail(f"the sweep is incomplete: {error}", INCOMPLETE)
        raise
    note(keep(store, derived.table))
    if result.state is SweepState.COMPLETE:
        publish(derived.table)
    if as_json:
        print_json({"sweep": result.sweep_id, "state": result.state.value, "db": where, "seconds": seconds,
                    "missing": result.missing, "table": derived.table.to_dict()})  # fmt: skip
    else:
        show_bands(derived)
        counts = store.counts(result.sweep_id)
        say(report.outcomes(counts.measured, counts.failures))
        say(f"{report.phases(seconds)}\ndatabase: {where}")
    if result.state is SweepState.INCOMPLETE:
        fail(f"the sweep is incomplete, run it again; no band covers {'; '.join(result.missing)}", INCOMPLETE)


def show_bands(derived: Derived) -> None:
    """Print the bands, and what each arm's best would do."""
    show(report.bands_sheet(derived.table))
    show(report.arms_sheet(derived))
    if (shipped := beside_sheet(derived)) is not None:
        show(shipped)
    if naive := naive_cutovers(derived):
        show(naive_sheet(naive))
    if any(edge.probes for edge in derived.edges):
        show(report.edges_sheet(derived))
    note("\n".join(f"no band covers {reason}" for reason in derived.missing.values()))


@app.command()
def probe(
    db: Db = DB, sweep_id: SweepId = None, max_regret: Regret = None, vram_budget: Budget = "60%",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure between a sweep's token counts where the choice changes, until each edge is exact."""
    device = detect()
    with Repository.open(db) as store, exclusive(db), stop_on_signals() as came:
        stored = chosen_sweep(store, sweep_id)
        record = require_same(stored.record, device)

        def derived() -> Derived:
            return derive_stored(store, store.sweep(stored.id), max_regret)

        budget, stop = VramBudget.parse(vram_budget, device.free_bytes), lambda: bool(came())
        l2 = str(record.protocol.get("l2", "warm"))
        try:
            with (
                open_bench(record.seam, record.target, l2) as bench,
                progress_bar(not as_json) as progress,
                conditions_reader(record.target) as read,
            ):
                how = (record, store, bench, budget, bench.compile_all)
                Prober(*how, derived, stop, Bar(progress), read).run(stored.id)
        except Stopped:
            note(
                f"stopped cleanly; every finished round is in {store.place.location}. Run it again to go on."
            )
            raise SystemExit(128 + came()) from None
        found = derived()
        note(keep(store, found.table))
        where = store.place.location
    if as_json:
        edges = [edge.to_data() for edge in found.edges]
        print_json({"sweep": stored.id, "db": where, "edges": edges, "table": found.table.to_dict()})
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
    figures = target.figures
    for made in plan_sweeps(target, sweep, model=model, seam=seam, tokens=tokens, l2=l2, here=False):
        cost = forecast(made, cores, figures.bandwidth_gb_s.value, int(figures.l2_bytes.value or 0))
        if as_json:
            print_json({"gpu": target.name, "token_counts": made.token_counts, **asdict(cost)})
            continue
        counts = " ".join(map(str, made.token_counts))
        say(f"{target.name}: {made.seam.name}, {made.seam.label(made.problem)}")
        say(f"tokens {counts}, {made.protocol.samples} samples")
        show(report.forecast_sheet(cost, cores))


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
        sweep = chosen_sweep(store, sweep_id)
        derived = derive_stored(store, sweep, max_regret, incumbent=today, terms=terms)
        note(keep(store, derived.table) if save else "")
    if as_json:
        costs: dict[str, list[Any]] = {}
        if pareto:
            costs = {
                "front": derived.chosen.front(),
                "gain": gains(derived),
                "naive": naive_cutovers(derived),
            }
        found = {name: [asdict(each) for each in rows] for name, rows in costs.items()}
        ships = beside(derived)
        if any(row.shipped for row in ships):
            found["shipped"] = [row.to_dict() for row in ships]
        print_json({**derived.table.to_dict(), **found})
    else:
        show_bands(derived)
        show(report.front_sheet(derived))
    if save:
        (note if as_json else say)(f"database: {store.place.location}")


@app.command()
def lookup(
    num_tokens: NumTokens, db: TableDb = DB, seam: TableSeam = None, problem: TableProblem = None,
    as_measured: AsMeasured = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Say which arm and config is served for a token count, and how far the answer can be trusted."""
    table = load_measured(db, seam, problem) if as_measured else load_here(db, detect(), seam, problem)
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
    why = why_served(derived, trials, tokens)
    print_json(why.to_dict(limit)) if as_json else show(why.sheet(limit))


@app.command("export")
def export_command(
    formats: Formats = "json,python", folder: Folder = Path("."), db: TableDb = DB,
    seam: TableSeam = None, problem: TableProblem = None, force: Force = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Write the newest table as files to check in, and its manifest; the same table gives the same bytes."""
    names, table = formats_of(formats), load_measured(db, seam, problem)
    written = [str(export(table, name, folder, force=force)) for name in names]
    if wrong := refusals(table):
        note(f"no manifest: {next(iter(wrong.values()))}")
    else:
        written.append(str(export_manifest(table, folder, force=force)))
    print_json(written) if as_json else say("\n".join(written))


@app.command()
def check(
    db: Db = DB, table: Exported = None, baseline: Baseline = None, tolerance: Tolerance = 0.1,
    no_measure: NoMeasure = False, passes: PassConfig = None, junit: Junit = None, markdown: Markdown = None,
    save: SaveRun = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Check that tables are legal, agree with file, samples and sources, and are still as fast."""
    against, changed = load_measured(str(baseline)) if baseline else None, parse_passes(passes or ())
    with Repository.open(db, readonly=not save) as store:
        checked = check_tables(store, load_measured(str(table)) if table else None)
        device, left_out, findings = detect(), [], [found for each in checked for found in each.findings]
        findings += manifests_beside(table, checked[0].table) if table else []
        for each in checked:
            if reason := "--no-measure" if no_measure else elsewhere(each.table, device):
                left_out.append(f"not measured again: {reason}")
                findings += gate(store, each, against, tolerance)
                continue
            findings += other_problem(each.table, against) if against else []
            findings += timed_again(each.table, then_of(store, each, against), tolerance, as_json, changed)
        done = Check(findings, left_out)
        if save:
            save_runs(store, checked, done)
    for path, text in ((junit, check_files.junit), (markdown, check_files.markdown)):
        if path:
            write(path, text(done), lambda _: True, force=True)
    if as_json:
        print_json(done.to_dict())
    for sheet in () if as_json else report.check_sheets(done):
        show(sheet)
    raise SystemExit(done.exit_code)


def timed_again(
    table: DispatchTable, then: Then, tolerance: float, quiet: bool, passes: Passes
) -> list[Finding]:
    """Time a table's choices on this machine, which is its device."""
    here = fingerprint(known_seam(table.seam), table.target, passes)
    named = table.seam, table.target, l2_of(table)
    with open_bench(*named, passes=passes) as bench, progress_bar(not quiet) as progress:
        bar = Bar(progress)
        return remeasure(table, bench, bench.compile_all, tolerance, bar, then=then, here=here)


@app.command()
def diff(before: Before, after: After, as_json: Json = False) -> None:
    """Show what two databases or exported tables differ by; 0: they answer alike, 1: they do not."""
    compared = diff_tables(before, after)
    if as_json:
        print_json([each.to_dict() for each in compared])
    for each in () if as_json else compared:
        lines = sentences(each.found) if each.found else [f"only in {each.only_in}"]
        verdict = "every token count is answered alike" if each.same else "they answer differently"
        show(report.difference_sheet(each.name, [*lines, verdict]))
    raise SystemExit(0 if same(compared) else DISAGREES)


@app.command("merge")
def merge_command(target: Target, sources: Sources, as_json: Json = False) -> None:
    """Write all sweeps of several databases into one file; the order changes nothing. 1: with conflicts."""
    merged = merge(target, sources)
    rows = [(f"{s.key[0]:%Y-%m-%d %H:%M:%S}", s.gpu_name, s.trials, s.tables, " ".join(s.places))
            for s in merged.sweeps]  # fmt: skip
    if as_json:
        print_json({"digest": merged.digest, "changed": merged.changed, "sweeps": rows,
                    "conflicts": merged.conflicts, "db": Place.of(target).location})  # fmt: skip
    else:
        show(report.merged_sheet(rows, target))
        say("\n".join((*(f"conflict: {each}" for each in merged.conflicts), f"content {merged.digest[:12]}")))
        say(f"database: {Place.of(target).location}" + ("" if merged.changed else " (held all of it before)"))
    raise SystemExit(DISAGREES if merged.conflicts else 0)


@app.command()
def replay(source: Recording, table: Kept = None, as_json: Json = False) -> None:
    """Derive bands again from a recording's or a database's samples; 1: not the kept table to the byte."""
    kept = load_measured(str(table)) if table else None
    if source.endswith(".jsonl") or source in recorded_names():
        replayed = [replay_recording(source, kept)]
    else:
        with Repository.open(source, readonly=True) as store:
            replayed = replay_database(store, kept)
    done = Check([each.finding for each in replayed if each.finding])
    if as_json:
        tables = [each.derived.table.to_dict() for each in replayed]
        print_json({"tables": tables, "findings": done.to_dict()["findings"]})
    for each in () if as_json else replayed:
        show_bands(each.derived)
    for sheet in report.check_sheets(done) if done.findings and not as_json else ():
        show(sheet)
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
    (ConfigError, 2), (ColdHost, 2), (BudgetError, 2),
    (NoBands, MISSING), (NoArm, MISSING), (TooFewSamples, CANNOT_TELL),
    (BenchLost, INCOMPLETE), (OtherDevice, OTHER_DEVICE),
    (DatabaseError, UNUSABLE), (ExportError, UNUSABLE), (TableError, UNUSABLE),
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
