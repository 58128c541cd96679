"""A dispatch table as CSV: one row a band, the default last; comment lines before say whose it is."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from mhctune.db.form import heading, lines_of, tunables_of

FIXED = ("first", "last", "arm")


def render_csv(data: Mapping[str, Any]) -> str:
    """Return the CSV text from a table's JSON form.

    Columns: first and last token count (`last` is empty for the default, which is open above), arm, a column
    a tunable (empty where the arm has none of that name), and the ids of the cells behind the choice.
    """
    lines, text = lines_of(data), io.StringIO()
    tunables = tunables_of(lines)
    text.writelines(f"# {line}\n" for line in heading(data))
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*FIXED, *tunables, "evidence"])
    for line in lines:
        config = [line.config.get(name, "") for name in tunables]
        last = "" if line.last is None else line.last
        rows.writerow([line.first, last, line.arm, *config, " ".join(line.evidence)])
    return text.getvalue()
