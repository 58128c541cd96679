"""What an exported file answers, as its reader would ask it, and whether that is what the table says.

Every format is asked for every token count from 0 to past the maximum, so that an edge that is off by one
cannot hide.
"""

from __future__ import annotations

import csv
import importlib.util
import itertools
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mhctune.db.form import lines_of, tunables_of
from mhctune.db.tables import load_table
from mhctune.kernels.dispatch import Choice, DispatchTable

Answers = dict[int, Any]

_MAIN = """\
#include <cstdio>
#include "{header}"
namespace table = mhctune::{space};
static_assert(table::lookup(0).arm == table::lookup(1).arm, "a lookup is a constant expression");
const char* const kArms[] = {{{arms}}};
int main() {{
  for (std::int64_t n = 0; n <= {last}; ++n) {{
    const table::Choice& c = table::lookup(n);
    std::printf("%lld %s{places}\\n", static_cast<long long>(n), kArms[static_cast<int>(c.arm)]{fields});
  }}
}}
"""


def module_of(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _choice(choice: Choice) -> tuple[str, dict[str, int]]:
    return choice.arm, dict(choice.config)


def of_json(path: Path, table: DispatchTable, counts: Sequence[int]) -> Answers:
    loaded = load_table(path)
    return {n: _choice(loaded.lookup(n).choice) for n in counts}


def of_python(path: Path, table: DispatchTable, counts: Sequence[int]) -> Answers:
    module = module_of(path)
    return {n: module.lookup(n) for n in counts}


def of_csv(path: Path, table: DispatchTable, counts: Sequence[int]) -> Answers:
    """The last row that begins at or below a count; every row but the last must end before the next."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    for row, after in itertools.pairwise(rows):
        assert int(row["last"]) + 1 == int(after["first"])
    assert rows[-1]["last"] == ""
    answers = {}
    for n in counts:
        row = next(r for r in reversed(rows) if int(r["first"]) <= max(n, 1))
        tunables = set(row) - {"first", "last", "arm", "evidence"}
        answers[n] = row["arm"], {name: int(row[name]) for name in sorted(tunables) if row[name]}
    return answers


def of_cpp(path: Path, table: DispatchTable, counts: Sequence[int]) -> Answers:
    """Compile the header, with warnings as errors, and let the program print every answer."""
    lines = lines_of(json.loads(json.dumps(table.to_dict())))
    tunables = tunables_of(lines)
    arms = list(dict.fromkeys(line.arm for line in lines))
    text = path.read_text()
    source, program = path.with_suffix(".main.cpp"), path.with_suffix(".out")
    source.write_text(
        _MAIN.format(
            header=path.name,
            space=text.split("namespace mhctune::")[1].split(" ")[0],
            arms=", ".join(f'"{arm}"' for arm in arms),
            last=max(counts),
            places=" %d" * len(tunables),
            fields="".join(f", c.{name}" for name in tunables),
        )
    )
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert built.returncode == 0, built.stderr
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=60).stdout
    answers = {}
    for line in printed.splitlines():
        n, arm, *values = line.split()
        config = {name: int(v) for name, v in zip(tunables, values, strict=True) if int(v) >= 0}
        answers[int(n)] = arm, config
    return {n: answers[n] for n in counts}


def of_vllm(path: Path, table: DispatchTable, counts: Sequence[int]) -> Answers:
    module = module_of(path)
    hidden, mult = table.problem["hidden_size"], table.problem["hc_mult"]
    return {n: module.split_config(n, hidden, mult) for n in counts}


READERS: dict[str, Callable[[Path, DispatchTable, Sequence[int]], Answers]] = {
    "json": of_json,
    "python": of_python,
    "csv": of_csv,
    "cpp": of_cpp,
    "vllm": of_vllm,
}


def _said(table: DispatchTable, format: str, num_tokens: int) -> Any:
    """What the table says, in the shape of a format."""
    arm, config = _choice(table.lookup(num_tokens).choice)
    if format != "vllm":
        return arm, config
    return tuple(config[name] for name in ("tile_n", "n_splits", "n_thr")) if arm == "fused" else None


def wrong_answers(format: str, path: Path, table: DispatchTable) -> dict[int, tuple[Any, Any]]:
    """Return the token counts where a file and the table differ, with both answers."""
    counts = range(table.max_tokens + 70)
    found = READERS[format](path, table, counts)
    assert sorted(found) == list(counts), "every token count is asked"
    said = {n: _said(table, format, n) for n in counts}
    return {n: (found[n], said[n]) for n in counts if found[n] != said[n]}
