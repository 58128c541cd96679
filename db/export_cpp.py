"""A dispatch table as a C++17 header that includes the standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mhctune.db.form import Line, compact, heading, lines_of, tunables_of
from mhctune.kernels.dispatch import TableError
from mhctune.kernels.until import END, until_of

# Of all that C++20 reserves, those that a tunable or an arm could be called by accident.
_RESERVED = frozenset(
    "alignas auto bool break case char class const continue default delete do double else enum explicit "
    "export extern false float for friend goto if inline int long mutable namespace new not operator or "
    "private protected public register return short signed sizeof static struct switch template this throw "
    "true try typedef union unsigned using virtual void volatile while xor and".split()
)

_TOP = """\
#pragma once

#include <cstddef>
#include <cstdint>

namespace mhctune::{space} {{

inline constexpr int kSchemaVersion = {version};
inline constexpr char kDigest[] = "{digest}";
inline constexpr std::int64_t kMaxTokens = {max_tokens};

enum class Arm {{ {arms} }};

// -1: the arm has no tunable of that name.
struct Choice {{
  Arm arm;
{fields}
}};

struct Band {{
  std::int64_t last;
  Choice choice;
}};

inline constexpr Band kBands[] = {{
{bands}
}};

// Above the last band.
inline constexpr Choice kDefault = {default};

// The choice for a token count; zero and below answer as 1 does.
constexpr const Choice& lookup(std::int64_t num_tokens) {{
  std::size_t low = 0;
  std::size_t high = sizeof(kBands) / sizeof(kBands[0]);
  const std::size_t count = high;
  while (low < high) {{
    const std::size_t middle = low + (high - low) / 2;
    if (kBands[middle].last < num_tokens) {{
      low = middle + 1;
    }} else {{
      high = middle;
    }}
  }}
  return low < count ? kBands[low].choice : kDefault;
}}

}}  // namespace mhctune::{space}
"""


def render_cpp(data: Mapping[str, Any]) -> str:
    """Return the header's text from a table's JSON form; `lookup` is constexpr and allocates nothing.

    Raises:
        TableError: an arm or a tunable has a name that is none in C++.
    """
    lines = lines_of(data)
    tunables, arms = tunables_of(lines), list(dict.fromkeys(line.arm for line in lines))
    for name in (*tunables, *arms):
        _require_name(name)
    *bands, default = lines
    top = _TOP.format(
        space=_space(data),
        version=data["mhctune_table"],
        digest=data["digest"],
        max_tokens=default.first - 1,
        arms=", ".join(arms),
        fields="\n".join(f"  int {name};" for name in tunables),
        bands="\n".join(_band(line, tunables) for line in bands),
        default=_choice(default, tunables),
    )
    return "".join(f"// {line}\n" for line in heading(data)) + top


def _band(line: Line, tunables: list[str]) -> str:
    evidence = f"  // {line.first}-{line.last}; evidence {compact(' '.join(line.evidence))}"
    return f"    {{{line.last}, {_choice(line, tunables)}}},{evidence}"


def _choice(line: Line, tunables: list[str]) -> str:
    values = "".join(f", /*{name}=*/{line.config.get(name, -1)}" for name in tunables)
    return f"{{Arm::{line.arm}{values}}}"


def _space(data: Mapping[str, Any]) -> str:
    """Return a namespace of the table's own: the seam, the problem's hidden size and what was timed."""
    seam, hidden = data["seam"], data["problem"].get("hidden_size", "any")
    until = until_of(data["evidence"].get("protocol"))
    name = f"{seam}_hidden{hidden}_{data['numerics']}" + ("" if until == END else f"_until_{until}")
    return re.sub(r"\W", "_", name, flags=re.ASCII)


def _require_name(name: str) -> None:
    if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_]*", name) or "__" in name or name in _RESERVED:
        raise TableError(f"{name!r} is no name in C++; export another format, or rename the arm or tunable")
