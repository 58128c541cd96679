"""The command line's options and arguments: what a person may type, its limits and its help.

They declare and print nothing. What needs to know an upper floor (the export formats) stays in `cli`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from mhctune.configs import loader
from mhctune.configs.recorded import recorded_names

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
Until = Annotated[Literal["end", "layer_input"] | None, Option(
    "--until", help="Time the whole launch, or what comes before the layer input (default: the sweep's).")]
TableUntil = Annotated[Literal["end", "layer_input"], Option(
    "--until", help="A table that was tuned by the whole launch, or by the time to the layer input.")]
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
