"""The other seams beside what ships: what `python benchmarks/hopper.py DB --seams` prints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from hopper_table import RECORDED_ON

from mhctune.autotuner.beside import Beside, beside
from mhctune.autotuner.derive import Derived
from mhctune.autotuner.shipped import streams_of
from mhctune.autotuner.standings import Standing
from mhctune.configs.loader import baseline_of
from mhctune.kernels.seam import Problem

SEAMS = ("pre", "post_pre", "post", "hc_head", "collapse", "pre_delayed")
POST_US = {1: 3.01, 8: 3.17, 16: 3.15, 32: 3.23, 64: 3.30, 128: 3.65, 512: 9.82, 2048: 47.95, 4096: 92.76}
"""vLLM 0.33's post kernel, hidden 5120, measured apart on one H200 on 2026-11-29 as `h200_as_shipped` was."""
EMPTY_US = 0.94
"""An empty kernel in a graph there. Unrolled launches of one kernel overlap, as they do not when served: less
than this is no time of a launch."""


def seams(found: Sequence[tuple[str, Derived]]) -> dict[str, Any]:
    """Print, for each other seam, what ours takes beside what ships, and return it as JSON-able data."""
    data: dict[str, Any] = {}
    for name in SEAMS:
        mine = [(label, derived) for label, derived in found if derived.table.seam == name]
        if not mine:
            print(f"{name}: no complete sweep here; `mhctune sweep --sweep seams` makes one\n")
        for label, derived in mine:
            rows = [_row(derived, each) for each in beside(derived)]
            print("\n".join([label, *_lines(rows), ""]))
            data[label] = rows
    print(
        "ours: what the bands serve; shipped: a runtime's constants in our kernels, or recorded; limits: 95 %"
    )
    return data


def nearest(derived: Derived, num_tokens: int) -> tuple[Standing, str] | None:
    """Return who of the measured has the split nearest to what ships, where that itself is illegal.

    Of several the best; None where nobody has the shipped route and tile.
    """
    table, baseline = derived.table, baseline_of(derived.table.seam)
    if baseline is None:
        return None
    hidden, sms = int(table.problem["hidden_size"]), table.fingerprint.sm_count
    choice = baseline.choice(num_tokens, hidden, sms, streams_of(table.seam))
    asked = choice.config["n_splits"]
    tile = choice.config.items() - {("n_splits", asked)}
    names = ("fused",) if choice.arm == "fused" else ("unfused", "unfused_mma")
    alike = [
        s for s in derived.cells[num_tokens]
        if s.candidate.arm in names and tile <= s.candidate.config.items()
        and not s.candidate.config.get("collapse", 0)
    ]  # fmt: skip
    found = min(alike, key=lambda s: abs(math.log(s.candidate.config["n_splits"] / asked)), default=None)
    if found is None:
        return None
    return found, f"{asked} splits are illegal here: {found.candidate.config['n_splits']} taken"


def _row(derived: Derived, row: Beside) -> dict[str, Any]:
    """Return one token count of a seam: what ships in our kernels, or for `post` the recorded kernel."""
    table, shipped, note = derived.table, row.shipped, "" if row.shipped else row.status
    if row.baseline and row.candidate is None and (near := nearest(derived, row.num_tokens)):
        shipped, note = near
    found: dict[str, Any] = {
        "num_tokens": row.num_tokens, "ours": str(row.tuned.candidate), "ours_us": row.tuned.latency_us,
        "shipped": None, "shipped_us": None, "ratio": None, "limits": None, "ours_is": "", "note": note,
    }  # fmt: skip
    if shipped is not None:
        both = Beside(row.num_tokens, row.baseline, shipped.candidate, shipped, row.tuned, "")
        assert both.limits is not None
        low, high = both.limits
        told = "faster" if low > 1 else "slower" if high < 1 else "tied"
        same = shipped.candidate == row.tuned.candidate
        found |= {"shipped": str(shipped.candidate), "shipped_us": shipped.latency_us, "ratio": both.ratio,
                  "limits": both.limits, "ours_is": "the same" if same else told}  # fmt: skip
    recorded = table.seam == "post" and table.fingerprint.gpu_name == RECORDED_ON
    if recorded and Problem(**table.problem).hidden_size == 5120 and row.num_tokens in POST_US:
        shipped_us, note = POST_US[row.num_tokens], "recorded of vLLM's kernel"
        ratio = shipped_us / max(EMPTY_US, row.tuned.latency_us)
        if row.tuned.latency_us < EMPTY_US:
            note += f"; ours overlap, taken as an empty kernel's {EMPTY_US} us"
        found |= {"shipped_us": shipped_us, "ratio": ratio, "ours_is": "faster" if ratio > 1 else "slower",
                  "note": note}  # fmt: skip
    return found


def _lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"{'tokens':>6} {'ours us':>8} {'shipped':>8} {'ratio':>6} {'limits':>11}  ours is"
    for row in rows:
        limits = "-".join(f"{each:.2f}" for each in row["limits"] or ())
        numbers = f"{'-':>8} {'-':>6}"
        if row["ratio"] is not None:
            numbers = f"{row['shipped_us']:8.2f} {row['ratio']:6.2f}"
        told = " ".join(filter(None, (row["ours_is"], row["note"] and f"[{row['note']}]")))
        yield f"{row['num_tokens']:6} {row['ours_us']:8.2f} {numbers} {limits or '-':>11}  {told}"
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    if not ratios:
        yield "nothing to compare with: no runtime ships constants for it, and none was recorded"
        return
    slower = [str(row["num_tokens"]) for row in rows if row["ours_is"] == "slower"]
    said = f"slower at {', '.join(slower)}" if slower else f"never slower at {len(ratios)} token counts"
    mean = geometric_mean(ratios)
    yield f"{said}; {min(ratios):.2f} to {max(ratios):.2f} times as fast, geometric mean {mean:.2f}"
