"""The manifest: which kernels a table can reach, so that a runtime compiles those and no other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mhctune.autotuner.check import Finding, Verdict, label
from mhctune.autotuner.words import counted
from mhctune.db.export import export, file_stem, is_json_with, write
from mhctune.kernels.dispatch import DispatchTable, TableError
from mhctune.kernels.legality import problem_of, refusals
from mhctune.kernels.manifest import manifest_of
from mhctune.kernels.registry import seam as find_seam
from mhctune.kernels.seam import Variant

SUFFIX = ".manifest.json"
SCHEMA = 1
_is_manifest = is_json_with("mhctune_manifest")


def reachable(table: DispatchTable) -> dict[Variant, list[str]]:
    """Return every kernel that a lookup in the table can lead to, each with the choices that launch it.

    Raises:
        TableError: a choice is unknown or illegal here, so that its kernels are not known.
    """
    wrong = refusals(table)
    if wrong:
        raise TableError(f"table {table.digest[:12]} has no manifest here: {next(iter(wrong.values()))}")
    seam, problem, manifest = find_seam(table.seam), problem_of(table), manifest_of(table)
    found: dict[Variant, list[str]] = {variant: [] for variant in sorted(manifest.variants)}
    for choice in manifest.choices:
        for variant in seam.arm(table.target, choice.arm).variants(problem, dict(choice.config)):
            found[variant].append(str(choice))
    return found


def manifest_data(table: DispatchTable) -> dict[str, Any]:
    """Return the manifest as JSON-able data: the table's digest and its compile keys."""
    keys = [
        {
            "kernel": variant.kernel,
            "target": variant.target,
            "params": dict(variant.params),
            "launched_by": choices,
        }
        for variant, choices in reachable(table).items()
    ]
    return {"mhctune_manifest": SCHEMA, "table": table.digest, "seam": table.seam, "compile_keys": keys}


def export_manifest(table: DispatchTable, folder: str | Path, force: bool = False) -> Path:
    """Write a table's manifest beside its exports and return the file's path.

    Raises:
        TableError: as `reachable`.
        ExportError: as `mhctune.db.export.export`.
    """
    path = Path(folder) / (file_stem(table) + SUFFIX)
    write(path, _text(manifest_data(table)), _is_manifest, force)
    return path


def export_all(
    table: DispatchTable, formats: Sequence[str], folder: Path, force: bool = False
) -> tuple[list[Path], str]:
    """Write a table in some formats, then its manifest; return the paths, and why there is no manifest.

    Raises:
        ExportError: a file cannot be written, or is not one that mhctune wrote.
    """
    written = [export(table, name, folder, force=force) for name in formats]
    if wrong := refusals(table):
        return written, f"no manifest: {next(iter(wrong.values()))}"
    return [*written, export_manifest(table, folder, force=force)], ""


def agrees(table: DispatchTable, path: Path) -> Finding:
    """Compare a manifest's file with what the table can reach; it may stand on another table by now."""
    name, what = label(table), "manifest"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Finding(name, what, Verdict.MISSING, f"{path} cannot be read: {error}; export it again")
    wanted = manifest_data(table)
    if found == wanted:
        kernels = counted(len(wanted["compile_keys"]), "kernel")
        return Finding(name, what, Verdict.PASSED, f"{kernels}, all that the table can reach")
    return Finding(name, what, Verdict.DISAGREES, f"{path}: {_difference(found, wanted)}; export it again")


def manifests_beside(exported: Path, table: DispatchTable) -> list[Finding]:
    """Compare the manifest that lies beside an exported table, if one does.

    A table that cannot be launched here has no manifest to compare; `mhctune.autotuner.check.legal` says so.
    """
    path = exported.with_name(exported.stem + SUFFIX)
    return [agrees(table, path)] if path.exists() and not refusals(table) else []


def _difference(found: Any, wanted: Mapping[str, Any]) -> str:
    if not isinstance(found, dict) or not _is_manifest(json.dumps(found)):
        return "is no manifest of mhctune"
    keys = [{_key(k) for k in each.get("compile_keys", ())} for each in (found, wanted)]
    if keys[0] != keys[1]:
        lacking, others = len(keys[1] - keys[0]), len(keys[0] - keys[1])
        return f"lacks {counted(lacking, 'compile key')} of the table and has {others} others"
    return f"is of table {str(found.get('table'))[:12]}, this is {wanted['table'][:12]}"


def _key(entry: Mapping[str, Any]) -> str:
    """Return what is compiled, whoever launches it."""
    return json.dumps({name: entry.get(name) for name in ("kernel", "target", "params")}, sort_keys=True)


def _text(data: Mapping[str, Any]) -> str:
    """Return JSON with one line a compile key, so that a changed key is a changed line."""
    head = {key: value for key, value in data.items() if key != "compile_keys"}
    keys = ",\n".join("  " + json.dumps(key, sort_keys=True) for key in data["compile_keys"])
    return json.dumps(head, indent=1)[:-2] + f',\n "compile_keys": [\n{keys}\n ]\n}}\n'
