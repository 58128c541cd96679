"""Link what a wheel declares into a bare environment: `python .ci/link_declared.py BARE`.

BARE has the wheel alone (`pip install --no-deps`). Run by an environment that was installed by the same
constraints, this links the packages that the wheel requires, and what those require, from it: the versions
that pip would take, without a second download of torch. What is not declared is not there.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required(dist: Distribution, extras: frozenset[str]) -> list[Requirement]:
    """Return what a distribution requires here, with some of its extras."""
    found = map(Requirement, dist.requires or ())
    return [
        r for r in found if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in {"", *extras})
    ]


def link(dist: Distribution, here: Path, there: Path) -> None:
    """Link every file of a distribution that lies among the packages."""
    for file in dist.files or ():
        source = Path(str(dist.locate_file(file)))
        if ".." in file.parts or not source.is_file():
            continue  # a script, or a cache that was not made
        target = there / source.relative_to(here)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            try:
                os.link(source, target)
            except OSError:  # another file system
                shutil.copy2(source, target)


def main(bare: str) -> None:
    """Walk the requirements of the wheel."""
    (there,) = Path(bare).glob("lib/python*/site-packages")
    (wheel,) = (d for d in distributions(path=[str(there)]) if d.name == "mhctune")
    todo, done = [(wheel, frozenset[str]())], set[tuple[str, frozenset[str]]]()
    while todo:
        dist, extras = todo.pop()
        for requirement in required(dist, extras):
            wanted = canonicalize_name(requirement.name), frozenset(requirement.extras)
            if wanted not in done:
                done.add(wanted)
                todo.append((distribution(requirement.name), wanted[1]))
                link(todo[-1][0], Path(str(todo[-1][0].locate_file(""))), there)
    print(f"{len({name for name, _ in done})} packages linked into {bare}")


if __name__ == "__main__":
    main(sys.argv[1])
