"""A dispatch table in the shape that vLLM's mHC dispatch calls: a function to `(tile_n, n_splits, n_thr)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mhctune.db.form import Line, heading, lines_of
from mhctune.kernels.dispatch import TableError

ARM, TRIPLE = "fused", ("tile_n", "n_splits", "n_thr")

_BODY = '''\
"""Split configs of the fused arm of {seam}, by token count."""

from __future__ import annotations

from bisect import bisect_left

SCHEMA_VERSION = {version}
DIGEST = "{digest}"
HIDDEN_SIZE = {hidden_size}
HC_MULT = {hc_mult}

# (last token count, (tile_n, n_splits, n_thr)); None: another arm is faster there.
_BANDS: list[tuple[int, tuple[int, int, int] | None]] = [
{bands}
]
# Above the last band.
_DEFAULT: tuple[int, int, int] | None = {default}
_LASTS = [last for last, _ in _BANDS]


def covers(hidden_size: int, hc_mult: int) -> bool:
    """Return whether the table was tuned for a model; check it once, where the model is loaded."""
    return (hidden_size, hc_mult) == (HIDDEN_SIZE, HC_MULT)


def split_config(num_tokens: int, hidden_size: int, hc_mult: int) -> tuple[int, int, int] | None:
    """Return (tile_n, n_splits, n_thr) of the fused arm; None: take the unfused one.

    None is also the answer for a model that the table was not tuned for; see `covers`.
    """
    if (hidden_size, hc_mult) != (HIDDEN_SIZE, HC_MULT):
        return None
    index = bisect_left(_LASTS, num_tokens)
    return _BANDS[index][1] if index < len(_BANDS) else _DEFAULT


def n_splits_to_warm() -> tuple[int, ...]:
    """Return every n_splits that `split_config` can answer, for warming up."""
    found = [*(config for _, config in _BANDS), _DEFAULT]
    return tuple(sorted({{config[1] for config in found if config}}))
'''


def render_vllm(data: Mapping[str, Any]) -> str:
    """Return the module's text from a table's JSON form.

    The triple is all that this shape can say: what else the fused arm was tuned with, and which arm is
    chosen where the answer is None, stands in the comment of the band.

    Raises:
        TableError: a fused choice lacks one of the three, so that the shape cannot hold it; or the problem
            names no hidden size.
    """
    lines, problem = lines_of(data), data["problem"]
    if "hidden_size" not in problem:
        raise TableError("the table's problem names no hidden_size, which the vllm format answers by")
    *bands, default = lines
    head = "".join(f"# {line}\n" for line in heading(data))
    return head + _BODY.format(
        seam=data["seam"],
        version=data["mhctune_table"],
        digest=data["digest"],
        hidden_size=problem["hidden_size"],
        hc_mult=problem.get("hc_mult", 4),
        bands="\n".join(f"    ({band.last}, {triple(band)}),  # {_comment(band)}" for band in bands),
        default=f"{triple(default)}  # {_comment(default)}",
    )


def triple(line: Line) -> tuple[int, int, int] | None:
    """Return what this format answers for a line; None for another arm.

    Raises:
        TableError: the fused arm's config lacks one of the three.
    """
    if line.arm != ARM:
        return None
    absent = [name for name in TRIPLE if name not in line.config]
    if absent:
        raise TableError(
            f"{ARM} at {line.first} tokens has no {absent[0]}, but the vllm format answers with "
            f"({', '.join(TRIPLE)}); it has {', '.join(line.config)}: export another format"
        )
    tile_n, n_splits, n_thr = (line.config[name] for name in TRIPLE)
    return tile_n, n_splits, n_thr


def _comment(line: Line) -> str:
    rest = " ".join(f"{k}={v}" for k, v in line.config.items() if line.arm != ARM or k not in TRIPLE)
    tokens = f"{line.first} and up" if line.last is None else f"{line.first}-{line.last}"
    return f"{tokens}: {line.arm} {rest}".rstrip() + (
        f"; evidence {' '.join(line.evidence)}" if line.evidence else ""
    )
